"""The grid: for every task, temperature and batch size all methods take turns, prompt by prompt; resumable.

    for each group (task, temperature, batch size):
        every method answers one prompt as a warm-up (it compiles, fills caches)
        for each repeat, for each batch of prompts: every method answers it, in alternating order

A method that raises leaves its group, with the reason; the others go on. Plain decoding answers every batch that any
method answers, so a method that is added later is compared with plain decoding of its own session.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter
from typing import Any
from zlib import crc32

from ..params import InputError
from . import checks, methods, peers
from .models import Models
from .store import Store
from .tasks import cut
from .types import OURS, Answer, Ask, Method, Peer, Prompt, Sample, Task, Turn

WARM = 16  # tokens of a warm-up of ours
STOCK = "transformers"  # the peer that figures are also ratios to

Advance = Callable[[str], None]  # called with what comes next, once for each answer
Weigh = Callable[[Answer, int], dict[str, int]]  # an answer and its rows -> bytes by part


@dataclass(frozen=True)
class Group:
    """The cells whose methods take turns."""

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
        """The samples of this group's prompts, renumbered: another session may have asked for fewer prompts."""
        place = {digest(self.task, chunk): i for i, chunk in enumerate(self.chunks)}
        key = (self.task.name, self.temperature, self.batch)
        mine = [s for s in samples if s.cell[:3] == key and s.digest in place]
        return [replace(s, chunk=place[s.digest]) for s in mine]


@dataclass(frozen=True)
class Text:
    """What one row wrote in one turn, and the tokens before it."""

    prompt: Prompt
    turn: int
    row: int  # among those that took part in the turn
    ids: list[int]
    seed: int
    new: list[int]


