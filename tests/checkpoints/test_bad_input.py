"""Damaged and foreign folders: one sentence each that says what to do; nothing is loaded, nothing is written."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import layouts_foreign as foreign
import pytest
import torch
from layouts_foreign import DRAFTED, LLAMA, VD, H, V, eagle, folder, hydra, medusa
from safetensors.torch import save_file

from outrider import drafters
from outrider.checkpoints import Facts, method_of, read, safeailab
from outrider.checkpoints.files import Weights
from outrider.params import InputError

IDS = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}
THREE = {**LLAMA, "draft_vocab_size": VD, **IDS}


def eagle3(**kwargs: Any) -> foreign.Tensors:
    return foreign.eagle3(**kwargs)


def without(tensors: foreign.Tensors, *names: str) -> foreign.Tensors:
    return {k: t for k, t in tensors.items() if k not in names}


class Harm:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("harmed",))


def pickled(at: Path, what: Any) -> Path:
    folder(at, dict(LLAMA), {"fc.weight": torch.zeros(1)}, "pytorch_model.bin")
    with (at / "pytorch_model.bin").open("wb") as file:
        pickle.dump(what, file)
    return at


def saved(at: Path, what: Any) -> Path:
    folder(at, dict(LLAMA), {"fc.weight": torch.zeros(1)}, "pytorch_model.bin")
    torch.save(what, at / "pytorch_model.bin")
    return at


def cut(at: Path) -> Path:
    file = folder(at, dict(LLAMA), eagle()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    return at


def text(at: Path, content: str) -> Path:
    (folder(at, {}, eagle()) / "config.json").write_text(content)
    return at


def test_an_embedding_is_known_in_few_bits() -> None:
    """A .gguf file's own may have four: 8 % of its norm; another model's is as far as it is long."""
    torch.manual_seed(0)
    own = torch.randn(50, 32)
    near, far = own + 0.08 * torch.randn(50, 32), torch.randn(50, 32)
    facts: Any = SimpleNamespace(name="m.gguf", embedding=lambda: near)
    safeailab.same_embedding(own, facts, "here")
    with pytest.raises(InputError, match=r"is not that of m\.gguf"):
        safeailab.same_embedding(far, facts, "here")


NAN = torch.full((H, 2 * H), float("nan"))
BAD: list[tuple[Callable[[Path], Any], str]] = [
    # files
    (lambda p: p / "nowhere", "there is no folder"),
    (lambda p: p.mkdir() or p, "it lacks config.json"),
    (lambda p: text(p, "{"), "not valid JSON"),
    (lambda p: text(p, "[1]"), "not a JSON object"),
    (lambda p: folder(p, {**LLAMA, "rms_norm_eps": None}, eagle()), "cannot be understood"),
    (lambda p: folder(p, {**LLAMA, "rms_norm_eps": [1]}, eagle()), "cannot be understood"),
    (lambda p: folder(p, dict(LLAMA), {}, "other.safetensors"), "has no weights"),
    (cut, "damaged"),
    (lambda p: pickled(p, {"fc.weight": Harm()}), "a pickle can run code"),
    (lambda p: saved(p, [1, 2]), "not a table of tensors"),
    (lambda p: folder(p, dict(LLAMA), {"model.layers.0.q": torch.zeros(1), "lm_head.weight": torch.zeros(1)}),
     "a full language model; use it as model:"),
    (lambda p: folder(p, dict(LLAMA), {"backbone.embedding.weight": torch.zeros(1)}), "a Mamba, .* use it as mamba:"),
    (lambda p: folder(p, dict(LLAMA), {"colour": torch.zeros(1)}), "is not a native folder, .* begin with colour"),
    # EAGLE
    (lambda p: folder(p, dict(LLAMA), without(eagle(), "fc.weight")), "lack fc.weight"),
    (lambda p: folder(p, dict(LLAMA), eagle(bias=False)), '"bias" absent means true'),
    (lambda p: folder(p, {**LLAMA, "bias": False}, eagle()), "hold fc.bias, which this layout has not"),
    (lambda p: folder(p, dict(LLAMA), {**eagle(), "layers.0.input_layernorm.weight": torch.ones(H)}), "hold layers"),
    (lambda p: folder(p, dict(LLAMA), eagle(qkv=True)), "hold layers.0.self_attn.k_proj.bias"),
    (lambda p: folder(p, dict(LLAMA), {**eagle(), "fc.weight": NAN}), "fc.weight of .* NaN"),
    (lambda p: folder(p, dict(LLAMA), {**eagle(), "fc.weight": NAN[:3]}), r"fc.weight of .* is \[3, 64\]"),
    (lambda p: folder(p, {**LLAMA, "num_hidden_layers": 2}, eagle()), "has 2 layers"),
    (lambda p: folder(p, {**LLAMA, "hidden_size": None}, eagle()), "does not say hidden_size"),
    (lambda p: folder(p, {**LLAMA, "vocab_size": "many"}, eagle()), "vocab_size .* must be an integer"),
    (lambda p: folder(p, {**LLAMA, "hidden_act": "gelu"}, eagle()), "uses gelu"),
    (lambda p: folder(p, {**LLAMA, "bias": "yes"}, eagle()), "bias .* must be true or false"),
    (lambda p: folder(p, {**LLAMA, "rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, eagle()), "two rotary"),
    (lambda p: folder(p, {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2}}, eagle()), "not dynamic"),
    (lambda p: folder(p, {**LLAMA, "rope_scaling": {"mrope_section": [1]}}, eagle()), "by modality"),
    (lambda p: folder(p, {**LLAMA, "outrider": {"colour": 1}}, eagle()), "the block outrider"),
    # EAGLE-3
    (lambda p: folder(p, THREE, without(eagle3(), "fc.weight")), "lack fc.weight"),
    (lambda p: folder(p, THREE, without(eagle3(), "lm_head.weight")), "has no LM head, it uses its target's"),
    (lambda p: folder(p, THREE, without(eagle3(), "d2t")), "lack d2t, but its draft vocabulary has 17 of 61"),
    (lambda p: folder(p, THREE, {**eagle3(), "d2t": torch.tensor(DRAFTED)}), "token ids where offsets belong"),
    (lambda p: folder(p, THREE, {**eagle3(), "d2t": torch.arange(VD)}), "d2t and t2d disagree"),
    (lambda p: folder(p, THREE, {**eagle3(), "d2t": -torch.arange(VD)}), "an id of its own"),
    (lambda p: folder(p, THREE, {**eagle3(), "d2t": torch.zeros(VD)}), "not an integer type"),
    (lambda p: folder(p, {**THREE, "draft_vocab_size": 9}, eagle3()), "where its config says"),
    (lambda p: folder(p, {**LLAMA, "draft_vocab_size": VD}, eagle3()), "name the target"),
    (lambda p: folder(p, {**THREE, "eagle_aux_hidden_state_layer_ids": [2, 2, 9]}, eagle3()), "three different ones"),
    (lambda p: folder(p, {**THREE, "eagle_config": dict(IDS)}, eagle3()), "one less"),
    (lambda p: folder(p, {**THREE, "eagle_config": {"use_aux_hidden_state": False}}, eagle3()), "reads one layer"),
    (lambda p: folder(p, {**THREE, "target_hidden_size": 48}, eagle3(wide=48)), "lack embed_tokens.weight"),
    (lambda p: folder(p, {**THREE, "norm_before_fc": True}, eagle3()), "lack input_norm.weight"),
    (lambda p: folder(p, THREE, eagle3(fc_norm=True)), "hold fc_norm.0.weight"),
    (lambda p: folder(p, foreign.speculators(speculators_model_type="mtp"), eagle3()), "a speculator of type mtp"),
    (lambda p: folder(p, {k: v for k, v in foreign.speculators().items() if k != "norm_before_residual"}, eagle3()),
     "has no norm_before_residual"),
    # Medusa and Hydra
    (lambda p: folder(p, {}, without(medusa(), "2.1.linear.bias"), "medusa_lm_head.pt"), "lack 2.1.linear.bias"),
    (lambda p: folder(p, {}, without(medusa(), "0.0.linear.weight"), "medusa_lm_head.pt"), "no Medusa heads"),
    (lambda p: folder(p, {}, {**medusa(), "x": torch.ones(1)}, "medusa_lm_head.pt"), "hold x, which this layout"),
    (lambda p: folder(p, {}, medusa(share=True), "medusa_lm_head.safetensors"), "share their target's LM head"),
    (lambda p: folder(p, {"model_type": "medusa", "hidden_size": H, "vocab_size": V, "truncated_vocab_size": 7},
                      {"blocks.0.layers.0.weight": torch.zeros(H, H)}), "truncated vocabulary"),
    (lambda p: folder(p, {"hydra_head_arch": "eagle-attn"}, hydra(), "hydra_lm_head.pt"), "heads of kind eagle-attn"),
    (lambda p: folder(p, {"grounded_heads": False}, hydra(), "hydra_lm_head.pt"), "do not see the drafted tokens"),
    (lambda p: folder(p, {"hydra_head_arch": "prefix-mlp"}, hydra(), "hydra_lm_head.pt"), "says prefix-mlp"),
    (lambda p: folder(p, {"hydra_head_arch": "prefix-mlp"}, hydra(prefix=True), "hydra_lm_head.pt"), "target's shape"),
    # native
    (lambda p: folder(p, {"outrider_method": "eagle", "format": 3}, eagle()), "format 3"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "sentence"), BAD, ids=[f"{i}-{b[1][:28]}" for i, b in enumerate(BAD)])
def test_refused_in_a_sentence(
    tmp_path: Path, make: Callable[[Path], Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=sentence) as error:
        read(make(tmp_path / "d"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "harmed").exists()


OTHER: list[tuple[Callable[[Path], Any], dict[str, Any], str]] = [
    (lambda p: folder(p, dict(LLAMA), eagle()), {"vocab_size": V}, "not that of .*: it was trained for another model"),
    (lambda p: folder(p, THREE, eagle3()), {"cut": 50}, "for a target with 61 tokens .* has 50"),
    (lambda p: folder(p, {}, medusa(), "medusa_lm_head.pt"), {"cut": 50}, "for a target with 61 tokens"),
    (lambda p: folder(p, {}, hydra(), "hydra_lm_head.pt"), {}, "trained for another model"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "change", "sentence"), OTHER, ids=["eagle", "eagle3", "medusa", "hydra"])
def test_another_target(tmp_path: Path, make: Callable[[Path], Any], change: dict[str, Any], sentence: str) -> None:
    rows = change.get("cut", V)
    tensors = {f"{n}.weight": foreign.some(rows, H, seed=1) for n in ("model.embed_tokens", "lm_head")}
    facts = Facts.at(folder(tmp_path / "t", {**LLAMA, "num_hidden_layers": 12, "vocab_size": rows}, tensors))
    with pytest.raises(InputError, match=sentence):
        read(make(tmp_path / "d"), facts)


def test_a_target_without_the_parts(tmp_path: Path) -> None:
    for name, make, sentence in (
        ("a", lambda p: p, "there is no folder"),
        ("b", lambda p: folder(p, dict(LLAMA), {"x": torch.zeros(1)}), "have none of"),
        ("c", lambda p: folder(p, dict(LLAMA), {"x": torch.zeros(1)}, "pytorch_model.bin"), "no safetensors weights"),
    ):
        with pytest.raises(InputError, match=sentence):
            Facts.at(make(tmp_path / name))


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"fc.weight": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(InputError, match=r"holds fc\.weight twice, in a\.safetensors and b\.safetensors"):
        Weights([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tmp_path)


def test_a_spec_without_a_method(tmp_path: Path) -> None:
    assert method_of(tmp_path) is None
    where = folder(tmp_path / "d", dict(LLAMA), {"colour": torch.zeros(1)})
    assert method_of(where) is None
    with pytest.raises(InputError, match="name the method"):
        drafters.load(str(where))


def test_what_ships_is_a_folder_by_its_name() -> None:
    assert read("demo/hass").method == "eagle"
    with pytest.raises(InputError, match=r"no .hess. for demo is installed; there are .*hass"):
        read("demo/hess")
    with pytest.raises(InputError, match="there is no folder demo; name the folder"):
        read("demo")
