"""Exports: round trips that lose no bit, the fields that engines ask for, and a checker that finds each fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import layouts_foreign as foreign
import pytest
import torch
from layouts_foreign import DRAFTED, HEADS, LAYERS, LLAMA, VD, D, H, V, config_of
from safetensors.torch import load_file, save_file
from small import build

from outrider.backends.torch import HFTarget
from outrider.checkpoints import Checkpoint, Facts, native, read
from outrider.checkpoints.check import check
from outrider.checkpoints.write import FORMATS_OF, keep, write
from outrider.params import FORMATS, InputError

LAYER = {
    "hidden": H, "heads": HEADS, "kv_heads": 2, "head_dim": D, "intermediate": 40, "inputs": H,
    "rope": {"rope_type": "default", "rope_theta": 10000.0}, "eps": 1e-6, "qkv_bias": False,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def eagle(**changes: Any) -> Checkpoint:
    layer = {**LAYER, **changes.pop("layer", {})}
    config = {
        "layer": layer, "vocab": V, "target_hidden": H, "inputs": "feature+shifted", "bias": False, "scale": 1.25,
        "trained": "hass", "draft_vocab": 0, **changes,
    }  # fmt: skip
    return filled("eagle", config)


def eagle3(**changes: Any) -> Checkpoint:
    layer = {**LAYER, "inputs": 2 * H, **changes.pop("layer", {})}
    config = {
        "layer": layer, "vocab": V, "draft_vocab": VD, "target_hidden": H, "taps": [2, LAYERS // 2, LAYERS - 3],
        "scale": 0.75, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "own_embedding": False, "layers": 1, "parallel": 0, "mask_token": 0, **changes,
    }  # fmt: skip
    result = filled("eagle3", config)
    few = config["draft_vocab"]
    ours = foreign.mapping() if few == VD else {"d2t": torch.zeros(V).long(), "t2d": torch.ones(V).bool()}
    return Checkpoint(result.layout, result.method, config, {**result.tensors, **ours})


def medusa(**changes: Any) -> Checkpoint:
    config = {
        "vocab": V, "hidden": H, "heads": 3, "layers": 2, "share_head": False, "bias": False, "scale": 1.5,
        "lossy": False, "tree": [[0], [0, 0], [1]], "draft_vocab": 0, **changes,
    }  # fmt: skip
    return filled("medusa", config)


def hydra() -> Checkpoint:
    config = {
        "vocab": V,
        "hidden": H,
        "heads": 2,
        "layers": 1,
        "prefix": False,
        "layer": None,
        "scale": 1.0,
        "tree": None,
        "draft_vocab": 0,
    }
    return filled("hydra", config)


def filled(method: str, config: dict[str, Any]) -> Checkpoint:
    return Checkpoint("native", method, config, foreign.fill(native.table(method, config)))


def same(a: Checkpoint, b: Checkpoint) -> None:
    assert (a.method, a.config) == (b.method, b.config)
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert tensor.dtype == b.tensors[name].dtype
        assert torch.equal(tensor, b.tensors[name]), name


ROUND: list[tuple[str, Callable[[], Checkpoint], list[str]]] = [
    ("eagle", eagle, ["safeailab", "vllm", "sglang"]),
    ("biased", lambda: eagle(bias=True), ["safeailab", "sglang"]),
    ("zero", lambda: zeroed(eagle(bias=True), "fc.bias"), ["safeailab", "vllm", "sglang"]),
    ("qwen", lambda: eagle(layer={"qkv_bias": True}), ["safeailab", "vllm", "sglang"]),
    ("scaled", lambda: eagle(layer={"rope": ROPE}), ["vllm", "sglang"]),
    ("eagle3", eagle3, ["safeailab", "vllm", "sglang", "speculators"]),
    ("residual", lambda: eagle3(norm_before_residual=True), ["vllm", "speculators"]),
    ("norms", lambda: eagle3(fc_norm=True, norm_output=True), ["vllm", "sglang", "speculators"]),
    ("before", lambda: eagle3(norm_before_fc=True, taps=[1, 3, 5]), ["vllm", "sglang", "speculators"]),
    ("whole", lambda: eagle3(draft_vocab=V), ["safeailab", "vllm", "sglang", "speculators"]),
    ("own", lambda: eagle3(own_embedding=True), ["safeailab", "vllm", "sglang", "speculators"]),
    ("medusa", medusa, ["medusa", "vllm"]),
    ("shared", lambda: medusa(share_head=True, lossy=True, tree=None), ["medusa", "vllm"]),
    ("bare", lambda: zeroed(medusa(), "linear.bias"), ["medusa", "vllm"]),
    ("ends", lambda: zeroed(medusa(bias=True), "lm_head.bias"), ["medusa", "vllm"]),
    ("ended", lambda: medusa(bias=True), ["medusa"]),
]  # fmt: skip


def zeroed(result: Checkpoint, end: str) -> Checkpoint:
    for name, tensor in result.tensors.items():
        if name.endswith(end):
            tensor.zero_()
    return result


SHARED = (
    [(eagle, to) for to in ("safeailab", "vllm", "sglang")]
    + [(lambda: medusa(share_head=True), to) for to in ("medusa", "vllm")]
)  # fmt: skip


@pytest.mark.parametrize(("make", "to"), SHARED, ids=[f"{'eagle' if m is eagle else 'medusa'}-{t}" for m, t in SHARED])
def test_engines_draft_from_all_tokens_of_a_shared_head(
    tmp_path: Path, facts: Facts, make: Callable[[], Checkpoint], to: str
) -> None:
    """The head is the target's, and a draft vocabulary names rows of it: without the list nothing else changes."""
    full = make()
    few = replace(
        full, config={**full.config, "draft_vocab": VD}, tensors={**full.tensors, "d2t": torch.zeros(VD).long()}
    )
    write(few, to, facts, tmp_path / "out")
    assert check(tmp_path / "out", to, facts) == []
    same(full, read(tmp_path / "out", facts))


