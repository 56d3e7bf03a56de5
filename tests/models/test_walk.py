"""The compiled walk against the coupled rule in tensors: the same paths, tokens and noise, and what it leaves alone."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest
import torch

from outrider.backends.native.library import library
from outrider.backends.torch.walk import Walk
from outrider.core import nucleus, sampling, verify
from outrider.core.changes import Changes
from outrider.core.noise import GumbelNoise
from outrider.core.tree import from_lists
from outrider.core.types import DraftTree, Rows
from outrider.params import Sampling

CODE = library("float32", "float32")
pytestmark = pytest.mark.skipif(CODE is None, reason="there is no compiled pass on this machine")


def rows_of(samplings: list[Sampling], seeds: list[int], starts: list[int], vocab: int) -> Rows:
    b, start = len(samplings), tuple(starts)
    zero = torch.zeros(b, dtype=torch.long)
    return Rows(
        zero, torch.tensor(starts), start, tuple(seeds), (0,) * b, tuple(samplings), "coupled", (99,) * b,
        GumbelNoise(vocab),
    )  # fmt: skip


def right(rows: Rows, tree: DraftTree, logits: torch.Tensor, history: Any = None) -> list[tuple[list[int], int]]:
    def choose(seen: torch.Tensor, depth: int, path: torch.Tensor) -> torch.Tensor:
        scores = seen if history is None else sampling.penalise(seen, rows.sampling, history, path)
        return nucleus.choose(scores, rows.sampling, partial(rows.some_noise, depth))

    return verify.coupled(tree, logits, choose, tree.deepest).host


def told_of_draws(rows: Rows, logits: torch.Tensor, dice: random.Random, depth: int) -> DraftTree:
    """Trees whose children are often what is drawn, so that walks go deep. Node i's logits are row i of a table."""
    tokens, parents = [], []
    for r in range(len(rows)):
        ids, ups, depths = [5], [0], [0]
        for _ in range(dice.randrange(logits.shape[1])):
            up = dice.randrange(len(ids))
            if depths[up] == depth:
                continue
            one = Rows(**{**rows.__dict__, **{n: getattr(rows, n)[r : r + 1] for n in SPLIT}})
            drawn = int(nucleus.choose(logits[r, up][None], one.sampling, partial(one.some_noise, depths[up] + 1)))
            token = drawn if dice.random() < 0.8 else dice.randrange(logits.shape[2])
            if (token, up) in zip(ids, ups, strict=True):
                continue
            ids.append(token)
            ups.append(up)
            depths.append(depths[up] + 1)
        tokens.append(ids)
        parents.append(ups)
    return from_lists(tokens, parents)


SPLIT = "root", "position", "start", "seeds", "serial", "sampling", "remaining"


@pytest.mark.parametrize("vocab", [7, 48, 8203])
@pytest.mark.parametrize("seed", range(6))
def test_walks_are_those_of_tensors(seed: int, vocab: int) -> None:
    assert CODE is not None
    dice, b, n = random.Random(seed), 4, 12
    torch.manual_seed(seed)
    logits = torch.randn(b, n, vocab) * dice.choice((0.5, 3.0))
    if seed % 2:
        logits = logits.round()  # equals, of which the first is drawn
    heats = [0.0, 1.0, 0.3, 2.5] if seed else [0.0] * 4
    seeds = [dice.randrange(-(1 << 70), 1 << 70) for _ in range(b)]
    rows = rows_of([Sampling(temperature=t) for t in heats], seeds, [dice.randrange(5000) for _ in range(b)], vocab)
    tree = told_of_draws(rows, logits, dice, 5)
    logits = logits[:, : tree.nodes].contiguous()
    found = Walk(CODE)(rows, tree, logits)
    assert found is not None
    wanted = right(rows, tree, logits)
    assert found.host == wanted
    assert max(len(path) for path, _ in wanted) > 1
    assert found.count.tolist() == [len(path) for path, _ in wanted]
    assert found.next.tolist() == [token for _, token in wanted]
    for path, (nodes, _) in zip(found.path.tolist(), wanted, strict=True):
        assert path == nodes + [0] * (len(path) - len(nodes))


def test_logits_that_are_no_numbers() -> None:
    """As tensors do: the first that is none is drawn, and where all are excluded the first of all."""
    assert CODE is not None
    logits = torch.randn(4, 1, 40)
    logits[1, 0, 17] = math.nan
    logits[2, 0] = -math.inf
    logits[3, 0, 3] = math.inf
    for heat in (0.0, 1.0):
        rows = rows_of([Sampling(temperature=heat)] * 4, [1, 2, 3, 4], [0] * 4, 40)
        tree = from_lists([[5]] * 4, [[0]] * 4)
        found = Walk(CODE)(rows, tree, logits)
        assert found is not None
        assert found.host == right(rows, tree, logits)
        assert [token for _, token in found.host[1:]] == [17, 0, 3]


