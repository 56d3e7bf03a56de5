"""The contract's second half: what losslessness cannot see. A wrong draft cache still gives the right text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract_world import NAMES, PROMPTS, VOCAB, World, outputs, plain, stop_at
from restless import Restless

from outrider import drafters
from outrider.backends.torch import hf
from outrider.budgets.budgeter import FixedBudget
from outrider.core import tree
from outrider.core.noise import GumbelNoise
from outrider.core.price import Price
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import model
from outrider.engine import Batch, Engine, Request, Row
from outrider.params import Sampling
from outrider.testing import TableTarget


def started(world: World, drafter: object, made: list[Request], budget: object = None, rule: str = "coupled") -> Batch:
    with torch.no_grad():
        batch, _ = Batch.start(world.engine(drafter, rule, budget=budget), [Row(r, i) for i, r in enumerate(made)])
    assert batch is not None
    return batch


def record(batch: Batch, budgets: list[Budget] | None = None) -> list[DraftTree]:
    """Every proposal that the batch is given from now on; and the budget that was given for it."""
    seen: list[DraftTree] = []
    inner = batch.drafting.propose

    def watched(rows: Rows, budget: Budget) -> DraftTree:
        seen.append(inner(rows, budget))
        if budgets is not None:
            budgets.append(budget)
        return seen[-1]

    batch.drafting.propose = watched  # type: ignore[method-assign]
    return seen


def same(a: DraftTree, b: DraftTree) -> bool:
    def rows(t: DraftTree) -> list[list[tuple[int, int]]]:
        return [
            list(zip(tokens[:n], parents[:n], strict=True))
            for tokens, parents, n in zip(t.tokens.tolist(), t.parents.tolist(), t.size.tolist(), strict=True)
        ]

    return rows(a) == rows(b)


class Ending(FixedBudget):
    """A budget that ends a draft where it does not pay, as the adaptive one does."""

    def choose(self, rows: Rows) -> Budget:
        return replace(super().choose(rows), reach=0.4, floor=0.002)


@pytest.mark.parametrize(("temperature", "kind"), [(0.0, FixedBudget), (1.0, Ending)])
@pytest.mark.parametrize("name", NAMES)
def test_reopen(world: World, name: str, temperature: float, kind: type[FixedBudget]) -> None:
    """A drafter that lived through rounds proposes what a fresh one proposes after reading the whole text."""
    drafter = world.drafter(name)
    if not getattr(drafter, "reopens", True):
        pytest.skip(f"{name} says that its state depends on the rounds it saw")
    made = [Request(p, 40 + i, 60, Sampling(temperature)) for i, p in enumerate(PROMPTS)]
    budget = kind(14, 4)
    lived = started(world, drafter, made, budget)
    proposals = record(lived)
    with torch.no_grad():
        for _ in range(6):
            again = [
                replace(
                    row.request,
                    prompt=[*row.request.prompt, *row.output[:-1]],
                    max_new_tokens=row.request.max_new_tokens - len(row.output) + 1,
                )
                for row in lived.rows
            ]
            fresh = started(world, drafter, again, budget)
            assert [row.output[-1] for row in lived.rows] == [row.output[0] for row in fresh.rows]
            expected = fresh.drafting.propose(fresh.view(), budget.choose(fresh.view()))
            lived.round()
            assert same(proposals[-1], expected)


@pytest.mark.parametrize(("piece", "batch"), [(1, 8), (3, 8), (64, 8), (3, 2)])
def test_a_draft_model_that_waited_drafts_as_if_it_had_not(
    world: World, tmp_path: object, monkeypatch: pytest.MonkeyPatch, piece: int, batch: int
) -> None:
    """What it has not read while nothing was drafted is read in pieces: the target as its own draft model guesses
    everything right afterwards."""
    monkeypatch.setattr(model, "PIECE", piece)
    world.model.save_pretrained(str(tmp_path))
    itself = drafters.load(f"model:{tmp_path}?tree=chain&scale=0.01", world.target)
    lengths = (60, 60, 60, 60) if batch == 8 else (60, 21, 47, 33)  # rows that join have other tokens waiting
    made = [Request(p, 7 + i, n, Sampling(1.0)) for i, (p, n) in enumerate(zip(PROMPTS, lengths, strict=True))]
    rows = outputs(world.engine(itself, budget=Restless((Budget(5, 4), *[Budget(1, 0)] * 11))), made, batch)
    for row, r in zip(rows, made, strict=True):
        assert row.output == plain(world.model, r.prompt, r.seed, r.sampling, r.max_new_tokens)
        assert row.usage.tested >= r.max_new_tokens // 5
        assert row.usage.accepted == row.usage.tested


@pytest.mark.parametrize("name", NAMES)
def test_prompts_in_chunks(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged prompts of several chunks: a row whose prompt has ended waits for the others."""
    monkeypatch.setattr(hf, "CHUNK", 3)
    drafter = world.drafter(name)
    made = [Request(p, 40 + i, 20, Sampling(1.0)) for i, p in enumerate([*PROMPTS, [*PROMPTS[0], *PROMPTS[1]]])]
    rows = outputs(world.engine(drafter, budget=FixedBudget(14, 4)), made)
    for row, r in zip(rows, made, strict=True):
        assert row.output == plain(world.model, r.prompt, r.seed, r.sampling, 20)


