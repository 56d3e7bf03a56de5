"""The loop: draft, verify, commit, for a batch whose rows come and go.

`generate` is the whole of it. A `Batch` is the running state: rows, the target's session, the drafter's state. One
round is `Batch.round`; newcomers are prefilled alone by `Batch.start` and then joined to the running rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from . import sampling, verify
from .budget import Budgeter, Report
from .noise import RaceNoise, digest
from .tree import root_only
from .types import (
    Budget,
    Drafter,
    Drafting,
    DraftTree,
    InputError,
    Look,
    Round,
    Rows,
    Rule,
    Sampling,
    Session,
    Target,
    Usage,
    Verdict,
)

Cut = Callable[[Sequence[int], Sequence[int]], tuple[int, str | None]]
Process = Callable[[list[int], Tensor], Tensor]  # (output so far, logits [1, v]) -> scores [1, v]


@dataclass(frozen=True)
class Request:
    """What one output is asked to be. Seed, law and end belong to the row: a text does not depend on its neighbours."""

    prompt: Sequence[int]
    seed: int
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    cut: Cut = lambda output, new: (len(new), None)  # how many of the new tokens are kept, and why the row ends
    process: Process | None = None  # transformers' logits processors, where they came prepared


@dataclass
class Row:
    """One request while it runs."""

    request: Request
    index: int  # which request it is
    output: list[int] = field(default_factory=list)
    length: int = 0  # committed tokens, = the root's position
    serial: int = 0
    finish: str | None = None
    mixed: int | None = None  # a hash of seed and prompt
    usage: Usage = field(default_factory=Usage)

    def key(self, rule: Rule) -> int:
        """What its randomness is keyed by. Rounds, unlike positions, are no property of the text: under the rejection
        rules two prompts with one seed must not share their draws, which a budget may have seen."""
        if rule == "coupled":
            return self.request.seed
        if self.mixed is None:
            self.mixed = digest(self.request.seed, self.request.prompt)
        return self.mixed

    def room(self, context: int) -> int:
        return min(self.request.max_new_tokens - len(self.output), context - 1 - self.length)


@dataclass(frozen=True)
class Piece:
    """What one round added to one row. The first `drafted` of its tokens came from the draft."""

    row: Row
    tokens: list[int]
    drafted: int


@dataclass(frozen=True)
class Engine:
    """What all batches share: the target, the drafter, the rule and its parameters, the budget, the noise."""

    target: Target
    drafter: Drafter
    budget: Budgeter
    race: RaceNoise
    rule: Rule = "coupled"
    epsilon: float = 0.09  # typical acceptance only
    delta: float = 0.3
    nodes: int = 64  # room kept in the cache for a tree


def generate(engine: Engine, requests: Iterable[Request], batch_size: int = 8) -> Iterator[Piece]:
    """Decode all requests, at most `batch_size` at a time, yielding what each round adds to each row."""
    waiting = deque(Row(request, i) for i, request in enumerate(requests))
    batch: Batch | None = None
    with torch.no_grad():
        while waiting or batch:
            free = batch_size - (len(batch.rows) if batch else 0)
            if waiting and free:
                newcomers, pieces = Batch.start(engine, [waiting.popleft() for _ in range(min(free, len(waiting)))])
                yield from pieces
                batch = newcomers if batch is None else batch.join(newcomers)
            if batch:
                pieces = batch.round()
                yield from pieces
                batch = batch.leave()


@dataclass
class Batch:
    engine: Engine
    rows: list[Row]
    session: Session
    drafting: Drafting
    root: Tensor  # [b]

    @classmethod
    def start(cls, engine: Engine, rows: list[Row]) -> tuple[Batch | None, list[Piece]]:
        """Read the newcomers' prompts and draw their first tokens."""
        began = perf_counter()
        prompts = [row.request.prompt for row in rows]
        for row in rows:
            check_prompt(row.request, engine.target)
            row.usage.prompt_tokens = len(row.request.prompt)
        longest = max(len(row.request.prompt) + row.request.max_new_tokens for row in rows)
        capacity = min(longest, engine.target.context) + engine.nodes
        session = engine.target.open(capacity)
        drafting = engine.drafter.open(prompts, capacity)
        batch = cls(engine, rows, session, drafting, torch.zeros(len(rows), dtype=torch.long))
        for chunk in session.prefill(prompts, engine.drafter.taps):
            for row, count in zip(rows, chunk.count.tolist(), strict=True):
                row.length += count
            last = torch.tensor(chunk.last, device=chunk.next.device)
            batch.root = chunk.next
            view = batch.view(back=1)
            drawn = batch.draw(view, chunk.look.logits[:, 0]) if any(chunk.last) else chunk.next
            batch.root = torch.where(last, drawn, chunk.next)
            first = [[t] if end else [] for t, end in zip(batch.root.tolist(), chunk.last, strict=True)]
            path = torch.arange(chunk.tree.nodes, device=last.device).expand(len(rows), -1)
            drafting.observe(Round(view, chunk.tree, chunk.look, path, chunk.count, batch.root, first))
            for row, tokens in zip(rows, first, strict=True):
                row.output += tokens
        batch.root = torch.tensor([row.output[-1] for row in rows], device=batch.root.device)
        seconds = perf_counter() - began
        pieces = []
        for row in rows:
            tokens, row.output = row.output, []
            row.usage.prefill_seconds = seconds
            pieces.append(Piece(row, batch.extend(row, tokens, 1), 0))
        return batch.leave(), pieces

    def round(self) -> list[Piece]:
        """Draft, verify, commit; what it added to each row."""
        began, engine = perf_counter(), self.engine
        view = self.view()
        budget = engine.budget.choose(view)
        start = perf_counter()
        tree = self.propose(view, budget)
        drafted = perf_counter()
        look = self.session.forward(tree, engine.drafter.taps)
        looked = perf_counter()
        verdict = self.judge(view, tree, look)
        self.root = verdict.next
        tokens, counts, tested = self.fetch(tree, verdict)
        if self.root.device.type != "cpu":
            looked = perf_counter()  # the pass runs while the host goes on; the fetch has waited for it
        self.session.keep(verdict.path, verdict.count)
        observing = perf_counter()
        self.drafting.observe(Round(view, tree, look, verdict.path, verdict.count, verdict.next, tokens))
        observed = perf_counter()
        draft_seconds, verify_seconds = drafted - start + observed - observing, looked - drafted
        sizes, pieces = tree.size.tolist(), []
        for i, row in enumerate(self.rows):
            row.length += counts[i]
            row.serial += 1
            added = self.extend(row, tokens[i], view.room[i])
            accepted = min(counts[i] - 1, len(added))
            self.account(row.usage, sizes[i] - 1, accepted, accepted if len(added) < len(tokens[i]) else tested[i])
            row.usage.draft_seconds += draft_seconds
            row.usage.verify_seconds += verify_seconds
            pieces.append(Piece(row, added, accepted))
        seconds = perf_counter() - began
        for row in self.rows:
            row.usage.decode_seconds += seconds
        asked = 0 if budget.nodes < 2 else max(0, min(budget.depth, max(view.room) - 1))
        engine.budget.learn(
            Report(
                len(self.rows), asked, tree.nodes, draft_seconds, verify_seconds,
                seconds - draft_seconds - verify_seconds,
                [sum(c > d for c in counts) for d in range(1, asked + 1)], min(asked, tree.deepest),
            )
        )  # fmt: skip
        return pieces

    def view(self, back: int = 0) -> Rows:
        """The rows as a drafter may see them; `back=1`: as if the prompt's last token were the root."""
        start = tuple(row.length - back for row in self.rows)
        context = self.engine.target.context
        return Rows(
            root=self.root,
            position=self.session.lengths - back,
            start=start,
            seeds=tuple(row.key(self.engine.rule) for row in self.rows),
            serial=tuple(row.serial for row in self.rows),
            sampling=tuple(row.request.sampling for row in self.rows),
            rule=self.engine.rule,
            room=tuple(row.room(context) for row in self.rows),
            race=self.engine.race,
        )

    def propose(self, view: Rows, budget: Budget) -> DraftTree:
        if budget.nodes < 2 or budget.depth < 1 or max(view.room) < 2:
            return root_only(view.root)
        return self.drafting.propose(view, budget)

    def judge(self, view: Rows, tree: DraftTree, look: Look) -> Verdict:
        """Apply the rule."""
        rule, depth = self.engine.rule, tree.deepest
        if rule == "coupled":

            def choose(logits: Tensor, depth: int, path: Tensor) -> Tensor:
                return self.draw(view, logits, depth, path)

            return verify.coupled(tree, look.logits, choose, depth)

        def law(logits: Tensor, depth: int, path: Tensor) -> Tensor:
            return self.law(view, logits, path)

        if rule == "typical":
            return verify.typical(tree, look.logits, law, self.engine.epsilon, self.engine.delta, depth)
        dice = verify.Dice(view.seeds, view.serial)
        if rule == "block" and tree.q is not None and max(tree.q.shape[1], 1) == tree.deepest == tree.nodes - 1:
            return verify.block(tree, look.logits, law, dice, depth)
        return verify.rejection(tree, look.logits, law, dice, depth)

    def draw(self, view: Rows, logits: Tensor, depth: int = 1, path: Tensor | None = None) -> Tensor:
        """The target's own choice at one node per row, logits [b, v] -> [b]."""
        noise = view.noise(depth) if view.hot else None
        return sampling.draw(self.penalised(logits, path), view.sampling, noise)

    def law(self, view: Rows, logits: Tensor, path: Tensor) -> Tensor:
        """The target's law at one node per row, [b, v] in float64."""
        scores = self.penalised(logits, path).double()
        return torch.stack([sampling.law(z, s) for z, s in zip(scores, view.sampling, strict=True)])

    def penalised(self, logits: Tensor, path: Tensor | None) -> Tensor:
        """Logits after whatever depends on the row's own text: penalties, bias, transformers' processors."""
        requests = [row.request for row in self.rows]
        if any(r.process for r in requests):
            tails = [[]] * len(self.rows) if path is None else path.tolist()
            scores = [
                r.process([*row.output, *tail], z[None].float())[0] if r.process else z.float()
                for r, row, tail, z in zip(requests, self.rows, tails, logits, strict=True)
            ]
            return torch.stack(scores)
        if any(r.sampling.penalised or r.sampling.logit_bias for r in requests):
            history = [(r.prompt, row.output) for r, row in zip(requests, self.rows, strict=True)]
            return sampling.penalise(logits, [r.sampling for r in requests], history, path)
        return logits

    def fetch(self, tree: DraftTree, verdict: Verdict) -> tuple[list[list[int]], list[int], list[int]]:
        """The round's one host sync: new tokens, committed counts, and how many depths were tested, per row."""
        last = verdict.path.gather(1, verdict.count[:, None] - 1)
        index = torch.arange(tree.nodes, device=last.device)
        child = (tree.parents == last) & (index > 0) & (index < tree.size[:, None])
        tested = verdict.count - 1 + child.any(1)
        spelled = tree.tokens.gather(1, verdict.path)
        packed = torch.cat([spelled, verdict.next[:, None], verdict.count[:, None], tested[:, None]], 1).tolist()
        counts = [p[-2] for p in packed]
        tokens = [[*p[1:c], p[-3]] for p, c in zip(packed, counts, strict=True)]
        return tokens, counts, [p[-1] for p in packed]

    def extend(self, row: Row, tokens: list[int], room: int) -> list[int]:
        """Add tokens to a row's output, up to its end and into the room it has; the ones that were added."""
        kept, row.finish = row.request.cut(row.output, tokens[:room])
        added = tokens[: min(kept, room)]
        row.output += added
        row.usage.new_tokens = len(row.output)
        if row.finish is None and row.room(self.engine.target.context) < 1:
            row.finish = "length"
        return added

    @staticmethod
    def account(usage: Usage, drafted: int, accepted: int, tested: int) -> None:
        usage.rounds += 1
        usage.drafted += drafted
        usage.accepted += accepted
        usage.tested += tested
        for counts, upto in ((usage.accepted_at, accepted), (usage.tested_at, tested)):
            counts.extend([0] * (upto - len(counts)))
            for d in range(upto):
                counts[d] += 1

    def leave(self) -> Batch | None:
        """The batch without its finished rows."""
        live = [i for i, row in enumerate(self.rows) if row.finish is None]
        if not live:
            return None
        if len(live) < len(self.rows):
            self.session.select(live)
            self.drafting.select(live)
            self.rows = [self.rows[i] for i in live]
            self.root = self.root[live]
        return self

    def join(self, newcomers: Batch | None) -> Batch:
        """This batch with the newcomers' rows behind its own."""
        if newcomers is not None:
            self.session.join(newcomers.session)
            self.drafting.join(newcomers.drafting)
            self.rows += newcomers.rows
            self.root = torch.cat([self.root, newcomers.root])
        return self


def check_prompt(request: Request, target: Target) -> None:
    """Refuse what cannot be decoded, before anything is computed."""
    if not request.prompt:
        raise InputError("the prompt is empty; give at least one token (most models have a begin-of-text token)")
    if len(request.prompt) >= target.context:
        raise InputError(
            f"the prompt has {len(request.prompt)} tokens and the model's context is {target.context}; "
            "shorten the prompt or choose a model with a longer context"
        )
    if request.max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
    for what, ids in (("prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
        if any(not 0 <= token < target.vocab for token in ids):
            raise InputError(f"the {what} has a token outside the model's vocabulary of {target.vocab}")
