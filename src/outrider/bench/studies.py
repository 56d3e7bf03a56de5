"""What is looked at once a grid is measured, without a clock: quality, confidences, causes of speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ..calibration import Family, Observed, ece, reliability
from ..engine import Batch, Request, Row
from ..llm import load
from ..types import Sampling
from .cells import Judge
from .explain import explain as causes
from .models import Models
from .peers.outrider import Ours
from .quality import quality
from .runner import Group, Runner

SHOWN = 16  # prompts of a task whose confidences are looked at


def add(
    document: dict[str, Any], judge: Judge, groups: Sequence[Group], models: Models, original: str | None,
    observe: bool, explain: bool,
) -> None:  # fmt: skip
    """Fill in what cells do not know by themselves."""
    runner = judge.runner
    referee = load(original, "none", dtype=models.dtype, device=models.device) if original else None
    for group in groups:
        cells = cells_of(document, group)
        for cell in cells.values():
            if cell["state"] not in ("done", "partial") or "new_tokens" not in cell:
                continue
            if not cell["lossless"] or referee is not None:
                cell["quality"] = quality(runner, group, cell["method"], cell["variant"], referee or models.llm())
            if observe and isinstance(peer := runner.peers.get(cell["method"]), Ours):
                cell["reliability"] = confidences(runner, group, peer)
        if explain and group.batch == 1:
            document["explain"] += [found for found in [best_of(runner, group, cells)] if found]


def cells_of(document: dict[str, Any], group: Group) -> dict[str, dict[str, Any]]:
    key = (group.task.name, group.temperature, group.batch)
    return {c["method"]: c for c in document["cells"] if (c["task"], c["temperature"], c["batch"]) == key}


def best_of(runner: Runner, group: Group, cells: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Why the fastest method of a group is not faster still."""
    plain = {m.variant: cells[m.name] for m in group.methods if m.plain}
    good = [c for c in cells.values() if c["state"] == "done" and c["lossless"] and c.get("alpha") and c.get("speedup")]
    if not good:
        return None
    fastest = max(good, key=lambda c: c["speedup"][0])
    return causes(runner, group, fastest, plain[fastest["variant"]])


@torch.no_grad()
def confidences(runner: Runner, group: Group, peer: Ours) -> dict[str, Any] | None:
    """The reliability of a drafter's confidences on this task's prompts (EAGLE-2's figure 6; `calibration.py`)."""
    pairs: list[tuple[float, bool]] = []

    def note(family: Family) -> None:
        pairs.extend(family.pairs)

    engine = replace(peer.engine, drafter=Observed(peer.engine.drafter, note))
    for i, prompt in enumerate(group.task.prompts[:SHOWN]):
        ids = runner.ids(group.task, prompt, [])
        batch, _ = Batch.start(engine, [Row(Request(ids, i, runner.tokens, Sampling(group.temperature)), 0)])
        while batch is not None:
            batch.round()
            batch = batch.leave()
    if not pairs:
        return None
    bins = reliability(pairs)
    return {"ece": round(ece(bins), 5), "pairs": len(pairs), "bins": [asdict(b) for b in bins]}
