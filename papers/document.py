"""The report of a study: that of `outrider bench`, and what only the papers' pages show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from outrider.bench import document as bench
from outrider.bench import results
from outrider.bench.document import Depth, Estimate, RoundTime

from .formulas import Comparison
from .reliability import Bin

T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """How often one node of the tree, in the drafter's order, was accepted."""

    position: int
    rounds: int
    rate: float  # of those rounds
    spread: list[float] = field(default_factory=list)  # over prompts: the quantiles 10, 25, 50, 75, 90%
    counts: list[list[int]] = field(default_factory=list)  # [accepted, rounds] of each prompt


@dataclass(frozen=True)
class Memory:
    """Bytes that the states of a batch held at its end, and what the process took at most meanwhile."""

    cache: int = 0
    drafter: int = 0
    peak: int = 0


@dataclass(frozen=True)
class DistributionTest:
    """The test that sampled tokens follow the target's distribution; see `distribution.py`."""

    tokens: int
    p: float


@dataclass(frozen=True)
class Quality:
    """Texts judged by a model; see `quality.py`."""

    log_likelihood: float | None = None  # nats a token of its texts, under the judge
    plain: float | None = None  # of plain decoding's texts
    exact: float | None = None  # share of right answers
    held_out_loss: float | None = None  # nats a token of the references, under the decoding target

    @property
    def gain(self) -> float | None:
        """Nats a token by which its texts are likelier than plain decoding's."""
        return None if self.log_likelihood is None or self.plain is None else self.log_likelihood - self.plain


@dataclass(frozen=True)
class Reliability:
    """Acceptance by confidence; see `outrider.drafters._calibrated`."""

    ece: float
    pairs: int
    bins: list[Bin] = field(default_factory=list)


@dataclass
class Cell(bench.Cell):
    """A cell with what was observed besides."""

    positions: list[Position] = field(default_factory=list)
    memory: Memory | None = None
    theory: Comparison | None = None
    distribution: DistributionTest | None = None
    quality: Quality | None = None
    reliability: Reliability | None = None


@dataclass
class Mean(bench.Mean):
    """Means over tasks, or figures of all prompts pooled, whatever their task."""

    distribution: DistributionTest | None = None
    # of pooled prompts:
    prompts: int = 0
    looping: int = 0  # left out
    same_text: int = 0
    compared: int = 0
    alpha: Estimate | None = None
    nodes: float | None = None
    depths: list[Depth] = field(default_factory=list)
    round_ms: RoundTime | None = None


@dataclass(frozen=True)
class Factor:
    """A part of the way from the ideal speed to the measured one."""

    name: str
    factor: float
    words: str


@dataclass
class Explanation:
    """Where the speed of one cell goes; see `explain.py`."""

    task: str
    temperature: float
    batch: int
    method: str
    ideal: float  # tokens per second
    measured: float
    parts: list[Factor]
    words: str


@dataclass
class Capacity:
    """How many sequences of a method fit beside the weights into `limit` bytes."""

    task: str
    temperature: float
    batch: int
    method: str
    bytes_per_row: int
    rows: int
    limit: float


@dataclass
class Document(bench.Document):
    """results.json of a study."""

    cells: Sequence[Cell] = field(default_factory=list)
    macro: Sequence[Mean] = field(default_factory=list)
    pooled: list[Mean] = field(default_factory=list)
    explain: list[Explanation] = field(default_factory=list)
    capacity: list[Capacity] = field(default_factory=list)

    def cell(self, task: str, temperature: float, batch: int, method: str) -> Cell | None:
        return next((c for c in self.cells if c.key == (task, temperature, batch, method)), None)


def extended(kind: type[T], row: Any) -> T:
    """A dataclass as one that extends it."""
    return kind(**{f.name: getattr(row, f.name) for f in fields(row)})


def read(path: str | Path) -> Document:
    """A study's results.json. Raises InputError if there is none."""
    return results.read(path, Document)


def pooled_bins(cells: Iterable[Cell]) -> list[Bin]:
    """The bins of several cells' reliability diagrams, merged."""
    bins = sorted((b for c in cells if c.reliability for b in c.reliability.bins), key=lambda b: b.low)
    merged = []
    for (low, high), group in groupby(bins, key=lambda b: (b.low, b.high)):
        mine = list(group)
        n = sum(b.count for b in mine)
        mean = (sum(getattr(b, key) * b.count for b in mine) / n for key in ("confidence", "acceptance"))
        merged.append(Bin(low, high, n, *mean))
    return merged
