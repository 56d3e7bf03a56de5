"""A row whose logits are NaN fails alone: its neighbours and the next row in its slot write their own text."""

from __future__ import annotations

import copy

import pytest
import torch
from contract_world import PROMPTS, VOCAB, World, outputs, plain

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.engine import Engine, Request
from outrider.engine.prefixes import Prefixes
from outrider.params import Sampling

POISON = VOCAB - 1
FORCED = Sampling(logit_bias={POISON: 1e9})


@pytest.fixture(scope="module")
def poisoned(world: World) -> World:
    """The target, but whoever reads the last token sees NaN from there on."""
    model = copy.deepcopy(world.model)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
    return World(load_target(model), model, world.folder)


@pytest.mark.parametrize("name", ["none", "lookup"])
def test_only_that_row(poisoned: World, name: str) -> None:
    target = poisoned.target
    engine = Engine(target, drafters.load(name, target), FixedBudget(8, 3), GumbelNoise(VOCAB))
    sane = [Request(p, 5 + i, 12 + 5 * i, Sampling(0.7, logit_bias={POISON: -1e9})) for i, p in enumerate(PROMPTS)]
    bad = [Request(PROMPTS[0], 1, 20, FORCED), Request([4, POISON, 4], 1, 20), Request(PROMPTS[1], 2, 20, FORCED)]
    rows = outputs(engine, [bad[0], sane[0], bad[1], sane[1], bad[2], sane[2], sane[3]], batch_size=2)
    failed, well = [rows[i] for i in (0, 2, 4)], [rows[i] for i in (1, 3, 5, 6)]
    assert [r.finish for r in failed] == ["error"] * 3
    assert [r.output for r in failed] == [[POISON], [], [POISON]]  # what was written before stays
    assert [r.finish for r in well] == ["length"] * 4
    for row, request in zip(well, sane, strict=True):
        expected = plain(poisoned.model, list(request.prompt), request.seed, request.sampling, request.max_new_tokens)
        assert row.output == expected


def test_nothing_of_it_is_kept(poisoned: World) -> None:
    """Its keys and values may be NaN: no later prompt may copy them."""
    target, prefixes = poisoned.target, Prefixes()
    engine = Engine(target, drafters.load("none"), FixedBudget(1, 0), GumbelNoise(VOCAB), prefixes=prefixes)
    prompt = [*PROMPTS[0], *PROMPTS[0]]
    (row,) = outputs(engine, [Request([*prompt, POISON], 1, 20)])
    assert (row.finish, prefixes.texts) == ("error", [])
    (row,) = outputs(engine, [Request(prompt, 1, 4, Sampling(logit_bias={POISON: -1e9}))])
    assert row.finish == "length"
    assert len(prefixes.texts) == 1


def test_no_memory_for_copies(poisoned: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that cannot be kept ends as any other, and those that were kept make room."""
    target, prefixes = poisoned.target, Prefixes()
    engine = Engine(target, drafters.load("none"), FixedBudget(1, 0), GumbelNoise(VOCAB), prefixes=prefixes)
    sane = Sampling(logit_bias={POISON: -1e9})
    outputs(engine, [Request([*PROMPTS[0], *PROMPTS[0]], 1, 4, sane)])
    assert len(prefixes.texts) == 1

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(type(target.open(40)), "taken", full)
    (row,) = outputs(engine, [Request([*PROMPTS[3], *PROMPTS[3]], 1, 4, sane)])
    assert (row.finish, len(row.output), prefixes.texts) == ("length", 4, [])


def test_processors_beside_penalties(world: World) -> None:
    """A row with a processor does not change its neighbour's distribution."""
    sampling = Sampling(0.8, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={3: 2.0})
    engine = world.engine(drafters.load("lookup", world.target))
    alone = outputs(engine, [Request(PROMPTS[0], 3, 25, sampling)])
    other = Request(PROMPTS[1], 4, 25, Sampling(0.5), process=lambda output, logits: logits)
    beside = outputs(engine, [Request(PROMPTS[0], 3, 25, sampling), other])
    assert beside[0].output == alone[0].output
    assert beside[0].output == plain(world.model, PROMPTS[0], 3, sampling, 25)
