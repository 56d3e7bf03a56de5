"""Mixtures of experts in native passes: the stock forward's logits, the bits of plain decoding, every form of files."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import text_of, trees_differ
from compiled_code import needs_code
from gguf_files import write
from safetensors.torch import save_file
from small import build
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from wrong_code import mutated

from outrider.backends import choose
from outrider.backends.native.target import load
from outrider.backends.torch import gguf
from outrider.backends.torch.mark import mark_of
from outrider.backends.torch.module import ModuleTarget
from outrider.core.protocols import Target
from outrider.params import InputError
from outrider.shipped import shipped

pytestmark = needs_code
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 2048}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "sliding_window": 70}),
    "one expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "all experts": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}),
    "not normalised": ("qwen3_moe", {"norm_topk_prob": False, "moe_intermediate_size": 64, "mlp_only_layers": [1]}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2,
            "norm_topk_prob": False,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 5, "sliding_window": 40, "intermediate_size": 64,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": 64,
            },
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3_moe, padded": ("qwen3_moe", {"num_experts": 5, "moe_intermediate_size": 24, "head_dim": 24}),
    "qwen2_moe, padded": (
        "qwen2_moe", {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "head_dim": 16},
    ),
    "gpt_oss, padded": ("gpt_oss", {"num_local_experts": 5, "intermediate_size": 24, "head_dim": 8}),
}  # fmt: skip


def made(case: str, dtype: torch.dtype, **more: Any) -> Any:
    """A tiny random model."""
    name, sizes = CASES[case]
    return build(name, dtype, **{**SIZES, **sizes, **more})


def after(target: Target, texts: list[list[int]]) -> list[np.ndarray]:
    """Logits after each of these texts, which are read together."""
    results = {}
    for chunk in target.open(64).prefill(texts):
        results |= {b: chunk.output.logits[b, 0] for b, last in enumerate(chunk.last) if last}
    return [results[b] for b in range(len(texts))]


@torch.no_grad()
def error(target: Target, model: Any) -> float:
    """How far logits are from the stock model's, as a share of the greatest."""
    worst = 0.0
    for seed, count in ((1, 5), (2, 130), (3, 300)):
        text = text_of(seed, count)
        right = model(torch.tensor([text])).logits[0, -1].double().numpy()
        worst = max(worst, np.abs(after(target, [text])[0] - right).max() / np.abs(right).max())
    return float(worst)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_stock_forward_with_and_without_drafts(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """Float32: to rounding. bfloat16: as near to the truth as it. Trees in a ragged batch: to the bit."""
    model = made(case, dtype)
    model.save_pretrained(tmp_path)
    target = load(tmp_path, str(dtype).removeprefix("torch."))
    if dtype == torch.float32:
        assert error(target, model) < 1e-5
    else:
        assert nearer(target, model)
    assert target.mark == mark_of(model)
    texts = [text_of(1, 168), text_of(2, 76), text_of(3, 100)]
    assert trees_differ(target, texts, [126, 34, 58], deep=6, taps=(0, 1, -1)) == 0


@torch.no_grad()
def nearer(target: Target, model: Any) -> bool:
    """Are logits of most texts nearer to those in float64 than the stock model's? (Of a few, rounding decides which
    experts are chosen.)"""
    truth, own, theirs = copy.deepcopy(model).double(), list[float](), list[float]()
    truth.set_experts_implementation("eager")  # grouped products exist in no double precision
    for seed in range(12):
        text = text_of(seed, 20 + 9 * seed)
        ids = torch.tensor([text])
        right = truth(ids).logits[0, -1].numpy()
        own.append(np.abs(after(target, [text])[0] - right).mean())
        theirs.append(np.abs(model(ids).logits[0, -1].double().numpy() - right).mean())
    return bool(np.median(own) < np.median(theirs))


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe"])
def test_the_same_on_processors_without_avx512(tmp_path: Path, case: str) -> None:
    model = made(case, torch.float32)
    model.save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        target = load(tmp_path, dtype)
        assert dtype == "bfloat16" or error(target, model) < 1e-5
        assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) == 0


