"""The grid: for every task, temperature and batch size all methods alternate prompt by prompt; resumable.

    for each group (task, temperature, batch size):
        every method answers one prompt as a warm-up (it compiles, fills caches)
        for each repeat, for each batch of prompts: every method answers it, in alternating order

A method that raises an exception leaves its group; the exception is reported. Plain decoding answers every batch that
any method answers, so a method that is added later is compared with plain decoding of its own session.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from time import monotonic, perf_counter
from typing import Any
from zlib import crc32

from ..encoding import has_template
from ..params import InputError, first_line
from . import checks, peers
from .models import Models
from .peers.outrider import Ours
from .store import Store
from .tasks import cut
from .types import OURS, Answer, Ask, Method, Peer, Prompt, Sample, Task, Turn

WARM = 16  # tokens of a warm-up of our engine
STOCK = "transformers"  # the peer of `Cell.over_stock`

Advance = Callable[[str], None]  # called before each answer, with a description


@dataclass(frozen=True)
class Group:
    """The cells whose methods alternate."""

    task: Task
    temperature: float
    batch: int
    methods: tuple[Method, ...]
    repeats: int

    @property
    def chunks(self) -> list[tuple[Prompt, ...]]:
        prompts = self.task.prompts
        return [prompts[i : i + self.batch] for i in range(0, len(prompts), self.batch)]

    def own(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of this group's prompts, renumbered: another session may have had fewer prompts."""
        place = {digest(self.task, chunk): i for i, chunk in enumerate(self.chunks)}
        key = (self.task.name, self.temperature, self.batch)
        mine = [s for s in samples if (s.task, s.temperature, s.batch) == key and s.digest in place]
        return [replace(s, chunk=place[s.digest]) for s in mine]


@dataclass(frozen=True)
class Text:
    """The output of one row in one turn, with its prompt."""

    prompt: Prompt
    turn: int
    row: int  # among the rows that have this turn
    ids: list[int]
    seed: int
    new: list[int]


