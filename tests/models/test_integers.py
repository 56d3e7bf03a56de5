"""Products of whole numbers: what they compute, that drafts change no bit of a text, and that wrong ones are found."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import opened, trees_differ
from gguf_files import write
from small import BASE, build
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from wrong_code import mutated

import outrider
from outrider import InputError
from outrider.backends.native import drafts
from outrider.backends.native import library as native
from outrider.backends.native.abi import Library
from outrider.backends.torch import HFTarget, blocks, gguf, load, load_target
from outrider.backends.torch import kernel_blocks as packs
from outrider.backends.torch.packed import PACKED
from outrider.backends.torch.products import HalfLinear
from outrider.backends.torch.validate import multiplied, validate
from outrider.bench import checks
from outrider.bench.types import text_of
from outrider.budgets.budgeter import FixedBudget
from outrider.proofs.audit import audit
from outrider.training.data import Document
from outrider.training.loop import train
from outrider.training.recipe import Recipe

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
SHAPES = [(8, 32), (13, 64), (192, 576), (41, 1536)]  # outputs and width
KINDS = {"native": packs.W4A8, "int8": packs.W8A8}
FOREIGN = torch.backends.cpu.get_cpu_capability().startswith("AVX512")  # the code for AVX2 is not this processor's


def code() -> Library:
    found = native.library("bfloat16", "bfloat16" if load.multiplies_halves() else "float32")
    assert found is not None
    return found


@pytest.fixture(autouse=True, params=["own", "avx2"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of this processor, and of one with AVX2 alone, which computes in float32."""
    if native.library("bfloat16", "bfloat16") is None:
        pytest.skip("the compiled pass wants gcc and an x86 processor with AVX2")
    if request.param == "avx2":
        if not FOREIGN:
            pytest.skip("this is such a processor")
        request.getfixturevalue("avx2")
        monkeypatch.setattr(load, "multiplies_halves", lambda: False)
    elif native.tiles():
        pytest.skip("code with tiles has no integer products")


@pytest.fixture(scope="module")
def stock() -> LlamaForCausalLM:
    torch.manual_seed(1)
    more = {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 1, "max_position_embeddings": 2048}
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **SIZES, **more})).eval()


def loaded(model: Path, weights: str) -> HFTarget:
    target = load_target(model, exact="auto", weights=weights)
    assert isinstance(target, HFTarget)
    assert target.native is not None
    assert {one.kind for one, *_ in target.native.weights.whole} == {KINDS[weights]}
    return target


# -- a product ---------------------------------------------------------------------------------------------------------


