"""What every drafter without weights must do, and `Play`: an engine in thirty lines with a table for a target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from outrider.drafters import _common, lookahead, lookup, ngram, none, suffix
from outrider.noise import RaceNoise
from outrider.tree import check, root_only
from outrider.types import Budget, Drafter, Drafting, DraftTree, InputError, Look, Round, Rows, Rule, Sampling

torch.set_num_threads(1)
VOCAB = 12


@dataclass(frozen=True)
class Table:
    """A target: a fixed random law given the last two tokens."""

    vocab: int = VOCAB
    context: int = 4096
    peak: float = 3.0

    def logits(self, text: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(71 * text[-1] + (text[-2] if len(text) > 1 else 0))
        return torch.randn(self.vocab, generator=generator) * self.peak

    def embed(self, tokens): ...
    def head(self, features): ...
    def open(self, capacity): ...


class Play:
    """Rounds by hand: prompts read in two chunks, then propose, accept along the tree, observe."""

    def __init__(
        self,
        drafter: Drafter,
        prompts: list[list[int]],
        temperature: float = 0.0,
        rule: Rule = "coupled",
        target: Table | None = None,
        length: int = 1 << 20,
        whole: list[list[int]] | None = None,
    ) -> None:
        self.target, self.rule, self.length = target or Table(), rule, length
        self.race = RaceNoise(self.target.vocab)
        self.texts = [list(p) for p in prompts]
        self.seeds = [100 + b for b in range(len(prompts))]
        self.sampling = [Sampling(temperature)] * len(prompts)
        self.drafting: Drafting = drafter.open([list(p) for p in prompts], 1024)
        self.proposals: list[DraftTree] = []
        self.prefill(whole)

    def prefill(self, whole: list[list[int]] | None) -> None:
        empty = [[] for _ in self.texts]
        firsts = [[self.draw(b, [])] for b in range(len(self.texts))] if whole is None else whole
        root = root_only(torch.tensor([t[-1] for t in self.texts]))
        look = Look(torch.zeros(len(self.texts), 1, self.target.vocab))
        zero = torch.zeros(len(self.texts), dtype=torch.long)
        for tokens in (empty, firsts):
            self.drafting.observe(Round(self.rows(), root, look, zero[:, None], zero, zero, tokens))
        for text, first in zip(self.texts, firsts, strict=True):
            text += first

    def rows(self) -> Rows:
        start = tuple(len(t) - 1 for t in self.texts)
        root, room = torch.tensor([t[-1] for t in self.texts]), tuple(self.length - len(t) for t in self.texts)
        serial = (0,) * len(start)
        law = tuple(self.sampling)
        return Rows(root, torch.tensor(start), start, tuple(self.seeds), serial, law, self.rule, room, self.race)

    def draw(self, b: int, path: list[int]) -> int:
        text = [*self.texts[b], *path]
        logits, t = self.target.logits(text), self.sampling[b].temperature
        noise = self.race.at([self.seeds[b]], [len(text)])[0] if t else 0.0
        return int((logits + t * noise).argmax())

    def propose(self, budget: Budget) -> DraftTree:
        tree = self.drafting.propose(self.rows(), budget)
        check(tree)
        assert int(tree.size.max()) <= max(1, budget.nodes)
        assert tree.tokens[:, 0].tolist() == [t[-1] for t in self.texts]
        for depths, room in zip(tree.depths.tolist(), self.rows().room, strict=True):
            assert max(depths) <= max(0, min(budget.depth, room - 1))
        self.proposals.append(tree)
        return tree

    def round(self, budget: Budget) -> list[list[int]]:
        rows, tree = self.rows(), self.propose(budget)
        new, logits, ids = [], torch.zeros(*tree.tokens.shape, self.target.vocab), []
        for b, paths in enumerate(paths_of(tree)):
            for i, path in enumerate(paths):
                logits[b, i] = self.target.logits([*self.texts[b], *path])
            node, path = 0, []
            while True:
                token = self.draw(b, path)
                path = [*path, token]
                if path not in paths:
                    break
                node = paths.index(path)
            new.append(path)
            ids.append(node)
        count = torch.tensor([len(path) for path in new])
        nodes = torch.zeros(len(new), int(count.max()), dtype=torch.long)
        for b, node in enumerate(ids):
            for depth in range(int(count[b]) - 1, -1, -1):
                nodes[b, depth], node = node, int(tree.parents[b, node])
        root = torch.tensor([path[-1] for path in new])
        self.drafting.observe(Round(rows, tree, Look(logits), nodes, count, root, new))
        for text, path in zip(self.texts, new, strict=True):
            text += path
        return new

    def select(self, index: list[int]) -> None:
        self.drafting.select(index)
        self.texts = [list(self.texts[i]) for i in index]
        self.seeds = [self.seeds[i] for i in index]
        self.sampling = [self.sampling[i] for i in index]

    def join(self, other: Play) -> None:
        self.drafting.join(other.drafting)
        self.texts += other.texts
        self.seeds += other.seeds
        self.sampling += other.sampling


def paths_of(tree: DraftTree) -> list[list[list[int]]]:
    """Per row and node the tokens from the root, exclusive: the miniature of tree.py -> [[] [5] [5 6] [5 7] [8]]."""
    out = []
    for tokens, parents, size in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.size.tolist(), strict=True):
        paths: list[list[int]] = [[]]
        for i in range(1, size):
            paths.append([*paths[parents[i]], tokens[i]])
        out.append(paths)
    return out


class Words:
    """A tokenizer: one token per word, a number."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]


FREE = {"none": none, "lookup": lookup, "suffix": suffix, "lookahead": lookahead, "ngram": ngram}
PROMPTS = [[1, 2, 3, 1, 2, 4, 1, 2], [5, 6, 5], [7]]
BUDGET = Budget(24, 8)


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
            fresh = Play(drafter, heads, temperature, whole=tails)
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


@pytest.mark.parametrize("name", FREE)
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} has no option colour"):
        FREE[name].load(Table(), colour="red")
    if name not in ("suffix", "ngram"):
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


def test_values_of_another_type_are_refused() -> None:
    for value in ("ten", 1.5, True, None):
        with pytest.raises(InputError, match="tokens must be a whole number of at least 1"):
            _common.whole("tokens", value)
    with pytest.raises(InputError, match="persist must be true or false"):
        _common.flag("persist", "perhaps")


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
