"""What a run found, as one document: the dataclasses of results.json, and how it is read and written.

    Document    the run, its tasks, a `Cell` for each line of the report, means over the tasks, and what was looked at
    Estimate    a figure with its interval of 95 %

Only the cells of `Document.results` are results. A failed cell has no figures; an invalid one keeps them in
results.json, for whoever looks into it, and nowhere else: no table, no plot, no mean and no headline shows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from ..budgets.calibration import Bin
from ..proofs.divergence import Divergence
from .theory import Comparison
from .types import OURS, PLAIN, VERSION, weights_of

State = Literal["done", "partial", "invalid", "failed"]
T = TypeVar("T")


class Estimate(NamedTuple):
    """A figure and its interval of 95 %. `low` and `high` are None where it rests on one prompt: no interval."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The interval, or the value twice where there is none."""
        return (self.value, self.value) if self.low is None or self.high is None else (self.low, self.high)

    def clear_of(self, value: float) -> bool:
        """Whether the whole interval lies on one side of `value`; never without an interval."""
        return self.low is not None and self.high is not None and (self.low > value or self.high < value)

    def text(self, digits: int = 2) -> str:
        """1.64 (1.53–1.75), or 1.64 (n = 1, no interval)."""
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f} (n = 1, no interval)"
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclass(frozen=True)
class Depth:
    """Acceptance at one depth of the tree, given that of all depths before."""

    depth: int
    tested: int
    accepted: int
    rate: Estimate
    spread: list[float] = field(default_factory=list)  # over prompts: the quantiles 10, 25, 50, 75, 90 %


@dataclass(frozen=True)
class Position:
    """How often one node of the tree, in the drafter's order, was accepted."""

    position: int
    rounds: int
    rate: float  # of those rounds
    spread: list[float] = field(default_factory=list)  # over prompts, as above


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of a round."""

    draft: float
    verify: float
    overhead: float


@dataclass(frozen=True)
class Memory:
    """Bytes that the states of a batch held at its end."""

    cache: int = 0
    drafter: int = 0


@dataclass(frozen=True)
class LawTest:
    """The test that sampled tokens follow the target's law: how many tokens, and the chance of an honest method."""

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
        """Nats a token by which its texts are likelier than plain decoding's; below 0: less likely."""
        return None if self.log_likelihood is None or self.plain is None else self.log_likelihood - self.plain


@dataclass(frozen=True)
class Reliability:
    """Acceptance by confidence; see `budgets/calibration.py`."""

    ece: float
    pairs: int
    bins: list[Bin] = field(default_factory=list)


@dataclass(frozen=True)
class Prediction:
    """The speed-up of a replayed model that a cost model computes: see `cost.py`."""

    cost: str
    speedup: Estimate | None = None
    without_drafting: Estimate | None = None
    draft_ms: float | None = None  # of a round, on this machine


@dataclass
class Cell:
    """One method on one task at one temperature and batch size: a line of the report."""

    task: str
    temperature: float
    batch: int  # rows decoded together
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
    loops: bool = False  # every plain text of this task repeats itself: all are counted, and none should be
    prompts: int = 0
    repeats: int = 0
    new_tokens: int = 0
    prompt_tokens: float | None = None  # mean
    looping: int = 0  # prompts left out because their plain text repeats itself
    tokens_per_second: Estimate | None = None  # of decoding
    speedup: Estimate | None = None  # over plain decoding
    whole: Estimate | None = None  # the same, the prompts' passes included
    over_stock: Estimate | None = None  # over transformers' generate
    tau: Estimate | None = None  # tokens a round, the target's own included
    alpha: Estimate | None = None  # accepted / tested
    drafted_alpha: float | None = None  # accepted / drafted
    depths: list[Depth] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    prefill_ms: Estimate | None = None
    round_ms: RoundTime | None = None
    nodes: float | None = None  # of a round's tree, the root included
    memory: Memory | None = None
    theory: Comparison | None = None
    same_text: int = 0
    compared: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    law: LawTest | None = None
    quality: Quality | None = None
    reliability: Reliability | None = None
    predicted: Prediction | None = None  # of a replay

    @property
    def key(self) -> tuple[str, float, int, str]:
        """What names the cell within its run."""
        return self.task, self.temperature, self.batch, self.method

    @property
    def setting(self) -> tuple[float, int]:
        return self.temperature, self.batch

    @property
    def plain(self) -> bool:
        """Is this plain decoding by our own loop?"""
        return self.peer == OURS and self.spec == PLAIN

    @property
    def result(self) -> bool:
        return self.state in ("done", "partial")

    @property
    def target(self) -> str:
        """Which weights decoded: packed ones are another target than the full one."""
        return weights_of(self.variant)


