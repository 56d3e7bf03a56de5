"""Weights in eight and four bits: near the model they were, and targets of their own that drafts are exact for."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write
from small import BASE, PROMPTS, build
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from outrider import InputError, drafters
from outrider.backends.torch import gguf, load_target
from outrider.backends.torch.kernels import SIZES
from outrider.backends.torch.packed import GROUP, PACKED, Int4Linear, Int8Linear, pack
from outrider.backends.torch.products import HalfLinear, OrderedLinear, hasten, hastened
from outrider.bench.models import Models
from outrider.budgets.budgeter import FixedBudget
from outrider.llm import LLM
from outrider.training.data import Document
from outrider.training.loop import train
from outrider.training.recipe import Recipe

IDS = torch.tensor(PROMPTS[:1])
SHAPES = [(7, 16), (1, 32), (48, 32), (33, 48), (16, 272)]


# -- one layer ---------------------------------------------------------------------------------------------------------


def eight(shape: tuple[int, int]) -> tuple[Int8Linear, nn.Linear]:
    """A layer of int8 rows, and the stock layer of the same numbers in float64."""
    linear = nn.Linear(shape[1], shape[0]).bfloat16()
    layer = Int8Linear(linear.weight.detach(), linear.bias)
    return layer, stock_of(layer.weight.double() * layer.scale.double()[:, None], linear.bias)


def four(shape: tuple[int, int]) -> tuple[Int4Linear, nn.Linear]:
    """A layer of four-bit blocks, and the stock layer of the same numbers in float64."""
    numbers = torch.randint(0, 16, shape)
    scales, offsets = torch.randn(2, shape[0], shape[1] // GROUP).bfloat16().double()
    bias = nn.Linear(shape[1], shape[0]).bfloat16().bias
    wide = ((numbers - 8) * scales.repeat_interleave(GROUP, 1)) + offsets.repeat_interleave(GROUP, 1)
    return Int4Linear((numbers, scales, offsets), bias), stock_of(wide, bias)


def stock_of(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    stock = nn.Linear(weight.shape[1], weight.shape[0]).double()
    stock.weight.copy_(weight)
    stock.bias.copy_(bias)
    return stock


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_a_layer_of_int8_is_its_weights_rounded(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    full = torch.randn(shape) * torch.logspace(0, 2, shape[0])[:, None]  # a scale for each row
    layer = Int8Linear(full.bfloat16(), None)
    assert layer.weight.dtype == torch.int8
    assert (layer.weight.abs().amax(1) >= 126).all(), "every row uses its whole range"
    error = (full.bfloat16().double() - layer.weight.double() * layer.scale.double()[:, None]).abs()
    assert (error <= 0.75 * layer.scale.double()[:, None]).all(), "half a step, and a little for the clamped largest"
    near(*eight(shape))


@pytest.mark.parametrize("shape", [(16, 32), (48, 64), (192, 576)], ids=str)
@torch.no_grad()
def test_a_layer_of_four_bits_is_its_blocks(shape: tuple[int, int]) -> None:
    """Every number, scale and offset stands where its weight is: a wrong place would be off by whole weights."""
    torch.manual_seed(3)
    near(*four(shape))


def near(layer: nn.Module, stock: nn.Linear) -> None:
    width, fine = stock.in_features, torch.finfo(torch.bfloat16).eps
    for x in (torch.randn(6, width), torch.randn(2, 3, width), torch.randn(width), torch.randn(0, width)):
        x = x.bfloat16()
        found, wanted = layer(x), stock(x.double())
        assert found.dtype == torch.bfloat16
        assert found.shape == wanted.shape
        size = nn.functional.linear(x.double().abs(), stock.weight.abs(), stock.bias.abs())
        assert ((found - wanted).abs() <= (4 + width / 16) * fine * size).all(), "rounding alone"


@torch.no_grad()
def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.randn(16, 32).bfloat16()
    weight[1] = 0
    for layer in (Int8Linear(weight, None), filled(weight)):
        y = layer(torch.ones(2, 32).bfloat16())
        assert (y[:, 1] == 0).all()
        assert (y[:, 0] != 0).all()


def filled(weight: torch.Tensor) -> Int4Linear:
    layer, _ = four(tuple(weight.shape))  # type: ignore[arg-type]
    layer.bias = None
    layer.fill(weight)
    return layer


@torch.no_grad()
def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Activations keep their precision, whatever stands beside them, and their bits, however many they are."""
    torch.manual_seed(2)
    for layer in (eight((64, 192))[0], four((64, 192))[0]):
        x = torch.randn(SIZES[-1], 192).bfloat16()
        x[4] *= 1e6
        whole = layer(x)
        for n in SIZES:
            assert torch.equal(layer(x[:n]), whole[:n])


# -- models ------------------------------------------------------------------------------------------------------------


