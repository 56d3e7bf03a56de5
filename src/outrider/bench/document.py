"""The results of a run as dataclasses: the contents of results.json.

Only the cells of `Document.results` are results. A failed cell has no figures; those of an invalid one stand in
results.json but in no table, plot, mean or headline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from ..proofs.divergence import Divergence
from .types import OURS, PLAIN, VERSION

State = Literal["done", "partial", "invalid", "failed"]
T = TypeVar("T")


class Estimate(NamedTuple):
    """A figure and its 95% interval; `low` and `high` are None for a single prompt."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The interval, or the value twice where there is none."""
        return (self.value, self.value) if self.low is None or self.high is None else (self.low, self.high)

    def clear_of(self, value: float) -> bool:
        """Whether the interval excludes `value`; False without an interval."""
        return self.low is not None and self.high is not None and (self.low > value or self.high < value)

    def text(self, digits: int = 2) -> str:
        """1.64 (1.53–1.75), or 1.64 (n = 1, no interval)."""
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f} (n = 1, no interval)"
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclass(frozen=True)
class Depth:
    """Acceptance at one depth of the draft tree, given acceptance at all depths before."""

    depth: int
    tested: int
    accepted: int
    rate: Estimate


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds per round."""

    draft: float
    verify: float
    overhead: float


@dataclass
class Cell:
    """One method on one task at one temperature and batch size."""

    task: str
    temperature: float
    batch: int  # sequences decoded together
    method: str  # its name in this run
    label: str = ""
    spec: str = ""
    rule: str = "coupled"
    budget: str = "auto"
    variant: str = "plain"
    peer: str = OURS
    lossless: bool = True
    state: State = "done"
    reason: str = ""
    faults: list[str] = field(default_factory=list)
    loops: bool = False  # every plain text of this task repeats itself, so none was left out
    prompts: int = 0
    repeats: int = 0
    new_tokens: int = 0
    prompt_tokens: float | None = None  # mean
    looping: int = 0  # prompts left out because their plain text repeats itself
    tokens_per_second: Estimate | None = None  # of decoding
    speedup: Estimate | None = None  # over plain decoding
    speedup_with_prefill: Estimate | None = None  # the same with prefill included
    over_stock: Estimate | None = None  # over transformers' generate
    tau: Estimate | None = None  # tokens per round, the target's own included
    alpha: Estimate | None = None  # accepted / tested
    depths: list[Depth] = field(default_factory=list)
    prefill_ms: Estimate | None = None
    round_ms: RoundTime | None = None
    nodes: float | None = None  # per round, with the root
    same_text: int = 0
    compared: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, float, int, str]:
        """What identifies the cell within its run."""
        return self.task, self.temperature, self.batch, self.method

    @property
    def setting(self) -> tuple[float, int]:
        return self.temperature, self.batch

    @property
    def plain(self) -> bool:
        """Whether this is plain decoding by our own loop."""
        return self.peer == OURS and self.spec == PLAIN

    @property
    def result(self) -> bool:
        return self.state in ("done", "partial")


@dataclass
class Mean:
    """A method's macro means over tasks (equal weights) at one temperature and batch size."""

    temperature: float
    batch: int
    method: str
    tasks: int = 1
    speedup: Estimate | None = None
    speedup_with_prefill: Estimate | None = None
    over_stock: Estimate | None = None
    tau: Estimate | None = None
    tokens_per_second: Estimate | None = None

    @property
    def setting(self) -> tuple[float, int]:
        return self.temperature, self.batch


@dataclass
class TaskInfo:
    """A task's description in a report."""

    prompts: int
    kind: str = ""
    note: str = ""
    raw: bool = False
    cut: int | None = None


@dataclass
class RunInfo:
    """The arguments, time and machine of a run. `seconds`: of all answers in its folder."""

    target: str
    started: str = ""
    seconds: float = 0.0
    sessions: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    mark: str = ""  # of the target's weights
    files: dict[str, str] = field(default_factory=dict)  # a stamp of the files that a SPEC names
    precision: str = ""  # the dtype of the target's computations
    exact: str = ""  # "bits" or "rounding": how far texts with drafts equal plain decoding's
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


@dataclass
class Document:
    """results.json."""

    run: RunInfo
    tasks: dict[str, TaskInfo] = field(default_factory=dict)
    cells: Sequence[Cell] = field(default_factory=list)
    macro: Sequence[Mean] = field(default_factory=list)
    format: int = VERSION

    @property
    def results(self) -> list[Cell]:
        return [c for c in self.cells if c.result]

    @property
    def means(self) -> list[Mean]:
        """The macro means of methods that are valid on all tasks of the setting."""
        invalid = {(c.setting, c.method) for c in self.cells if c.state == "invalid"}
        return [m for m in self.macro if (m.setting, m.method) not in invalid]

    @property
    def settings(self) -> list[tuple[float, int]]:
        """(temperature, batch size)."""
        return sorted({c.setting for c in self.cells})

    @property
    def methods(self) -> dict[str, Cell]:
        """For each method one cell, with its spec, rule, budget, variant and peer."""
        return {c.method: c for c in self.cells}


def counted(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that means include: those with a plain text that does not repeat itself, or all if there is none."""
    return [c for c in cells if not c.loops] or list(cells)


def unique(values: Iterable[T]) -> list[T]:
    """Without repetitions, in the order of first appearance."""
    return list(dict.fromkeys(values))


def setting_text(setting: Sequence[float]) -> str:
    """A setting in words."""
    return f"temperature {setting[0]:g}, batch size {setting[1]}"


def short(value: Any) -> str:
    """A value of the arguments, the machine or the versions, on one line."""
    return f"{value:g}" if isinstance(value, float) else str(value)
