"""How long a pass takes, by nodes, rows and context: native, and by the stock forward.

    python benchmarks/passes.py smollm2 --rows 1 8 --contexts 150 700 --nodes 1 4 16 32
    python benchmarks/passes.py smollm2 --weights native int8

The second compares quantised weights, by integer products, with full ones.
All ways stand side by side in one process and are measured in turn; medians and the middle half of the repeats, in
milliseconds. A prompt's time is that of reading `context` tokens for all rows.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from outrider.backends.choose import load
from outrider.backends.native.target import NativeTarget
from outrider.core.protocols import Target
from outrider.core.tree import chain
from outrider.params import InputError

WAYS: dict[str, dict[str, Any]] = {"native": {"weights": "full"}, "stock": {"compile": False}}


def ways_of(weights: list[str]) -> dict[str, dict[str, Any]]:
    """Native passes over full weights and over these."""
    return {"native": WAYS["native"], **{f"native, {one}": {"weights": one} for one in weights}}


def targets(model: str, ways: dict[str, dict[str, Any]]) -> dict[str, Target]:
    """Each way's own target; those that cannot be had are left out, with a word."""
    targets: dict[str, Target] = {}
    for way, how in ways.items():
        try:
            target = load(model, **how).target
        except InputError as error:
            print(f"{way}: {error}")
            continue
        if way.startswith("native") and not isinstance(target, NativeTarget):
            print(f"{way}: this model or machine has no native passes")
            continue
        targets[way] = target
    return targets


def timed(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every call, taken in turn; sorted."""
    for call in calls.values():
        for _ in range(3):
            call()
    results: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(repeats):
        for way, call in calls.items():
            began = perf_counter()
            call()
            results[way].append(1e3 * (perf_counter() - began))
    return {way: sorted(times) for way, times in results.items()}


def cell(times: list[float]) -> str:
    return f"{statistics.median(times):.1f} ({times[len(times) // 4]:.1f}-{times[-1 - len(times) // 4]:.1f})"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[150, 700])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--weights", nargs="+", choices=["int8", "native"], default=[])
    given = parser.parse_args()
    if min(*given.rows, *given.contexts, *given.nodes, given.repeats) < 1:
        parser.error("rows, contexts, nodes and repeats are at least 1")
    try:
        ways = targets(given.model, ways_of(given.weights) if given.weights else WAYS)
    except InputError as error:
        parser.error(str(error))
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    print(f"| rows | context | pass | {' | '.join(ways)} |", "|--:|--:|---|" + "--:|" * len(ways), sep="\n", flush=True)
    dice = random.Random(0)
    for rows in given.rows:
        for context in given.contexts:
            vocab = min(target.vocab for target in ways.values())
            prompts = [[dice.randrange(vocab) for _ in range(context)] for _ in range(rows)]

            def read(target: Target, prompts: list[list[int]] = prompts, context: int = context) -> Any:
                session = target.open(context + max(given.nodes) + 64)
                for _ in session.prefill(prompts):
                    pass
                return session

            results = timed({way: partial(read, target) for way, target in ways.items()}, max(1, given.repeats // 5))
            print(f"| {rows} | {context} | prompt | {' | '.join(map(cell, results.values()))} |", flush=True)
            sessions = {way: read(target) for way, target in ways.items()}
            for nodes in given.nodes:
                tree = chain([list(range(nodes))] * rows)
                calls = {way: partial(session.forward, tree) for way, session in sessions.items()}
                results = timed(calls, given.repeats)
                print(f"| {rows} | {context} | {nodes} | {' | '.join(map(cell, results.values()))} |", flush=True)


if __name__ == "__main__":
    main()
