"""What a replayed answer would cost on a large model: a model of a machine, not a measurement.

    time of a pass = overhead + max(bytes moved / bandwidth, 2 * (parameters + share * experts) * nodes / flops)
    bytes moved    = (parameters + experts * (1 - (1 - share)^nodes)) * bytes + context * kv

One pass reads every weight and the text's keys and values once, however many nodes it verifies: nodes are free until
their arithmetic takes longer than the reading. A node uses a share of a mixture's experts; the pass reads those of all
nodes. A COST is MODEL@MACHINE (7b@a100), or the figures themselves:

    parameters=8e9,bandwidth=9e11,flops=1.5e14,bytes=2,overhead=2e-4,kv=131072

or both, where figures replace those of the preset: 7b@a100,bytes=0.5. Models: 7b is Llama 2 and Vicuna (32 layers of 32
key-value heads of 128 numbers, 16 bits each), 8b is Llama 3 (8 key-value heads). A machine's figures are its maker's
published peaks times an efficiency that we state and did not measure: 75 % of the bandwidth, 65 % of the arithmetic;
its overhead per pass is a guess. docs/scaling.md holds them against published runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from outrider.bench.document import Estimate
from outrider.bench.metrics import ratio
from outrider.params import InputError

if TYPE_CHECKING:
    from outrider.core.types import Usage

BANDWIDTH = 0.75  # of the published peak that a pass reaches
ARITHMETIC = 0.65

MODELS: dict[str, dict[str, float]] = {
    "7b": {"parameters": 7e9, "bytes": 2, "kv": 2 * 32 * 32 * 128 * 2},
    "8b": {"parameters": 8e9, "bytes": 2, "kv": 2 * 32 * 8 * 128 * 2},
}
PEAKS: dict[str, tuple[float, float, float]] = {  # bytes/s, FLOP/s, seconds of overhead
    "a100": (2.039e12, 312e12, 5e-4),  # SXM, 80 GB; bfloat16, dense
    "h100": (3.35e12, 989e12, 5e-4),  # SXM
    "h200": (4.8e12, 989e12, 5e-4),
    "b200": (8e12, 2.25e15, 5e-4),
    "b300": (8e12, 2.25e15, 5e-4),
    "rtx3090": (936e9, 71e12, 5e-4),
    "rtx4090": (1.008e12, 165.2e12, 5e-4),  # bfloat16, dense, float32 sums
    "m2-max": (400e9, 13.6e12, 1e-3),  # 38 GPU cores, float32 sums
    "cpu-ddr5": (89.6e9, 1.15e12, 1e-3),  # two channels of DDR5-5600; 8 cores, two 256-bit units, 4.5 GHz, float32
}


@dataclass(frozen=True)
class Cost:
    """A target on a machine. Only `name` is for people; the rest are figures, all of at least 0."""

    name: str
    parameters: float
    bandwidth: float  # bytes/s
    flops: float  # FLOP/s
    bytes: float = 2.0  # of one parameter
    overhead: float = 0.0  # seconds of every pass
    kv: float = 0.0  # bytes of the keys and values of one token: layers * 2 * heads * size * bytes
    experts: float = 0.0  # parameters of a mixture's routed experts, which `parameters` leaves out
    share: float = 0.0  # of them, that one token uses

    def __post_init__(self) -> None:
        for key in FIGURES:
            figure, positive = getattr(self, key), key in ("parameters", "bandwidth", "flops", "bytes")
            if not 0 <= figure < math.inf or (positive and figure == 0):
                kind = "positive" if positive else "not negative"
                raise InputError(f"the cost {self.name}: {key} must be {kind} and finite, not {figure:g}")

    def pass_seconds(self, nodes: int, context: int) -> float:
        """One pass over `nodes` tokens (roots included) of rows with `context` tokens in their caches, all together."""
        read = self.parameters + self.experts * (1 - (1 - self.share) ** nodes)
        used = self.parameters + self.experts * self.share
        moved = read * self.bytes + context * self.kv
        return self.overhead + max(moved / self.bandwidth, 2 * used * nodes / self.flops)


FIGURES = tuple(f.name for f in fields(Cost) if f.name != "name")


def presets() -> list[str]:
    """The names MODEL@MACHINE that a cost model can be asked for."""
    return [f"{model}@{machine}" for model in MODELS for machine in PEAKS]


def parse(text: str) -> Cost:
    """A COST as above: `7b@a100`, `7b@a100,bytes=1`, or `parameters=8e9,bandwidth=9e11,flops=1.5e14`."""
    first, *rest = (part.strip() for part in text.split(","))
    figures: dict[str, float] = {}
    if "=" in first:
        rest = [first, *rest]
    else:
        figures = _preset(first)
    for part in rest:
        key, _, figure = part.partition("=")
        if key not in FIGURES:
            raise InputError(f"a cost has no figure {key!r}; it has {', '.join(FIGURES)}")
        try:
            figures[key] = float(figure)
        except ValueError:
            raise InputError(f"the cost {text}: {key} must be a number, not {figure!r}") from None
    missing = [key for key in ("parameters", "bandwidth", "flops") if key not in figures]
    if missing:
        raise InputError(
            f"the cost {text} lacks {', '.join(missing)}; give it, or begin with one of {', '.join(presets())}"
        )
    return Cost(text, **figures)


def _preset(name: str) -> dict[str, float]:
    model, _, machine = name.partition("@")
    if model not in MODELS or machine not in PEAKS:
        raise InputError(f"there is no cost {name!r}; choose one of {', '.join(presets())}, or give figures")
    return {**MODELS[model], **speeds(machine)}


def speeds(machine: str, count: int = 1) -> dict[str, float]:
    """Of Cost's figures those of `count` machines that share every pass and lose no time to one another."""
    bandwidth, flops, overhead = PEAKS[machine]
    return {"bandwidth": count * BANDWIDTH * bandwidth, "flops": count * ARITHMETIC * flops, "overhead": overhead}


@dataclass(frozen=True)
class Prediction:
    """The speed-up of a replayed model that a cost model computes."""

    cost: str
    speedup: Estimate | None = None
    without_drafting: Estimate | None = None
    draft_ms: float | None = None  # of a round, on this machine


@dataclass(frozen=True)
class Run:
    """One answer, decoded alone."""

    usage: Usage
    passes: tuple[
        tuple[int, int], ...
    ]  # of each round: nodes verified, root included, and committed tokens before them


def predict(runs: Sequence[Run], cost: Cost) -> Prediction:
    """The speed-up over plain decoding, with a 95 % interval over answers; None without rounds.

    Plain decoding takes a pass over one token for every token but the first, which the prompt's pass gives to both.
    `speedup` adds the drafting time that this machine's CPU took, `without_drafting` leaves it out. Nothing else of the
    loop is counted.
    """
    drafted = [run for run in runs if run.passes]
    if not drafted:
        return Prediction(cost.name)
    plain = np.array([_plain_seconds(run.usage, cost) for run in drafted])
    verify = np.array([sum(cost.pass_seconds(*one) for one in run.passes) for run in drafted])
    draft = np.array([run.usage.draft_seconds for run in drafted])
    ms = 1e3 * float(draft.sum()) / sum(len(run.passes) for run in drafted)
    return Prediction(cost.name, ratio(plain, verify + draft).estimate, ratio(plain, verify).estimate, ms)


def _plain_seconds(usage: Usage, cost: Cost) -> float:
    return sum(cost.pass_seconds(1, usage.prompt_tokens + i) for i in range(usage.new_tokens - 1))