def test_rows_of_many_prompts_and_threads_change_no_bit(tmp_path: Path) -> None:
    """More rows in a pass than experts compute together."""
    made("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path)
    target, texts = load(tmp_path), [text_of(seed, 500 + seed) for seed in range(4)]
    together, before = after(target, texts), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(np.array_equal(one, after(target, [text])[0]) for one, text in zip(together, texts, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a model, and the model."""
    folder, model = tmp_path_factory.mktemp("experts"), made("not normalised", torch.float32, norm_topk_prob=True)
    model.save_pretrained(folder)
    return folder, model


ORDERED = "for (int64_t r = 0; r < top_k; r++) {"
MUTANTS = {
    "weights do not sum to one": ("if (own->normalised)", "if (WRONG ? !own->normalised : own->normalised)"),
    "the least logits": (
        "logits[e] > logits[chosen[at - 1]]",
        "(WRONG ? logits[e] < logits[chosen[at - 1]] : logits[e] > logits[chosen[at - 1]])",
    ),
    "other experts": (
        "own->gate[e], own->up[e],", "own->gate[WRONG ? count - 1 - e : e], own->up[WRONG ? count - 1 - e : e],",
    ),
    "weights of others": ("sum = v_fma(v_set1(weight[r])", "sum = v_fma(v_set1(weight[WRONG ? top_k - 1 - r : r])"),
    "an order of sums that depends on other rows": (
        ORDERED,
        "for (int64_t i = 0; i < top_k; i++) { const int64_t r = !WRONG || n % 2 ? i : top_k - 1 - i;",
    ),
}  # fmt: skip
WRONG = [*MUTANTS]


@pytest.mark.parametrize("mutant", [*WRONG, "none"])
def test_wrong_routing_is_caught(
    routed: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mutant: str
) -> None:
    """Another order of sums is right up to rounding."""
    lines = [("layers/experts.h", *lines) for lines in MUTANTS.values()]
    with mutated(monkeypatch, tmp_path, lines, WRONG.index(mutant) if mutant in WRONG else -1):
        target = load(routed[0])
        if mutant in WRONG[:-1]:
            assert error(target, routed[1]) > 1e-2
        else:
            assert error(target, routed[1]) < 1e-5
            differs = trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) > 0
            assert differs is (mutant != "none")


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_names_of_transformers_5(tmp_path: Path, case: str) -> None:
    """Matrices of all experts in one tensor."""
    model = made(case, torch.float32)
    model.save_pretrained(tmp_path / "alone")
    model.config.save_pretrained(tmp_path / "stacked")
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "stacked" / "model.safetensors")
    one, two = load(tmp_path / "alone"), load(tmp_path / "stacked")
    assert np.array_equal(after(one, [text_of(1, 50)]), after(two, [text_of(1, 50)]))
    assert one.mark == two.mark


@torch.no_grad()
def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Blocks and exponents as the hub keeps them, against transformers' dequantised values."""
    model, dice = made("gpt_oss", torch.bfloat16), np.random.default_rng(1)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            experts, inputs, outputs = tensor.shape
            quants = dice.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
            exponents = dice.integers(122, 126, (experts, outputs, inputs // 32), np.uint8)
            state[f"{name}_blocks"], state[f"{name}_scales"] = torch.tensor(quants), torch.tensor(exponents)
            tensor.copy_(convert_moe_packed_tensors(state[f"{name}_blocks"], state[f"{name}_scales"]))
            del state[name]
    model.save_pretrained(tmp_path / "plain")
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(tmp_path / "blocks")
    save_file(state, tmp_path / "blocks" / "model.safetensors")
    for dtype in ("bfloat16", "float32"):
        one, two = load(tmp_path / "plain", dtype), load(tmp_path / "blocks", dtype)
        assert np.array_equal(after(one, [text_of(1, 50)]), after(two, [text_of(1, 50)]))
        assert one.mark == two.mark == mark_of(model)
    shutil.copy(Path(shipped("demo/target")) / "tokenizer.json", tmp_path / "blocks")
    assert not choose.load(str(tmp_path / "blocks")).target.integers, "unlike a .gguf file's blocks"


@pytest.mark.parametrize("scale", [1e2, 1e4, -1e4])
@torch.no_grad()
def test_the_gate_of_a_shared_expert_may_be_shut(scale: float) -> None:
    """Its logits are far from 0: exp(-logit) is beyond float32."""
    model = made("qwen2_moe", torch.float32)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "shared_expert_gate"):
            layer.mlp.shared_expert_gate.weight.mul_(scale)
    text = text_of(1, 50)
    right = model(torch.tensor([text])).logits[0, -1].numpy()
    np.testing.assert_allclose(after(ModuleTarget(model), [text])[0], right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_models_in_memory(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """The bits of the same model's file, also when weights have changed in place."""
    model = made(case, dtype)
    target = ModuleTarget(model)
    assert target.mark == mark_of(model)
    for _ in range(2):
        model.save_pretrained(tmp_path)
        other = load(tmp_path)
        assert np.array_equal(after(target, [text_of(1, 50)]), after(other, [text_of(1, 50)]))
        with torch.no_grad():
            for parameter in model.model.layers[0].mlp.parameters():
                parameter.mul_(0.5)


GGUFS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("mixtral", {"num_local_experts": 3}),
    "qwen3moe": ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 256}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 3}),
}


def wide(arch: str) -> Any:
    """Wide enough for blocks of 256."""
    name, sizes = GGUFS[arch]
    more = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "bos_token_id": 1, "eos_token_id": 1}
    return build(name, torch.float32, **{**SIZES, **more, "initializer_range": 0.05, **sizes})


STACKED = [(arch, kind) for arch in GGUFS for kind in ("F32", "Q8_0", "Q4_K")]
STACKED += [("llama", "F16"), ("llama", "Q6_K"), ("qwen3moe", "BF16"), ("gpt-oss", "MXFP4")]


@pytest.mark.parametrize(("arch", "kind"), STACKED)
def test_files_whose_experts_are_stacked(tmp_path: Path, arch: str, kind: str) -> None:
    """The stock model of the file's dequantised weights."""
    source = wide(arch)
    file = write(tmp_path / "m.gguf", source, kind, arch=arch)
    target, model = load(file, "float32"), gguf.read(file, "float32")[0]
    assert error(target, model) < 1e-5
    assert target.mark == mark_of(model)
    if kind == "F32":
        assert target.mark == mark_of(source)
        assert error(target, source) < 1e-5
    else:
        halves = load(file, "bfloat16")
        assert nearer(halves, gguf.read(file, "bfloat16")[0])
        assert trees_differ(halves, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) == 0


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"num_local_experts": 0}, "num_local_experts is 0, not a positive whole number"),
        ({"num_experts_per_tok": 6}, "6 of 5 experts cannot be chosen in layers of width 64"),
        ({"num_local_experts": 65}, "2 of 65 experts cannot be chosen in layers of width 64"),
        ({"num_local_experts": 6}, "lack 9 tensors, model.layers.0.mlp.experts.5.down_proj.weight among them"),
        ({"intermediate_size": 64}, "experts.0.gate_proj.weight is [96, 64], not [64, 64]; fetch both again"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide', not a whole number"),
    ],
)
def test_a_config_that_does_not_fit_is_one_sentence(tmp_path: Path, values: dict[str, Any], sentence: str) -> None:
    made("mixtral", torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | values
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as refused:
        load(tmp_path)
    assert sentence in str(refused.value)


def test_a_file_that_lacks_experts_is_one_sentence(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", wide("qwen3moe"), "F32", "qwen3moe", leave_out="blk.1.ffn_up_exps.weight")
    with pytest.raises(InputError, match=r"lack 4 tensors, model\.layers\.1\.mlp\.experts\.0\.up_proj"):
        load(file)
