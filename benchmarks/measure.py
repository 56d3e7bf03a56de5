"""What the scripts share: held-out prompts as tokens, measured in turn by the runner of `outrider bench`.

Samples lie in runs/bench/NAME, NAME being that of the script's --out. A script that is broken off goes on where it
stopped; one that is to measure anew needs another --out, or the folder gone.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from outrider import files as whole
from outrider.bench import metrics
from outrider.bench.machine import here
from outrider.bench.metrics import Table
from outrider.bench.models import Models
from outrider.bench.peers.outrider import Ours
from outrider.bench.runner import Group, Runner
from outrider.bench.store import Store
from outrider.bench.types import Answer, Ask, Method, Peer, Prompt, Sample, Task
from outrider.engine import Engine
from outrider.llm import LLM

DEMO = files("outrider") / "demo"
RUNS = Path(__file__).resolve().parents[1] / "runs" / "bench"
MACHINE = ("python", "torch", "transformers", "threads", "cores", "processor")

Given = Mapping[str, Sequence[int]]  # prompts as tokens, by their ids


def heldout(llm: LLM, each: int) -> dict[str, list[int]]:
    """The first `each` held-out prompts of every domain."""
    lines = (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    by_domain: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, lines):
        by_domain.setdefault(row["domain"], []).append(row)
    chosen = [row for rows in by_domain.values() for row in rows[:each]]
    return {row["id"]: llm.encode(row.get("messages") or row["text"]) for row in chosen}


class TokenRunner(Runner):
    """A runner of prompts whose text is a JSON list of tokens."""

    def ids(self, task: Task, prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int]:
        return list(json.loads(prompt.turns[0]))


def measured(
    name: str, models: Models, task: str, given: Given, rows: Sequence[Method], temperature: float, tokens: int,
    repeats: int = 1, peers: Mapping[str, Peer] | None = None,
) -> dict[str, list[Sample]]:  # fmt: skip
    """Every method's samples, by its label. `peers`, by label too, are methods that no SPEC can name."""
    arguments = {"model": models.target, "tokens": tokens, "threads": torch.get_num_threads()}
    kept = Store.open(RUNS / name, {"target": models.target, "arguments": arguments, **here()})
    kept.begin()
    runner = TokenRunner(models, kept, tokens)
    runner.peers |= {m.name: peers[m.label] for m in rows if peers and m.label in peers}
    runner.open([m for m in rows if m.name not in runner.peers])
    prompts = tuple(Prompt(name, (json.dumps(list(ids)),)) for name, ids in given.items())
    group = Group(Task(task, prompts), temperature, 1, tuple(rows), repeats)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task(task, total=runner.steps(group))
        runner.run(group, lambda what: bar.update(shown, advance=1, description=what))
    own = group.own(kept.samples)
    found = {m.label: [s for s in own if s.method == m.name] for m in rows}
    wrong = [f.reason for f in kept.failures] + [fault for s in own for fault in s.faults]
    if wrong:
        raise SystemExit(f"{task}: {wrong[0]}")
    return found


def answer(
    engine: Engine, ids: Sequence[int], tokens: int, eos: frozenset[int], t: float = 0.0, seed: int = 0
) -> Answer:
    """One text of an engine of one's own."""
    return Ours(engine).run([ids], Ask(tokens, t, (seed,), eos))


def rates(table: Table) -> list[float]:
    """Decoded tokens per second of each repeat."""
    return [metrics.speed(run).value for run in table.samples]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine() -> dict[str, Any]:
    found = here()
    return {k: {**found["machine"], **found["versions"]}[k] for k in MACHINE}


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.write(path, json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)
