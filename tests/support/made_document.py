"""A results.json that no run wrote: figures of a likely shape, with everything that a report can show.

python tests/support/made_document.py FOLDER      writes its report, to be looked at
"""

from __future__ import annotations

import random
import sys
from typing import Any

from outrider.bench.types import VERSION

TASKS = {"chat": 1.0, "maths": 1.15, "code": 1.3, "summaries": 0.85}
CUTS = {"narrative@1024": 1024, "narrative@2048": 2048, "narrative@4096": 4096}
# method -> spec, rule, budget, variant, peer; tau and speed-up at T = 0 and batch size 1; draft, verify (ms)
METHODS: dict[str, tuple[tuple[str, str, str, str, str], float | None, float, float, float]] = {
    "none": (("none", "coupled", "auto", "plain", "outrider"), 1.0, 1.0, 0.04, 5.65),
    "transformers": (("transformers", "", "", "plain", "transformers"), None, 0.72, 0, 0),
    "lookup": (("lookup", "coupled", "auto", "plain", "outrider"), 1.97, 1.43, 0.15, 7.74),
    "EAGLE-2, 8x5": (("eagle:demo/eagle", "coupled", "8x5", "plain", "outrider"), 3.2, 1.5, 4.1, 8.6),
    "EAGLE-2, 16x5": (("eagle:demo/eagle", "coupled", "16x5", "plain", "outrider"), 3.56, 1.44, 4.7, 9.6),
    "EAGLE-2, 60x6": (("eagle:demo/eagle", "coupled", "60x6", "plain", "outrider"), 4.42, 1.13, 5.8, 17.2),
    "EAGLE chain": (("eagle:demo/eagle?tree=chain", "coupled", "auto", "plain", "outrider"), 2.93, 1.52, 3.1, 7.9),
    "HASS": (("eagle:demo/hass", "coupled", "auto", "plain", "outrider"), 3.93, 1.59, 4.6, 9.7),
    "HASS, rejection": (("eagle:demo/hass", "rejection", "auto", "plain", "outrider"), 3.1, 1.2, 4.6, 9.7),
    "HASS, typical?epsilon=0.3&delta=0.09": (
        ("eagle:demo/hass", "typical?epsilon=0.3&delta=0.09", "auto", "plain", "outrider"), 4.4, 1.75, 4.6, 9.7,
    ),
    "none, int8": (("none", "coupled", "auto", "int8", "outrider"), 1.0, 1.3, 0.04, 4.3),
    "HASS, int8": (("eagle:demo/hass", "coupled", "auto", "int8", "outrider"), 3.9, 1.9, 4.6, 7.1),
}  # fmt: skip


def triple(value: float, width: float = 0.06) -> list[float]:
    return [round(value, 4), round(value * (1 - width), 4), round(value * (1 + width), 4)]


def cell(
    dice: random.Random, task: str, easy: float, temperature: float, batch: int, method: str, words: int
) -> dict[str, Any]:
    (spec, rule, budget, variant, peer), tau, speed, draft, verify = METHODS[method]
    lossless = not rule.startswith("typical")
    drafts = tau is not None and tau > 1
    if drafts:
        tau = 1 + (tau - 1) * easy * (0.75 if temperature else 1) * dice.uniform(0.92, 1.08)
        speed = 1 + (speed - 1) * easy - 0.25 * bool(temperature) - 0.12 * (batch > 1)
    speed *= dice.uniform(0.97, 1.03) if spec != "none" else 1
    rate = 166 * (batch**0.7) * speed
    alpha = 1 - 1 / (tau + 0.5) if drafts else None
    results: dict[str, Any] = {
        "task": task, "temperature": temperature, "batch": batch, "method": method, "spec": spec, "rule": rule,
        "budget": budget, "variant": variant, "peer": peer, "lossless": lossless, "state": "done", "reason": "",
        "faults": [], "prompts": 13, "repeats": 3, "new_tokens": 416, "looping": 2, "same_text": 13, "compared": 13,
        "tokens_per_second": triple(rate, 0.04), "speedup": [1.0, 1.0, 1.0] if method == "none" else triple(speed),
        "over_stock": triple(speed / 0.72), "tau": triple(tau, 0.05) if tau else None,
        "alpha": triple(alpha, 0.03) if alpha else None, "depths": [],
        "prefill_ms": triple(12 + words * 0.09), "round_ms": None, "prompt_tokens": float(words),
        "divergences": [],
    }  # fmt: skip
    if tau is not None:
        results["round_ms"] = {"draft": draft, "verify": verify * batch**0.4, "overhead": 0.3 + 0.02 * batch}
    if method in ("HASS", "EAGLE chain"):
        results["depths"] = [depth(dice, d, alpha * 0.97**d) for d in range(1, 6)]
    return results