@dataclass
class Mean:
    """A method's figures over several prompts or tasks, at one temperature and batch size."""

    temperature: float
    batch: int
    method: str
    tasks: int = 1
    speedup: Estimate | None = None
    whole: Estimate | None = None
    over_stock: Estimate | None = None
    tau: Estimate | None = None
    tokens_per_second: Estimate | None = None
    law: LawTest | None = None
    # of prompts that are pooled:
    prompts: int = 0
    looping: int = 0  # left out
    same_text: int = 0
    compared: int = 0
    alpha: Estimate | None = None
    drafted_alpha: float | None = None
    nodes: float | None = None
    depths: list[Depth] = field(default_factory=list)
    round_ms: RoundTime | None = None

    @property
    def setting(self) -> tuple[float, int]:
        return self.temperature, self.batch


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
    """How many rows of a method fit beside the weights into `limit` bytes."""

    task: str
    temperature: float
    batch: int
    method: str
    bytes_per_row: int
    rows: int
    limit: float


@dataclass
class TaskInfo:
    """What is said of a task beside its figures."""

    prompts: int
    kind: str = ""
    note: str = ""
    raw: bool = False
    cut: int | None = None


@dataclass
class RunInfo:
    """What was asked for, when, and on which machine."""

    target: str
    started: str = ""
    seconds: float = 0.0
    sessions: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    precision: str = ""  # what the target computed in
    exact: str = ""  # "bits" or "rounding": what its texts with drafts are equal to
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


@dataclass
class Document:
    """results.json."""

    run: RunInfo
    tasks: dict[str, TaskInfo] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    macro: list[Mean] = field(default_factory=list)  # means in which every task weighs alike
    pooled: list[Mean] = field(default_factory=list)  # ratios of sums over all prompts, whatever their task
    explain: list[Explanation] = field(default_factory=list)
    capacity: list[Capacity] = field(default_factory=list)
    format: int = VERSION

    @property
    def results(self) -> list[Cell]:
        return [c for c in self.cells if c.result]

    @property
    def means(self) -> list[Mean]:
        """The macro means that are results: no task of theirs is invalid at that temperature and batch size."""
        return self._valid(self.macro)

    def _valid(self, means: Iterable[Mean]) -> list[Mean]:
        struck = {(c.setting, c.method) for c in self.cells if c.state == "invalid"}
        return [m for m in means if (m.setting, m.method) not in struck]

    @property
    def settings(self) -> list[tuple[float, int]]:
        """(temperature, batch size)."""
        return sorted({c.setting for c in self.cells})

    @property
    def methods(self) -> dict[str, Cell]:
        """Method -> a cell that says its spec, rule, budget, variant, peer and whether it is lossless."""
        found: dict[str, Cell] = {}
        for cell in self.cells:
            found.setdefault(cell.method, cell)
        return found

    def cell(self, task: str, temperature: float, batch: int, method: str) -> Cell | None:
        return next((c for c in self.cells if c.key == (task, temperature, batch, method)), None)


def unique(values: Iterable[T]) -> list[T]:
    """In the order of their first appearance."""
    return list(dict.fromkeys(values))


def said(setting: tuple[float, int]) -> str:
    """A setting (temperature, batch size) in words."""
    return f"temperature {setting[0]:g}, batch size {setting[1]}"


def short(value: Any) -> str:
    """A value of the arguments, the machine or the versions, for one line."""
    return f"{value:g}" if isinstance(value, float) else str(value)
