"""The suffix automaton against substring search, and suffix decoding by hand."""

from __future__ import annotations

import math
import random

import pytest
from play import PROMPTS, Play, Words, paths_of

from outrider.core.types import Budget
from outrider.drafters import suffix
from outrider.drafters.suffix import Automaton


def occurrences(texts: list[list[int]], part: list[int]) -> int:
    """How often `part` occurs: the obvious way."""
    n = len(part)
    return sum(text[i : i + n] == part for text in texts for i in range(len(text) - n + 1))


def walk(automaton: Automaton, part: list[int]) -> int | None:
    state: int | None = 0
    for token in part:
        state = automaton.successors[state].get(token) if state is not None else None
    return state


@pytest.mark.parametrize("vocab", [1, 2, 4])
@pytest.mark.parametrize("span", [3, 6, 100])
def test_the_automaton_counts_substrings(vocab: int, span: int) -> None:
    rng = random.Random(vocab * span)
    for _ in range(6):
        automaton, texts, states = Automaton(span), [[], []], [0, 0]
        for _ in range(30):  # two strings grow by turns
            which, new = rng.randrange(2), [rng.randrange(vocab) for _ in range(rng.randrange(1, 4))]
            states[which] = automaton.extend(states[which], new)
            texts[which] += new
        for _ in range(150):
            n = rng.randrange(1, span + 2)
            source = rng.choice(texts)
            start = rng.randrange(max(1, len(source) - n))
            part = source[start : start + n] if rng.random() < 0.7 else [rng.randrange(vocab) for _ in range(min(n, 9))]
            state = walk(automaton, part)
            assert (automaton.count[state] if state is not None else 0) == occurrences(texts, part)


def test_a_forked_text_shares_no_tokens_that_wait() -> None:
    text = suffix.Text(Automaton(8), 8).extend([1, 2])
    fork = text.fork()
    text.extend([3])
    assert (text.read().tail, fork.read().tail) == ([1, 2, 3], [1, 2])


@pytest.mark.parametrize("vocab", [1, 2, 4])
def test_matching_finds_the_longest_known_suffix(vocab: int) -> None:
    rng = random.Random(vocab)
    for _ in range(10):
        text = [rng.randrange(vocab) for _ in range(25)]
        automaton = Automaton(16)
        automaton.extend(0, text)
        state = length = 0
        query: list[int] = []
        for _ in range(60):
            query.append(rng.randrange(vocab + 1))
            state, length = automaton.step(state, length, query[-1], 5)
            known = [n for n in range(6) if n <= len(query) and occurrences([text], query[len(query) - n :])]
            assert length == (max(known) if query[-1] < vocab else 0)
            assert state == walk(automaton, query[len(query) - length :])


def test_a_fork_is_a_copy() -> None:
    text = [1, 2, 1, 2, 3]
    automaton = Automaton(8)
    state = automaton.extend(0, text)
    twin = automaton.fork()
    twin.extend(state, [1, 2, 2, 1])
    fresh = Automaton(8)
    fresh.extend(0, text)
    assert automaton == fresh
    automaton.extend(state, [1, 2, 2, 1])
    assert automaton == twin


def test_work_per_token_is_bounded_on_repetitive_texts() -> None:
    automaton = Automaton(8)
    state = automaton.extend(0, [1] * 500)
    steps = 0
    while state > 0:
        state, steps = automaton.link[state], steps + 1
    assert steps <= 9


LARGE = Budget(64, 16)


def drafts(prompt: list[int], budget: Budget = LARGE, **options) -> dict[tuple[int, ...], float]:
    play = Play(suffix.load(None, **options), [prompt[:-1]], first=[prompt[-1:]])
    tree = play.propose(budget)
    assert tree.values is not None
    return {tuple(p): math.exp(v) for p, v in zip(paths_of(tree)[0], tree.values[0].tolist(), strict=True) if p}