def linears(model: Any) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize(
    ("name", "tied"), [("llama", False), ("llama", True), ("gpt_neox", False), ("qwen2", True), ("phi", False)]
)
@torch.no_grad()
def test_all_linear_layers_become_int8(name: str, tied: bool) -> None:
    """The LM head too, beside embeddings that stay whole."""
    wide = {"hidden_size": 32, "intermediate_size": 48}
    model = build(name, torch.bfloat16, tie_word_embeddings=tied, **wide)
    full, before = copy.deepcopy(model), linears(model)
    embeddings = model.get_input_embeddings()
    assert pack(model, "int8") == 1.0
    made = {n: m for n, m in model.named_modules() if isinstance(m, Int8Linear)}
    assert set(made) == set(before)
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    assert torch.equal(embeddings.weight, full.get_input_embeddings().weight)
    for layer_name, layer in made.items():
        assert layer.bias is before[layer_name].bias
    theirs, mine = full(IDS).logits, model(IDS).logits
    assert not torch.equal(theirs, mine)
    assert (theirs - mine).norm() < 0.06 * theirs.norm()
    for layer_name, layer in made.items():
        stock = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None).bfloat16()
        stock.weight.copy_(layer.weight * layer.scale[:, None])
        if layer.bias is not None:
            stock.bias.copy_(layer.bias)
        full.set_submodule(layer_name, stock)
    assert (full(IDS).logits - mine).norm() < 0.02 * mine.norm(), "the model of the rounded weights"


@pytest.fixture(scope="module")
def stock() -> LlamaForCausalLM:
    torch.manual_seed(1)
    wide = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **wide, "bos_token_id": 1, "eos_token_id": 1})).eval()


@pytest.mark.parametrize(("kind", "form"), [("Q4_0", Int4Linear), ("Q4_1", Int4Linear), ("Q8_0", Int8Linear)])
@torch.no_grad()
def test_native_weights_are_the_files(tmp_path: Path, stock: Any, kind: str, form: type) -> None:
    """Of every layer, though the file keeps queries and keys in another order of rows."""
    file = write(tmp_path / "m.gguf", stock, kind)
    full: Any = load_target(file, dtype="bfloat16", training=True).model  # which leaves its layers as they are
    native: Any = load_target(file, dtype="bfloat16", weights="native", native=False).model
    made = {n: m for n, m in native.named_modules() if isinstance(m, PACKED)}
    assert set(made) == set(linears(full))
    assert all(isinstance(m, form) for m in made.values())
    for name, layer in made.items():
        weight = full.get_submodule(name).weight.float()
        found = layer(torch.eye(weight.shape[1]).bfloat16()).float().T
        assert float((found - weight).norm()) < 0.01 * float(weight.norm()), name
    theirs, mine = (m(torch.arange(12)[None]).logits.float() for m in (full, native))
    assert float((theirs - mine).norm()) < 0.05 * float(theirs.norm())


def test_blocks_are_the_weights(tmp_path: Path, stock: Any) -> None:
    """What is read of a file is what transformers makes of it."""
    for kind in ("Q4_0", "Q4_1", "Q8_0"):
        file = write(tmp_path / f"{kind}.gguf", stock, kind)
        model, _ = gguf.read(file, "float32")
        weights = {tuple(p.sum(1).sort().values.tolist()) for p in model.parameters() if p.dim() == 2}
        found = list(gguf.blocks(file))
        assert len(found) == sum(p.dim() == 2 for p in stock.parameters())
        for blocks in found:
            assert tuple(blocks.full().sum(1).sort().values.tolist()) in weights
            assert (blocks.minima is None) == (kind == "Q8_0")


def test_what_cannot_be_packed_says_so(tmp_path: Path, stock: Any) -> None:
    file = write(tmp_path / "m.gguf", stock)  # float32
    folder = saved(tmp_path / "gpt2", "gpt2")  # layers of another class
    for where, more, words in (
        (file, {"weights": "native"}, "0% are in blocks .* take weights=int8"),
        (folder, {"weights": "native"}, "is none; choose int8 or full"),
        (folder, {"weights": "int8"}, "are in linear layers that can be packed; leave weights out"),
        (file, {"weights": "int4"}, "weights are full, int8 or native, not 'int4'"),
        (file, {"weights": "int8", "device": "cuda"}, "are for CPUs"),
        (file, {"weights": "int8", "dtype": "float16"}, "need bfloat16"),
        (stock, {"weights": "int8"}, "loaded by name"),
    ):
        with pytest.raises(InputError, match=words):
            load_target(where, **more)  # type: ignore[arg-type]


def saved(folder: Path, name: str) -> Path:
    """A tiny random model with the demo's tokenizer."""
    build(name, torch.float32, vocab_size=4096).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(str(files("outrider") / "demo" / "target" / file), folder)
    return folder