@dataclass
class Runner:
    """Runs methods over tasks and adds every sample to the store, until the deadline."""

    models: Models
    store: Store
    tokens: int  # at most, for every turn
    seed: int = 0
    deadline: float = float("inf")  # of time.monotonic
    peers: dict[str, Peer] = field(default_factory=dict)  # by method
    weigh: Callable[[Answer, int], dict[str, int]] = lambda answer, rows: {}  # bytes by part
    failures: dict[tuple[Any, ...], str] = field(default_factory=dict)  # of this session, by cell
    begun: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # group and repeat that a method is at

    def missing(self, group: Group) -> list[tuple[int, int, list[Method]]]:
        """(repeat, chunk, methods) still to be measured, with the methods that they are compared with. A sample counts
        if plain decoding answered the same prompts in its session."""
        sound = {(s.method, s.chunk, s.repeat, s.session) for s in group.own(self.store.samples) if not s.faults}
        plain = next((m.name for m in group.methods if m.plain), None)
        done = {sample[:3] for sample in sound if plain is None or (plain, *sample[1:]) in sound}
        left = []
        for repeat, chunk in product(range(group.repeats), range(len(group.chunks))):
            new = [m for m in group.methods if (m.name, chunk, repeat) not in done]
            if new:
                left.append((repeat, chunk, [m for m in group.methods if m.plain or m.spec == STOCK or m in new]))
        return left

    def steps(self, group: Group) -> int:
        """The number of answers still to be measured, warm-ups included."""
        left = self.missing(group)
        return sum(len(ms) for _, _, ms in left) + len({m.name for _, _, ms in left for m in ms})

    def open(self, rows: Sequence[Method]) -> None:
        """Load our own methods before the first measurement, so that a wrong SPEC fails at once."""
        for method in rows:
            if method.peer == OURS and method.name not in self.peers:
                self.peers[method.name] = peers.load(method, self.models)

    def run(self, group: Group, advance: Advance = lambda what: None) -> bool:
        """Measure what is missing of a group; False if the deadline came first."""
        left, failed = self.missing(group), set[str]()
        steps = [
            (method, "warm-up", partial(self.warm, group, method))
            for method in group.methods
            if any(method in rows for _, _, rows in left)
        ]
        for repeat, chunk, rows in left:
            order = rows if (repeat + chunk) % 2 == 0 else rows[::-1]
            steps += [(method, "", partial(self.measure, group, method, chunk, repeat)) for method in order]
        for method, what, step in steps:
            if monotonic() > self.deadline:
                return False
            advance(": ".join(filter(None, (f"{group.task.name}, {method.name}", what))))
            try:
                if method.name not in failed:
                    step()
            except Exception as error:
                failed.add(method.name)
                key = (group.task.name, group.temperature, group.batch, method.name)
                self.failures[key] = f"{type(error).__name__}: {first_line(error)}"[:300]
        return True

    def warm(self, group: Group, method: Method) -> None:
        """One answer as a warm-up."""
        if method.name not in self.peers:
            self.peers[method.name] = peers.load(method, self.models)
        if method.peer == OURS:
            chunk, limit = group.chunks[0], min(WARM, self.tokens)
        else:  # static caches are allocated for the longest prompts
            chunk, limit = max(group.chunks, key=lambda c: max(len(p.turns[0]) for p in c)), self.tokens
        ids = [self.ids(group.task, p, []) for p in chunk]
        self.peers[method.name].run(ids, replace(self._ask(group, chunk, 0), limit=limit))

    def measure(self, group: Group, method: Method, chunk: int, repeat: int) -> None:
        """Add a method's answer to a batch of prompts to the store."""
        prompts, at = group.chunks[chunk], (group.task.name, group.temperature, group.batch, repeat)
        if self.begun.get(method.name) != at:  # no text is drafted from an answer to its own prompt
            self.begun[method.name] = at
            if isinstance(peer := self.peers[method.name], Ours):
                peer.forget()
        sample = Sample(
            group.task.name, group.temperature, group.batch, method.name, chunk, repeat, self.store.session,
            digest(group.task, prompts), [p.id for p in prompts], [], [],
        )  # fmt: skip
        for turn, ids, rows in self.turns(group.task, prompts, sample.turns):
            sample.lengths = sample.lengths or [len(i) for i in ids]
            ask = self._ask(group, [prompts[i] for i in rows], turn)
            sample.turns.append(self._turn(method, ids, ask, sample.faults))
            if sample.faults and len(sample.turns[-1].tokens) != len(ids):
                break  # no text to go on from
        self.store.add(sample)

    def _turn(self, method: Method, ids: list[list[int]], ask: Ask, faults: list[str]) -> Turn:
        """One call, timed. Our engine reports its prefill; for other methods it is the time of a call for one token."""
        peer, llm = self.peers[method.name], self.models.llm()
        began = self._now()
        answer: Answer = peer.run(ids, ask)
        seconds = self._now() - began
        prefill = answer.prefill
        if prefill is None or method.peer != OURS:
            began = self._now()
            peer.run(ids, replace(ask, limit=1))
            prefill = self._now() - began
        context = llm.target.context
        remaining = [context - (0 if llm.target.separate else len(i)) for i in ids]
        wrong = checks.answer(answer, ask, len(ids), llm.target.vocab, remaining, seconds)
        faults += [f for f in wrong if f not in faults]
        return Turn(answer.tokens, seconds, min(prefill, seconds), answer.usages, self.weigh(answer, len(ids)))

    def _now(self) -> float:
        """The time, after all work on a GPU is done."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        return perf_counter()

    def _ask(self, group: Group, prompts: Sequence[Prompt], turn: int) -> Ask:
        return Ask(self.tokens, group.temperature, self.seeds(group, prompts, turn), self.models.llm().eos, turn)

    def seeds(self, group: Group, prompts: Sequence[Prompt], turn: int) -> tuple[int, ...]:
        """Seeds by prompt and turn, so that a text does not depend on the batch or the other prompts."""
        return tuple(self.seed + crc32(f"{group.task.name}/{p.id}/{turn}".encode()) for p in prompts)

    def turns(
        self, task: Task, prompts: Sequence[Prompt], done: Sequence[Turn]
    ) -> Iterator[tuple[int, list[list[int]], list[int]]]:
        """(turn, token ids, indices of the prompts that have this turn). `done` grows meanwhile: its answers are part
        of later turns."""
        for turn in range(max(len(p.turns) for p in prompts)):
            rows = [i for i, p in enumerate(prompts) if len(p.turns) > turn]
            answers = [[answer_of(prompts, done, t, i) for t in range(turn)] for i in rows]
            yield turn, [self.ids(task, prompts[i], a) for i, a in zip(rows, answers, strict=True)], rows

    def texts(self, group: Group, samples: Mapping[int, Sample]) -> Iterator[Text]:
        """All rows and turns of samples, by the number of their batch of prompts."""
        for chunk, sample in samples.items():
            for turn, ids, rows in self.turns(group.task, group.chunks[chunk], sample.turns):
                prompts = [group.chunks[chunk][i] for i in rows]
                parts = zip(prompts, ids, self.seeds(group, prompts, turn), sample.turns[turn].tokens, strict=True)
                for row, (prompt, before, seed, new) in enumerate(parts):
                    yield Text(prompt, turn, row, before, seed, new)

    def ids(self, task: Task, prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int]:
        """A conversation's tokens up to the next answer, by the model's chat template if it has one."""
        llm = self.models.llm()
        replies = [llm.decode(a) for a in answers]
        turns = prompt.turns[: len(replies) + 1]
        if task.raw or not has_template(llm.tokenizer):
            parts = [x for pair in zip(turns, [*replies, ""], strict=True) for x in pair if x]
            ids = llm.encode("\n\n".join(parts))
        else:
            messages = [{"role": "user", "content": turns[0]}]
            for reply, question in zip(replies, turns[1:], strict=True):
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
            ids = llm.encode(messages)
        return cut(ids, task.cut) if task.cut else ids


def digest(task: Task, prompts: Sequence[Prompt]) -> int:
    """A checksum of a batch of prompts: another text under the same name is another prompt."""
    return crc32(repr([task.raw, task.cut, [(p.id, p.turns) for p in prompts]]).encode())


def answer_of(prompts: Sequence[Prompt], done: Sequence[Turn], turn: int, index: int) -> list[int]:
    """The tokens that answered one prompt in an earlier turn."""
    return done[turn].tokens[sum(len(p.turns) > turn for p in prompts[:index])]


def fitting(task: Task, runner: Runner) -> Task:
    """The prompts that fit into the model's context with all turns and answers; a note gives the number of others."""
    target = runner.models.llm().target
    context = target.context

    def length(prompt: Prompt) -> int:
        blank: list[list[int]] = [[] for _ in prompt.turns[1:]]
        return len(runner.ids(task, prompt, blank)) + runner.tokens * len(prompt.turns)

    kept = tuple(p for p in task.prompts if target.separate or length(p) <= context)
    longer = len(task.prompts) - len(kept)
    if not kept:
        raise InputError(
            f"no prompt of {task.name} fits into the model's context of {context} tokens, {runner.tokens} of them new; "
            f"lower --max-new-tokens, or cut the prompts as in {task.name}@{max(1, context - runner.tokens)}"
        )
    note = f"{longer} of {len(task.prompts)} prompts are longer than the model's context and were left out"
    return replace(task, prompts=kept, note="; ".join(filter(None, (task.note, note * bool(longer)))))
