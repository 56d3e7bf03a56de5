"""What the losses of blocks and of P-EAGLE may depend on: one token, feature, slot or mark is changed, all others stay.

Everything that may not depend on it must be the same bits, and everything that does depend on it must move: a leak and
a shift by one both show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_world import VOCAB, packed, target, texts, value
from objective_world import build as fresh
from torch import Tensor

from outrider.backends.torch import HFTarget
from outrider.training.data import Batch
from outrider.training.features import TargetFeatures, see
from outrider.training.objectives import _parallel

TAPS, BLOCK, SIZES = (1, 3), 4, (10, 7)
Slot = tuple[int, int]  # the anchor's place in the row, and which token after it is drafted, from 0
Made = dict[Slot, tuple[Tensor, Tensor]]  # logits of the drafter and of the target

BLOCKS = [
    *itertools.product([True, False], ["none", "markov", "selector"], [True, False], [0]),
    (True, "selector", False, 2),
    (False, "selector", False, 2),
]
blocks = pytest.mark.parametrize(("causal", "pair_head", "from_anchor", "conv"), BLOCKS)


def row() -> Batch:
    """Two texts side by side, of which everything is learned."""
    return packed([[(texts(size, [size])[0][0], [True] * size) for size in SIZES]])


def build(of: HFTarget, causal: bool, pair_head: str, from_anchor: bool, conv: int, **options: Any) -> Any:
    given = {"causal": causal, "pair_head": pair_head, "sample_from_anchor": from_anchor, "conv": conv, **options}
    sizes = {"taps": TAPS, "block": BLOCK, "layers": 2, "pair_rank": 5, "anchors": 99}
    objective = fresh("block", of, range(VOCAB), **sizes, **given)
    for name, p in objective.net.named_parameters():
        if "_conv." in name or name in ("seed.weight", "markov_w1.weight", "markov_w2.weight"):
            torch.nn.init.normal_(p, std=0.5)
    return objective


def same_text(batch: Batch, a: int, b: int) -> bool:
    return bool(batch.documents[0, a] == batch.documents[0, b])


def slots(objective: Any, batch: Batch) -> list[Slot]:
    """Every slot whose token is learned, of all anchors, by loops."""
    learn, n, results = batch.learn[0].tolist(), batch.tokens.shape[1], []
    for anchor in range(n - 1):
        if learn[anchor] and learn[anchor + 1] and same_text(batch, anchor, anchor + 1):
            for k in range(objective.net.config.drafts):
                label = anchor + k + 1
                if label < n and learn[label] and same_text(batch, anchor, label):
                    results.append((anchor, k))
    return results


def made(objective: Any, of: HFTarget, batch: Batch, seen: TargetFeatures | None = None) -> Made:
    """What the objective compares in each slot, as it computes it."""
    pairs: list[tuple[Tensor, Tensor]] = []
    loss = type(objective)._loss

    def recorded(student: Tensor, teacher: Tensor) -> Tensor:
        pairs.extend(zip(student, teacher, strict=True))
        return loss(objective, student, teacher)

    objective._loss = recorded
    try:
        with torch.no_grad():
            objective(batch, seen or see(of, batch, objective.taps))
    finally:
        del objective._loss
    return dict(zip(slots(objective, batch), pairs, strict=True))


def moved(before: Made, after: Made) -> tuple[set[Slot], set[Slot]]:
    """The slots whose own logits are other bits, and those whose target's are."""
    assert before.keys() == after.keys()
    student, teacher = ({s for s in before if not torch.equal(before[s][i], after[s][i])} for i in (0, 1))
    return student, teacher


def changed(batch: Batch, place: int) -> Batch:
    tokens = batch.tokens.clone()
    tokens[0, place] = (tokens[0, place] + 1) % VOCAB
    return replace(batch, tokens=tokens)


@blocks
def test_a_token_moves_what_stands_behind_it_and_nothing_else(
    causal: bool, pair_head: str, from_anchor: bool, conv: int
) -> None:
    """A slot knows the text up to its anchor, and by the pair head the token above it; its target knows all up to that
    token. The token that is drafted is known to neither."""
    of, batch = target(), row()
    objective = build(of, causal, pair_head, from_anchor, conv)
    plain = made(objective, of, batch)
    assert {a for a, _ in plain} == {*range(9), *range(10, 16)}
    for place in range(sum(SIZES)):
        student, teacher = moved(plain, made(objective, of, changed(batch, place)))
        near = {s for s in plain if same_text(batch, place, s[0])}
        above = {(a, k) for a, k in near if pair_head != "none" and place == a + k}
        assert student == {(a, k) for a, k in near if place <= a} | above, place
        assert teacher == {(a, k) for a, k in near if place <= a + k}, place


