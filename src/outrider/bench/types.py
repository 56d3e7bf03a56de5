"""The terms of the benchmark: a task has prompts, a method decodes them, a sample is one answer with its times.

A *cell* is (task, temperature, batch size, method): one line of the report. The cells that share task, temperature and
batch size are a *group*: its methods alternate prompt by prompt (A B A B), so that a disturbance of the machine affects
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..core.types import Usage
from ..params import INTEGERS

VERSION = 4  # of the files of a run
OURS = "outrider"  # the peer that runs our engine
PLAIN = "none"  # the drafter of plain decoding, which speed-ups are ratios to
EAGER = "eager"  # the variant of the stock forward
VARIED = "full", *INTEGERS  # variants that name how weights are kept: another distribution each


def weights_of(variant: str, usual: str = "auto") -> str:
    """How a variant of the target keeps its weights (`outrider.load`); `usual`: where it does not say."""
    return variant if variant in VARIED else "full" if variant == EAGER else usual


@dataclass(frozen=True)
class Prompt:
    """A conversation: the user's turns in order. In a raw task the single turn is text to continue."""

    id: str
    turns: tuple[str, ...]
    category: str = ""
    reference: str = ""  # a known good answer, if the task has one


@dataclass(frozen=True)
class Task:
    """A named set of prompts. What changes a prompt's tokens (raw, cut) is part of the name or of the digest."""

    name: str
    prompts: tuple[Prompt, ...]
    raw: bool = False  # text to continue, without a chat template
    cut: int | None = None  # longer prompts keep their first and last halves, as in LongBench
    kind: str = ""  # chat, maths, code, summarisation, ...
    note: str = ""  # shown beside every figure: a substitute, a cut, a sample


@dataclass(frozen=True)
class Method:
    """One way to decode: a drafter with its rule, budget and variant of the target, or a peer."""

    spec: str
    rule: str = "coupled"  # with options, as in typical?epsilon=0.09&delta=0.3
    budget: str = "auto"  # as `outrider.budgets.parse` reads it
    variant: str = "plain"  # of the target; see `methods.VARIANTS`
    peer: str = OURS  # a file of bench/peers
    label: str = ""

    @property
    def name(self) -> str:
        """Unique within a run; defaults are left out."""
        parts = [self.label or self.spec]
        if self.peer == OURS and not self.plain:
            parts += [self.rule] * (self.rule != "coupled") + [self.budget] * (self.budget != "auto")
        return ", ".join([*parts, *[self.variant] * (self.variant != "plain")])

    @property
    def plain(self) -> bool:
        return self.peer == OURS and self.spec == PLAIN


@dataclass(frozen=True)
class Ask:
    """The settings of one call, the same for every method."""

    limit: int  # new tokens of each row
    temperature: float
    seeds: tuple[int, ...]  # one for each row
    eos: frozenset[int]
    turn: int = 0  # of the chat, whose earlier turns were answered just before


@dataclass
class Answer:
    """What a method returns for a batch of prompts."""

    tokens: list[list[int]]  # new tokens of each row, with the end-of-text token if one was written
    prefill: float | None = None  # seconds until every row had its first token; used of our own engine alone
    usages: list[Usage] = field(default_factory=list)  # of each row, if the method counts rounds
    states: tuple[Any, ...] = ()  # the target's session and the drafting, for `Runner.weigh`


@runtime_checkable
class Peer(Protocol):
    """A way to decode. To add one, write a file in bench/peers with `load(models, path, **options) -> Peer`."""

    def run(self, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer: ...


@dataclass
class Turn:
    """One turn of a batch: its tokens and its times."""

    tokens: list[list[int]]
    seconds: float  # of the call, prefill included, by the runner's clock
    prefill: float
    usages: list[Usage] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)  # bytes by part; see `Runner.weigh`


@dataclass
class Sample:
    """One method's answer to one batch of prompts: a line of samples.jsonl."""

    task: str
    temperature: float
    batch: int
    method: str
    chunk: int  # the number of the batch of prompts
    repeat: int
    session: int  # which start of the program: speeds are compared within one
    digest: int  # of the prompts' texts
    prompts: list[str]  # ids
    lengths: list[int]  # tokens of each prompt, first turn
    turns: list[Turn]
    faults: list[str] = field(default_factory=list)  # why it does not count

    @property
    def pair_key(self) -> tuple[Any, ...]:
        """The same for samples of different methods that answered the same prompts in the same session and repeat."""
        return (self.task, self.chunk, self.repeat, self.session)
