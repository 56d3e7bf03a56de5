"""The words of the benchmark: a task has prompts, a method answers them, a sample is one answer and what it took.

A *cell* is (task, temperature, batch size, method): one line of the report. The cells that share task, temperature and
batch size are a *group*: its methods take turns prompt by prompt (A B A B), so that what disturbs the machine disturbs
all of them. Samples are appended to a file one by one; a run that is broken off goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ..core.types import Usage

VERSION = 2  # of the files of a run
OURS = "outrider"  # the peer that runs our drafters
PLAIN = "none"  # the drafter of plain decoding: what speeds are ratios to
PACKED = "int8", "native"  # weights in fewer bits: another target than the full one


def weights_of(variant: str) -> str:
    """How a variant of the target keeps its weights: full, int8 or native."""
    kind = variant.rpartition("+")[2]
    return kind if kind in PACKED else "full"


def law_of(variant: str) -> str:
    """What a variant's texts are of: full weights by whichever passes; packed ones by their own, which round otherwise
    where they are compiled."""
    return "full" if weights_of(variant) == "full" else variant


@dataclass(frozen=True)
class Prompt:
    """One conversation: the user's turns in order. Where a task is raw, the single turn is text to go on from."""

    id: str
    turns: tuple[str, ...]
    category: str = ""
    reference: str = ""  # a known good answer, where the task has one


@dataclass(frozen=True)
class Task:
    """A named set of prompts. What changes a prompt's tokens (raw, cut) is part of the name or of the digest."""

    name: str
    prompts: tuple[Prompt, ...]
    raw: bool = False  # text to go on from, not a question: no chat template
    cut: int | None = None  # prompts of more tokens keep their first and last halves, LongBench's way
    kind: str = ""  # what a newcomer would call it: chat, maths, code, summarisation, ...
    note: str = ""  # said beside every figure: a substitute, a cut, a sample


@dataclass(frozen=True)
class Method:
    """A row of a table: the SPEC of a drafter, or of another peer, with what it is run under."""

    spec: str
    rule: str = "coupled"  # with options, as in typical?epsilon=0.09&delta=0.3
    budget: str = "auto"  # as `outrider.budgets.parse` reads it
    variant: str = "plain"  # of the target; see `methods.VARIANTS`
    peer: str = OURS  # a file of bench/peers
    label: str = ""

    @property
    def name(self) -> str:
        """Unique within a run; what does not differ from the defaults is left out."""
        parts = [self.label or self.spec]
        if self.peer == OURS and not self.plain:
            parts += [self.rule] * (self.rule != "coupled") + [self.budget] * (self.budget != "auto")
        return ", ".join([*parts, *[self.variant] * (self.variant != "plain")])

    @property
    def plain(self) -> bool:
        return self.peer == OURS and self.spec == PLAIN


@dataclass(frozen=True)
class Ask:
    """What every method is asked for, alike."""

    limit: int  # new tokens at most, for each row
    temperature: float
    seeds: tuple[int, ...]  # one for each row
    eos: frozenset[int]


@dataclass
class Answer:
    """What a method returns for a batch of prompts. The runner measures the time; a method may say how it was spent."""

    tokens: list[list[int]]  # new tokens of each row, the end-of-text token included where one was written
    prefill: float | None = None  # seconds until every row had its first token; believed of our own engine alone
    usages: list[Usage] = field(default_factory=list)  # of each row, where the method counts rounds
    states: tuple[Any, ...] = ()  # the target's and the drafter's, whose bytes are counted once the clock has stopped


@runtime_checkable
class Peer(Protocol):
    """A way to decode. Add one: a file in bench/peers with `load(models, path, **options) -> Peer`."""

    def run(self, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer: ...


@dataclass
class Turn:
    """One turn of a batch: what was written and what it took."""

    tokens: list[list[int]]
    seconds: float  # by the runner's clock, around the whole call
    prefill: float
    usages: list[Usage] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)


@dataclass
class Sample:
    """One method's answer to one batch of prompts. A line of samples.jsonl."""

    task: str
    temperature: float
    batch: int
    method: str
    chunk: int  # which batch of the task's prompts
    repeat: int
    session: int  # which start of the program: speeds are compared within one
    digest: int  # of the prompts' texts
    prompts: list[str]  # ids
    lengths: list[int]  # tokens of each prompt, first turn
    turns: list[Turn]
    faults: list[str] = field(default_factory=list)  # why it may not be counted

    @property
    def cell(self) -> tuple[Any, ...]:
        return (self.task, self.temperature, self.batch, self.method)

    @property
    def pair_key(self) -> tuple[Any, ...]:
        """What all methods share that took turns on the same prompts."""
        return (self.task, self.chunk, self.repeat, self.session)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, line: dict[str, Any]) -> Sample:
        from ..core.types import Usage

        turns = [Turn(**{**t, "usages": [Usage(**u) for u in t["usages"]]}) for t in line["turns"]]
        return cls(**{**line, "turns": turns})


@dataclass(frozen=True)
class Failure:
    """A cell that could not be measured, and why; tried again when the run is resumed."""

    task: str
    temperature: float
    batch: int
    method: str
    reason: str

    @property
    def cell(self) -> tuple[Any, ...]:
        return (self.task, self.temperature, self.batch, self.method)
