"""The optimised sparse tree (Medusa, section 2.3.3), for every drafter that ranks candidates.

    accuracy a_d(i)   how often the target's d-th token below the root is the drafter's candidate of rank i, given that
                      the drafter knows the d - 1 tokens before it
    value of a node   a_1(i_1) a_2(i_2) ... a_d(i_d) for the path of ranks (i_1, ..., i_d)
    the tree          the n nodes of the highest values, one after the other (`drafters/_ranks.py:greedy`)

Accuracies are measured on texts that the target writes: first with drafts, then once more, the drafter being shown the
text as it goes and asked for its candidates below every root. Both runs go through the engine, under the rule `coupled`
and one seed, so that they write the same. A sampled text is ranked by the noise it was sampled with, as in decoding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .. import files
from ..budgets.budgeter import FixedBudget
from ..core.protocols import Drafter, Drafting, Round
from ..core.tree import chain, padded
from ..core.types import Array, Budget, DraftTree, Rows
from ..drafters import _ranks
from ..engine import Engine, Request, generate
from ..params import InputError

Progress = Callable[[str, int, int], None]
STRIDE = 2  # known tokens that a round of the second run drafts: every third place is asked about


@runtime_checkable
class Ranks(Protocol):
    """A drafting whose candidates have ranks."""

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates, best first, at each depth [b, d, k] below a path of known tokens [b, >= d]; int64."""


@dataclass(frozen=True)
class Measured:
    """hits[d][i] of tested[d] tokens at depth d + 1 were the candidate of rank i."""

    hits: tuple[tuple[int, ...], ...]
    tested: tuple[int, ...]

    @property
    def accuracies(self) -> tuple[tuple[float, ...], ...]:
        """Shares that never rise with the rank: where counts of few make them rise, neighbours share their mean."""
        pairs = zip(self.hits, self.tested, strict=True)
        return tuple(falling([h / t for h in hits]) for hits, t in pairs if t > 0)


@dataclass(frozen=True)
class Tuned:
    """A sparse tree. `paths`: its nodes but the root, best first; any first part of them is the best smaller tree."""

    paths: tuple[tuple[int, ...], ...]
    values: tuple[float, ...]

    @property
    def tau(self) -> float:
        """Tokens that a round commits, the target's own included, if the accuracies of the depths multiply."""
        return 1 + sum(self.values)


def falling(shares: Sequence[float]) -> tuple[float, ...]:
    """The nearest sequence that never rises (pool adjacent violators): .5 .1 .2 .1 -> .5 .15 .15 .1"""
    blocks: list[tuple[float, int]] = []
    for share in shares:
        total, count = share, 1
        while blocks and blocks[-1][0] / blocks[-1][1] < total / count:
            above, of = blocks.pop()
            total, count = total + above, count + of
        blocks.append((total, count))
    return tuple(total / count for total, count in blocks for _ in range(count))


def grow(measured: Measured, nodes: int) -> Tuned:
    """The best tree of `nodes` nodes, root included."""
    if nodes < 2:
        raise InputError(f"a tree has a root and at least one node more: nodes must be at least 2, not {nodes}")
    found = Tuned(*_ranks.greedy(measured.accuracies, nodes - 1))
    if not found.paths:
        raise InputError("none of the drafter's candidates was ever right, so there is no tree to grow; train it first")
    return found


def measure(
    engine: Engine,
    requests: Sequence[Request],
    ranks: int = 10,
    depth: int = 8,
    batch_size: int = 8,
    progress: Progress = lambda part, done, of: None,
) -> Measured:
    """How often each rank at each depth is right, on the texts that the target writes to these requests."""
    if min(ranks, depth, batch_size) < 1 or not requests:
        raise InputError("there must be at least one prompt, and ranks, depth and batch_size must be at least 1")
    engine = replace(engine, drafter=engine.drafter.uncalibrated)
    if not isinstance(engine.drafter.open([[0]], 1), Ranks):
        raise InputError("this drafter does not rank candidates, so there is no tree to tune; name a model or heads")
    engine = replace(engine, rule="coupled")
    texts: dict[int, list[int]] = {}
    watch = Watch([0] * depth, [[0] * ranks for _ in range(depth)])
    for part in ("writing", "measuring"):
        if part == "measuring":
            known = {tuple(r.prompt): texts[i] for i, r in enumerate(requests)}
            watched = Watched(engine.drafter, known, watch)
            engine = replace(engine, drafter=watched, budget=FixedBudget(STRIDE + 1, STRIDE))
        done = 0
        for piece in generate(engine, requests, batch_size):
            texts[piece.row.index] = [*piece.row.request.prompt, *piece.row.output]
            done += piece.row.finish is not None
            progress(part, done, len(requests))
    if not watch.tested[0]:
        raise InputError("the texts are too short to measure anything; allow more new tokens")
    return Measured(tuple(map(tuple, watch.hits)), tuple(watch.tested))


