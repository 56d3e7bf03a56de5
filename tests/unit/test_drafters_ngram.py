"""The n-gram drafters: their distributions, and what they draft under each rule."""

from __future__ import annotations

import numpy as np
import pytest
from play import PROMPTS, VOCAB, Play, Table, Words, paths_of

from outrider.core.types import Array, Budget
from outrider.drafters import ngram
from outrider.drafters.ngram import Counts
from outrider.params import InputError


@pytest.mark.parametrize("n", [1, 2])
def test_the_distribution_sums_to_one_and_has_full_support(n: int) -> None:
    for text in ([], [3], [1, 2, 1, 2, 1, 3]):
        probabilities = Counts.of(text, VOCAB).distribution(range(VOCAB), n)
        assert probabilities.shape == (VOCAB, VOCAB)
        assert (probabilities > 0).all()
        np.testing.assert_allclose(probabilities.sum(-1), 1)


def test_the_distribution_by_hand() -> None:
    counts = Counts.of([1, 2, 1, 2, 1, 3], 4)
    assert counts.distribution([0], 1)[0].tolist() == pytest.approx([0.1, 0.4, 0.3, 0.2])
    assert counts.distribution([1], 2)[0].tolist() == pytest.approx([0.025, 0.1, (2 + 0.3) / 4, (1 + 0.2) / 4])
    assert counts.distribution([3], 2)[0].tolist() == pytest.approx(
        [0.1, 0.4, 0.3, 0.2]
    )  # the unigram: nothing followed 3


def test_counts_in_pieces_equal_counts_at_once() -> None:
    text = [1, 2, 1, 2, 1, 3, 0, 1]
    counts = Counts.of(text[:3], 4)
    for token in text[3:]:
        counts.extend([token])
    assert np.array_equal(counts.distribution(range(4), 2), Counts.of(text, 4).distribution(range(4), 2))


def test_the_probable_token_comes_first(tmp_path) -> None:
    (tmp_path / "corpus.txt").write_text("1 2 1 2 1 3 4 5")
    drafter = ngram.load(Table(), Words(), str(tmp_path / "corpus.txt"), width=1)
    play = Play(drafter, [[9]], first=[[1]])
    assert paths_of(play.propose(Budget(4, 3)))[0] == [[], [2], [2, 1], [2, 1, 2]]
    unigram = ngram.load(Table(), Words(), str(tmp_path / "corpus.txt"), n=1, width=2)
    play = Play(unigram, [[9]], first=[[3]])
    assert paths_of(play.propose(Budget(3, 1)))[0] == [[], [1], [2]]


def test_under_rejection_a_sampled_chain_has_its_q() -> None:
    drafter = ngram.load(Table())
    play = Play(drafter, PROMPTS, 1.0, rule="rejection")
    tree = play.propose(Budget(5, 8))
    assert tree.parents.tolist() == [[0, 0, 1, 2, 3]] * 3
    assert tree.q is not None
    assert tree.q.shape == (3, 4, VOCAB)
    for b, prompt in enumerate(play.texts):
        probabilities = Counts.of(prompt, VOCAB).distribution(tree.tokens[b, :-1].tolist(), 2)
        np.testing.assert_allclose(tree.q[b], probabilities, atol=1e-6, rtol=1e-5)
    shaped = play.propose(Budget(20, 8, shape=(3, 2)))
    assert shaped.parents[0].tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert shaped.q is not None
    assert shaped.q.shape == (3, 4, VOCAB)


def test_a_sampled_tree_is_cut_by_the_remaining_length_alone() -> None:
    play = Play(ngram.load(Table()), PROMPTS, 1.0, rule="rejection", length=11)  # 2, 7 and 9 more tokens fit
    tree, shaped = play.propose(Budget(6, 5)), play.propose(Budget(20, 8, shape=(3, 2)))
    assert tree.size.tolist() == [2, 6, 6]
    assert shaped.size.tolist() == [4, 10, 10]
    assert tree.q is not None
    assert tree.q.shape == (3, 5, VOCAB)


def test_sampled_tokens_follow_the_distribution() -> None:
    play = Play(ngram.load(Table(), n=1), [[1, 1, 1, 2]], 1.0, rule="rejection", first=[[2]])
    seen = np.zeros((2, VOCAB))
    twins = 0
    for seed in range(1000):
        play.seeds = [seed]
        first, second = play.propose(Budget(3, 2)).tokens[0, 1:].tolist()
        seen[0, first] += 1
        seen[1, second] += 1
        twins += first == second
    distribution = Counts.of([1, 1, 1, 2, 2], VOCAB).unigram()
    assert (
        float(((seen / 1000 - distribution) ** 2 / distribution * 1000).sum(-1).max()) < 31.3
    )  # chi-square, 11 degrees, .999
    chance = float((distribution**2).sum())  # the two are independent
    assert abs(twins / 1000 - chance) < 3.3 * (chance * (1 - chance) / 1000) ** 0.5


class Bigram(Table):
    """The drafter's own distribution as the target."""

    def logits(self, text: list[int]) -> Array:
        return np.log(Counts.of(CORPUS, VOCAB).distribution([text[-1]], 2)[0]).astype(np.float32)


CORPUS = [1, 2, 3, 1, 2, 4, 5, 6, 1, 7, 2, 3, 8, 9, 1, 10, 0, 11, 5, 2]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_target_of_the_same_distribution_accepts_every_draft(tmp_path, temperature: float) -> None:
    (tmp_path / "corpus.txt").write_text(" ".join(map(str, CORPUS)))
    drafter = ngram.load(Table(), Words(), str(tmp_path / "corpus.txt"), width=1)
    play = Play(drafter, PROMPTS, temperature, target=Bigram())
    for _ in range(5):
        assert [len(new) for new in play.round(Budget(5, 4))] == [5, 5, 5]


def test_greedy_rejection_is_deterministic() -> None:
    assert Play(ngram.load(Table()), PROMPTS, 0.0, rule="rejection").propose(Budget(5, 8)).q is None


def test_a_corpus_learns_nothing(tmp_path) -> None:
    (tmp_path / "corpus.txt").write_text("1 2 3")
    drafter = ngram.load(Table(), Words(), str(tmp_path / "corpus.txt"))
    before = drafter.corpus.distribution(range(VOCAB), 2)
    play = Play(drafter, PROMPTS)
    play.select([0, 0, 2])
    for _ in range(4):
        play.round(Budget(8, 3))
    assert np.array_equal(before, drafter.corpus.distribution(range(VOCAB), 2))


def test_bad_input(tmp_path) -> None:
    with pytest.raises(InputError, match="needs the target"):
        ngram.load(None)
    (tmp_path / "corpus.txt").write_text(f"1 {VOCAB}")
    with pytest.raises(InputError, match="outside the target's vocabulary"):
        ngram.load(Table(), Words(), str(tmp_path / "corpus.txt"))
