"""The table target behaves like a real session: trees read as their paths do, and slots follow keep, select, join."""

from __future__ import annotations

import numpy as np
import pytest

from outrider import drafters
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Session, Target, TargetOutput
from outrider.core.tree import chain, from_lists, from_paths
from outrider.engine import Engine, Request, generate
from outrider.params import InputError, Sampling
from outrider.testing import POISON, TableSession, TableTarget, plain

TARGET = TableTarget(vocab=7, order=3, seed=1, context=40, chunk=4)
PROMPTS = [[1, 2, 3, 4, 5, 6, 0, 1, 2], [3], [5, 5, 2, 6, 1]]


def opened(prompts: list[list[int]] = PROMPTS) -> TableSession:
    session = TARGET.open(8)
    for _ in session.prefill(prompts):
        pass
    return session


def same(output: TargetOutput, node: int, texts: list[list[int]]) -> None:
    expected = np.stack([TARGET.logits_after(text) for text in texts])
    assert np.array_equal(output.logits[:, node], expected)


def test_it_is_a_target() -> None:
    assert isinstance(TARGET, Target)
    assert isinstance(opened(), Session)
    assert np.array_equal(TARGET.table, TableTarget(vocab=7, order=3, seed=1).table)
    assert not np.array_equal(TARGET.table, TableTarget(vocab=7, order=3, seed=2).table)


def test_prefill_is_chunked_and_exact() -> None:
    session = TARGET.open(4)
    chunks = list(session.prefill(PROMPTS))
    assert [c.tree.size.tolist() for c in chunks] == [[4, 1, 4], [4, 0, 1], [1, 0, 0]]
    assert [c.last for c in chunks] == [(False, True, False), (False, False, True), (True, False, False)]
    assert [c.next for c in chunks] == [[5, -1, 1], [2, -1, -1], [-1, -1, -1]]
    assert np.array_equal(chunks[0].output.logits[1, 0], TARGET.logits_after([3]))
    assert np.array_equal(chunks[1].output.logits[0, 0], TARGET.logits_after(PROMPTS[0][:8]))
    assert np.array_equal(chunks[2].output.logits[0, 0], TARGET.logits_after(PROMPTS[0]))
    assert session.lengths == [9, 1, 5]


def test_a_tree_reads_as_its_paths() -> None:
    paths = [[[1, 2, 3], [1, 4], [6]], [[0], [2, 2]], [[5, 5, 5, 5]]]
    tree, where = from_paths([4, 4, 0], paths)
    output = opened().forward(tree, taps=(-1,))
    for b, row in enumerate(paths):
        assert np.array_equal(output.logits[b, 0], TARGET.logits_after([*PROMPTS[b], int(tree.tokens[b, 0])]))
        for path, ids in zip(row, where[b], strict=True):
            for depth, node in enumerate(ids, 1):
                text = [*PROMPTS[b], int(tree.tokens[b, 0]), *path[:depth]]
                assert np.array_equal(output.logits[b, node], TARGET.logits_after(text))
    assert np.array_equal(TARGET.head(output.features[-1]), output.logits)


def test_keep_gathers_and_the_next_round_sees_it() -> None:
    session = opened()
    tree, _ = from_paths([4, 4, 0], [[[1, 2, 3], [1, 4], [6]], [[0], [2, 2]], [[5, 5]]])
    session.forward(tree)
    session.keep([[0, 1, 4], [0, 2, 3], [0]])
    texts = [[*PROMPTS[0], 4, 1, 4], [*PROMPTS[1], 4, 2, 2], [*PROMPTS[2], 0]]
    assert session.lengths == [len(t) for t in texts]
    same(session.forward(chain([[3], [3], [3]])), 0, [[*t, 3] for t in texts])


def test_since_reads_the_slots_not_the_tree() -> None:
    session, root = opened(), [[4], [4], [0]]
    session.forward(chain(root))
    grown = chain([[r[0], 2] for r in root])
    output = session.forward(grown, since=1)
    assert output.logits.shape == (3, 1, 7)
    same(output, 0, [[*p, *r, 2] for p, r in zip(PROMPTS, root, strict=True)])
    assert np.array_equal(opened().forward(grown, embeds=TARGET.embed(grown.tokens)).logits[:, 1:], output.logits)


def test_an_unwritten_slot_is_poison() -> None:
    with pytest.raises(AssertionError, match="never written"):
        opened().forward(chain([[4, 2], [4, 2], [0, 2]]), since=1)
    session = opened()
    session.forward(chain([[4], [4], [4]]))
    with pytest.raises(AssertionError, match="did not hold"):
        session.keep([[0, 1], [0], [0]])


def test_a_tree_that_is_none_is_refused() -> None:
    with pytest.raises(AssertionError, match="distinct"):
        opened([[1]]).forward(from_lists([([1, 2, 2], [0, 0, 0], [0.0] * 3)]))


def test_select_forks_join_appends_rewind_forgets() -> None:
    one, other = opened(), opened([[2, 2, 2], [6]])
    one.select([2, 0, 2])
    one.join(other)
    texts = [PROMPTS[2], PROMPTS[0], PROMPTS[2], [2, 2, 2], [6]]
    assert one.lengths == [len(t) for t in texts]
    tree = chain([[i, 1] for i in range(5)])
    output = one.forward(tree)
    same(output, 0, [[*t, i] for i, t in enumerate(texts)])
    same(output, 1, [[*t, i, 1] for i, t in enumerate(texts)])
    one.keep([[0, 1], [0], [0, 1], [0, 1], [0]])
    one.rewind([2, 2, 2, 2, 1])
    assert {slot for row in one.slots for slot in row[2:]} == {POISON}
    same(one.forward(chain([[3]] * 5)), 0, [[*t[:2], 3] for t in texts])


def test_plain_decoding_looks_up() -> None:
    text = plain(TARGET, [1, 2], 5)
    for i, token in enumerate(text):
        assert token == int(TARGET.logits_after([1, 2, *text[:i]]).argmax())
    assert plain(TARGET, [1, 2], 9, 1.0, 4) == plain(TARGET, [1, 2], 9, 1.0, 4) != plain(TARGET, [1, 2], 9, 1.0, 5)
    assert len(plain(TARGET, [1] * 38, 9)) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["none", "lookup", "suffix", "ngram", "lookahead"])
def test_the_engine_runs_on_it(name: str, temperature: float) -> None:
    engine = Engine(TARGET, drafters.load(name, TARGET), FixedBudget(10, 4), GumbelNoise(TARGET.vocab))
    made = [Request(p, i, 20, Sampling(temperature), lambda out, new: (len(new), None)) for i, p in enumerate(PROMPTS)]
    rows = {piece.row.index: piece.row for piece in generate(engine, made, batch_size=2)}
    for i, prompt in enumerate(PROMPTS):
        assert rows[i].output == plain(TARGET, prompt, 20, temperature, seed=i)


def test_bad_tables_are_refused() -> None:
    with pytest.raises(InputError, match="too large"):
        TableTarget(vocab=1000, order=3)
    with pytest.raises(InputError, match="at least 1"):
        TableTarget(vocab=5, order=0)
