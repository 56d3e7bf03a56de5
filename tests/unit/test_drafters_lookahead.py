"""Lookahead: the comb, the Jacobi step against a slow and obvious one, the pool, and how budgets are shared."""

from __future__ import annotations

import pytest
from play import PROMPTS, Play, Table, paths_of

from outrider.core.tree import root_only
from outrider.core.types import Budget
from outrider.drafters import _mix, lookahead, lookup
from outrider.drafters.lookahead import Row


def state(play: Play, b: int = 0) -> Row:
    return play.drafting.rows[b]  # type: ignore[attr-defined]


def test_the_window_rides_along_as_a_comb() -> None:
    play = Play(lookahead.load(None, window=3, ngram=4, guesses=1, text=False), [[1, 2, 3]], first=[[7]])
    row = state(play)
    row.levels = [[0, 1, 2], [3, 4, 5], [6, 8, 9]]
    paths = paths_of(play.propose(Budget(9, 5)))[0]
    assert paths == [[], [3], [3, 6], [1], [1, 4], [1, 4, 8], [1, 2], [1, 2, 5], [1, 2, 5, 9]]
    assert [row.column(j) for j in range(3)] == [[3, 6], [1, 4, 8], [1, 2, 5, 9]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sizes", [(7, 5), (4, 3), (3, 2)])
def test_the_jacobi_step_is_the_obvious_one(temperature: float, sizes: tuple[int, int]) -> None:
    """Token (l, j) goes to its position; what the target draws after column j is level N - 1; then all move up."""
    w, n = sizes
    play = Play(lookahead.load(None, window=w, ngram=n), PROMPTS, temperature)
    for _ in range(12):
        old = [[list(level) for level in state(play, b).levels] for b in range(3)]
        columns = [[state(play, b).column(j) for j in range(w)] for b in range(3)]
        drawn = [[play.draw(b, path) for path in columns[b]] for b in range(3)]
        roots = [t[-1] for t in play.texts]
        new = play.round(Budget(200, 64))
        for b in range(3):
            moved = [*old[b][1:], drawn[b]]
            shift = len(new[b]) - 1
            for level, before in zip(state(play, b).levels, moved, strict=True):
                assert level[: max(0, w - shift)] == before[shift:]
                assert len(level) == w
            if state(play, b).rounds >= n - 1:
                old[b][0][0] = roots[b]
                last = {old[b][0][j]: (*(level[j] for level in old[b][1:]), drawn[b][j]) for j in range(w)}
                pool = state(play, b).pool
                assert all(rest in pool[first] for first, rest in last.items())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_window_alone_finds_what_the_target_writes(temperature: float) -> None:
    play = Play(lookahead.load(None, text=False), PROMPTS, temperature, target=Table(peak=6.0))
    committed = sum(len(new) for _ in range(80) for new in play.round(Budget(64, 16)))
    assert committed > 1.3 * 80 * len(PROMPTS)


def test_the_pool_keeps_the_latest_n_grams_first() -> None:
    row = Row.of([], lookahead.load(None, ngram=3, guesses=2))
    for gram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7], [2, 0, 0]):
        row.learn(gram)
    assert row.pool == {1: ((6, 7), (2, 3)), 2: ((0, 0),)}


def test_the_text_feeds_the_pool() -> None:
    row = Row.of([1, 2, 3, 4], lookahead.load(None, ngram=3))
    assert row.pool == {1: ((2, 3),), 2: ((3, 4),)}
    row.read([5])
    assert row.pool[3] == ((4, 5),)
    assert Row.of([1, 2, 3, 4], lookahead.load(None, ngram=3, text=False)).pool == {}


def test_guesses_come_first_and_share_the_budget_with_the_window() -> None:
    play = Play(lookahead.load(None, window=4, ngram=3, guesses=4), [[1, 2, 3]], first=[[7]])
    row = state(play)
    for rest in ([1, 2], [3, 4], [5, 6], [8, 9]):
        row.learn([7, *rest])
    row.levels = [[0, 10, 11, 10], [11, 11, 11, 11]]
    full = paths_of(play.propose(Budget(64, 8)))[0]
    assert full[1:9] == [[8], [8, 9], [5], [5, 6], [3], [3, 4], [1], [1, 2]]
    assert full[9:] == [[11], [10], [10, 11], [10, 11, 11], [10, 11, 10], [10, 11, 10, 11]]
    half = paths_of(play.propose(Budget(9, 8)))[0]
    assert half[1:6] == [[8], [8, 9], [5], [5, 6], [3]]  # 8 nodes: 4 of the window's would fit 2 columns,
    assert half[6:] == [[11], [10], [10, 11]]  # which take 3
    row.pool.clear()
    alone = paths_of(play.propose(Budget(9, 8)))[0]
    assert alone[1:] == [[11], [10], [10, 11], [10, 11, 11], [10, 11, 10], [10, 11, 10, 11]]


def test_columns_that_were_not_verified_wait() -> None:
    play = Play(lookahead.load(None, window=4, ngram=3, guesses=1, text=False), [[1, 2, 3]])
    before = [list(level) for level in state(play).levels]
    new = play.round(Budget(3, 1))[0]  # depth 1 fits one column
    assert len(new) == 1
    after = state(play).levels
    assert [level[1:] for level in after] == [level[1:] for level in before]
    assert after[0][0] == before[1][0]


def test_columns_that_a_mix_has_cut_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their logits are nobody's: what is drawn is what the target writes after the others."""
    play = Play(_mix.of([lookup.load(None), lookahead.load(None, window=4, ngram=3)]), PROMPTS)
    drawn: list[list[list[int]]] = []
    iterates = lookahead.LookaheadDrafting._iterates
    monkeypatch.setattr(
        lookahead.LookaheadDrafting, "_iterates", lambda self, given: drawn.append(iterates(self, given)) or drawn[-1]
    )
    counts = set()
    for _ in range(12):
        rows = play.drafting.parts[1].rows  # type: ignore[attr-defined]
        right = [[play.draw(b, row.column(j)) for j in range(4)] for b, row in enumerate(rows)]
        play.round(Budget(10, 8))
        assert drawn[-1] == [r[: len(d)] for r, d in zip(right, drawn[-1], strict=True)]
        counts |= set(map(len, drawn[-1]))
    assert min(counts) < max(counts)


def test_a_round_without_a_proposal_moves_the_window_on() -> None:
    play = Play(lookahead.load(None, window=3, ngram=3, text=False), PROMPTS)
    play.round(Budget(64, 16))
    levels = [list(level) for level in state(play).levels]
    pool = dict(state(play).pool)
    play.propose = lambda budget: root_only(play.rows().root)  # type: ignore[method-assign]
    play.round(Budget(64, 16))
    assert state(play).pool == pool
    assert [level[:2] for level in state(play).levels] == [level[1:] for level in levels]


def test_it_declares_that_it_does_not_reopen() -> None:
    assert not lookahead.load(None).reopens