@pytest.mark.parametrize(
    ("make", "to"), [(m, t) for _, m, ts in ROUND for t in ts], ids=[f"{n}-{t}" for n, _, ts in ROUND for t in ts]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trips_lose_nothing(
    tmp_path: Path, facts: Facts, make: Callable[[], Checkpoint], to: str, dtype: Any
) -> None:
    result = make()
    cast = {k: t.to(dtype) if t.is_floating_point() else t for k, t in result.tensors.items()}
    result = Checkpoint(result.layout, result.method, result.config, cast)
    write(result, to, facts, tmp_path / "out")
    assert check(tmp_path / "out", to, facts) == []
    back = read(tmp_path / "out", facts)
    same(result, back)
    keep(back, tmp_path / "again")
    same(result, read(tmp_path / "again"))
    if result.method != "medusa" or to != "medusa":
        assert config_of(tmp_path / "out")["dtype"] == str(dtype).removeprefix("torch.")


def test_an_eagle_export_has_the_fields_of_engines(tmp_path: Path, facts: Facts) -> None:
    write(eagle(), "vllm", facts, tmp_path / "out")
    config, tensors = config_of(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    assert (config["model_type"], config["num_hidden_layers"], config["tie_word_embeddings"]) == ("llama", 1, False)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["head_dim"] == D
    assert "bias" not in config, "vLLM takes it for attention's"
    assert not tensors["fc.bias"].any()
    assert torch.equal(tensors["embed_tokens.weight"], foreign.embedding())


def test_an_eagle3_export_has_the_fields_of_engines(tmp_path: Path, facts: Facts) -> None:
    write(eagle3(taps=[1, 4, 9]), "vllm", facts, tmp_path / "out")
    config, tensors = config_of(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 9], "vLLM: hidden states"
    inner = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 8]}
    assert config["eagle_config"] == inner, "SGLang: the layers before"
    assert (config["draft_vocab_size"], config["target_hidden_size"], config["num_aux_hidden_states"]) == (VD, H, 3)
    assert (config["norm_before_residual"], config["norm_before_fc"]) == (False, False)
    assert tensors["d2t"].dtype == torch.int64
    assert (torch.arange(VD) + tensors["d2t"]).tolist() == DRAFTED
    assert "midlayer.hidden_norm.weight" in tensors
    write(eagle3(draft_vocab=V), "vllm", facts, tmp_path / "whole")
    assert "d2t" not in load_file(tmp_path / "whole" / "model.safetensors"), "vLLM refuses it there"


