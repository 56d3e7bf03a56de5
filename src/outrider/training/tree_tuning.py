"""The optimised sparse tree (Medusa, section 2.3.3), for every drafter that ranks candidates.

    accuracy a_d(i)   share of positions where the target's d-th token below the root is the drafter's candidate of rank
                      i, given the d - 1 tokens before it
    value of a node   a_1(i_1) a_2(i_2) ... a_d(i_d) for the path of ranks (i_1, ..., i_d)
    the tree          the n nodes of the highest values (`drafters/_ranks.py:greedy`)

Accuracies are measured on texts of the target: they are generated once with drafts, then again while the drafter's
candidates below every root are recorded. Both runs use the engine, the rule `coupled` and the same seed, so that they
give the same texts. Candidates of a sampled text are ranked with its noise, as in decoding.
"""

from __future__ import annotations

import json
import os
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
STRIDE = 2  # known tokens drafted per round of the second run: every third position is measured


@runtime_checkable
class Ranks(Protocol):
    """A drafting that ranks candidates."""

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates, best first, at each depth [b, d, k] below a path of known tokens [b, >= d]; int64."""


@dataclass(frozen=True)
class Measured:
    """Of tested[d] tokens at depth d + 1, hits[d][i] were the candidate of rank i."""

    hits: tuple[tuple[int, ...], ...]
    tested: tuple[int, ...]

    @property
    def accuracies(self) -> tuple[tuple[float, ...], ...]:
        """Accuracies that do not increase with the rank: where noise makes them, neighbours are averaged."""
        pairs = zip(self.hits, self.tested, strict=True)
        return tuple(falling([h / t for h in hits]) for hits, t in pairs if t > 0)


@dataclass(frozen=True)
class Tuned:
    """A sparse tree. paths: its nodes without the root, best first; every prefix is the best smaller tree."""

    paths: tuple[tuple[int, ...], ...]
    values: tuple[float, ...]

    @property
    def tau(self) -> float:
        """Expected tokens per round, the target's own included, if the accuracies of depths multiply."""
        return 1 + sum(self.values)


def falling(shares: Sequence[float]) -> tuple[float, ...]:
    """The nearest non-increasing sequence (pool adjacent violators): .5 .1 .2 .1 -> .5 .15 .15 .1"""
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
        raise InputError(f"nodes must be at least 2, the root and one more, not {nodes}")
    tuned = Tuned(*_ranks.greedy(measured.accuracies, nodes - 1))
    if not tuned.paths:
        raise InputError("none of the drafter's candidates was right, so there is no tree to grow; train it first")
    return tuned


def measure(
    engine: Engine,
    requests: Sequence[Request],
    ranks: int = 10,
    depth: int = 8,
    batch_size: int = 8,
    progress: Progress = lambda part, done, of: None,
) -> Measured:
    """The accuracy of each rank at each depth, on the target's texts for these requests."""
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
    """Counts of right candidates by depth and rank."""

    tested: list[int]
    hits: list[list[int]]

    def note(self, ranked: Array, truth: Array, size: Sequence[int]) -> None:
        """Count candidates ranked [b, d, k] against paths truth [b, >= d], known to depth size[b]."""
        known = np.arange(ranked.shape[1]) < np.array(size)[:, None]
        right = (ranked == truth[:, : ranked.shape[1], None]) & known[..., None]
        for d, (count, hits) in enumerate(zip(known.sum(0).tolist(), right.sum(0).tolist(), strict=True)):
            self.tested[d] += count
            for i, h in enumerate(hits):
                self.hits[d][i] += h


@dataclass(frozen=True)
class Watched(Drafter):
    """A drafter that drafts known texts (by prompt) and records another drafter's candidates below them."""

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
    """A drafting whose candidates are compared with a known text."""

    watch: Watch
    inner: Any
    texts: list[list[int]] = field(default_factory=list)

    def observe(self, round: Round) -> None:
        self.inner.observe(round)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        roots, depth = rows.root, len(self.watch.tested)
        ahead: list[list[int]] = []
        for text, at, root in zip(self.texts, rows.start, roots, strict=True):
            # In low precision the second text may differ; the rest of it is then unknown.
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
    """The document that `tree=FILE` loads ("paths"), with its origin."""
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


def storing(folder: str | Path) -> dict[str, Any]:
    """The config of a drafter's folder that may hold a tree. Raises InputError where it cannot."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if not isinstance(config, dict) or "outrider_method" not in config or "tree" not in config:
        raise InputError(f"{folder or 'this drafter'} has no config for a tree; write it to a file with --out")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} cannot be written; write the tree to a file with --out")
    return config


def store(folder: str | Path, tuned: Tuned) -> None:
    """Make the tree a trained drafter's default, in the folder's config. Raises as `storing` does."""
    config = {**storing(folder), "tree": [list(p) for p in tuned.paths]}
    files.write(Path(folder) / "config.json", json.dumps(config, indent=2) + "\n")
