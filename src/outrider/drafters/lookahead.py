"""Lookahead decoding (Fu et al. 2024): Jacobi iteration on a window yields n-grams, n-grams make guesses.

W (`window`, 7) columns of N - 1 levels (`ngram` N, 5) hold the last Jacobi iterates of the positions ahead. Token
(l, j) lies j + l tokens after the root; (0, 0) is the root itself. Column j rides along as a path of the tree,

    (0, 1) ... (0, j) (1, j) ... (N-2, j),                          so the window is a comb: depth j + N - 2, teeth j

and what the target would write after it becomes the column's next iterate: all levels move up by one. Levels plus
iterate are an n-gram, kept in a pool: at most G (`guesses`, 7) continuations per first token, the newest
first. Those of the root's token are the guesses. Defaults are the authors' repository's. Beyond it:

 * one tree holds guesses and window, and the target verifies and iterates in one pass (as in the paper, with any rule);
 * at T > 0 the window draws with the shared noise of its positions, so guesses are what the target will draw;
 * `text=true`: the pool also learns the n-grams of prompt and output (the repository's POOL_FROM_PROMPT, and more);
 * a small budget shrinks the window to half of the nodes, guesses have the rest, and either may use what the other
   leaves; guesses come first in the tree. A window that starves makes no guesses, so it is not simply cut. A full one
   takes (N - 1) W - 1 nodes and a depth of W + N - 3; columns that were not verified wait as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core import sampling
from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.tree import from_paths
from ..core.types import Budget, DraftTree, Rows
from ..params import Sampling, integer
from ._common import no_file, selected, useful
from ._logits import array


@dataclass(frozen=True)
class LookaheadDrafter(Drafter):
    """Lookahead decoding: `window` columns of Jacobi iterates, a pool of `ngram`-grams, `guesses` tried a round."""

    window: int = 7
    ngram: int = 5
    guesses: int = 7
    text: bool = True
    reopens: bool = False  # window and pool depend on the rounds, not on the text alone

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> LookaheadDrafting:
        return LookaheadDrafting(self, [Row.of(prompt, self) for prompt in prompts])


@dataclass
class Row:
    """One row: its window, its pool and the last tokens of its text."""

    drafter: LookaheadDrafter
    levels: list[list[int]]  # [N - 1][W]; (0, 0) is not used: the root stands there
    pool: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)  # newest first
    tail: list[int] = field(default_factory=list)
    rounds: int = 0  # Jacobi steps made; before N - 2 of them the levels are not yet one another's successors

    @classmethod
    def of(cls, prompt: Sequence[int], drafter: LookaheadDrafter) -> Row:
        """The window begins with tokens of the prompt, spread evenly."""
        w, levels, n = drafter.window, drafter.ngram - 1, max(1, len(prompt))
        start = list(prompt) or [0]
        row = cls(drafter, [[start[(j * levels + i) * n // (w * levels)] for j in range(w)] for i in range(levels)])
        row.read(prompt)
        return row

    def read(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text, and its n-grams to the pool."""
        for token in tokens:
            self.tail = [*self.tail[1 - self.drafter.ngram :], token]
            if self.drafter.text and len(self.tail) == self.drafter.ngram:
                self.learn(self.tail)

    def learn(self, gram: Sequence[int]) -> None:
        first, rest = gram[0], tuple(gram[1:])
        others = [g for g in self.pool.get(first, ()) if g != rest]
        self.pool[first] = (rest, *others)[: self.drafter.guesses]

    def column(self, j: int) -> list[int]:
        """The path of column j from the root, exclusive: j + N - 2 tokens."""
        return [*self.levels[0][1 : j + 1], *(level[j] for level in self.levels[1:])]

    def step(self, iterates: Sequence[int], tokens: Sequence[int]) -> None:
        """One Jacobi step of the first columns, the root having moved on by `tokens`."""
        width, verified, shift = self.drafter.window, len(iterates), len(tokens)
        if verified:
            if self.rounds >= len(self.levels) - 1:
                for j, new in enumerate(iterates):
                    first = self.levels[0][j] if j else self.tail[-1]
                    self.learn([first, *(level[j] for level in self.levels[1:]), new])
            above = [*self.levels[1:], [*iterates]]
            self.levels = [[*up[:verified], *same[verified:]] for same, up in zip(self.levels, above, strict=True)]
            self.rounds += 1
            shift -= 1  # the step itself moved the window by one
        self.levels = [[*level[shift:], *level][:width] for level in self.levels]
        self.read(tokens)

    def fork(self) -> Row:
        return Row(self.drafter, [list(level) for level in self.levels], dict(self.pool), list(self.tail), self.rounds)


