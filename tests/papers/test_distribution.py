"""Sampled tokens that do not follow the target's distribution are caught; honest samplers are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from instrument import Lab

from outrider.bench.cells import Analysis, document
from outrider.bench.instrument import Grid
from outrider.bench.types import Answer, Ask, Method
from outrider.core.sampling import softmax
from outrider.core.types import Array
from papers.distribution import LEAST, REFUSED, law_test
from papers.document import Cell, Document, extended
from papers.measure import Study, judge_laws


class Sampler:
    """Draws each token by a distribution of its own from the target's p [v]."""

    def __init__(self, lab: Lab, drawing: Callable[[Array, random.Random], int]):
        self.lab, self.drawing = lab, drawing

    def run(self, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        return Answer([self.row(p, ask, s) for p, s in zip(prompts, ask.seeds, strict=True)])

    def row(self, ids: Sequence[int], ask: Ask, seed: int) -> list[int]:
        dice, text = random.Random(seed), list(ids)
        while len(text) - len(ids) < ask.limit:
            text.append(self.drawing(softmax(self.lab.target.logits_after(text)), dice))
        return text[len(ids) :]


def pick(p: Array, dice: random.Random) -> int:
    return dice.choices(range(len(p)), p.tolist())[0]


def drafted(p: Array) -> Array:
    """A drafter's distribution: the target's, flattened, its columns shifted by one."""
    q: Array = 0.8 * np.roll(p, 1) + 0.2 * p
    return q


def rejection(p: Array, dice: random.Random) -> int:
    """Algorithm 1 for one token: honest."""
    q = drafted(p)
    x = pick(q, dice)
    return x if dice.random() < float(p[x] / q[x]) else pick((p - q).clip(min=0), dice)


def no_residual(p: Array, dice: random.Random) -> int:
    """Draws anew from p where it should from what q left over."""
    q = drafted(p)
    x = pick(q, dice)
    return x if dice.random() < float(p[x] / q[x]) else pick(p, dice)


def reversed_test(p: Array, dice: random.Random) -> int:
    """Accepts where p/q lies below the draw: the test the wrong way round."""
    q = drafted(p)
    x = pick(q, dice)
    return x if float(p[x] / q[x]) < dice.random() else pick((p - q).clip(min=0), dice)


def colder(p: Array, dice: random.Random) -> int:
    return pick(p**1.5, dice)


def top_p(p: Array, dice: random.Random) -> int:
    """A forgotten nucleus filter."""
    order = np.argsort(-p)
    values = p[order]
    keep = values.cumsum() - values < 0.85
    return int(order[pick(values * keep, dice)])


HONEST, BIASED = (pick, rejection), (no_residual, reversed_test, colder, top_p)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """All samplers beside plain decoding, in one run."""
    lab = Lab(tmp_path_factory.mktemp("samplers"), tokens=250, turns=(1,) * 6)
    peers = {drawing.__name__: Sampler(lab, drawing) for drawing in (*HONEST, *BIASED)}
    runner = lab.runner(peers=dict(peers))
    group = lab.group([Method("none"), *(Method(name, peer=name) for name in peers)], 1.0)
    runner.open(group.methods[:1])
    assert runner.run(group)
    analysis = Analysis(runner, keep_loops=True)
    result = document(analysis, [group])
    made = Document(result.run, result.tasks, [extended(Cell, c) for c in result.cells])
    judge_laws(made, analysis, Grid(Study(), runner, [group]))
    return made


def cell_of(document: Document, method: str) -> Cell:
    (result,) = [c for c in document.cells if c.method == method]
    return result


@pytest.mark.parametrize("drawing", ["none", *(drawing.__name__ for drawing in HONEST)])
def test_honest_samplers_stay(sampled: Document, drawing: str) -> None:
    cell = cell_of(sampled, drawing)
    assert cell.state == "done", cell.faults
    assert cell.distribution is not None
    assert cell.distribution.p > 1e-3
    assert cell.distribution.tokens == 6 * 250
    assert [m.distribution for m in sampled.macro if m.method == drawing] == [cell.distribution]


@pytest.mark.parametrize("drawing", [drawing.__name__ for drawing in BIASED])
def test_biased_samplers_are_caught(sampled: Document, drawing: str) -> None:
    cell = cell_of(sampled, drawing)
    assert cell.state == "invalid"
    assert "do not follow the target's distribution" in cell.reason
    assert drawing not in {m.method for m in sampled.macro}


def test_uniforms_are_uniform_and_few_decide_nothing() -> None:
    dice = random.Random(1)
    good = [dice.random() for _ in range(4000)]
    assert law_test(good) > 1e-3  # type: ignore[operator]
    assert law_test([u**1.3 for u in good]) < REFUSED  # type: ignore[operator]
    assert law_test(good[: LEAST - 1]) is None