def matrix(outputs: int, width: int, weights: str) -> tuple[packs.Packed, Tensor]:
    """Random rows, and the same weights as numbers."""
    dice = torch.Generator().manual_seed(outputs + width)
    scales = (torch.rand(outputs, width // 32, generator=dice) + 0.1).half().float()
    if weights == "int8":
        numbers, minima = torch.randint(-128, 128, (outputs, width), generator=dice), torch.zeros_like(scales)
    else:
        numbers = torch.randint(0, 16, (outputs, width), generator=dice)
        minima = torch.randn(scales.shape, generator=dice).half().float()
    full = (numbers.unflatten(1, (-1, 32)) * scales[..., None] + minima[..., None]).flatten(1)
    return packs.whole(numbers, scales, None if weights == "int8" else minima), full


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_its_numbers(shape: tuple[int, int], weights: str) -> None:
    """All places, scales and minima; weights and activations that are as large as they can be fill no sum."""
    made, full = matrix(*shape, weights)
    assert torch.equal(packs.opened(made, shape[1])[: shape[0]], full)
    assert not packs.opened(made, shape[1])[shape[0] :].any(), "rows of zeros make the last eight whole"
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 5)[:, None]
    x[1] = torch.where(torch.arange(shape[1]) % 3 == 0, -1.0, 1.0)  # every one is 127 or -127
    x = x.bfloat16().float()
    largest = packs.whole(torch.full(shape, 15), *torch.ones(2, shape[0], shape[1] // 32))
    for one, weight in ((made, full), (largest, torch.full(shape, 16.0))):
        right = packs.nearest(x).double() @ weight.double().T  # in float32, where a tie is the code's tie
        found = packs.multiply(code(), one, shape[0], x)
        size = x.double().abs() @ weight.double().abs().T
        assert ((found - right).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("weights", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(weights: str) -> None:
    """Nor on their number, nor on the number of threads; and what is no number stays none, in its own row."""
    one, _ = matrix(41, 576, weights)
    x = torch.randn(70, 576, generator=torch.Generator().manual_seed(4))
    x[3], x[4] = 0, 1e-38
    whole, threads = packs.multiply(code(), one, 41, x), torch.get_num_threads()
    assert not whole[3:5].any()
    for n in (1, 2, 3, 4, 5, 8, 64, 65):
        assert torch.equal(packs.multiply(code(), one, 41, x[:n]), whole[:n])
    try:
        torch.set_num_threads(3)
        assert torch.equal(packs.multiply(code(), one, 41, x), whole)
    finally:
        torch.set_num_threads(threads)
    x[2, 100], x[5, 7] = torch.nan, torch.inf
    found = packs.multiply(code(), one, 41, x)
    assert not found[[2, 5]].isfinite().any()
    others = [i for i in range(70) if i not in (2, 5)]
    assert torch.equal(found[others], whole[others])


def test_sixteen_lanes_of_floats() -> None:
    """The code of processors with AVX-512 for whatever computes in float32."""
    if not FOREIGN:
        pytest.skip("this processor has eight lanes")
    floats = native.library("bfloat16", "float32")
    assert floats is not None
    assert all(multiplied(floats, matrix(*shape, weights)[0], *shape) for shape in SHAPES for weights in KINDS)


def test_drafters_take_them() -> None:
    assert drafts.matrix(torch.randn(13, 64).numpy(), code()).kind == packs.W8A8


def test_the_nearest_activations() -> None:
    x = torch.randn(3, 64, dtype=torch.double)
    step = x.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    made = packs.nearest(x).unflatten(1, (-1, 32))
    assert ((made - x.unflatten(1, (-1, 32))).abs() <= 0.5001 * step).all()
    assert torch.allclose((made / step).round(), made / step)
    assert not packs.nearest(torch.zeros(1, 32)).any()


# -- a model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", KINDS)
@torch.no_grad()
def test_trees_have_the_bits_of_single_tokens(tmp_path: Path, stock: Any, weights: str) -> None:
    target = loaded(write(tmp_path / "m.gguf", stock, "Q4_1"), weights)
    assert target.exact == "bits"
    assert target.dtype == (torch.bfloat16 if load.multiplies_halves() else torch.float32)
    texts = [[(7 * i + 3 * b) % 97 for i in range(40 + 9 * b)] for b in range(3)]
    assert trees_differ(target, texts, [20, 29, 3], 12) == 0
    report = validate(target)
    assert report.verdict == "PASS bits"
    assert "integer products" in report.sentence
    assert report.worst == 0
    assert report.control > 100 * report.allowed


@pytest.mark.parametrize("weights", KINDS)
def test_drafts_do_not_change_a_bit_of_the_text(tmp_path: Path, stock: Any, weights: str) -> None:
    """Plainly, with drafts, in batches; the full model's text, and that of torch's products, is another one."""
    file, texts = write(tmp_path / "m.gguf", stock, "Q4_1"), []
    prompts = [[7, 8, 9, 7, 8, 9, 7], [3, 4], [20, 30, 40, 20, 30]]
    given: dict[str, Any] = {"max_new_tokens": 48, "seed": 5, "ignore_eos": True}
    for drafter in ("none", "lookup", "suffix + lookup"):
        llm = outrider.load(file, drafter, weights=weights)
        assert llm.target.exact == "bits"
        for batch in (1, 3):
            for budget in (FixedBudget(16, 4), "auto"):
                made = [
                    llm.generate(prompts, temperature=t, batch_size=batch, budget=budget, **given) for t in (0.0, 1.0)
                ]
                texts.append([[output.tokens for output in outputs] for outputs in made])
    assert all(made == texts[0] for made in texts)
    for other in (outrider.load(file, "none"), outrider.load(file, "none", weights=weights, compile=False)):
        assert [o.tokens for o in other.generate(prompts, temperature=1.0, batch_size=1, **given)] != texts[0][1]


@pytest.mark.parametrize("weights", KINDS)
@torch.no_grad()
def test_the_law_is_near_the_full_models(tmp_path: Path, stock: Any, weights: str) -> None:
    file = write(tmp_path / "m.gguf", stock, "Q4_1")
    prompts = [[(11 * i + b) % 97 for i in range(60)] for b in range(8)]
    full, whole = (opened(load_target(file, weights=w), prompts)[1] for w in ("full", weights))
    assert 0 < float((full - whole).norm()) < 0.1 * float(full.norm())


@torch.no_grad()
def test_what_a_file_has_in_other_blocks_stays_full(tmp_path: Path, stock: Any) -> None:
    """And where one half of a gated layer does, the other half too, for both round what they are given."""
    file = write(tmp_path / "m.gguf", stock, "Q4_1")
    model = gguf.read(file, "bfloat16")[0]
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight[3, 5] += 1
    layer.mlp.gate_proj.weight[0, 0] += 1
    found = blocks.integers(model, "native", file)
    names = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and id(m.weight) not in found}
    assert names == {"model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}
    for p in model.parameters():
        p += 1
    assert not blocks.integers(model, "native", file), "less than half"


def test_what_knows_the_stock_model_alone_refuses(tmp_path: Path, stock: Any) -> None:
    """It has full weights."""
    stock.save_pretrained(tmp_path / "m")
    target: Any = load_target(tmp_path / "m", weights="int8")
    assert target.whole
    documents = [Document((1, 2, 3, 4), (True,) * 4, str(i)) for i in range(40)]
    with pytest.raises(InputError, match="trained for the full weights"):
        train(target, documents, tmp_path / "out", Recipe("eagle", steps=1, length=16))
    with pytest.raises(InputError, match="leave weights out"):
        audit(outrider.load(write(tmp_path / "m.gguf", stock, "Q4_1"), "none", weights="native"))


@torch.no_grad()
def test_a_benchmark_holds_texts_to_the_same_products(tmp_path: Path, stock: Any) -> None:
    llm = outrider.load(write(tmp_path / "m.gguf", stock, "Q4_1"), "none", weights="native")
    for temperature in (0.0, 1.0):
        text = llm.generate([[1, 2, 3]], max_new_tokens=40, temperature=temperature, seed=3, ignore_eos=True)[0].tokens
        assert checks.own(llm, [1, 2, 3], text, temperature, 3) == 0
    assert "W4A8" in repr(llm)
    assert text_of("native") != text_of("eager+native")
    assert text_of("plain") == text_of("eager")


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_checkpoints_of_other_precisions_are_rounded_too(tmp_path: Path, stock: Any, kind: torch.dtype) -> None:
    copy.deepcopy(stock).to(kind).save_pretrained(tmp_path)
    loaded(tmp_path, "int8")


def test_models_of_other_layers_take_torchs_products(tmp_path: Path) -> None:
    build("gpt_neox", torch.float32).save_pretrained(tmp_path)
    target: Any = load_target(tmp_path, weights="int8")
    assert target.native is None
    assert any(isinstance(m, PACKED) for m in target.model.modules())


def test_the_stock_model_stays_whole(tmp_path: Path, stock: Any) -> None:
    """No layer of it is replaced by one of fewer bits."""
    target = loaded(write(tmp_path / "m.gguf", stock, "Q4_1"), "native")
    form = type(target.model.model.layers[0].mlp.up_proj)
    assert form in (torch.nn.Linear, HalfLinear)


LEAST = "sum[i] = f8_fma(f8_set1(x[i].sum), least, sum[i]);"
MUTANTS = {
    "a row has another's sums": ("simd/int8.h", "_mm256_shuffle_ps(a, b, 0xdd)", "_mm256_shuffle_ps(a, b, 0x88)"),
    "minima are left out": ("gemm/int8.h", LEAST, ";"),
    "a row has another's scale": ("gemm/int8.h", "f8_set1(x[i].scale)", "f8_set1(x[0].scale)"),
    "activations are cut off": ("simd/int8.h", "return _mm256_cvtps_epi32(x)", "return _mm256_cvttps_epi32(x)"),
    "numbers are in another order": (
        "simd/int8.h",
        "_mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);",
        "_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);",
    ),
    "the smallest number is cut": ("gemm/int8.h", "i8_sign(acts[v], own)", "acts[v]"),
}


@pytest.fixture
def mutant(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Code with a wrong line."""
    with mutated(monkeypatch, tmp_path, *MUTANTS[request.param]):
        yield request.param


@pytest.mark.parametrize("mutant", MUTANTS, indirect=True)
def test_wrong_products_are_found(mutant: str) -> None:
    found = [multiplied(code(), matrix(13, 64, weights)[0], 13, 64) for weights in KINDS]
    assert not all(found)


def test_right_products_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also in code that is built as wrong code is."""
    assert all(multiplied(code(), matrix(*shape, weights)[0], *shape) for shape in SHAPES for weights in KINDS)
    with mutated(monkeypatch, tmp_path, "gemm/int8.h", LEAST, LEAST):
        assert all(multiplied(code(), matrix(13, 64, weights)[0], 13, 64) for weights in KINDS)


@pytest.mark.parametrize("mutant", ["minima are left out"], indirect=True)
@torch.no_grad()
def test_wrong_products_are_not_used(tmp_path: Path, stock: Any, mutant: str, caplog: pytest.LogCaptureFixture) -> None:
    target: Any = load_target(write(tmp_path / "m.gguf", stock, "Q4_1"), weights="native")
    assert target.native is None
    assert "one of them is wrong here" in caplog.text
    assert any(isinstance(m, PACKED) for m in target.model.modules())
