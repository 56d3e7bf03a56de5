"""The loop: draft, verify, commit, for a batch whose rows come and go.

`generate` runs it. A `Batch` is the running state: rows, the target's session, the drafter's state. One
round is `Batch.round`; newcomers are prefilled alone by `Batch.start` and then joined to the running rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..budgets import parse
from ..budgets.budgeter import Budgeter, Report, may_draft
from ..core import verify
from ..core.clock import Clock
from ..core.noise import GumbelNoise
from ..core.protocols import Drafter, Drafting, Kept, Prefill, Round, Session, Target
from ..core.tree import flaw, root_only
from ..core.types import Budget, DraftTree, Question, Rows, Verdict
from ..params import InputError, Rule, check_rule, integer
from .prefixes import Prefixes, Seen
from .request import Done, Piece, Request, Row, alike, check_prompt

P, T = ParamSpec("P"), TypeVar("T")
LEAD = 16  # prompt tokens put before a prediction: its first tokens are matched by what precedes them


@dataclass(frozen=True)
class Engine:
    """What all batches share: the target, the drafter, the rule and its parameters, the budget, the noise."""

    target: Target
    drafter: Drafter
    budget: Budgeter
    gumbel: GumbelNoise
    rule: Rule = "coupled"
    epsilon: float = 0.09  # typical acceptance only
    delta: float = 0.3
    nodes: int = 64  # slots of the cache for a tree, beyond the context
    prefixes: Prefixes | None = None  # texts that ended, for prompts that continue them; None: nothing is kept

    @classmethod
    def of(
        cls,
        target: Target,
        drafter: Drafter,
        budget: Budgeter | str = "auto",
        rule: Rule = "coupled",
        gumbel: GumbelNoise | None = None,
        **more: Any,
    ) -> Engine:
        """The engine of a target and a drafter: the one place where engines are built.

        `budget` may be spelled (`outrider.budgets.parse`). `gumbel`: noise that other engines of this target use too.
        `more` holds the fields epsilon, delta and nodes. Raises InputError for an unknown rule or budget.
        """
        chosen = parse(budget) if isinstance(budget, str) else budget
        if not isinstance(chosen, Budgeter):
            raise InputError(f"a budget is text such as auto or 16x6, or a budget object, not {budget!r}")
        gumbel = GumbelNoise(target.vocab) if gumbel is None else gumbel
        return cls(target, drafter, chosen, gumbel, check_rule(rule), **more)


def generate(engine: Engine, requests: Iterable[Request], batch_size: int = 8) -> Iterator[Piece]:
    """Decode all requests, at most `batch_size` at a time, yielding what each round adds to each row.

    Rows are numbered as the requests come (`piece.row.index`) and join as places get free. Raises InputError for a
    prompt that cannot be decoded, when its turn comes, and for a batch of none.
    """
    integer("batch_size", batch_size)
    waiting = deque(Row(request, i) for i, request in enumerate(requests))
    batch: Batch | None = None
    try:
        while waiting or batch:
            free = batch_size - (len(batch.rows) if batch else 0)
            if waiting and free:
                for rows in alike([waiting.popleft() for _ in range(min(free, len(waiting)))]):
                    newcomers, pieces = Batch.start(engine, rows)
                    batch = newcomers if batch is None else batch.join(newcomers)
                    yield from pieces
            if batch:
                yield from batch.round()
                batch = batch.leave()
    except KeyboardInterrupt:  # the next prompt may go on from here; a round that was cut short changed nothing before
        if batch is not None and len(batch.rows) == 1 and batch.rows[0].finish != "error":
            batch.keep(0)
        raise


def _alone(step: Callable[Concatenate[Batch, P], T]) -> Callable[Concatenate[Batch, P], T]:
    """A step of a batch that holds the target's lock."""

    @wraps(step)
    def taken(self: Batch, *args: P.args, **more: P.kwargs) -> T:
        with self.engine.target.turn():
            return step(self, *args, **more)

    return taken