LAWS = (
    {"top_p": 0.9}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_p": 0.05}, {"top_k": 1}, {"top_k": 5}, {"top_k": 100},
    {"min_p": 0.05}, {"min_p": 0.9}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 3, "top_p": 0.7, "min_p": 0.2}, {},
)  # fmt: skip


@pytest.mark.parametrize("vocab", [48, 8203, 49152])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_filtered_laws_are_drawn_as_in_tensors(vocab: int, spread: float) -> None:
    """Every filter, flat laws and narrow ones: tensors draw what the code draws, and it nearly always does."""
    assert CODE is not None
    torch.manual_seed(vocab)
    code, sure, n = Walk(CODE), 0, 3
    for seed in range(8):
        logits = torch.randn(len(LAWS), n, vocab) * spread
        samplings = [Sampling(temperature=(0.4, 1.0, 1.7)[seed % 3], **law) for law in LAWS]
        rows = rows_of(samplings, [seed * 100 + i for i in range(len(LAWS))], [7 * seed] * len(LAWS), vocab)
        tree = told_of_draws(rows, logits, random.Random(seed), 2)
        logits = logits[:, : tree.nodes].contiguous()
        found, wanted = code(rows, tree, logits), right(rows, tree, logits)
        assert found is None or found.host == wanted
        sure += found is not None
    assert sure >= 7


def test_what_rounding_could_decide_is_left_to_tensors() -> None:
    """Equal logits at the edge of what a filter keeps; and where the edge is elsewhere they are drawn."""
    assert CODE is not None
    code, tree = Walk(CODE), from_lists([[5]], [[0]])
    logits = torch.full((1, 1, 64), -20.0)
    logits[0, 0, :4] = 0.0
    for law, sure in (({"top_p": 0.5}, False), ({"top_p": 0.99}, True), ({"top_k": 4}, True), ({"top_p": 0.75}, False)):
        for seed in range(20):
            rows = rows_of([Sampling(temperature=1.0, **law)], [seed], [0], 64)
            found = code(rows, tree, logits)
            assert (found is not None) == sure
            assert found is None or found.host == right(rows, tree, logits)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_no_token_is_passed_over_whose_noise_could_win(temperature: float, spread: float) -> None:
    """Whole vocabularies: noise is looked up only where it can still win, and the winners are those of tensors."""
    assert CODE is not None
    torch.manual_seed(3)
    b, vocab = 64, 49_152
    logits, tree = torch.randn(b, 1, vocab) * spread, from_lists([[5]] * b, [[0]] * b)
    rows = rows_of([Sampling(temperature=temperature)] * b, list(range(b)), list(range(b)), vocab)
    found = Walk(CODE)(rows, tree, logits)
    assert found is not None
    assert found.host == right(rows, tree, logits)


PENALTIES = (
    {"repetition_penalty": 1.3}, {"repetition_penalty": 0.8, "temperature": 0.0}, {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4}, {"logit_bias": {3: 4.0, 5: -100.0}}, {},
    {"repetition_penalty": 1.1, "top_p": 0.9, "logit_bias": {2: 2.5}},
    {"frequency_penalty": 1.0, "top_k": 5, "temperature": 0.6},
)  # fmt: skip


@pytest.mark.parametrize("vocab", [7, 48, 8203])
@pytest.mark.parametrize("seed", range(5))
def test_penalties_and_biases_are_those_of_tensors(seed: int, vocab: int) -> None:
    """Rows of every kind side by side, down trees whose paths say tokens again; the logits are left as they were."""
    assert CODE is not None
    dice, b, n = random.Random(seed), len(PENALTIES), 12
    torch.manual_seed(seed)
    logits = torch.randn(b, n, vocab) * 2
    rows = rows_of([Sampling(**{"temperature": 1.0, **law}) for law in PENALTIES], list(range(b)), [9] * b, vocab)
    history = [
        ([dice.randrange(vocab) for _ in range(5)], [dice.randrange(min(vocab, 9)) for _ in range(6)]) for _ in range(b)
    ]
    tree = told_of_draws(rows, logits, dice, 5)
    logits = logits[:, : tree.nodes].contiguous()
    before, changes = (
        logits.clone(),
        [Changes.of(s, prompt) for s, (prompt, _) in zip(rows.sampling, history, strict=True)],
    )
    for some in (2, 6):  # the text grows
        told = [(prompt, output[:some]) for prompt, output in history]
        grown = [c if c is None else c.upto(output) for c, (_, output) in zip(changes, told, strict=True)]
        found, wanted = Walk(CODE)(rows, tree, logits, grown), right(rows, tree, logits, told)
        assert found is not None
        assert found.host == wanted
        assert torch.equal(logits, before)
    assert max(len(path) for path, _ in wanted) > 1