@dataclass
class Runner:
    """Runs methods over tasks and puts every sample into the store, until the deadline."""

    models: Models
    store: Store
    tokens: int  # new tokens of every turn, at most
    seed: int = 0
    deadline: float = float("inf")  # of time.monotonic
    peers: dict[str, Peer] = field(default_factory=dict)  # by method
    weigh: Weigh = lambda answer, rows: {}
    failures: dict[tuple[Any, ...], str] = field(default_factory=dict)  # why a cell of this session failed

    def groups(
        self, tasks: Sequence[Task], temperatures: Sequence[float], batches: Sequence[int], rows: Sequence[Method],
        repeats: int,
    ) -> list[Group]:  # fmt: skip
        return [
            Group(task, t, b, methods.at(t, rows), repeats) for task in tasks for t in temperatures for b in batches
        ]

    def missing(self, group: Group) -> list[tuple[int, int, list[Method]]]:
        """(repeat, chunk, methods) still to be measured, with the methods that they are compared with."""
        done = {(s.method, s.chunk, s.repeat) for s in group.own(self.store.samples) if not s.faults}
        left = []
        for repeat in range(group.repeats):
            for chunk in range(len(group.chunks)):
                lack = [m for m in group.methods if (m.name, chunk, repeat) not in done]
                if lack:
                    left.append((repeat, chunk, [m for m in group.methods if m.plain or m.spec == STOCK or m in lack]))
        return left

    def steps(self, group: Group) -> int:
        """How many answers of a group are missing, with warm-ups."""
        left = self.missing(group)
        return sum(len(ms) for _, _, ms in left) + len({m.name for _, _, ms in left for m in ms})

    def open(self, rows: Sequence[Method]) -> None:
        """Load our own methods before the first measurement, so that a wrong SPEC costs no time."""
        for method in rows:
            if method.peer == OURS and method.name not in self.peers:
                self.peers[method.name] = peers.load(method, self.models)

    def run(self, group: Group, advance: Advance = lambda what: None) -> bool:
        """Measure what is missing of a group; False if the time was up before the end."""
        left, out = self.missing(group), set[str]()
        if not left:
            return True
        for method in [m for m in group.methods if any(m in ms for _, _, ms in left)]:
            if monotonic() > self.deadline:
                return False
            advance(f"{group.task.name}, {method.name}: warm-up")
            if not self.warm(group, method):
                out.add(method.name)
        for repeat, chunk, wanted in left:
            for method in wanted if (repeat + chunk) % 2 == 0 else wanted[::-1]:
                if monotonic() > self.deadline:
                    return False
                advance(f"{group.task.name}, {method.name}")
                if method.name not in out and not self._measure(group, method, chunk, repeat):
                    out.add(method.name)
        return True

    def warm(self, group: Group, method: Method) -> bool:
        """Let a method answer once as a warm-up; False if it fails."""
        try:
            if method.name not in self.peers:
                self.peers[method.name] = peers.load(method, self.models)
            peer = self.peers[method.name]
            if method.peer == OURS:
                chunk, limit = group.chunks[0], min(WARM, self.tokens)
            else:  # caches of a fixed size are made for the largest
                chunk, limit = max(group.chunks, key=lambda c: max(len(p.turns[0]) for p in c)), self.tokens
            ids = [self.ids(group.task, p, []) for p in chunk]
            peer.run(ids, replace(self._ask(group, chunk, 0), limit=limit))
        except Exception as error:
            return self._failed(group, method, error)
        return True

    def _measure(self, group: Group, method: Method, chunk: int, repeat: int) -> bool:
        prompts = group.chunks[chunk]
        made = Sample(
            group.task.name, group.temperature, group.batch, method.name, chunk, repeat, self.store.session,
            digest(group.task, prompts), [p.id for p in prompts], [], [],
        )  # fmt: skip
        try:
            for turn, ids, who in self.turns(group.task, prompts, made.turns):
                if turn == 0:
                    made.lengths = [len(i) for i in ids]
                ask = self._ask(group, [prompts[i] for i in who], turn)
                made.turns.append(self._turn(method, ids, ask, made.faults))
                if made.faults and len(made.turns[-1].tokens) != len(ids):
                    break  # no text to go on from
        except Exception as error:
            return self._failed(group, method, error)
        self.store.add(made)
        return True

    def _failed(self, group: Group, method: Method, error: Exception) -> bool:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
        self.failures[group.task.name, group.temperature, group.batch, method.name] = reason
        return False

    def _turn(self, method: Method, ids: list[list[int]], ask: Ask, faults: list[str]) -> Turn:
        """One call, timed; the prompt's part by our engine's own word, of another method by a call for one token."""
        peer, llm = self.peers[method.name], self.models.llm()
        began = self._now()
        given: Answer = peer.run(ids, ask)
        seconds = self._now() - began
        prefill = given.prefill
        if prefill is None or method.peer != OURS:
            began = self._now()
            peer.run(ids, replace(ask, limit=1))
            prefill = self._now() - began
        context = llm.target.context
        remaining = [context - (0 if checks.seq2seq(llm) else len(i)) for i in ids]
        wrong = checks.answer(given, ask, len(ids), llm.target.vocab, remaining, seconds)
        faults += [f for f in wrong if f not in faults]
        return Turn(given.tokens, seconds, min(prefill, seconds), given.usages, self.weigh(given, len(ids)))

    def _now(self) -> float:
        """The time, once all work on a GPU is done."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        return perf_counter()

    def _ask(self, group: Group, prompts: Sequence[Prompt], turn: int) -> Ask:
        return Ask(self.tokens, group.temperature, self.seeds(group, prompts, turn), self.models.llm().eos)

    def seeds(self, group: Group, prompts: Sequence[Prompt], turn: int) -> tuple[int, ...]:
        """A seed belongs to a prompt and its turn, so that a text does not depend on the batch or the other prompts."""
        return tuple(self.seed + crc32(f"{group.task.name}/{p.id}/{turn}".encode()) for p in prompts)

    def turns(
        self, task: Task, prompts: Sequence[Prompt], made: Sequence[Turn]
    ) -> Iterator[tuple[int, list[list[int]], list[int]]]:
        """(turn, prompts' ids, which prompts take part). `made` grows meanwhile: later turns contain its answers."""
        for turn in range(max(len(p.turns) for p in prompts)):
            who = [i for i, p in enumerate(prompts) if len(p.turns) > turn]
            answers = [[answer_of(prompts, made, t, i) for t in range(turn)] for i in who]
            yield turn, [self.ids(task, prompts[i], a) for i, a in zip(who, answers, strict=True)], who

    def texts(self, group: Group, samples: Mapping[int, Sample]) -> Iterator[Text]:
        """All rows and turns of samples, given by the number of their batch of prompts."""
        for chunk, sample in samples.items():
            prompts = group.chunks[chunk]
            for turn, ids, who in self.turns(group.task, prompts, sample.turns):
                asked = [prompts[i] for i in who]
                parts = zip(asked, ids, self.seeds(group, asked, turn), sample.turns[turn].tokens, strict=True)
                for row, (prompt, before, seed, new) in enumerate(parts):
                    yield Text(prompt, turn, row, before, seed, new)

    def ids(self, task: Task, prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int]:
        """A conversation's tokens up to the next answer, by the model's chat template if it has one."""
        llm = self.models.llm()
        said = [llm.decode(a) for a in answers]
        turns = prompt.turns[: len(said) + 1]
        if task.raw or not getattr(llm.tokenizer, "chat_template", None):
            parts = [x for pair in zip(turns, [*said, ""], strict=True) for x in pair if x]
            ids = llm.encode("\n\n".join(parts))
        else:
            messages = [{"role": "user", "content": turns[0]}]
            for answer, question in zip(said, turns[1:], strict=True):
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
            ids = llm.encode(messages)
        return cut(ids, task.cut) if task.cut else ids


def digest(task: Task, prompts: Sequence[Prompt]) -> int:
    """A checksum of a batch of prompts: another text under the same name is another prompt."""
    return crc32(repr([task.raw, task.cut, [(p.id, p.turns) for p in prompts]]).encode())


def answer_of(prompts: Sequence[Prompt], made: Sequence[Turn], turn: int, index: int) -> list[int]:
    """What a method wrote for one prompt in an earlier turn."""
    who = [i for i, p in enumerate(prompts) if len(p.turns) > turn]
    return made[turn].tokens[who.index(index)]


def fitting(task: Task, runner: Runner) -> Task:
    """The prompts that fit into the model's context, all turns and answers counted; a note says how many do not."""
    context = runner.models.llm().target.context

    def needs(prompt: Prompt) -> int:
        blank: list[list[int]] = [[] for _ in prompt.turns[1:]]
        return len(runner.ids(task, prompt, blank)) + runner.tokens * len(prompt.turns)

    kept = tuple(p for p in task.prompts if checks.seq2seq(runner.models.llm()) or needs(p) <= context)
    left = len(task.prompts) - len(kept)
    if not kept:
        raise InputError(
            f"no prompt of {task.name} fits into the model's context of {context} tokens, {runner.tokens} of them new; "
            f"ask for fewer --max-new-tokens, or cut the prompts as in {task.name}@{max(1, context - runner.tokens)}"
        )
    note = (
        f"{left} of {len(task.prompts)} prompts are longer than the model's context and were left out" if left else ""
    )
    return replace(task, prompts=kept, note="; ".join(filter(None, (task.note, note))))