@dataclass
class Batch:
    """Rows that decode side by side. Whoever drives one (`generate` does) calls

        batch, pieces = Batch.start(engine, rows)     prompts prefilled, first tokens drawn; `read` does it in steps
        pieces = batch.round()                        one round of every row
        batch = batch.leave()                         without the finished rows; None when none is left
        batch = batch.join(newcomers)                 with rows that another `start` has made ready
        batch.cancel(row)                             ends a row, between rounds

    A text depends on its own request alone, never on when its row came or who ran beside it. Each call is one step: it
    takes its turn over the target, and gives it back before it returns. So batches of several threads may share an
    engine, while each batch belongs to one thread at a time.
    """

    engine: Engine
    rows: list[Row]
    session: Session
    drafting: Drafting
    root: list[int]  # [b] the last committed token, whose keys and values the next pass writes
    seen: Seen = field(default_factory=Seen)  # hidden states of texts that will be kept

    @classmethod
    def start(cls, engine: Engine, rows: list[Row]) -> tuple[Batch | None, list[Piece]]:
        """Prefill the newcomers' prompts and draw their first tokens.

        Returns the batch of those that continue (None if the first token ended all of them) and a piece for each row.
        Raises InputError for a prompt that cannot be decoded, before anything is computed.
        """
        reading = cls.read(engine, rows)
        while True:
            try:
                next(reading)
            except StopIteration as end:
                return end.value

    @classmethod
    def read(cls, engine: Engine, rows: list[Row]) -> Generator[Batch, None, tuple[Batch | None, list[Piece]]]:
        """The same in steps: it pauses between the chunks of the prompts, so that others may decode in between, and
        yields what it has read so far, of which a caller that gives up may `keep` a row. The prefix that a single row's
        text shares with a kept one is copied.

        A row that has an output already continues from there, as if that stood in its prompt. An encoder-decoder's rows
        cannot: their output is no part of what the encoder reads."""
        clock, prompts = Clock(engine.target.settle), [row.text for row in rows]
        for row in rows:
            check_prompt(row.request, engine.target)
            row.length = 0
            if engine.target.separate:
                row.continues(engine.target.opening)
            row.usage.prompt_tokens = len(row.request.prompt)
        longest = max(len(row.request.prompt) + row.request.max_new_tokens for row in rows)
        capacity = min(longest, engine.target.context) + engine.nodes
        taps, known, seen = engine.drafter.taps, None, Seen()
        with engine.target.turn():
            session, drafting = engine.target.open(capacity), engine.drafter.open(prompts, capacity)
            if engine.prefixes is not None:
                seen = Seen(taps, [[] for _ in rows])
                known = engine.prefixes.find(prompts[0], rows[0].salt, taps) if len(rows) == 1 else None
        for i, row in enumerate(rows):
            if row.request.prediction:
                drafting.expect(i, [*row.request.prompt[-LEAD:], *row.request.prediction])
        batch = cls(engine, rows, session, drafting, [0] * len(rows), seen)
        if known and not rows[0].output:
            rows[0].usage.cached_tokens = known[1]
        chunks = session.resume(prompts[0], taps, *known) if known else session.prefill(prompts, taps)
        unread = set(range(len(rows)))
        while True:
            with engine.target.turn(), clock("prefill"):
                batch.take(chunk := next(chunks))
            unread.difference_update(i for i, last in enumerate(chunk.last) if last)
            if not unread:
                break
            yield batch
        batch.root = [row.output[-1] for row in rows]
        pieces = []
        for row in rows:
            token = row.output.pop()
            row.usage.prefill_seconds += clock["prefill"]
            pieces.append(Piece(row, [] if row.finish else batch.extend(row, [token], 1), 0))
        return batch.leave(), pieces

    def take(self, chunk: Prefill) -> None:
        """A chunk of the prompts has been read: rows whose prompt ends in it draw their first token."""
        sizes = chunk.tree.size.tolist()
        for row, count in zip(self.rows, sizes, strict=True):
            row.length += count
        self.root, view = list(chunk.next), self.view(back=1)
        if any(chunk.last):
            first = replace(view, rule="coupled")
            texts = [row.row_text() for row in self.rows]
            verdict = self.judge(Question(first, root_only(first.root), chunk.output.logits, texts))
            self.root = [new if end else old for new, end, old in zip(verdict.next, chunk.last, self.root, strict=True)]
            for row, finite, end in zip(self.rows, verdict.finite, chunk.last, strict=True):
                if end and not finite:
                    self.fail(row)
        tokens = [[token] if end else [] for token, end in zip(self.root, chunk.last, strict=True)]
        paths = [list(range(count)) for count in sizes]
        self.observe(Round(view, chunk.tree, chunk.output, paths, self.root, tokens))
        for row, new in zip(self.rows, tokens, strict=True):
            row.output += new

    @_alone
    def round(self) -> list[Piece]:
        """One round of every row: schedule, draft, verify, commit, account. Returns what it added to each row."""
        clock, view = Clock(self.engine.target.settle), self.view()
        drafting = may_draft(view, self.drafting)
        budget = self.engine.budget.choose(drafting)
        with clock("draft"):
            tree = self.propose(view, budget)
        with clock("verify"):
            output = self.session.forward(tree, self.engine.drafter.taps)
        with clock("rest"):
            texts = [row.row_text() for row in self.rows]
            engine = self.engine
            verdict = self.judge(Question(view, tree, output.logits, texts, engine.epsilon, engine.delta))
            done = Done.of(tree, verdict)
        self.session.keep(verdict.paths)
        self.root = verdict.next
        with clock("draft"):
            self.observe(Round(view, tree, output, verdict.paths, verdict.next, done.tokens))
        pieces = [self.advance(row, done, i, view.remaining[i]) for i, row in enumerate(self.rows)]
        self.account(clock, drafting, budget, tree, done)
        return pieces

    def observe(self, round: Round) -> None:
        self.seen.add(round)
        self.drafting.observe(round)

    def advance(self, row: Row, done: Done, i: int, remaining: int) -> Piece:
        """Row i after a round: its new tokens and its counts."""
        count = len(done.tokens[i])
        row.length += count
        row.serial += 1
        added = self.extend(row, done.tokens[i], remaining) if done.finite[i] else self.fail(row)
        accepted = min(count - 1, len(added))
        row.usage.count(done.sizes[i] - 1, accepted, done.tested[i] if len(added) == count else accepted)
        return Piece(row, added, accepted)

    def account(self, clock: Clock, drafting: Rows, budget: Budget, tree: DraftTree, done: Done) -> None:
        """Times into every row's usage; times and hits to the budget."""
        draft, verify, seconds = clock["draft"], clock["verify"], clock.total
        depth = 0 if budget.nodes < 2 else max(0, min(budget.depth, max(drafting.remaining) - 1))
        counts = [len(new) for new, left in zip(done.tokens, drafting.remaining, strict=True) if left > 1]
        hits = [sum(c > d for c in counts) for d in range(1, depth + 1)]
        n, b, promised = tree.nodes, len(self.rows), 0.0
        if tree.values is not None:
            promised = math.fsum(math.exp(value) for _, _, logs in tree.host for value in logs[1:])
        rest = seconds - draft - verify
        total = sum(done.sizes) if self.engine.target.ragged else 0
        report = Report(b, depth, n, draft, verify, rest, hits, promised, len(counts), total)
        self.engine.budget.learn(report)
        seconds = clock.total  # with what the budget's learning took
        for row in self.rows:
            row.usage.draft_seconds += draft
            row.usage.verify_seconds += verify
            row.usage.decode_seconds += seconds

    def view(self, back: int = 0) -> Rows:
        """The rows as a drafter may see them; `back=1`: as if the prompt's last token were the root."""
        start = tuple(row.length - back for row in self.rows)
        context = self.engine.target.context
        return Rows(
            root=tuple(self.root),
            start=start,
            seeds=tuple(row.key(self.engine.rule) for row in self.rows),
            serial=tuple(row.serial for row in self.rows),
            sampling=tuple(row.request.sampling for row in self.rows),
            rule=self.engine.rule,
            remaining=tuple(row.remaining(context) for row in self.rows),
            gumbel=self.engine.gumbel,
        )

    def propose(self, view: Rows, budget: Budget) -> DraftTree:
        if budget.nodes < 2 or budget.depth < 1 or max(view.remaining) < 2:
            return root_only(view.root)
        if self.engine.rule != "coupled":  # only the coupled rule stays lossless where nodes are dropped by value
            budget = replace(budget, floor=0.0, reach=0.0, price=None, rate=0.0)
        tree = self.drafting.propose(view, budget)
        if wrong := flaw(tree, view.root, self.engine.target.vocab):
            kind = type(self.engine.drafter.uncalibrated)
            raise InputError(f"the drafter {kind.__module__}.{kind.__qualname__} proposed a broken tree: {wrong}")
        return tree

    def judge(self, question: Question) -> Verdict:
        """Apply the rule: where the logits are, or by the reference."""
        return self.engine.target.judge(question) or verify.judge(question)

    @staticmethod
    def fail(row: Row) -> list[int]:
        """End a row whose logits are NaN or infinite; it alone, and what it wrote before stays."""
        row.finish = "error"
        return []

    def extend(self, row: Row, tokens: list[int], remaining: int) -> list[int]:
        """Add tokens to a row's output, up to its end and at most `remaining`; the ones that were added."""
        kept, row.finish = row.request.cut(row.output, tokens[:remaining])
        added = tokens[: min(kept, remaining)]
        row.output += added
        row.usage.new_tokens = len(row.output)
        if row.finish is None and row.remaining(self.engine.target.context) < 1:
            row.finish = "length"
        return added

    def cancel(self, row: Row, why: str = "cancelled") -> None:
        """End a row from outside, between rounds; what it wrote stays, and `leave` drops it."""
        row.finish = row.finish or why

    def leave(self, paused: Collection[int] = ()) -> Batch | None:
        """The batch without its finished rows and without those whose index is in `paused`, which another `read` may
        take up again; the last rows move into their places, so that few are copied."""
        for i, row in enumerate(self.rows):
            if row.finish not in (None, "error"):
                self.keep(i)
        live = [i for i, row in enumerate(self.rows) if row.finish is None and row.index not in paused]
        if not live:
            return None
        if len(live) < len(self.rows):
            stay = set(live)
            self._select([i if i in stay else live.pop() for i in range(len(live))])
        return self

    @_alone
    def keep(self, i: int) -> None:
        """Add row i's text to the prefix cache."""
        prefixes, row = self.engine.prefixes, self.rows[i]
        if prefixes is None:
            return
        tokens = row.text[: row.length]

        def copy() -> Kept | None:
            return self.session.taken(i, tokens, self.seen.of(i, len(tokens)))

        try:
            prefixes.add(tokens, copy, row.salt, self.seen.taps)
        except (RuntimeError, MemoryError):  # no memory for copies
            prefixes.clear()

    @_alone
    def _select(self, live: list[int]) -> None:
        failed = [i for i, row in enumerate(self.rows) if row.finish == "error"]
        if failed:
            self.session.wipe(failed)
        self.session.select(live)
        self.drafting.select(live)
        self.seen.select(live)
        self.rows = [self.rows[i] for i in live]
        self.root = [self.root[i] for i in live]

    @_alone
    def join(self, newcomers: Batch | None) -> Batch:
        """This batch with the newcomers' rows after its own."""
        if newcomers is not None:
            self.session.join(newcomers.session)
            self.drafting.join(newcomers.drafting)
            self.seen.join(newcomers.seen)
            self.rows += newcomers.rows
            self.root = self.root + newcomers.root
        return self
