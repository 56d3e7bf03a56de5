"""Recorded answers of a real model as a target: how far drafters that need no model get on its texts, without it.

Engine, rule and drafters are the real ones, and at temperature 0 the rule asks the target for its token along its own
text alone, which is what a recording (recording.py) knows. So rounds, drafted and accepted counts are those of the real
model, if its ids were recorded. What a recording does not know, nobody is told:

 * off the recorded text every token is as good as any other (equal logits), and the rule never goes there;
 * lookahead's window asks about guesses off the text: it is left out, and the pool of the text's n-grams drafts alone;
 * tokens keep their own ids over the whole vocabulary: ngram adds one to the count of each of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, NoReturn

import torch
import typer
from jaxtyping import Int
from torch import Tensor

from outrider import drafters
from outrider.backends.torch.load import load_tokenizer
from outrider.bench import metrics
from outrider.bench.document import unique
from outrider.bench.methods import budget_of
from outrider.bench.results import to_json
from outrider.budgets.budgeter import FixedBudget
from outrider.core.padding import padded
from outrider.core.protocols import Drafter, Prefill, Session, TargetOutput
from outrider.core.tree import chain_of
from outrider.core.types import DraftTree, Usage
from outrider.drafters.lookahead import LookaheadDrafter
from outrider.engine import Engine, Request, generate
from outrider.engine.stopping import Stop
from outrider.params import InputError

from . import command
from .cost import Cost, Prediction, Run, parse, predict
from .recording import Record, read, vocabulary

FREE = ("none", "lookup", "suffix", "ngram", "lookahead")  # drafters that need no model
DEFAULT = ("lookup", "suffix")
CERTAIN = 1e4  # the logit of the recorded token, the others' being 0: exp(-1e4) is 0
BEYOND = 4096  # tokens that an answer which ended by itself might have gone on for: more than any draft is deep


# ------------------------------------------------------------------------------------------------ the target


@dataclass
class ReplayTarget:
    """A target whose greedy text after each recorded prompt is the recorded answer. It knows no other prompt."""

    records: Sequence[Record]
    vocab: int
    context: int = 1 << 30  # a recording has no limit of its own
    device: torch.device = field(default=torch.device("cpu"), init=False)
    dtype: torch.dtype = field(default=torch.float32, init=False)
    hidden: int = field(default=0, init=False)  # of hidden states, which no recording has
    layers: int = field(default=0, init=False)
    config_dict: dict[str, Any] = field(default_factory=dict, init=False)
    exact: str = field(default="bits", init=False)
    recorded: bool = field(default=False, init=False)
    lock: AbstractContextManager[Any] = field(default_factory=RLock, init=False, repr=False, compare=False)
    answers: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for number, record in enumerate(self.records, 1):
            if max((*record.prompt, *record.answer)) >= self.vocab:
                raise InputError(f"answer {number} has a token outside the vocabulary of {self.vocab}")
            if self.answers.setdefault(record.prompt, record.answer) != record.answer:
                raise InputError(
                    f"answer {number} is to a prompt that another one was recorded for, and a greedy model has one; "
                    "keep one of them, and the answers of several models in a file each"
                )

    def begin(self, prompt: Sequence[int]) -> Place:
        """A row whose prompt has been read."""
        answer = self.answers.get(tuple(prompt))
        if answer is None:
            raise InputError(f"no answer to this prompt of {len(prompt)} tokens was recorded; replay recorded ones")
        return Place((*prompt, *answer), len(prompt), len(prompt))

    def open(self, capacity: int) -> ReplaySession:
        return ReplaySession(self)

    def embed(self, tokens: Tensor) -> NoReturn:
        raise InputError("a recording has no embeddings; this drafter needs the model itself")

    def head(self, features: Tensor) -> NoReturn:
        raise InputError("a recording has no output layer; this drafter needs the model itself")


@dataclass(frozen=True)
class Place:
    """Where a row stands in its recorded text: of its `length` committed tokens the first `agreed` are the text's."""

    text: tuple[int, ...]
    length: int
    agreed: int

    def after(self, tokens: Sequence[int]) -> Place:
        """`tokens` committed."""
        agreed = self.agreed
        for i, token in enumerate(tokens, self.length):
            agreed += agreed == i < len(self.text) and self.text[i] == token
        return Place(self.text, self.length + len(tokens), agreed)

    def back(self, length: int) -> Place:
        return Place(self.text, length, min(length, self.agreed))

    def following(self, tokens: Sequence[int], parents: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(node, the text's next token) for the nodes on the recorded text, but its last.

        Behind [5] of [5 6 7 8], a tree of tokens [6 9 7] and parents [0 0 0]: (0, 7), (2, 8).
        """
        if self.agreed < self.length:
            return
        spots: dict[int, int] = {}  # node -> its place in the text
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            spot = spots.get(parent, len(self.text)) + 1 if node else self.length
            if spot < len(self.text) and self.text[spot] == token:
                spots[node] = spot
                if spot + 1 < len(self.text):
                    yield node, self.text[spot + 1]


@dataclass
class ReplaySession:
    """One batch: a place for each row."""

    target: ReplayTarget
    rows: list[Place] = field(default_factory=list)
    lengths: Int[Tensor, " b"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    longest: int = 0
    nodes: list[list[int]] = field(default_factory=list)  # the last tree's tokens

    def prefill(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> Iterator[Prefill]:
        """All prompts in one chunk."""
        self._stand([self.target.begin(prompt) for prompt in prompts])
        sizes = torch.tensor([len(p) for p in prompts])
        tokens = padded(prompts)
        known = [(b, 0, row.text[row.length]) for b, row in enumerate(self.rows)]
        over = torch.full((len(prompts),), -1)
        tree = chain_of(tokens, sizes, matrix=False)
        yield Prefill(tree, self._output(known, len(prompts), 1, taps), sizes, (True,) * len(prompts), over)

    def forward(
        self, tree: DraftTree, taps: tuple[int, ...] = (), since: int = 0, embeds: Tensor | None = None
    ) -> TargetOutput:
        """Logits [b, n - since, v]: of the recorded token at nodes on the recorded text, equal ones elsewhere."""
        assert embeds is None, "a recording has tokens alone"
        self.nodes = tree.tokens.tolist()
        known = []
        for b, (row, size) in enumerate(zip(self.rows, tree.size.tolist(), strict=True)):
            follow = row.following(self.nodes[b][:size], tree.parents[b, :size].tolist())
            known += [(b, node - since, token) for node, token in follow if node >= since]
        return self._output(known, len(self.rows), tree.nodes - since, taps)

    def _output(self, known: list[tuple[int, int, int]], b: int, n: int, taps: tuple[int, ...]) -> TargetOutput:
        """`known`: (row, node, its recorded token)."""
        if taps:
            raise InputError("a recording has no hidden states; this drafter needs the model itself")
        logits = torch.zeros(b, n, self.target.vocab)
        logits[torch.tensor(known, dtype=torch.long).view(-1, 3).unbind(1)] = CERTAIN
        return TargetOutput(logits)

    def keep(self, path: Int[Tensor, "b k"], count: Int[Tensor, " b"]) -> None:
        steps = zip(self.rows, self.nodes, path.tolist(), count.tolist(), strict=True)
        self._stand([row.after([tokens[i] for i in nodes[:n]]) for row, tokens, nodes, n in steps])

    def rewind(self, lengths: Sequence[int]) -> None:
        self._stand([row.back(n) for row, n in zip(self.rows, lengths, strict=True)])

    def wipe(self, rows: Sequence[int]) -> None:
        pass  # nothing is computed from what a row held

    def select(self, index: Sequence[int]) -> None:
        self._stand([self.rows[i] for i in index])

    def join(self, other: Session) -> None:
        assert isinstance(other, ReplaySession)
        assert other.target is self.target, "sessions of one target join"
        self._stand(self.rows + other.rows)

    def _stand(self, rows: list[Place]) -> None:
        self.rows, self.lengths = rows, torch.tensor([row.length for row in rows], dtype=torch.long)
        self.longest = max((row.length for row in rows), default=0)


# ------------------------------------------------------------------------------------------------ decoding


@dataclass(frozen=True)
class Replay:
    """What came of it: by method, a run for each record."""

    records: Sequence[Record]
    budget: str
    runs: dict[str, list[Run]]
    specs: dict[str, str]

    def usages(self, name: str) -> list[Usage]:
        return [run.usage for run in self.runs[name]]


def replay(
    records: Sequence[Record], specs: Sequence[str], budget: str = "16x6", tokenizer: Any = None,
    vocab: int | None = None, progress: Callable[[int, int], None] = lambda done, of: None,
) -> Replay:  # fmt: skip
    """Decode every recorded answer anew, alone, with each drafter in turn.

    `budget` is NODESxDEPTH or a shape. `vocab`: the model's own, where its logits are more than its tokenizer's ids.
    `progress` is told how many of the records are done.
    """
    target = ReplayTarget(records, vocab or vocabulary(records, tokenizer))
    named = [(*drafter_of(spec, target, tokenizer), spec) for spec in dict.fromkeys(specs)]
    engines = {name: engine(target, drafter, budget) for name, drafter, _ in named}
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for done, record in enumerate(records, 1):
        for name in engines:
            runs[name] += decode(engines[name], [record])
        progress(done, len(records))
    return Replay(records, budget, runs, {name: spec for name, _, spec in named})


def drafter_of(spec: str, target: ReplayTarget, tokenizer: Any = None) -> tuple[str, Drafter]:
    """A drafter that needs no model, and what its row is called."""
    if spec.partition("?")[0].partition(":")[0] not in FREE:
        raise InputError(
            f"a recording is replayed for {', '.join(FREE)}, which need no model; {spec!r} is none of them"
        )
    drafter = drafters.load(spec, target, tokenizer)
    if not isinstance(drafter, LookaheadDrafter):
        return spec, drafter
    if not drafter.text:
        raise InputError(f"{spec}: without the text's n-grams nothing is left of lookahead in a replay; leave out text")
    return f"{spec} (pool alone)", replace(drafter, window=0)


def engine(target: ReplayTarget, drafter: Drafter, budget: str) -> Engine:
    """The engine that replays recorded texts. Raises InputError for a budget that needs a clock."""
    chosen = budget_of(budget)
    if not isinstance(chosen, FixedBudget):
        raise InputError(f"a replay has no clock that {budget!r} could learn from; give NODESxDEPTH, as in 16x6")
    return Engine.of(target, drafter, chosen, nodes=chosen.nodes)


def request(record: Record) -> Request:
    """The record's prompt, to be decoded up to where its answer ends."""
    remaining = len(record.answer) + BEYOND * record.ended
    return Request(record.prompt, 0, remaining, cut=Stop(max_new_tokens=len(record.answer)).cut)


def decode(engine: Engine, records: Sequence[Record]) -> list[Run]:
    """The records' answers, decoded side by side. (The drafting time of a round then counts for each of its rows.)"""
    usages, outputs = [Usage() for _ in records], [list[int]() for _ in records]
    passes: list[list[tuple[int, int]]] = [[] for _ in records]
    drafted = [0] * len(records)
    for piece in generate(engine, map(request, records), len(records)):
        i, usage = piece.row.index, piece.row.usage
        if outputs[i]:
            passes[i].append((usage.drafted - drafted[i] + 1, usage.prompt_tokens + len(outputs[i]) - 1))
        usages[i], drafted[i] = usage, usage.drafted
        outputs[i] += piece.tokens
    for record, output in zip(records, outputs, strict=True):
        if tuple(output) != record.answer:
            raise RuntimeError(f"the replay of {record.id or 'an answer'} wrote another text than was recorded")
    return [Run(usage, tuple(p)) for usage, p in zip(usages, passes, strict=True)]


# ------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Figures:
    """One method on one task: acceptance is that of the real model, the speed-up is computed."""

    task: str
    method: str
    answers: int
    new_tokens: int
    looping: int  # answers that repeat themselves
    rounds: dict[str, Any]  # tau, alpha, nodes and depths
    predicted: Prediction


def figures(replayed: Replay, cost: Cost) -> list[Figures]:
    """Of every task and method. Only drafting was timed: a speed-up is predicted, not measured."""
    rows = []
    for task in unique(r.task for r in replayed.records):
        chosen = [i for i, r in enumerate(replayed.records) if r.task == task]
        for name in replayed.runs:
            runs = [replayed.runs[name][i] for i in chosen]
            of = metrics.rounds([[run.usage] for run in runs])
            rows.append(Figures(
                task, name, len(runs), sum(run.usage.new_tokens for run in runs),
                sum(metrics.loops(replayed.records[i].answer) > metrics.LOOP_SHARE for i in chosen),
                {key: of[key] for key in ("tau", "alpha", "nodes", "depths")}, predict(runs, cost),
            ))  # fmt: skip
    return rows


def main(
    recording: Annotated[Path, typer.Argument(metavar="FILE", help="Recorded answers (JSONL); see docs/formats.md.")],
    drafter: Annotated[list[str] | None, typer.Option(metavar="SPEC", help=f"One of {', '.join(FREE)}.")] = None,
    budget: Annotated[str, typer.Option(help="NODESxDEPTH, or a shape.")] = "16x6",
    tokenizer: Annotated[str | None, typer.Option(help="The folder or hub id of the answers' tokenizer.")] = None,
    cost: Annotated[str, typer.Option(help="MODEL@MACHINE, or figures; see papers/cost.py.")] = "7b@a100",
    limit: Annotated[int | None, typer.Option(help="Replay at most so many answers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Replay recorded answers of a model for drafters that need none: tau is exact, the speed-up computed.

    For example: python -m papers.replay answers.jsonl --tokenizer DIR --drafter lookup --cost 7b@a100
    """
    price, words = parse(cost), load_tokenizer(tokenizer)
    records = read(recording, words)[:limit]
    rows = figures(replay(records, drafter or DEFAULT, budget, words), price)
    if as_json:
        typer.echo(json.dumps(to_json(rows)))
        return
    for row in rows:
        tau, p = row.rounds["tau"], row.predicted
        speed = (
            f"{p.speedup.text()} ({p.without_drafting.value:.2f} if drafts took no time)"
            if p.speedup and p.without_drafting
            else "none"
        )
        typer.echo(
            f"{row.task}, {row.method}: tau {tau.text() if tau else 'none'}; on {p.cost} predicted speed-up {speed}"
        )


if __name__ == "__main__":
    command.main(main)
