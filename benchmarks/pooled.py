"""A run of `outrider bench` as one table over all its prompts: `python benchmarks/pooled.py RUN OUT`.

A report's means weigh tasks alike, and its cells are tasks; here all prompts weigh alike, whatever their task, so that
a figure rests on as many prompts as there are. Prompts whose plain text loops at T = 0 are left out at every T, as in
the report; `all` counts them too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.bench import metrics, report
from outrider.bench.metrics import LOOP_SHARE, Table
from outrider.bench.store import read_samples
from outrider.bench.types import Sample

NAMES = {"transformers:demo": "transformers, assisted"}


def pooled(folder: Path) -> dict[str, Any]:
    document, samples = report.read(folder), list(read_samples(folder))
    cells = document["cells"]
    run, tasks = document["run"], list(document["tasks"])
    found: dict[str, Any] = {"machine": {**run["machine"], **run["versions"]}, "temperatures": {}}
    for t in sorted({c["temperature"] for c in cells}):
        mine = numbered([s for s in samples if s.temperature == t and s.batch == 1], tasks)
        names = {c["method"]: label(c) for c in cells if c["temperature"] == t and c["state"] == "done"}
        same = {n: sum(c["same_text"] for c in cells if (c["method"], c["temperature"]) == (n, t)) for n in names}
        rows = {n: [s for s in mine if s.method == n] for n in names}
        plain = rows["none"]
        every = sorted(s.chunk for s in plain if metrics.tokens(s) > 1)
        calm = [s.chunk for s in plain if s.chunk in every and not metrics.looping(s)]
        domain = {s.chunk: s.task.removeprefix("demo/").replace("-", "_") for s in plain}
        arguments = {"per_domain": run["arguments"]["limit"], "tokens": run["arguments"]["tokens"]}
        found["temperatures"][f"{t:g}"] = {
            "arguments": arguments, "prompts": len(every), "not_looping": len(calm), "loop_share": LOOP_SHARE,
            "methods": {
                name: {
                    "same_text": same[n],
                    "all": figures(rows[n], plain, every),
                    "not_looping": figures(rows[n], plain, calm),
                    "alpha": [d["rate"][0] for d in metrics.depths(Table.of(rows[n], calm).usages())],
                    "milliseconds_per_round": metrics.round_ms(Table.of(rows[n], calm).usages()),
                    "domains": {
                        d: figures(rows[n], plain, [c for c in calm if domain[c] == d])
                        for d in dict.fromkeys(domain.values())
                    },
                }
                for n, name in names.items()
            },
        }  # fmt: skip
    return found


def label(cell: dict[str, Any]) -> str:
    return cell["label"] or NAMES.get(cell["spec"], cell["spec"])


def numbered(samples: Sequence[Sample], tasks: Sequence[str]) -> list[Sample]:
    """Chunks numbered through all tasks; of each chunk and method the last session's."""
    newest = {(s.task, s.chunk, s.method, s.repeat): s for s in sorted(samples, key=lambda s: s.session)}
    most = 1 + max(s.chunk for s in samples)
    return [replace(s, chunk=tasks.index(s.task) * most + s.chunk) for s in newest.values()]


def figures(mine: Sequence[Sample], plain: Sequence[Sample], chunks: Sequence[int]) -> dict[str, Any]:
    """tau and speed with their intervals; tau is 0 where a method counts no rounds."""
    if not chunks:
        return {}
    table, base = Table.of(mine, chunks), Table.of(plain, chunks)
    usages, faster = table.usages(), table.faster(base)
    assert faster is not None, "all methods answered the same prompts in turn"
    return {
        "prompts": len(chunks),
        "tau": metrics.tau(usages).interval if usages else [0.0, 0.0, 0.0],
        "speedup": faster.interval,
        "tokens_per_second": table.rate().interval,
    }


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.write_text(json.dumps(pooled(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