def written(llm: LLM, batch: int, temperature: float, tokens: int = 12) -> list[list[int]]:
    prompts = [[7, 8, 9, 7, 8, 9, 7], [3, 4], [20, 30, 40, 20, 30]]
    given = llm.generate(
        prompts, max_new_tokens=tokens, seed=5, batch_size=batch, temperature=temperature, budget=FixedBudget(16, 4),
        ignore_eos=True,
    )  # fmt: skip
    return [output.tokens for output in given]


@pytest.mark.parametrize("weights", ["int8", "native"])
def test_drafts_do_not_change_a_bit_of_a_packed_models_text(tmp_path: Path, stock: Any, weights: str) -> None:
    """Plainly, with drafts, in batches, and with recorded passes; the full model's text is another one."""
    file, texts = write(tmp_path / "m.gguf", stock, "Q4_1"), []
    for drafter, recorded in (("none", False), ("lookup", False), ("lookup", True)):
        llm = outrider.load(file, drafter, weights=weights, exact="bits", compile=False)
        if recorded:
            llm.target.compile()
        assert llm.target.exact == "bits"
        assert llm.name.endswith(f"{weights} weights")
        texts += [[written(llm, batch, temperature, 24) for temperature in (0.0, 1.0)] for batch in (1, 3)]
    assert all(made == texts[0] for made in texts)
    full = outrider.load(file, "none", dtype="bfloat16", exact="bits")
    assert written(full, 1, 1.0, 24) != texts[0][1]


def test_where_bits_are_promised_other_kinds_of_pass_may_be_recorded_later(tmp_path: Path, stock: Any) -> None:
    """Passes that are cut into blocks are of more kinds than a server can meet before its first request."""
    file = write(tmp_path / "m.gguf", stock, "Q4_1")
    target: Any = load_target(file, weights="int8", exact="bits", native=False)
    target.compile(patience=7)
    target.record()
    assert target.graphs.made
    assert not target.graphs.closed
    assert target.graphs.patience == 7


def test_variants_of_a_benchmark(tmp_path: Path, stock: Any) -> None:
    models = Models(str(write(tmp_path / "m.gguf", stock, "Q4_1")), device="cpu")
    full = nn.Linear, HalfLinear, OrderedLinear
    for variant, form in (("eager+int8", Int8Linear), ("eager+native", Int4Linear), ("plain", full)):
        target: Any = models.llm(variant).target
        assert isinstance(target.model.model.layers[0].mlp.up_proj, form)
        assert variant == "plain" or target.graphs is None
    assert models.llm("native") is models.llm("native")
    assert models.with_drafter("native", "lookup").target is models.llm("native").target


@pytest.mark.trained
@pytest.mark.parametrize(
    "drafter", ["eagle:demo/hass", "eagle3:demo", "medusa:demo", "hydra:demo", "model", "eagle:demo + lookup"]
)
def test_trained_drafters_draft_for_packed_weights(drafter: str, demo: tuple[LLM, list[list[int]]]) -> None:
    """They were trained for the full weights, and some of their guesses are right for the packed ones too."""
    llm, plain = demo
    made = drafters.load(drafter.split(" + "), llm.target, llm.tokenizer)
    drafted = replace(llm, drafter=made, drafter_name=drafter, budgets={})
    prompts = ["Once upon a time there was a", "def add(a, b):\n    return"]
    found = drafted.generate(prompts, max_new_tokens=16, budget=FixedBudget(8, 3), ignore_eos=True)
    assert [output.tokens for output in found] == plain
    assert sum(output.usage.tau for output in found) / 2 > 1.05


@pytest.fixture(scope="module")
def demo() -> tuple[LLM, list[list[int]]]:
    llm = outrider.load("demo", "none", weights="int8", compile=False, exact="bits")
    prompts = ["Once upon a time there was a", "def add(a, b):\n    return"]
    return llm, [o.tokens for o in llm.generate(prompts, max_new_tokens=16, ignore_eos=True)]


def test_a_packed_target_trains_no_drafter(tmp_path: Path, stock: Any) -> None:
    target = load_target(write(tmp_path / "m.gguf", stock, "Q4_1"), weights="native", native=False)
    documents = [Document((1, 2, 3, 4), (True,) * 4, str(i)) for i in range(40)]
    with pytest.raises(InputError, match="trained for the full weights"):
        train(target, documents, tmp_path / "out", Recipe("eagle", steps=1, length=16))  # type: ignore[arg-type]


def test_a_hastened_target_trains_no_drafter(tmp_path: Path) -> None:
    """Its products pass no gradients on, so that nothing would be learnt."""
    target = load_target("demo")
    hasten(target.model)
    if not hastened(target.model):
        pytest.skip("this processor reads plain weights alone")
    documents = [Document((1, 2, 3, 4), (True,) * 4, str(i)) for i in range(40)]
    with pytest.raises(InputError, match="training=True"):
        train(target, documents, tmp_path / "out", Recipe("eagle", steps=1, length=16))  # type: ignore[arg-type]
