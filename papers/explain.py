"""Where the distance between the measured and the ideal speed goes: a product of factors, each with its cause.

Ideal: every pass takes no longer than reading the weights once at this machine's measured bandwidth, and commits as
many tokens as the best tree of that size can. From there down to what was measured, tokens per second lose a factor to

    one pass       reading the weights  ->  the pass over one token that plain decoding was measured with
    the nodes      that pass            ->  the pass over the whole tree
    the drafter    the best tree of that many nodes and depths  ->  the trees that were drafted
    the rule       what those trees are worth to fresh draws of the target  ->  what the rule accepted
                   (above 1 under `coupled`: shared noise makes the drafter guess the draw, not only the distribution)
    drafting       the pass alone  ->  the pass and the draft
    the engine     pass and draft  ->  all the rest of a round

The best tree knows the target's distribution: it holds the largest path probabilities, whose sum is its expected
length, and is grown by the target as its own drafter. At T = 0 that distribution is a single token, and the best tree a
chain of as many tokens as the nodes allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from outrider.bench.peers.outrider import Ours
from outrider.bench.runner import Group, Runner
from outrider.budgets.budgeter import FixedBudget
from outrider.core.protocols import Round
from outrider.core.sampling import distribution
from outrider.core.types import DraftTree
from outrider.drafters._growth import Growth
from outrider.drafters._words import Same
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.params import Sampling
from outrider.proofs.logits import host

from .document import Cell, Explanation, Factor
from .memory import weights
from .watch import watch

SHOWN = 6  # prompts that are looked at
ADVICE = {
    "one pass": "a pass takes longer than reading its weights: leave out --no-compile, or use a faster machine",
    "the nodes": "passes over trees cost more than over one token: draft fewer nodes, or use the adaptive budget",
    "the drafter": "its guesses are far from the target's text: take a trained drafter, or train this one longer or "
    "on the target's own answers",
    "the rule": "the rule turns down tokens that the target would have drawn: use coupled",
    "drafting": "drafts take long: a smaller drafter, fewer depths, or a chain",
    "the engine": "what is neither pass nor draft takes long: larger batches, or fewer rounds",
}


@dataclass
class Trees:
    """What the trees of some rounds were."""

    worth: list[float] = field(default_factory=list)  # tokens a round to fresh draws of the target
    nodes: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # that were committed

    @property
    def tau(self) -> float:
        return sum(self.tokens) / len(self.tokens)


def expected(tree: DraftTree, logits: Any, temperature: float) -> list[float]:
    """Tokens a round of each row's tree, the target's own counted: the sum of its paths' probabilities."""
    results, scores, sampling = [], host(logits), Sampling(temperature)
    for b, (tokens, parents, _) in enumerate(tree.host):
        chances = [distribution(scores[b, node], sampling) for node in range(len(tokens))]
        reach = [1.0]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            reach.append(reach[parent] * float(chances[parent][token]))
        results.append(math.fsum(reach))
    return results


def trees(engine: Engine, prompts: Sequence[Sequence[int]], limit: int, temperature: float) -> Trees:
    """The trees that an engine drafts for some prompts."""
    results = Trees()

    def note(prompt: int, round: Round) -> None:
        results.worth += expected(round.tree, round.output.logits, temperature)
        results.nodes += round.tree.size.tolist()
        results.tokens += map(len, round.tokens)
        results.depths += [round.tree.deepest] * len(round.rows)

    watch(engine, prompts, limit, temperature, note)
    return results


def best(
    engine: Engine, prompts: Sequence[Sequence[int]], limit: int, temperature: float, nodes: int, depth: int
) -> float:
    """Tokens a round of the best tree of so many nodes and depths."""
    if nodes < 2 or temperature == 0:
        return float(min(nodes, depth + 1))
    target = engine.target
    drafter = ModelDrafter(
        target, Same(target.vocab, target.vocab), Growth(depth=depth, width=nodes, top_k=nodes, nodes=nodes)
    )
    oracle = replace(engine, drafter=drafter, rule="rejection", budget=FixedBudget(nodes, depth))
    seen = trees(oracle, prompts, min(limit, 16), temperature).worth
    return sum(seen) / len(seen)


def bandwidth(size: int, device: str) -> float:
    """Bytes per second that this machine reads of a buffer of `size` bytes, at most a gibibyte: the best of several."""
    import torch

    buffer, times = torch.ones(max(1, min(size, 1 << 30) // 4), device=device), []
    for _ in range(12):
        began = perf_counter()
        float(buffer.sum())
        times.append(perf_counter() - began)
    return buffer.numel() * 4 / min(times)


def explain(runner: Runner, group: Group, cell: Cell, plain: Cell) -> Explanation | None:
    """One cell's factors; None where nothing was drafted or plain decoding was not measured."""
    peer, ms, rate, tau = runner.peers.get(cell.method), cell.round_ms, cell.tokens_per_second, cell.tau
    if not isinstance(peer, Ours) or not ms or not rate or not tau or not plain.round_ms or not cell.alpha:
        return None
    prompts = [runner.ids(group.task, p, []) for p in group.task.prompts[:SHOWN]]
    seen = trees(peer.engine, prompts, runner.tokens, group.temperature)
    if not seen.worth:
        return None
    nodes, depth = round(sum(seen.nodes) / len(seen.nodes)), max(seen.depths)
    most = best(peer.engine, prompts, runner.tokens, group.temperature, nodes, depth)
    target = peer.engine.target
    size = weights(target)
    one, measured, worth = plain.round_ms.verify, rate.value, sum(seen.worth) / len(seen.worth)
    read = min(one, 1e3 * size / bandwidth(size, target.device))
    parts = [
        ("one pass", read / one, f"a pass over one token takes {one:.2f} ms, its weights {read:.2f} ms to read"),
        ("the nodes", one / ms.verify, f"a pass over the tree ({nodes} nodes) takes {ms.verify:.2f} ms"),
        ("the drafter", worth / most, f"its trees are worth {worth:.2f} tokens a round, the best ones {most:.2f}"),
        ("the rule", seen.tau / worth, f"{seen.tau:.2f} tokens a round were committed"),
        ("drafting", ms.verify / (ms.verify + ms.draft), f"a draft takes {ms.draft:.2f} ms"),
    ]
    ideal = 1e3 * most / read * tau.value / seen.tau  # of all prompts: their texts are as much easier or harder
    so_far = ideal * math.prod(f for _, f, _ in parts)
    parts.append(("the engine", measured / so_far, f"the rest of a round takes {ms.overhead:.2f} ms"))
    return Explanation(
        *cell.key, round(ideal, 1), round(measured, 1), [Factor(n, round(f, 4), w) for n, f, w in parts],
        words(cell.method, ideal, measured, most, nodes, parts),
    )  # fmt: skip


def words(
    method: str, ideal: float, measured: float, most: float, nodes: int, parts: Sequence[tuple[str, float, str]]
) -> str:
    """The paragraph: what the ideal is, what was measured, and what to mend first."""
    first, second = sorted(parts, key=lambda p: p[1])[:2]
    return (
        f"If every pass took only the time to read the weights and every tree of {nodes} nodes were the best one "
        f"({most:.2f} tokens a round), {method} would write {ideal:.0f} tokens a second; it writes {measured:.0f}. "
        f"Most is lost to {first[0]} (a factor of {first[1]:.2f}: {first[2]}), then to {second[0]} ({second[1]:.2f}: "
        f"{second[2]}). Mend first: {ADVICE[first[0]]}."
    )