@blocks
def test_a_feature_is_read_behind_it_and_learned_where_it_stands(
    causal: bool, pair_head: str, from_anchor: bool, conv: int
) -> None:
    """The anchor's own feature does not exist yet when its block is drafted; the one before it does."""
    of, batch = target(), row()
    objective = build(of, causal, pair_head, from_anchor, conv)
    seen = see(of, batch, objective.taps)
    plain = made(objective, of, batch, seen)
    for place, tap in itertools.product(range(sum(SIZES)), objective.taps):
        features = {t: f.clone() for t, f in seen.features.items()}
        features[tap][0, place] += 1
        student, teacher = moved(plain, made(objective, of, batch, TargetFeatures(features)))
        near = {s for s in plain if same_text(batch, place, s[0])}
        assert student == {(a, k) for a, k in near if tap in TAPS and place < a}, (place, tap)
        assert teacher == {(a, k) for a, k in near if tap == -1 and place == a + k}, (place, tap)


@blocks
def test_a_slot_moves_its_own_block_and_earlier_slots_only_without_causality(
    causal: bool, pair_head: str, from_anchor: bool, conv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, batch = target(), row()
    objective = build(of, causal, pair_head, from_anchor, conv)
    net, plain = objective.net, made(objective, of, batch)
    anchors, drafting = sorted({a for a, _ in plain}), 0 if from_anchor else 1
    inputs: Callable[..., Tensor] = net.slots
    for number, slot in itertools.product((0, 4, len(anchors) - 4), range(BLOCK)):

        def other(*given: Tensor, at: int = number * BLOCK + slot) -> Tensor:
            x = inputs(*given).clone()
            x[:, at] += 1
            return x

        with monkeypatch.context() as patch:
            patch.setattr(net, "slots", other)
            student, teacher = moved(plain, made(objective, of, batch))
        own = {(a, k) for a, k in plain if a == anchors[number]}
        assert len(own) == objective.net.config.drafts
        assert student == {(a, k) for a, k in own if not causal or k + drafting >= slot}, (number, slot)
        assert not teacher


@blocks
@pytest.mark.parametrize("loss", ["kl", "ce", "tv", "lk"])
def test_a_label_outside_every_loss_changes_no_loss(
    causal: bool, pair_head: str, from_anchor: bool, conv: int, loss: str
) -> None:
    """A text's last token is drafted and never read: weights, distances and hits are those of before, bit for bit. The
    one before it is read by one slot's pair head and by the target alone."""
    of, batch = target(), row()
    objective = build(of, causal, pair_head, from_anchor, conv, loss=loss)
    plain, weight, hits = value(objective, of, batch)
    for last in (SIZES[0] - 1, sum(SIZES) - 1):
        again, weight_again, hits_again = value(objective, of, changed(batch, last))
        assert torch.equal(plain, again)
        assert torch.equal(weight, weight_again)
        assert hits == hits_again
        assert not torch.equal(plain, value(objective, of, changed(batch, last - 1))[0])


@pytest.mark.parametrize("from_anchor", [True, False])
def test_a_label_that_cannot_be_drafted_takes_its_own_slots_away(from_anchor: bool) -> None:
    """With a draft vocabulary: the slots that would draft it, and no neighbour of theirs."""
    of, batch = target(), row()
    objective = build(of, True, "markov", from_anchor, 0, draft_vocab=VOCAB - 1)
    (never,) = set(range(VOCAB)) - set(objective.net.ids().tolist())
    batch = replace(batch, tokens=torch.where(batch.tokens == never, (never + 1) % VOCAB, batch.tokens))
    objective.dpace = 0.0
    _, weight, _ = value(objective, of, batch)
    assert float(weight) == len(slots(objective, batch))
    for place in range(sum(SIZES)):
        tokens = batch.tokens.clone()
        tokens[0, place] = never
        _, less, _ = value(objective, of, replace(batch, tokens=tokens))
        assert float(weight - less) == sum(a + k + 1 == place for a, k in slots(objective, batch)), place


def test_p_eagles_depths_know_their_pair_and_the_target_knows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth d of pair i drafts token i + d + 2. It knows the text up to token i + 1, its target all up to i + d + 1."""
    monkeypatch.setattr(_parallel, "LEAST", 2.0)
    of, batch, depths = target(), row(), 4
    objective = fresh("eagle3", of, taps=(0, 2, 3), parallel=True, passes=depths, layers=2, mask_token=7)
    n = sum(SIZES)
    wanted = [
        (i, d) for d in range(depths) for i in range(n) if i + d + 2 < n and same_text(batch, i, i + d + 2)
    ]  # fmt: skip
    pairs: list[tuple[Tensor, Tensor]] = []
    true = _parallel.cross_entropy

    def recorded(student: Tensor, teacher: Tensor) -> Tensor:
        pairs.extend(zip(student, teacher, strict=True))
        return true(student, teacher)

    monkeypatch.setattr(_parallel, "cross_entropy", recorded)

    def made(batch: Batch) -> Made:
        pairs.clear()
        value(objective, of, batch)
        return dict(zip(wanted, list(pairs), strict=True))

    plain = made(batch)
    for place in range(n):
        student, teacher = moved(plain, made(changed(batch, place)))
        near = {s for s in plain if same_text(batch, place, s[0])}
        assert student == {(i, d) for i, d in near if place <= i + 1}, place
        assert teacher == {(i, d) for i, d in near if place <= i + d + 1}, place
