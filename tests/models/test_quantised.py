"""Low precision: speculation writes the plain text of the same model, or parts from it where rounding could decide.

A pass over one token and a pass over several round differently. The difference is measured on the stock model alone;
wherever the engine's text first parts from plain decoding, the two best logits must lie closer than twice that noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small import PROMPTS, VOCAB, build

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.backends.torch.carrier import carried, carrying
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.engine import Engine, Request, generate

NEW = 40


@dataclass
class Parting:
    """Where a row's text leaves plain decoding."""

    row: int
    at: int
    margin: float  # between plain decoding's two best logits there


def written(target: Any, drafter: str) -> list[list[int]]:
    engine = Engine(target, drafters.load(drafter, target), FixedBudget(10, 4), GumbelNoise(VOCAB))  # type: ignore[arg-type]
    rows: dict[int, Any] = {}
    for piece in generate(engine, [Request(p, i, NEW) for i, p in enumerate(PROMPTS)]):
        rows[piece.row.index] = piece.row
    return [rows[i].output for i in range(len(PROMPTS))]


@torch.no_grad()
def plain(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy stock decoding: tokens, and the logits [NEW, v] each was chosen by."""
    out, tokens, seen = model(torch.tensor([prompt]), use_cache=True), [], []
    for _ in range(NEW):
        seen.append(out.logits[0, -1].float())
        tokens.append(int(seen[-1].argmax()))
        out = model(torch.tensor([tokens[-1:]]), **carrying(model, carried(model, out)))
    return tokens, torch.stack(seen)


@torch.no_grad()
def noise_of(model: Any, prompt: list[int], tokens: list[int], seen: torch.Tensor) -> float:
    """The largest difference of any logit between one-token passes and one pass over the same text."""
    full = model(torch.tensor([prompt + tokens])).logits[0].float()
    return float((full[len(prompt) - 1 : -1] - seen).abs().max())


def compare(target: Any, drafter: str) -> tuple[list[Parting], float]:
    partings, noise = [], 0.0
    for row, (prompt, text) in enumerate(zip(PROMPTS, written(target, drafter), strict=True)):
        tokens, seen = plain(target.model, prompt)
        noise = max(noise, noise_of(target.model, prompt, tokens, seen))
        assert len(text) == NEW
        for at, (a, b) in enumerate(zip(text, tokens, strict=True)):
            if a != b:
                first, second = seen[at].topk(2).values.tolist()
                partings.append(Parting(row, at, first - second))
                break
    return partings, noise


def judged(target: Any, drafter: str, record: Any) -> None:
    partings, noise = compare(target, drafter)
    record("noise", noise)
    record("partings", str(partings))
    print(f"{drafter.split(':')[0]}: noise {noise:.2e}, {len(partings)} of {len(PROMPTS)} rows part: {partings}")
    for parting in partings:
        assert parting.margin <= 2 * noise, f"rounding ({noise}) does not explain {parting}"


def draft_in(folder: Path) -> str:
    """The target's own weights, unquantised, with a little noise: it drafts well, yet not perfectly."""
    model = build("llama", torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.std())
    model.save_pretrained(folder)
    return f"model:{folder}"


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("precision", ["int8", "bfloat16"])
def test_low_precision_parts_only_within_rounding(
    precision: str, drafter: str, tmp_path: Path, record_property: Any
) -> None:
    build("llama", torch.float32).save_pretrained(tmp_path / "target")
    if precision == "int8":
        quantization = pytest.importorskip("torchao.quantization", reason="int8 needs torchao")
        from transformers import TorchAoConfig

        options = {"quantization_config": TorchAoConfig(quantization.Int8WeightOnlyConfig())}
        target = load_target(tmp_path / "target", dtype="float32", device="cpu", **options)
        kinds = {type(p).__name__ for p in target.model.parameters()}
        assert any("Int8" in kind or "Quantized" in kind for kind in kinds), f"nothing is quantised: {kinds}"
    else:
        target = load_target(tmp_path / "target", dtype=precision, device="cpu")
    name = draft_in(tmp_path / "draft") if drafter == "model" else drafter
    judged(target, name, record_property)
