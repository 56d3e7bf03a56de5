"""Prompt lookup by hand, and against a linear scan."""

from __future__ import annotations

import math
import random

import pytest
from play import Play, paths_of

from outrider.core.types import Budget
from outrider.drafters import lookup

LARGE = Budget(64, 16)


def drafts(prompt: list[int], budget: Budget = LARGE, **options) -> list[list[int]]:
    play = Play(lookup.load(None, **options), [prompt[:-1]], first=[prompt[-1:]])
    return paths_of(play.propose(budget))[0][1:]


def test_the_most_recent_match_wins() -> None:
    #      .  .  old  .  .  .  recent .  root
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    assert drafts(text, matches=1, tokens=3) == [[4], [4, 8], [4, 8, 1]]
    assert drafts(text, matches=2, tokens=2) == [[4], [4, 8], [3], [3, 9]]


def test_a_longer_ngram_beats_a_recent_one() -> None:
    text = [1, 2, 3, 5, 2, 4, 1, 2]  # [1 2] stood at the start, [2] alone stood later
    assert drafts(text, matches=1, tokens=1) == [[3]]
    assert drafts(text, matches=2, tokens=1) == [[3], [4]]
    assert drafts(text, matches=1, tokens=1, ngram=1) == [[4]]


def test_a_small_budget_keeps_the_best_match() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    assert drafts(text, Budget(4, 16), tokens=3) == [[4], [4, 8], [4, 8, 1]]
    assert drafts(text, Budget(6, 16), tokens=3)[-1] == [3, 9]
    assert drafts(text, Budget(64, 1)) == [[4], [3]]


def test_values_are_products_of_confidences() -> None:
    """Two tokens match: 1 - 1/4, then 1 - 1/5 and 1 - 1/6; the second match has the first one's rest."""
    play = Play(lookup.load(None, matches=2, tokens=3), [[1, 2, 3, 9, 1, 2, 4, 8, 1]], first=[[2]])
    tree = play.propose(LARGE)
    assert paths_of(tree)[0][1:] == [[4], [4, 8], [4, 8, 1], [3], [3, 9], [3, 9, 1]]
    assert tree.values is not None
    results = [math.exp(value) for value in tree.values[0].tolist()]
    assert results == pytest.approx([1, 3 / 4, 3 / 5, 1 / 2, 3 / 16, 3 / 20, 1 / 8])


def test_matches_that_agree_are_one() -> None:
    text = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2]
    assert drafts(text, tokens=2) == [[3], [3, 8], [3, 7]]
    assert drafts(text, tokens=1) == [[3]]


def test_a_draft_that_reaches_the_end_goes_on_periodically() -> None:
    assert drafts([5, 5, 5], matches=1, tokens=4)[-1] == [5, 5, 5, 5]
    assert drafts([7, 1, 2, 1, 2], matches=1, tokens=5)[-1] == [1, 2, 1, 2, 1]


def test_nothing_to_find() -> None:
    assert drafts([1, 2, 3]) == []
    assert drafts([1, 2]) == []


def scan(text: list[int], ngram: int) -> list[int]:
    """The obvious way: ends of the matches of the last n tokens, n falling, recent first."""
    results: list[int] = []
    for n in range(min(ngram, len(text)), 0, -1):
        ends = [e for e in range(len(text) - 2, n - 2, -1) if text[e + 1 - n : e + 1] == text[-n:]]
        results += [e for e in ends if e not in results]
    return results


@pytest.mark.parametrize("vocab", [2, 5, 20])
def test_the_index_finds_what_a_scan_finds(vocab: int) -> None:
    rng = random.Random(vocab)
    for ngram in (1, 2, 3, 5):
        text = [rng.randrange(vocab) for _ in range(4)]
        index = lookup.Index.of(text, ngram)
        for _ in range(40):
            assert list(index.occurrences()) == scan(text, ngram)
            new = [rng.randrange(vocab) for _ in range(rng.randrange(1, 4))]
            index.extend(new)
            text += new