def depth(dice: random.Random, d: int, rate: float) -> dict[str, Any]:
    rate = min(0.97, rate * dice.uniform(0.95, 1.05))
    tested = 400 // d
    return {
        "depth": d, "tested": tested, "accepted": round(tested * rate), "rate": triple(rate, 0.03)
    }  # fmt: skip


def made() -> dict[str, Any]:
    """The whole document. "EAGLE-2, 60x6" is invalid on code at T = 0; "lookup" failed once, and is partial once."""
    dice = random.Random(0)
    cells = [
        cell(dice, task, easy, t, batch, method, 180)
        for t in (0.0, 1.0)
        for batch in (1, 4)
        for task, easy in TASKS.items()
        for method, (about, *_) in METHODS.items()
        if t or about[1] in ("coupled", "")
    ]
    cells += [
        cell(dice, task, 0.9, 0.0, 1, method, words)
        for task, words in CUTS.items()
        for method, (about, *_) in METHODS.items()
        if about[1] in ("coupled", "")
    ]
    by = {(c["task"], c["temperature"], c["batch"], c["method"]): c for c in cells}
    broken = by["code", 0.0, 1, "EAGLE-2, 60x6"]
    broken |= {"state": "invalid", "reason": "counts 33 tokens where its text has 32", "same_text": 11}
    broken |= {"faults": ["counts 33 tokens where its text has 32"], "speedup": triple(9.87), "tau": triple(8.76)}
    failed = by["maths", 1.0, 4, "lookup"]
    kept = {k: failed[k] for k in list(failed)[:10]}
    failed.clear()
    failed |= {**kept, "state": "failed", "reason": "RuntimeError: the target ran out of memory", "faults": []}
    by["chat", 1.0, 4, "lookup"] |= {"state": "partial", "reason": "not all prompts yet", "prompts": 7}
    near = {"prompt": "maths-3", "turn": 0, "position": 17, "margin": 2.4e-6, "mine": 311, "plain": 64}
    by["maths", 0.0, 4, "HASS"] |= {"divergences": [near], "same_text": 12}
    return {
        "format": VERSION,
        "run": {
            "target": "outrider/demo", "started": "2025-03-04T10:11:12+00:00", "seconds": 1834.2, "sessions": 1,
            "arguments": {"target": "demo", "tokens": 32, "temperature": [0.0, 1.0], "batch_size": [1, 4], "seed": 0},
            "machine": {"processor": "x86_64", "cores": 2, "threads": 2, "gpus": []},
            "versions": {"outrider": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.23.0"},
        },
        "tasks": {
            name: {"prompts": 13, "kind": name.partition("@")[0], "note": "", "raw": False, "cut": CUTS.get(name)}
            for name in (*TASKS, *CUTS)
        },
        "cells": cells, "macro": macro(cells),
    }  # fmt: skip


def macro(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a run does: of methods with a figure for every task."""
    results = []
    for t, b in dict.fromkeys((c["temperature"], c["batch"]) for c in cells):
        group = [c for c in cells if (c["temperature"], c["batch"]) == (t, b)]
        tasks = {c["task"] for c in group}
        for method in dict.fromkeys(c["method"] for c in group):
            mine = [c for c in group if c["method"] == method and c["state"] in ("done", "partial")]
            if len(mine) < len(tasks):
                continue
            row = {"temperature": t, "batch": b, "method": method, "tasks": len(tasks)}
            for name in ("speedup", "tau", "tokens_per_second"):
                each = [c[name] for c in mine if c[name]]
                row[name] = [sum(x) / len(x) for x in zip(*each, strict=True)] if each else None
            results.append(row)
    return results


if __name__ == "__main__":
    from outrider.bench import results
    from outrider.bench.document import Document
    from outrider.schema import from_dict

    print(*results.write(from_dict(Document, made()), sys.argv[1]), sep="\n")
