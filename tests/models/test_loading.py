"""What is refused at the door, in one sentence; what is proved there; and the tiny pretrained models."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_files import write
from safetensors.torch import load_file, save_file
from small import build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from outrider import drafters
from outrider.backends import choose
from outrider.backends.torch import load, load_target
from outrider.backends.torch.validate import own_code, validate
from outrider.engine import Engine, Request, generate
from outrider.params import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("llama", torch.float32).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def refused(where: Any, words: str, **options: Any) -> None:
    with pytest.raises(InputError, match=words) as result:
        load_target(where, **options)
    assert "\n" not in str(result.value), "one sentence"


def test_a_folder_loads(folder: Path) -> None:
    assert load_target(folder, device="cpu").vocab == 97


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def without_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def rewritten(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("config.json", Path.unlink, "config.json"),
        ("config.json", lambda file: file.write_text("{"), "not valid JSON"),
        ("config.json", lambda file: rewritten(file, intermediate_size=40), "do not have the shapes that its config.j"),
        ("model.safetensors", Path.unlink, "no safetensors weights"),
        ("model.safetensors", cut, "damaged"),
        ("model.safetensors", without_a_tensor, "up_proj"),  # which transformers would initialise at random
    ],
)
def test_a_damaged_folder_is_refused(folder: Path, file: str, damage: Callable[[Path], Any], words: str) -> None:
    damage(folder / file)
    refused(folder, words)


def test_no_language_model(tmp_path: Path) -> None:
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    refused(tmp_path, "no language model")
    refused(transformers.LlamaModel(build("llama").config), "not a language model")
    refused(7, "a name, a folder or a transformers model")


def test_code_of_its_own_needs_trust(folder: Path) -> None:
    remote = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddModel"}
    rewritten(folder / "config.json", model_type="odd", auto_map=remote)
    (folder / "odd.py").write_text("raise RuntimeError('this must never run')")
    refused(folder, "only if you trust its author")


OWN_CODE = """
import transformers

class Mine(transformers.LlamaForCausalLM):
    def forward(self, *args, **given):
        made = super().forward(*args, **given)
        made.logits = -made.logits
        return made
"""


def test_code_of_its_own_runs_where_it_is_trusted(folder: Path) -> None:
    """Also of a model whose config native passes know."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_mine.py").write_text(OWN_CODE)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))).save_pretrained(folder)
    trusted, plain = (choose.load(str(folder), trust_remote_code=trust) for trust in (True, False))
    assert type(trusted.target.model).__name__ == "Mine"
    texts = []
    for target in (trusted.target, plain.target):
        engine = Engine.of(target, drafters.load("none"))
        (*_, piece) = generate(engine, [Request([5, 6, 7], 0, 12)])
        texts.append(piece.row.output)
    assert texts[0] != texts[1]


def test_a_folder_that_is_called_like_a_shipped_model_has_its_own_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build("llama", torch.float32).save_pretrained("demo")
    words = {"hello": 0, "there": 1}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="hello"))).save_pretrained("demo")
    made = choose.load(AutoModelForCausalLM.from_pretrained("demo"))
    assert made.tokenizer.get_vocab() == words


