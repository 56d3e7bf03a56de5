"""What is observed once a grid is measured, without a clock: confidences, causes of speed, memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.bench.methods import budget_of
from outrider.bench.peers.outrider import Ours
from outrider.bench.runner import Group, Runner
from outrider.bench.types import PLAIN
from outrider.core.protocols import Round
from outrider.drafters._calibrated import families
from outrider.engine import Batch, Request, Row
from outrider.params import Sampling

from .document import Capacity, Cell, Document, Explanation, Position, Reliability
from .explain import explain
from .memory import held, weights
from .reliability import ece, reliability
from .watch import watch

QUANTILES = (10, 25, 50, 75, 90)
SHOWN = 30  # prompts of a task whose confidences are looked at


def cells_of(document: Document, group: Group) -> dict[str, Cell]:
    """A group's cells by method."""
    key = (group.task.name, group.temperature, group.batch)
    return {c.method: c for c in document.cells if c.key[:3] == key}


def ours(runner: Runner, method: str) -> Ours | None:
    """The peer of a method, if it is our engine."""
    peer = runner.peers.get(method)
    return peer if isinstance(peer, Ours) else None


def explained(runner: Runner, group: Group, cells: dict[str, Cell]) -> Explanation | None:
    """Why the fastest method of a group is not faster still."""
    plain = {m.variant: cells[m.name] for m in group.methods if m.plain}
    good = [c for c in cells.values() if c.state == "done" and c.lossless and c.alpha and c.speedup]
    if not good:
        return None
    fastest = max(good, key=lambda c: c.speedup.value if c.speedup else 0.0)
    return explain(runner, group, fastest, plain[fastest.variant])


def observed(runner: Runner, group: Group, peer: Ours) -> tuple[Reliability | None, list[Position]]:
    """A drafter on this task's prompts: how true its confidences are, and which of its nodes are accepted.

    `reliability`: acceptance by confidence (EAGLE-2's figure 6). `positions`: the share of rounds in
    which each node of the tree, in its order, was accepted, and the spread of that share over prompts (figure 5).
    """
    prompts = [runner.ids(group.task, p, []) for p in group.task.prompts[:SHOWN]]
    pairs: list[tuple[float, bool]] = []
    hits: list[dict[int, int]] = [{} for _ in prompts]
    rounds: list[dict[int, int]] = [{} for _ in prompts]

    def note(prompt: int, round: Round) -> None:
        for family in families(round.tree, round.tokens):
            pairs.extend(family.pairs)
        size, accepted = int(round.tree.size[0]), set(round.paths[0][1:])
        for node in range(1, size):
            rounds[prompt][node] = rounds[prompt].get(node, 0) + 1
            hits[prompt][node] = hits[prompt].get(node, 0) + (node in accepted)

    watch(peer.engine, prompts, runner.tokens, group.temperature, note)
    bins = reliability(pairs)
    by_confidence = Reliability(round(ece(bins), 5), len(pairs), bins) if pairs else None
    results = []
    for node in sorted({n for r in rounds for n in r}):
        each = [h.get(node, 0) / r[node] for h, r in zip(hits, rounds, strict=True) if node in r]
        count = sum(r.get(node, 0) for r in rounds)
        rate = round(sum(h.get(node, 0) for h in hits) / count, 5)
        counts = [[h.get(node, 0), r[node]] for h, r in zip(hits, rounds, strict=True) if node in r]
        results.append(Position(node, count, rate, np.percentile(each, QUANTILES).round(4).tolist(), counts))
    return by_confidence, results


def capacity(document: Document, groups: Sequence[Group], runner: Runner, limit: float) -> list[Capacity]:
    """The most rows that fit into `limit` bytes beside the weights, by what a row of each method holds in a batch.

    A row holds its part of the target's cache and of the drafter's state, after a round of the task's first batch, and
    the logits of its tree in float32. The weights are the target's, and a draft model's.
    """
    results = []
    for group in groups:
        for name, cell in cells_of(document, group).items():
            peer = runner.peers.get(name)
            if cell.state != "done" or not isinstance(peer, Ours):
                continue
            ids = [runner.ids(group.task, p, []) for p in group.chunks[0]]
            sampling = Sampling(group.temperature)
            batch, _ = Batch.start(
                peer.engine, [Row(Request(i, 0, runner.tokens, sampling), n) for n, i in enumerate(ids)]
            )
            if batch is None or len(batch.rows) < len(ids):  # what those that left have held would be shared out
                continue
            batch.round()
            target = peer.engine.target
            used = weights(target) + sum(map(weights, peer.engine.drafter.models))
            nodes = 1 + (cell.alpha is not None) * most_nodes(cell)
            row = (held(batch.session) + held(batch.drafting)) / len(ids) + 4.0 * nodes * target.vocab
            most = int(max(0.0, limit - used) // row)
            results.append(Capacity(*cell.key, round(row), most, limit))
    plain = {(c.task, c.temperature, c.batch): c.bytes_per_row for c in results if c.method == PLAIN}
    less = [c.method for c in results if c.bytes_per_row < plain.get((c.task, c.temperature, c.batch), 0)]
    assert not less, f"{less[0]} takes less memory than plain decoding: rows that had left were counted"
    return results


def most_nodes(cell: Cell) -> int:
    """Nodes of a round, the root left out: as budgeted, or as the adaptive budget's most."""
    return int(getattr(budget_of(cell.budget), "nodes", 32)) - 1