@pytest.mark.parametrize("shape", ["chain", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_self_draft(world: World, tmp_path: object, temperature: float, shape: str) -> None:
    """The target as its own drafter is accepted to full depth (noise off by one position would show here)."""
    world.model.save_pretrained(str(tmp_path))
    itself = drafters.load(f"model:{tmp_path}?tree={shape}&scale=0.01", world.target)
    made = [Request(p, 7 + i, 41, Sampling(temperature)) for i, p in enumerate(PROMPTS)]
    rows = outputs(world.engine(itself, nodes=5 if shape == "chain" else 17, depth=4), made)
    for row in rows:
        assert row.usage.rounds == 8
        assert row.usage.accepted_at == row.usage.tested_at == [8, 8, 8, 8]
        assert row.usage.tau == 5.0


def test_a_text_that_ends_inside_a_draft(world: World, tmp_path: object) -> None:
    """Of the last draft, what stands behind the end was neither tested nor accepted, and the target's token is none."""
    world.model.save_pretrained(str(tmp_path))
    itself = drafters.load(f"model:{tmp_path}?tree=chain&scale=0.01", world.target)
    whole = plain(world.model, PROMPTS[0], 7, Sampling(1.0), 41)
    ends = [i for i, token in enumerate(whole) if token not in whole[:i] and i > 6]
    assert {(i - 1) % 5 == 4 for i in ends} == {True, False}  # rounds of five tokens follow the first
    for end in ends:
        made = Request(PROMPTS[0], 7, 41, Sampling(1.0), stop_at({whole[end]}))
        (row,) = outputs(world.engine(itself, nodes=5, depth=4), [made])
        assert (row.output, row.finish) == (whole[: end + 1], "eos")
        own = end // 5  # of the rounds' tokens, those that the target added
        assert row.usage.accepted == row.usage.tested == end - own


def test_rejection_is_never_asked_to_drop_nodes_by_value(world: World) -> None:
    """Only the coupled rule stays lossless then."""
    priced = Budget(8, 3, floor=0.3, reach=0.3, price=Price((1.0,) * 8), rate=1.0)
    for rule, wanted in (("coupled", priced), ("rejection", Budget(8, 3))):
        made = [Request(PROMPTS[0], 1, 40, Sampling(1.0))]
        batch = started(world, world.drafter("lookup"), made, Restless((priced,)), rule)
        given: list[Budget] = []
        record(batch, given)
        with torch.no_grad():
            batch.round()
        assert given == [wanted]


@pytest.mark.parametrize("name", NAMES)
def test_proposals_are_trees_within_the_budget(world: World, name: str) -> None:
    drafter = world.drafter(name)
    batch = started(world, drafter, [Request(p, i, 60, Sampling(1.0)) for i, p in enumerate(PROMPTS)])
    proposals = record(batch)
    with torch.no_grad():
        for nodes, depth in [(2, 1), (6, 3), (12, 5), (3, 8)] * 2:
            batch.engine = replace(batch.engine, budget=FixedBudget(nodes, depth))
            batch.round()
            tree.check(proposals[-1])
            assert proposals[-1].nodes <= nodes
            assert int(proposals[-1].tokens.max()) < VOCAB
    assert len(proposals) == 8


@pytest.mark.parametrize("name", NAMES)
def test_forked_rows_are_independent(world: World, name: str) -> None:
    """`select` with repeats forks: each copy then lives as if alone."""
    drafter = world.drafter(name)
    batch = started(
        world, drafter, [Request(PROMPTS[0], 5, 40, Sampling(1.0)), Request(PROMPTS[3], 6, 40, Sampling(1.0))]
    )
    with torch.no_grad():
        for _ in range(2):
            batch.round()
        order = [1, 0, 0]
        batch.session.select(order)
        batch.drafting.select(order)
        batch.root = [batch.root[i] for i in order]
        copies = [batch.rows[i] for i in order]
        batch.rows = [
            replace(row, request=replace(row.request, seed=row.request.seed + i), output=list(row.output))
            for i, row in enumerate(copies)
        ]
        for row in batch.rows:
            row.usage = replace(row.usage, accepted_at=[], tested_at=[])
        for _ in range(3):
            batch.round()
    for i, row in enumerate(batch.rows):
        known = [*row.request.prompt, *copies[i].output]
        rest = row.output[len(copies[i].output) :]
        again = plain(world.model, known, row.request.seed, Sampling(1.0), len(rest))
        assert rest == again


@pytest.mark.parametrize(("length", "pauses"), [(1, 0), (8, 0), (9, 1), (17, 2)])
def test_a_prompt_that_has_been_read_waits_for_nothing(length: int, pauses: int) -> None:
    """Reading pauses between chunks of 8 tokens; after the last one the row has its first token and can join."""
    target = TableTarget(VOCAB, chunk=8)
    engine = Engine(target, drafters.load("none", target), FixedBudget(1, 0), GumbelNoise(VOCAB))
    steps = Batch.read(engine, [Row(Request([i % VOCAB for i in range(length)], 1, 4), 0)])
    for _ in range(pauses):
        next(steps)
    with pytest.raises(StopIteration) as done, torch.no_grad():
        next(steps)
    batch, (piece,) = done.value.value
    assert len(piece.tokens) == len(batch.rows[0].output) == 1
    assert batch.rows[0].length == length
