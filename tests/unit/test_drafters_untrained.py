"""What every drafter without weights must do: the target's own text, in any batch, whatever is forked or joined."""

from __future__ import annotations

from dataclasses import replace

import pytest
from play import BUDGET, PROMPTS, Play, Table, Words, paths_of

from outrider.core.protocols import Drafter
from outrider.core.types import Budget
from outrider.drafters import lookahead, lookup, ngram, none, suffix
from outrider.params import InputError

FREE = {"none": none, "lookup": lookup, "suffix": suffix, "lookahead": lookahead, "ngram": ngram}


@pytest.fixture(params=FREE)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return FREE[request.param].load(Table())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_targets_own(drafter: Drafter, temperature: float) -> None:
    play, plain = (Play(d, PROMPTS, temperature) for d in (drafter, none.load(None)))
    for _ in range(12):
        play.round(BUDGET)
    while min(map(len, plain.texts)) < max(map(len, play.texts)):
        plain.round(BUDGET)
    assert all(b[: len(a)] == a for a, b in zip(play.texts, plain.texts, strict=True))


@pytest.mark.parametrize("name", ["lookup", "suffix", "lookahead", "ngram"])
def test_drafts_are_accepted_on_a_text_that_repeats(name: str) -> None:
    play = Play(FREE[name].load(Table()), PROMPTS)
    committed = sum(len(new) for _ in range(60) for new in play.round(BUDGET))
    assert committed > 1.5 * 60 * len(PROMPTS)


def test_small_budgets(drafter: Drafter) -> None:
    play = Play(drafter, PROMPTS, length=40)
    for budget in (Budget(1, 5), Budget(0, 5), Budget(9, 0)):
        assert play.propose(budget).nodes == 1
    for nodes in range(2, 12):
        play.round(Budget(nodes, 1 + nodes % 4))
    play = Play(drafter, PROMPTS, length=10)
    while play.texts:
        play.round(BUDGET)
        assert max(map(len, play.texts)) <= 10
        play.select([i for i, t in enumerate(play.texts) if len(t) < 10])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_reopen(drafter: Drafter, temperature: float) -> None:
    play = Play(drafter, PROMPTS, temperature)
    for turn in range(14):
        play.round(replace(BUDGET, nodes=2 + turn))
        if not drafter.reopens:
            continue
        for split in (1, 6):
            cut = [max(1, len(t) - split) for t in play.texts]
            heads = [t[:c] for t, c in zip(play.texts, cut, strict=True)]
            tails = [t[c:] for t, c in zip(play.texts, cut, strict=True)]
            fresh = Play(drafter, heads, temperature, first=tails)
            assert fresh.texts == play.texts
            assert paths_of(fresh.propose(BUDGET)) == paths_of(play.drafting.propose(play.rows(), BUDGET))


def test_rows_are_independent_of_their_batch(drafter: Drafter) -> None:
    batch = Play(drafter, PROMPTS[:1], 0.8)
    joined = Play(drafter, PROMPTS, 0.8)
    joined.select([1, 2])
    for _ in range(3):
        batch.round(BUDGET)
    batch.join(joined)
    for _ in range(5):
        batch.round(BUDGET)
    for b, rounds in enumerate((8, 5, 5)):
        lone = Play(drafter, PROMPTS, 0.8)
        lone.select([b])
        for _ in range(rounds):
            lone.round(BUDGET)
        assert lone.texts[0] == batch.texts[b]
        assert paths_of(lone.propose(BUDGET))[0] == paths_of(batch.propose(BUDGET))[b]


def test_forks_share_nothing(drafter: Drafter) -> None:
    play, lone = (Play(drafter, PROMPTS, 0.8) for _ in range(2))
    for each in (play, lone):
        each.round(BUDGET)
    play.select([0, 1, 1, 0])
    lone.select([1])
    play.seeds[1:] = [7, play.seeds[2], 8]  # row 1 goes another way than its twin, row 2
    for _ in range(6):
        play.round(BUDGET)
        lone.round(BUDGET)
    assert play.texts[1] != play.texts[2] == lone.texts[0]
    assert paths_of(play.propose(BUDGET))[2] == paths_of(lone.propose(BUDGET))[0]


@pytest.mark.parametrize("name", [name for name in FREE if name not in ("suffix", "ngram")])
def test_a_file_that_nothing_is_read_of_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="reads no file"):
        FREE[name].load(Table(), path="corpus.txt")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lookup", {"ngram": 0}),
        ("lookup", {"matches": 0}),
        ("suffix", {"context": 0}),
        ("ngram", {"n": 3}),
        ("ngram", {"width": 0}),
        ("lookahead", {"ngram": 1}),
        ("lookahead", {"window": -1}),
    ],
)
def test_bad_values_are_refused(name: str, options: dict) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(options))} must be"):
        FREE[name].load(Table(), **options)


@pytest.mark.parametrize("name", ["suffix", "ngram"])
def test_corpus_errors_are_one_sentence(name: str, tmp_path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "good.txt").write_text("1 2 3")
    cases = [("missing.txt", "cannot be read"), ("latin.txt", "not UTF-8"), ("empty.txt", "is empty")]
    for file, message in cases:
        with pytest.raises(InputError, match=message) as error:
            FREE[name].load(Table(), Words(), str(tmp_path / file))
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="cannot be read"):
        FREE[name].load(Table(), Words(), str(tmp_path))
    with pytest.raises(InputError, match="needs the target's tokenizer"):
        FREE[name].load(Table(), None, str(tmp_path / "good.txt"))
    FREE[name].load(Table(), Words(), str(tmp_path / "good.txt"))