def plan(row: Row, nodes: int, depth: int) -> tuple[list[list[int]], int]:
    """The guesses of a row, and how many columns of its window fit into half of `nodes` (the root not counted) or into
    what the guesses leave."""
    guesses = [list(g[:depth]) for g in row.pool.get(row.tail[-1], ())] if depth else []
    lower = row.drafter.ngram - 2
    wanted = len({tuple(g[: i + 1]) for g in guesses for i in range(len(g))})
    free = max(nodes // 2, nodes - wanted)
    columns = min(row.drafter.window, (free + 1) // (lower + 1), depth - lower + 1)
    return guesses, max(0, columns)


@dataclass
class LookaheadDrafting(Drafting):
    """Each row's window and pool."""

    drafter: LookaheadDrafter
    rows: list[Row]
    last: list[list[int]] | None = None  # per row and verified column: the node after which its iterate is drawn

    def observe(self, round: Round) -> None:
        iterates = self._iterates(round)
        for row, new, tokens in zip(self.rows, iterates, round.tokens, strict=True):
            row.step(new, tokens)
        self.last = None

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        paths, counts = [], []
        nodes = max(0, budget.nodes - 1)
        for row, depth in zip(self.rows, useful(rows, budget), strict=True):
            guesses, columns = plan(row, nodes, depth)
            window = [row.column(j) for j in range(columns)]
            paths.append(cut(guesses, window, nodes) + window)
            counts.append(columns)
        roots = [row.tail[-1] for row in self.rows]
        tree, where = from_paths(roots, paths, max(1, budget.nodes))
        self.last = [[(ids or [0])[-1] for ids in w[len(w) - n :]] for w, n in zip(where, counts, strict=True)]
        return tree

    def select(self, index: Sequence[int]) -> None:
        self.rows = selected(self.rows, index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, LookaheadDrafting)
        self.rows += other.rows

    def _iterates(self, round: Round) -> list[list[int]]:
        """What the target writes after each verified column, drawn as it draws: logits + T * G of the position."""
        if self.last is None:
            return [[] for _ in self.rows]
        rows, drawn = round.rows, []
        for r, (columns, settings) in enumerate(zip(self.last, rows.sampling, strict=True)):
            unseen = round.unseen[r] if round.unseen else ()
            nodes = columns[: next((i for i, node in enumerate(columns) if node in unseen), len(columns))]
            # Without top-k and its kin: they would cost a sort per column and change few tokens.
            plain, hot = Sampling(settings.temperature), settings.temperature > 0
            depths = [rows.start[r] + j + self.drafter.ngram - 1 for j in range(len(nodes))]
            noise = [rows.gumbel.at([rows.seeds[r]], [at])[0] if hot else None for at in depths]
            logits = array(round.output.logits[r, nodes])
            drawn.append([sampling.draw(z, plain, g) for z, g in zip(logits, noise, strict=True)])
        return drawn


def cut(guesses: list[list[int]], window: list[list[int]], nodes: int) -> list[list[int]]:
    """Guesses, the newest first, as far as the window leaves nodes for them."""

    def prefixes(paths: list[list[int]]) -> set[tuple[int, ...]]:
        return {tuple(p[: i + 1]) for p in paths for i in range(len(p))}

    used, kept = prefixes(window), []
    for guess in guesses:
        new = [tuple(guess[: i + 1]) for i in range(len(guess)) if tuple(guess[: i + 1]) not in used]
        fit = len(guess) - len(new) + min(len(new), nodes - len(used))
        kept.append(guess[:fit])
        used.update(new[: nodes - len(used)])
    return kept


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    window: int = 7,
    ngram: int = 5,
    guesses: int = 7,
    text: bool = True,
) -> LookaheadDrafter:
    """Lookahead decoding with W = `window`, N = `ngram`, G = `guesses`."""
    no_file("lookahead", path)
    sizes = integer("window", window), integer("ngram", ngram, least=2, most=32), integer("guesses", guesses)
    return LookaheadDrafter(*sizes, text)