EXTREME = (
    {"temperature": 1e9}, {"temperature": 1e9, "top_p": 0.6}, {"temperature": 1e-9}, {"temperature": 1e-9, "top_k": 3},
    {"top_k": 2**63 + 2**40}, {"top_k": 2**64 + 5}, {"logit_bias": {3: 1e9, 5: 1e9, 6: -1e9}},
    {"repetition_penalty": 1e9, "temperature": 1e9}, {"repetition_penalty": 1e-9, "frequency_penalty": -1e9},
    {"temperature": 1e-9, "top_p": 0.9, "presence_penalty": 1e9, "logit_bias": {2: -1e9}},
)  # fmt: skip


@pytest.mark.parametrize("vocab", [7, 40, 8203])
def test_the_ends_of_every_range_are_drawn_as_in_tensors(vocab: int) -> None:
    """No sum or quotient is infinite there, no lane behind the vocabulary's end is drawn, and counts do not wrap."""
    assert CODE is not None
    torch.manual_seed(vocab)
    b, sure = len(EXTREME), 0
    history = [([1, 2, 3], [3, 3, 5, 6])] * b
    for seed in range(8):
        logits = torch.randn(b, 1, vocab) * 3
        rows = rows_of([Sampling(**{"temperature": 1.0, **law}) for law in EXTREME], [seed] * b, [9] * b, vocab)
        tree = from_lists([[5]] * b, [[0]] * b)
        wanted = right(rows, tree, logits, history)
        changes = [Changes.of(s, [1, 2, 3]) for s in rows.sampling]
        grown = [c if c is None else c.upto([3, 3, 5, 6]) for c in changes]
        assert all(0 <= token < vocab for _, token in wanted)
        for i in range(b):  # one by one: where rounding could decide for one row, tensors draw all
            one = Rows(**{**rows.__dict__, **{n: getattr(rows, n)[i : i + 1] for n in SPLIT}})
            found = Walk(CODE)(one, from_lists([[5]], [[0]]), logits[i : i + 1].contiguous(), grown[i : i + 1])
            assert found is None or found.host == wanted[i : i + 1]
            sure += found is not None
    assert sure >= 0.8 * 8 * b


@pytest.mark.parametrize("flaw", [math.nan, math.inf])
def test_filtered_logits_that_are_no_numbers_are_left_to_tensors(flaw: float) -> None:
    assert CODE is not None
    logits = torch.randn(1, 1, 40)
    logits[0, 0, 17] = flaw
    tree = from_lists([[5]], [[0]])
    for law in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        assert Walk(CODE)(rows_of([Sampling(temperature=1.0, **law)], [1], [0], 40), tree, logits) is None
    logits[:] = -math.inf
    assert Walk(CODE)(rows_of([Sampling(temperature=1.0, top_p=0.9)], [1], [0], 40), tree, logits) is None


def test_other_precisions_are_left_alone() -> None:
    assert CODE is not None
    tree, logits = from_lists([[5]], [[0]]), torch.randn(1, 1, 40)
    assert Walk(CODE)(rows_of([Sampling()], [1], [0], 40), tree, logits.double()) is None


def test_every_token_of_a_filtered_law_comes_as_often_as_it_should() -> None:
    """Ten thousand draws of eight tokens under top-p 0.8: those kept in their proportions, the others never."""
    assert CODE is not None
    b, tree = 10_000, from_lists([[5]] * 10_000, [[0]] * 10_000)
    chances = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.06, 0.05, 0.03, 0.01])
    logits = chances.log().expand(b, 1, 8).contiguous()
    found = Walk(CODE)(rows_of([Sampling(temperature=1.0, top_p=0.8)] * b, list(range(b)), [0] * b, 8), tree, logits)
    assert found is not None
    share = torch.bincount(found.next, minlength=8) / b
    kept = torch.tensor([0.3, 0.25, 0.2, 0.1, 0, 0, 0, 0]) / 0.85
    assert float((share - kept).abs().max()) < 0.02
    assert share[4:].tolist() == [0.0] * 4
