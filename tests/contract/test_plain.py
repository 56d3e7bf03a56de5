"""The contract's first half: whatever drafts, the text is plain decoding's, token for token, under the same seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
from contract_world import NAMES, PROMPTS, World, needs, outputs, plain, stop_at
from restless import Restless

from outrider import drafters
from outrider.budgets.adaptive import AdaptiveBudget
from outrider.budgets.bandit import BanditBudget
from outrider.core.types import Budget
from outrider.drafters._choice import ChoiceDrafter
from outrider.engine import Request
from outrider.params import InputError, Sampling

SAMPLINGS = {
    "greedy": Sampling(),
    "T.7": Sampling(0.7),
    "T1": Sampling(1.0),
    "top-p": Sampling(0.9, top_p=0.8),
    "top-k, min-p": Sampling(1.2, top_k=9, min_p=0.05),
    "penalties": Sampling(
        0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias={5: 1.5, 7: -2.0}
    ),
    "greedy penalties": Sampling(repetition_penalty=1.2, frequency_penalty=0.5),
}

BOTH = [SAMPLINGS["greedy"], SAMPLINGS["T1"]]


def requests(samplings: list[Sampling], limits: list[int], eos: set[int] | None = None) -> list[Request]:
    """A request for each limit; prompts and samplings take turns."""
    cut = stop_at(eos or set())
    turns = zip(cycle(PROMPTS), cycle(samplings), limits, strict=False)
    return [Request(p, 100 + i, limit, sampling, cut) for i, (p, sampling, limit) in enumerate(turns)]


def expected(world: World, made: list[Request], eos: set[int] | None = None) -> list[list[int]]:
    return [plain(world.model, list(r.prompt), r.seed, r.sampling, r.max_new_tokens, eos or set()) for r in made]


@pytest.mark.parametrize("sampling", ["greedy", "penalties"])
@pytest.mark.parametrize("name", NAMES)
def test_one_row(world: World, name: str, sampling: str) -> None:
    made = requests([SAMPLINGS[sampling]], [40])
    rows = outputs(world.engine(world.drafter(name)), made)
    assert [r.output for r in rows] == expected(world, made)


@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_batch_of_all_samplings(world: World, name: str) -> None:
    """Every sampling in one batch, each on prompts of two lengths."""
    made = requests([*SAMPLINGS.values()], [30] * 2 * len(SAMPLINGS))
    rows = outputs(world.engine(world.drafter(name)), made, len(made))
    assert [r.output for r in rows] == expected(world, made)


@pytest.mark.parametrize("name", NAMES)
def test_a_bandit_over_shapes(world: World, name: str) -> None:
    made = requests(BOTH, [40, 40, 30, 30])
    bandit = BanditBudget(arms=((0, ()), (0, (2, 1)), (0, (2, 2, 1)), (0, (1, 1, 1, 1))))
    rows = outputs(world.engine(world.drafter(name), budget=bandit), made, batch_size=2)
    assert [r.output for r in rows] == expected(world, made)
    played = sum(arm.gain.bottom > 0 for play, arm in bandit.played.get(2, {}).items() if play[1])
    assert played == 0 if name == "none" else played > 0, "where nothing can be drafted there is nothing to choose"


def test_a_bandit_over_drafters(world: World) -> None:
    """Drafters that read features, that read tokens, and that need no model, each reading what the others drafted."""
    made = requests(BOTH, [40, 40, 30, 30])
    parts = tuple(world.drafter(name) for name in ("eagle", "model", "medusa", "mamba", "lookup") if name in NAMES)
    plays = tuple((i, (2, 1) if i % 2 else (1, 1, 1)) for i in range(len(parts)))
    bandit = BanditBudget(arms=((0, ()), *plays))
    rows = outputs(world.engine(ChoiceDrafter(parts), budget=bandit), made, batch_size=2)
    assert [r.output for r in rows] == expected(world, made)
    assert {play for play, arm in bandit.played[2].items() if arm.gain.bottom > 0} > set(plays[1:])
    with pytest.raises(InputError, match="no drafter 6"):
        outputs(world.engine(ChoiceDrafter(parts), budget=Restless((Budget(2, 1, part=5),))), made)


@pytest.mark.parametrize("name", NAMES)
def test_rows_join_and_leave(world: World, name: str) -> None:
    made = requests(BOTH, [25, 3, 30, 12])
    rows = outputs(world.engine(world.drafter(name)), made, batch_size=2)
    assert [r.output for r in rows] == expected(world, made)


@pytest.mark.parametrize("name", NAMES)
def test_eos_inside_the_tree(world: World, name: str) -> None:
    free = expected(world, requests(BOTH, [40, 40, 40, 40]))
    eos = {text[9] for text in free}
    made = requests(BOTH, [40, 40, 40, 40], eos)
    rows = outputs(world.engine(world.drafter(name)), made)
    assert [r.output for r in rows] == expected(world, made, eos)
    for row in rows:
        assert row.finish == "eos"
        assert not eos & set(row.output[:-1])
        assert row.usage.new_tokens == len(row.output)
        own = row.usage.new_tokens - 1 - row.usage.accepted  # the target's: one of each round, but where a draft ended
        assert own in (row.usage.rounds - 1, row.usage.rounds)


@pytest.mark.parametrize("name", NAMES)
def test_the_context_ends_the_text(world: World, name: str) -> None:
    full = requests([Sampling(1.0)], [1000, 1000])
    made = [replace(r, prompt=[*r.prompt] * (120 // len(r.prompt))) for r in full]
    rows = outputs(world.engine(world.drafter(name)), made)
    assert [r.output for r in rows] == expected(world, made)
    assert all(len(r.request.prompt) + len(r.output) == world.target.context for r in rows)
    assert {r.finish for r in rows} == {"length"}


@pytest.mark.parametrize(("nodes", "depth"), [(2, 1), (40, 12)])
@pytest.mark.parametrize("name", NAMES)
def test_any_budget_same_text(world: World, name: str, nodes: int, depth: int) -> None:
    made = requests([Sampling(1.0)], [24, 24])
    rows = outputs(world.engine(world.drafter(name), nodes=nodes, depth=depth), made)
    assert [r.output for r in rows] == expected(world, made)


@pytest.mark.parametrize("name", NAMES)
def test_limits_of_one_and_two_tokens(world: World, name: str) -> None:
    made = requests([Sampling(1.0)], [1, 2, 2, 1])
    rows = outputs(world.engine(world.drafter(name)), made)
    assert [r.output for r in rows] == expected(world, made)
    assert [len(r.output) for r in rows] == [1, 2, 2, 1]


@pytest.mark.parametrize("name", NAMES)
def test_adaptive_budget_same_text(world: World, name: str) -> None:
    made = requests([Sampling(1.0)], [40, 40, 40, 40])
    engine = world.engine(world.drafter(name), budget=AdaptiveBudget())
    assert [r.output for r in outputs(engine, made)] == expected(world, made)


CHANGING = Budget(10, 3), Budget(1, 0), Budget(1, 4), Budget(4, 2), Budget(9, 0), Budget(30, 6, floor=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_a_restless_budget_same_text(world: World, name: str) -> None:
    made = requests(BOTH, [36, 12, 24, 36])
    engine = world.engine(world.drafter(name), budget=Restless(CHANGING))
    assert [r.output for r in outputs(engine, made, batch_size=3)] == expected(world, made)


def test_row_order_and_company_do_not_matter(world: World) -> None:
    made = requests([Sampling(1.0)], [30, 20, 25, 30])
    drafter = world.drafter("model")
    together = [r.output for r in outputs(world.engine(drafter), made)]
    backwards = [r.output for r in outputs(world.engine(drafter), made[::-1])][::-1]
    alone = [outputs(world.engine(drafter), [r])[0].output for r in made]
    assert together == backwards == alone


@pytest.mark.parametrize("others", [["lookahead?window=3&ngram=3&guesses=3"], ["suffix", "eagle", "peagle"]], ids=len)
def test_a_mix_of_drafters(world: World, others: list[str]) -> None:
    """In their order, and where all of them have confidences, by value."""
    specs = [needs(name, world.folder) if name in NAMES else name for name in ["lookup", "model", *others]]
    mixed = drafters.load(specs, world.target)
    made = requests([*BOTH, SAMPLINGS["penalties"]], [40, 12, 40, 30])
    rows = outputs(world.engine(mixed, nodes=20), made, batch_size=3)
    assert [r.output for r in rows] == expected(world, made)


TREES = {
    "model": ("tree=best&width=2", "tree=static&shape=2,2,1", "tree=chain", "scale=0.5&top_k=6&width=2"),
    "medusa": ("tree=chain", "tree=static&shape=5,4,3,2", "tree=greedy63", "scale=0.5&top_k=3"),
    "hydra": ("tree=chain", "tree=static&shape=3,2,2,1", "tree=greedy63", "scale=0.5&top_k=3&width=2"),
}


@pytest.mark.parametrize(("name", "options"), [(name, one) for name, options in TREES.items() for one in options])
def test_every_shape_of_tree(world: World, name: str, options: str) -> None:
    drafter = drafters.load(f"{needs(name, world.folder).partition('?')[0]}?{options}", world.target)
    made = requests([*BOTH, SAMPLINGS["top-p"]], [40, 12, 40, 30, 30])
    rows = outputs(world.engine(drafter, nodes=64 if "63" in options else 14, depth=5), made, batch_size=3)
    assert [r.output for r in rows] == expected(world, made)
    assert name != "model" or max(r.usage.tau for r in rows) > 1.2