@pytest.mark.parametrize("to", ["safeailab", "speculators", "vllm", "sglang"])
def test_folders_older_than_some_of_their_fields(tmp_path: Path, facts: Facts, to: str) -> None:
    """The EAGLE-3 that ships was written before P-EAGLE; a field that is not there has its default."""
    new = eagle3()
    kept = {name: value for name, value in new.config.items() if name not in ("layers", "parallel", "mask_token")}
    write(new, to, facts, tmp_path / "new")
    write(Checkpoint(new.layout, new.method, kept, new.tensors), to, facts, tmp_path / "old")
    assert config_of(tmp_path / "old") == config_of(tmp_path / "new")


def test_an_export_has_the_fields_of_speculators(tmp_path: Path, facts: Facts) -> None:
    write(eagle3(), "speculators", facts, tmp_path / "out")
    config, tensors = config_of(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert (config["architectures"], config["speculators_model_type"]) == (["Eagle3DraftModel"], "eagle3")
    given = config["speculators_config"]
    assert given["verifier"] == {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    assert given["proposal_methods"][0]["proposal_type"] == given["default_proposal_method"] == "greedy"
    assert torch.equal(tensors["embed_tokens.weight"], foreign.embedding())
    assert "layers.0.hidden_norm.weight" in tensors
    assert not any("midlayer" in name for name in tensors)


@pytest.mark.parametrize(("family", "scaled"), [("gemma3", True), ("granite", True), ("llama", False)])
def test_the_facts_of_a_loaded_target(family: str, scaled: bool) -> None:
    """As of a .gguf file, whose config names no classes."""
    model = build(family, torch.float32)
    facts = Facts.of(HFTarget(model))
    assert facts.scaled is scaled
    config = {name: value for name, value in facts.config.items() if name != "architectures"}
    assert replace(facts, config=config).architectures == [type(model).__name__]


def test_a_scaled_embedding_goes_with_the_drafter(tmp_path: Path) -> None:
    """Gemma scales after looking up; engines would give the drafter the unscaled one."""
    facts = Facts.at(foreign.target(tmp_path / "gemma", tied=True, model_type="gemma3_text", embedding_multiplier=None))
    write(eagle3(), "vllm", facts, tmp_path / "out")
    kept = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    assert float((kept - foreign.embedding() * H**0.5).abs().max()) < 1e-12
    assert check(tmp_path / "out", "vllm", facts) == []
    same(eagle3(), read(tmp_path / "out", facts))


REFUSED: list[tuple[Callable[[], Checkpoint], str, str]] = [
    (hydra, "vllm", "no format for hydra"),
    (hydra, "safeailab", "no format for hydra"),
    (eagle, "speculators", "no format for eagle; export it to safeailab or vllm or sglang"),
    (eagle, "medusa", "no format for eagle"),
    (medusa, "sglang", "no format for medusa; export it to medusa or vllm"),
    (eagle, "tensorrt", "there is no format 'tensorrt'"),
    (lambda: eagle(bias=True), "vllm", "vLLM ignores the bias"),
    (lambda: eagle(inputs="feature"), "vllm", "no engine has EAGLE with the inputs feature"),
    (lambda: eagle(layer={"rope": ROPE}), "safeailab", "RoPE of type llama3"),
    (lambda: eagle3(taps=[2, 6, 8]), "safeailab", r"reads hidden states \[2, 6, 9\], not \[2, 6, 8\]"),
    (lambda: eagle3(taps=[2, 6, LAYERS]), "vllm", "1 to 11"),
    (lambda: eagle3(taps=[0, 2, 6]), "sglang", "1 to 11"),
    (lambda: eagle3(norm_before_residual=True), "sglang", "no EAGLE-3 with norm_before_residual"),
    (lambda: eagle3(norm_output=True), "safeailab", "no EAGLE-3 with norm_output"),
    (lambda: eagle3(layer={"qkv_bias": True}), "vllm", "biases in its attention"),
    (lambda: medusa(bias=True), "vllm", "no bias in their LM head"),
    (lambda: medusa(draft_vocab=VD), "vllm", "no draft vocabulary for medusa"),
    (lambda: eagle(vocab=V + 1), "vllm", "for a target with 62 tokens"),
    (lambda: broken(eagle()), "vllm", "lack fc.weight"),
]  # fmt: skip


def broken(result: Checkpoint) -> Checkpoint:
    del result.tensors["fc.weight"]
    return result


@pytest.mark.parametrize(("make", "to", "sentence"), REFUSED, ids=[f"{r[1]}-{r[2][:24]}" for r in REFUSED])
def test_refusals_leave_nothing(
    tmp_path: Path, facts: Facts, make: Callable[[], Checkpoint], to: str, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        write(make(), to, facts, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target"]


def test_nothing_half_written(tmp_path: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, a folder that is there, and a check that fails."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("mine")
    with pytest.raises(InputError, match="there already"):
        write(eagle(), "vllm", facts, tmp_path / "full")
    (tmp_path / "full" / "a").unlink()
    write(eagle(), "vllm", facts, tmp_path / "full")  # an empty one will do
    assert (tmp_path / "full" / "config.json").is_file()

    def refuse(folder: Path) -> None:
        assert (folder / "model.safetensors").is_file()
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        write(eagle(), "vllm", facts, tmp_path / "out", refuse)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(InputError, match=r"cannot be written \(No space left"):
        write(eagle(), "vllm", facts, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "target"]


# --- the checker -----------------------------------------------------------------------------------------------------


def tensors(folder: Path, **changed: Any) -> None:
    kept = load_file(folder / "model.safetensors")
    for name, value in changed.items():
        name = name.replace("__", ".")
        if value is None:
            del kept[name]
        else:
            kept[name] = value(kept.get(name)) if callable(value) else value
    save_file({k: t.contiguous() for k, t in kept.items()}, folder / "model.safetensors")


def fields(folder: Path, **changed: Any) -> None:
    config = {**config_of(folder), **changed}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def verifier(folder: Path) -> None:
    """Another architecture's."""
    given = config_of(folder)["speculators_config"]
    given["verifier"]["architectures"] = ["OtherForCausalLM"]
    fields(folder, speculators_config=given)


NAN = torch.full((H, 2 * H), float("nan"), dtype=torch.float64)
FAULTS: list[tuple[Callable[[], Checkpoint], str, Callable[[Path], None], str]] = [
    (eagle, "vllm", lambda f: tensors(f, fc__weight=None), "fc.weight is missing"),
    (eagle, "sglang", lambda f: tensors(f, fc__bias=None), "fc.bias is missing"),
    (eagle, "vllm", lambda f: tensors(f, fc__weight=NAN), "fc.weight has entries that are NaN"),
    (eagle, "vllm", lambda f: tensors(f, fc__weight=NAN[:, :H]), "fc.weight is [32, 32]"),
    (eagle, "vllm", lambda f: tensors(f, surplus=torch.zeros(3)), "surplus is none of this layout's"),
    (eagle, "vllm", lambda f: tensors(f, fc__bias=lambda t: t + 1), "vLLM ignores it"),
    (eagle, "vllm", lambda f: tensors(f, embed_tokens__weight=lambda t: t + 1), "not the embedding of"),
    (eagle, "vllm", lambda f: fields(f, architectures=["LlamaForCausalLMEagle"]), "architectures is"),
    (eagle, "vllm", lambda f: fields(f, rope_theta=None), "rope_theta and rope_parameters"),
    (eagle, "vllm", lambda f: fields(f, rope_theta=500.0), "two rotary bases"),
    (eagle, "vllm", lambda f: fields(f, bias=True), "biases of the attention's output"),
    (eagle, "vllm", lambda f: fields(f, head_dim=None), "head_dim is missing"),
    (eagle, "vllm", lambda f: fields(f, vocab_size=V + 3), "another target's drafter"),
    (eagle3, "vllm", lambda f: tensors(f, d2t=torch.tensor(DRAFTED)), "are these ids, and not offsets?"),
    (eagle3, "sglang", lambda f: tensors(f, d2t=torch.zeros(VD).long()), "are these ids, and not offsets?"),
    (eagle3, "vllm", lambda f: tensors(f, d2t=lambda t: t.int()), "int64 offsets"),
    (eagle3, "vllm", lambda f: tensors(f, t2d=lambda t: ~t), "t2d does not mark"),
    (eagle3, "vllm", lambda f: tensors(f, t2d=None), "t2d is missing"),
    (eagle3, "vllm", lambda f: fields(f, eagle_aux_hidden_state_layer_ids=[2, 2, 9]), "names a layer twice"),
    (eagle3, "sglang", lambda f: fields(f, eagle_aux_hidden_state_layer_ids=[3, 6, 9]), "SGLang counts one less"),
    (eagle3, "vllm", lambda f: fields(f, eagle_aux_hidden_state_layer_ids=[2, 6, 12]), "lie outside 1 to 11"),
    (eagle3, "vllm", lambda f: fields(f, eagle_aux_hidden_state_layer_ids=None), "engines guess"),
    (eagle3, "vllm", lambda f: fields(f, target_hidden_size=48), "48 wide here and 32 in"),
    (eagle3, "sglang", lambda f: fields(f, norm_before_residual=True), "which SGLang ignores"),
    (eagle3, "speculators", lambda f: tensors(f, embed_tokens__weight=None), "embed_tokens.weight is missing"),
    (eagle3, "speculators", lambda f: fields(f, norm_before_residual=None), "norm_before_residual is missing"),
    (eagle3, "speculators", lambda f: fields(f, speculators_config={}), "names no verifier"),
    (eagle3, "speculators", verifier, "the verifier is ['OtherForCausalLM']"),
    (medusa, "vllm", lambda f: tensors(f, lm_heads__1__weight=None), "lm_heads.1.weight is missing"),
    (medusa, "vllm", lambda f: fields(f, num_heads=4), "blocks.3.layers.0.weight is missing"),
    (medusa, "vllm", lambda f: fields(f, medusa_fc_bias=False), "bias is none of this layout's"),
    (eagle, "vllm", lambda f: (f / "config.json").write_text("{") and None, "not valid JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "to", "spoil", "fault"), FAULTS, ids=[f[3][:30] for f in FAULTS])
def test_the_checker_finds(
    tmp_path: Path, facts: Facts, make: Callable[[], Checkpoint], to: str, spoil: Callable[[Path], None], fault: str
) -> None:
    write(make(), to, facts, tmp_path / "out")
    assert check(tmp_path / "out", to, facts) == []
    spoil(tmp_path / "out")
    results = check(tmp_path / "out", to, facts)
    assert any(fault in sentence for sentence in results), results


def test_a_folder_that_medusas_code_does_not_load_is_found(tmp_path: Path, facts: Facts) -> None:
    """Outrider reads all of these, and that is not what was asked."""
    for name, made in (("eagle", eagle()), ("medusa", medusa())):
        (tmp_path / name).mkdir()
        native.write(made, tmp_path / name)
        assert any("of which medusa loads one" in fault for fault in check(tmp_path / name, "medusa", facts))
    write(medusa(), "medusa", facts, tmp_path / "out")
    assert check(tmp_path / "out", "medusa", facts) == []


def test_the_checker_knows_the_target(tmp_path: Path, facts: Facts) -> None:
    write(eagle3(), "vllm", facts, tmp_path / "out")
    other = Facts.at(foreign.target(tmp_path / "deep", num_hidden_layers=8))
    assert any("lie outside 1 to 7" in fault for fault in check(tmp_path / "out", "vllm", other))
    assert {to for known in FORMATS_OF.values() for to in known} == {*FORMATS}
    assert LLAMA["vocab_size"] == V