def test_a_model_of_a_gguf_file_in_memory_has_the_files_tokenizer(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", build("llama", vocab_size=128), "F32")
    stock, _ = load.gguf.read(file, torch.float32)
    tokenizer = load.load_tokenizer(load.origin_of(stock))
    assert tokenizer.get_vocab() == load.load_tokenizer(str(file)).get_vocab()


def test_a_proof_is_of_the_code_that_runs() -> None:
    """Also where the code is a class below the model's own, and made anew for a class without a source."""
    model = build("llama", torch.float32)
    assert own_code(model) == []
    spaces: list[dict[str, Any]] = [{"torch": torch}, {"torch": torch}]
    seen = []
    for space in spaces:
        exec("class Own(torch.nn.Linear):\n    pass", space)
        model.lm_head.__class__ = space["Own"]
        seen.append(own_code(model))
    assert seen[0] != seen[1]


def test_a_head_that_is_no_matrix_is_refused() -> None:
    model = build("llama", torch.float32)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    refused(model, "is not a matrix")


def test_another_revision_has_its_own_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What names a revision or an access is given to all readers; an unreachable hub is asked by none."""
    seen: dict[str, dict[str, Any]] = {}

    def reader(name: str) -> Any:
        def read(where: str, **options: Any) -> None:
            seen[name] = options
            raise OSError("enough")

        return read

    for name in ("AutoConfig", "AutoTokenizer"):
        monkeypatch.setattr(getattr(load, name), "from_pretrained", reader(name))
    monkeypatch.setattr(load.hub, "ensure", lambda *given: False)
    for options, wanted in (({"revision": "v2", "token": "t"}, {"revision": "v2", "token": "t"}),
                            ({"attn_implementation": "sdpa"}, {"local_files_only": True})):  # fmt: skip
        with pytest.raises(InputError):
            load_target("org/model", **options)
        with pytest.raises(InputError):
            load.load_tokenizer("org/model", False, options)
        for given in seen.values():
            assert {name: value for name, value in given.items() if name != "trust_remote_code"} == wanted


def test_recurrent_models_are_refused_by_name() -> None:
    config = transformers.MambaConfig(vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=1)
    refused(transformers.MambaForCausalLM(config), "mamba keeps a recurrent state")


def test_dynamic_rope_is_refused() -> None:
    refused(build("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic")


def test_long_rope_is_used_within_its_original_context() -> None:
    """The factors change where the longest text of a batch crosses that length; no text of ours ever does."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    target = load_target(build("phi3", rope_parameters=rope, original_max_position_embeddings=48))
    assert target.context == 48
    assert validate(target).exact


@pytest.mark.parametrize("name", ["stablelm", "starcoder2", "smollm3"])
def test_an_unlisted_family_is_proved_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family missing from the table passes `validate` at load; the second load trusts the first."""
    from outrider.backends.torch import families

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    model = build(name)
    monkeypatch.delitem(families.TABLE, model.config.model_type, raising=False)
    target = load_target(model)
    assert not target.family.proved
    (proof,) = (tmp_path / "validated").glob("*.json")
    assert json.loads(proof.read_text())["exact"]
    stamp = proof.stat().st_mtime_ns
    load_target(model)
    assert proof.stat().st_mtime_ns == stamp


def test_a_proof_in_full_precision_holds_in_a_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a router may flip by rounding; masks and positions do not depend on the precision."""
    from outrider.backends.torch import families

    monkeypatch.delitem(families.TABLE, "qwen3_moe")
    load_target(build("qwen3_moe", torch.float32))

    def never(*args: Any) -> None:
        raise AssertionError("proved again")

    monkeypatch.setattr(importlib.import_module("outrider.backends.torch.validate"), "_compare", never)
    load_target(build("qwen3_moe", torch.bfloat16))
    with pytest.raises(InputError, match="proved again"):
        load_target(build("qwen3_moe", torch.bfloat16, norm_topk_prob=False))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "cohere2", "gemma2"])
def test_low_precision_is_no_reason_to_refuse(name: str) -> None:
    report = validate(load_target(build(name, torch.bfloat16)))
    assert report.exact, report.sentence


def test_a_model_that_ignores_masks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.backends.torch import families

    model = build("llama")
    monkeypatch.delitem(families.TABLE, "llama")
    stock = model.forward

    def careless(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        kept = None if attention_mask is None else torch.zeros_like(attention_mask)
        return stock(*args, attention_mask=kept, **kwargs)

    monkeypatch.setattr(model, "forward", careless)
    refused(model, "refused")
    assert not list(tmp_path.glob("**/*.json")), "a failed proof is not remembered"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["stories260K", "tinystories-656k", "tinystories-chat-neo-3m"])
def test_pretrained_models_pass_the_proof(shared: Path, name: str, dtype: str) -> None:
    where = shared / "models" / name
    if not where.is_dir():
        pytest.skip(f"the tiny pretrained model {name} is not beside the repository")
    report = validate(load_target(where, dtype=dtype, device="cpu"))
    assert report.exact, report.sentence
    assert report.worst < (1e-5 if dtype == "float64" else 1e-3)


@pytest.mark.parametrize(
    ("able", "memory", "asked", "dtype"),
    [
        (True, 1 << 40, {}, torch.bfloat16),
        (False, 1 << 40, {}, torch.float32),
        (False, 1 << 10, {}, torch.bfloat16),  # float32 would take too much
        (False, 1 << 40, {"dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_without_products_in_16_bits_a_model_computes_in_float32(
    able: bool, memory: int, asked: dict[str, str], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "multiplies_halves", lambda: able)
    monkeypatch.setattr(load, "physical_memory", lambda: memory)
    build("llama", torch.bfloat16).save_pretrained(tmp_path)
    assert load_target(tmp_path, **asked).dtype == dtype  # type: ignore[arg-type]
