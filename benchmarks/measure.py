"""Fair measurement: same process, same prompts, methods in turn (A B A B), medians with spread, texts compared."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from peers import Peer, Sample

LOOP_SHARE = 0.25  # a text with more of its 8-grams repeated than this is called looping


@dataclass
class Series:
    """All samples of one method: [repeat][prompt]."""

    name: str
    samples: list[list[Sample]] = field(default_factory=list)

    def rate(self, keep: Sequence[int], decode: bool = True) -> list[float]:
        """Tokens per second of each repeat over the prompts `keep`."""
        rates = []
        for run in self.samples:
            chosen = [run[i] for i in keep]
            seconds = sum(s.seconds - (s.prefill if decode else 0) for s in chosen)
            tokens = sum(len(s.tokens) - decode for s in chosen)
            rates.append(tokens / seconds)
        return rates

    def tau(self, keep: Sequence[int]) -> float | None:
        used = [s.usage for s in (self.samples[0][i] for i in keep) if s.usage and s.usage.rounds]
        if not used:
            return None
        return sum(u.new_tokens - 1 for u in used) / sum(u.rounds for u in used)

    def shares(self) -> dict[str, float] | None:
        """Where the decoding time went: draft, verify, overhead."""
        used = [s.usage for run in self.samples for s in run if s.usage]
        whole = sum(u.decode_seconds for u in used)
        if not whole:
            return None
        draft, verify = sum(u.draft_seconds for u in used) / whole, sum(u.verify_seconds for u in used) / whole
        return {"draft": draft, "verify": verify, "overhead": 1 - draft - verify}


def interleave(
    peers: Sequence[Peer], prompts: Sequence[Sequence[int]], limit: int, repeats: int, label: str
) -> dict[str, Series]:
    """Every method on every prompt, in turn; the first prompt of each method is a warm-up that is not counted."""
    series = {p.name: Series(p.name) for p in peers}
    console = Console(stderr=True)
    with Progress(
        TextColumn(label), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn(),
        console=console, transient=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(label, total=repeats * len(prompts) * len(peers))
        for peer in peers:
            peer.run(prompts[0], min(limit, 16))
        for repeat in range(repeats):
            for s in series.values():
                s.samples.append([])
            for i, prompt in enumerate(prompts):
                order = list(peers) if (i + repeat) % 2 == 0 else list(peers)[::-1]
                for peer in order:
                    series[peer.name].samples[-1].append(peer.run(prompt, limit))
                    bar.advance(task)
    return series


def loops(tokens: Sequence[int], n: int = 8) -> float:
    """The share of a text's n-grams that occurred before in it."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def summary(series: dict[str, Series], baseline: str, prompts: int) -> dict[str, Any]:
    """Rates and ratios over all prompts and over those whose baseline text does not loop."""
    texts = [s.tokens for s in series[baseline].samples[0]]
    calm = [i for i in range(prompts) if loops(texts[i]) <= LOOP_SHARE]
    found: dict[str, Any] = {"prompts": prompts, "not_looping": len(calm), "loop_share": LOOP_SHARE, "methods": {}}
    for name, s in series.items():
        row: dict[str, Any] = {}
        for key, keep in (("all", list(range(prompts))), ("not_looping", calm)):
            if not keep:
                continue
            rates, base = s.rate(keep), series[baseline].rate(keep)
            ratios = [a / b for a, b in zip(rates, base, strict=True)]
            row[key] = {
                "tokens_per_second": spread(rates),
                "whole_tokens_per_second": spread(s.rate(keep, decode=False)),
                "speedup": spread(ratios),
                "tau": s.tau(keep),
            }
        row["same_text"] = sum(a.tokens == b for a, b in zip(s.samples[0], texts, strict=True))
        row["shares"] = s.shares()
        found["methods"][name] = row
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show(title: str, found: dict[str, Any], baseline: str) -> None:
    table = Table(title=f"{title} ({found['not_looping']} of {found['prompts']} prompts do not loop)")
    for column in (
        "method",
        "tokens/s",
        f"x {baseline}",
        "spread",
        "x not looping",
        "tau",
        "tau n.l.",
        "overhead",
        "same",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, row in found["methods"].items():
        a, c = row["all"], row.get("not_looping", row["all"])
        tau = ["" if r["tau"] is None else f"{r['tau']:.2f}" for r in (a, c)]
        table.add_row(
            name, f"{a['tokens_per_second']['median']:.0f}", f"{a['speedup']['median']:.2f}",
            f"{a['speedup']['min']:.2f}-{a['speedup']['max']:.2f}", f"{c['speedup']['median']:.2f}", *tau,
            f"{row['shares']['overhead']:.1%}" if row["shares"] else "", f"{row['same_text']}/{found['prompts']}",
        )  # fmt: skip
    Console().print(table)


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
    }


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    print(f"wrote {path}", file=sys.stderr)