@dataclass
class Watch:
    """How often the candidates of each depth and rank were right."""

    tested: list[int]
    hits: list[list[int]]

    def note(self, found: Array, truth: Array, size: Sequence[int]) -> None:
        """Candidates [b, d, k] below paths [b, >= d], of which row b's is known to depth size[b]."""
        known = np.arange(found.shape[1]) < np.array(size)[:, None]
        right = (found == truth[:, : found.shape[1], None]) & known[..., None]
        for d, (count, hits) in enumerate(zip(known.sum(0).tolist(), right.sum(0).tolist(), strict=True)):
            self.tested[d] += count
            for i, h in enumerate(hits):
                self.hits[d][i] += h


@dataclass(frozen=True)
class Watched(Drafter):
    """A drafter that is asked for candidates below known texts (by prompt), and drafts the texts themselves."""

    inner: Drafter
    texts: Mapping[tuple[int, ...], list[int]]
    watch: Watch

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.inner.taps

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> WatchedDrafting:
        return WatchedDrafting(self.watch, self.inner.open(prompts, capacity), [self.texts[tuple(p)] for p in prompts])


@dataclass
class WatchedDrafting(Drafting):
    """A drafting whose candidates are held against the text that was written."""

    watch: Watch
    inner: Any
    texts: list[list[int]] = field(default_factory=list)

    def observe(self, round: Round) -> None:
        self.inner.observe(round)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        roots, depth = rows.root, len(self.watch.tested)
        ahead: list[list[int]] = []
        for text, at, root in zip(self.texts, rows.start, roots, strict=True):
            # In low precision a text may be written otherwise the second time; what follows is then unknown.
            same = at < len(text) and text[at] == root
            ahead.append(text[at + 1 : at + 1 + depth] if same else [])
        size = [len(tokens) for tokens in ahead]
        if max(size) > 0:
            truth = padded(ahead)
            self.watch.note(self.inner.candidates(rows, truth, len(self.watch.hits[0])), truth, size)
        deep = min(budget.depth, budget.nodes - 1)
        return chain([[root, *tokens[:deep]] for root, tokens in zip(roots, ahead, strict=True)])

    def select(self, index: Sequence[int]) -> None:
        self.inner.select(index)
        self.texts = [self.texts[i] for i in index]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, WatchedDrafting)
        self.inner.join(other.inner)
        self.texts = self.texts + other.texts


def document(tuned: Tuned, measured: Measured, about: Mapping[str, Any]) -> dict[str, Any]:
    """What `tree=FILE` reads ("paths"), and where it came from."""
    return {
        "format": 1,
        **about,
        "nodes": len(tuned.paths) + 1,
        "expected_tau": tuned.tau,
        "tested": list(measured.tested),
        "accuracies": [list(a) for a in measured.accuracies],
        "paths": [list(p) for p in tuned.paths],
        "values": list(tuned.values),
    }


def store(folder: str, tuned: Tuned) -> None:
    """Make the tree the default of a trained drafter, by writing it into the folder's config."""
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if not isinstance(config, dict) or "outrider_method" not in config or "tree" not in config:
        raise InputError(
            f"{folder or 'this drafter'} has no config that could hold a tree; write it to a file by --out"
        )
    config["tree"] = [list(p) for p in tuned.paths]
    files.write(file, json.dumps(config, indent=2) + "\n")