def test_the_frequent_continuation_comes_first() -> None:
    text = [1, 2, 1, 3, 1, 2, 1]  # after 1: 2 twice, 3 once; after 1 2 1: 3 once
    result = drafts(text, Budget(64, 1))
    assert list(result) == [(3,), (2,)]
    assert result[(3,)] == pytest.approx(1 - 1 / (1 + 3 + 1))  # the context [1 2 1], of length 3, has one successor
    escape = 1 / (1 + 3 + 1)
    assert result[(2,)] == pytest.approx(escape * 2 / 3 * (1 - 1 / (3 + 1 + 1)))  # then [1], which has three
    text = [1, 2, 9, 1, 3, 8, 1, 2, 7, 1]
    assert list(drafts(text, Budget(64, 1))) == [(2,), (3,)]
    assert list(drafts(text, Budget(2, 1))) == [(2,)]


def test_of_equally_frequent_continuations_the_recent_one_comes_first() -> None:
    assert list(drafts([1, 2, 9, 1, 3, 8, 1], Budget(64, 1))) == [(3,), (2,)]


def test_best_first_under_a_floor() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    result = drafts(text, Budget(6, 16))
    assert list(result) == [(3,), (3, 4), (3, 4, 5), (3, 4, 5, 1), (3, 4, 5, 1, 2)]
    assert list(result.values()) == sorted(result.values(), reverse=True)
    kept = drafts(text, Budget(64, 16, floor=0.5))
    assert set(kept) == {path for path, value in drafts(text).items() if value >= 0.5}
    assert 0 < len(kept) < len(drafts(text))


def test_a_draft_goes_on_beyond_the_end() -> None:
    assert (5, 5, 5, 5, 5) in drafts([5, 5, 5], Budget(6, 5))
    assert drafts([1, 2, 3]) == {}


def test_a_corpus_is_shared_and_extends_the_text(tmp_path) -> None:
    (tmp_path / "corpus.txt").write_text("10 1 2 3 4 5 6\n7 1 2 8")
    drafter = suffix.load(None, Words(), str(tmp_path / "corpus.txt"))
    before = [dict(s) for s in drafter.corpus.successors], list(drafter.corpus.count)
    play = Play(drafter, [[10, 1], [7, 1]], first=[[2], [2]])
    paths = paths_of(play.propose(Budget(5, 4)))
    assert paths[0][1:] == [[3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]
    assert paths[1][1] == [8]
    for _ in range(5):
        play.round(Budget(8, 4))
    assert before == (drafter.corpus.successors, drafter.corpus.count)


def test_what_others_wrote_is_forgotten_on_demand() -> None:
    """As `outrider bench` does before the same prompts come again; a generation under way goes on."""
    drafter = suffix.load(None, persist=True)
    play = Play(drafter, PROMPTS[2:], first=[[1]])
    for _ in range(6):
        play.round(Budget(1, 0))

    def drafted() -> int:
        return Play(drafter, [[9, 9, 9]], first=[[1]]).propose(Budget(4, 3)).nodes

    assert drafted() > 1
    drafter.forget()
    assert drafted() == 1
    for _ in range(20):
        play.round(Budget(1, 0))
    assert drafter.memory is not None
    assert drafter.memory.written >= 20


def test_persistence_serves_the_next_request() -> None:
    drafter = suffix.load(None, persist=True)
    first = Play(drafter, PROMPTS[2:], first=[[1]])
    assert not drafter.reopens
    assert first.propose(Budget(8, 4)).nodes == 1
    first.drafting.select([])
    written = [1]
    second = Play(drafter, PROMPTS[2:], first=[[1]])
    for _ in range(6):
        written += second.round(Budget(1, 0))[0]
    third = Play(drafter, [[9, 9, 9]], first=[[1]])
    assert paths_of(third.propose(Budget(4, 3)))[0][-1] == written[1:4]
    assert paths_of(Play(suffix.load(None), [[9, 9, 9]], first=[[1]]).propose(Budget(4, 3)))[0] == [[]]


def test_the_memory_is_bounded() -> None:
    drafter = suffix.load(None, persist=True, keep=100)
    play = Play(drafter, PROMPTS)
    for _ in range(200):
        play.round(Budget(8, 4))
    memory = drafter.memory
    assert memory is not None
    assert memory.epoch > 2
    assert all(len(a.link) < 2 * 100 for a in (memory.young, memory.old))
