"""A run of `outrider bench` as one table over all its prompts: `python benchmarks/pooled.py RUN OUT`.

A report's means weigh tasks alike, and its cells are tasks; here all prompts weigh alike, whatever their task, so that
a figure rests on as many prompts as there are. Prompts whose plain text loops are left out, as in the report; `all`
counts them too. The run has one variant of the target.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.bench import metrics, read
from outrider.bench.cells import newest
from outrider.bench.metrics import LOOP_SHARE, Table
from outrider.bench.results import to_json
from outrider.bench.store import read_samples
from outrider.bench.types import PLAIN, Sample

NAMES = {"transformers:demo": "transformers, assisted"}


def pooled(folder: Path) -> dict[str, Any]:
    """The table of each temperature."""
    document: dict[str, Any] = to_json(read(folder))
    run = document["run"]
    arguments = {"per_domain": run["arguments"]["limit"], "tokens": run["arguments"]["tokens"]}
    found: dict[str, Any] = {"machine": {**run["machine"], **run["versions"]}, "temperatures": {}}
    for t in sorted({c["temperature"] for c in document["cells"]}):
        mine = samples(folder, document, t)
        plain = newest(mine[PLAIN])
        every = [i for i, s in plain.items() if metrics.tokens(s) > 1]
        domains = {i: s.task.removeprefix("demo/").replace("-", "_") for i, s in plain.items()}
        found["temperatures"][f"{t:g}"] = {
            "arguments": arguments, "prompts": len(every), "not_looping": len(calm(mine)), "loop_share": LOOP_SHARE,
            "methods": {name: row(rows, mine[PLAIN], every, calm(mine), domains) for name, rows in mine.items()},
        }  # fmt: skip
    return found


def samples(folder: Path, document: dict[str, Any], t: float) -> dict[str, list[Sample]]:
    """Of every method that answered all tasks at a temperature, by its label; prompts numbered through all tasks."""
    cells = [c for c in document["cells"] if (c["temperature"], c["batch"]) == (t, 1)]
    lacking = {c["method"] for c in cells if c["state"] != "done"}
    names = {c["method"]: label(c) for c in cells if c["method"] not in lacking}
    mine = [s for s in read_samples(folder) if (s.temperature, s.batch) == (t, 1) and s.method in names]
    number = {key: i for i, key in enumerate(dict.fromkeys((s.task, s.digest) for s in mine))}
    mine = [replace(s, chunk=number[s.task, s.digest]) for s in mine]
    return {name: [s for s in mine if s.method == method] for method, name in names.items()}


def label(cell: dict[str, Any]) -> str:
    return str(cell["label"] or NAMES.get(cell["spec"], cell["spec"]))


def calm(mine: dict[str, list[Sample]]) -> list[int]:
    """The prompts whose plain text does not loop."""
    return [i for i, s in newest(mine[PLAIN]).items() if metrics.tokens(s) > 1 and not metrics.looping(s)]


def row(
    mine: Sequence[Sample], plain: Sequence[Sample], every: Sequence[int], keep: Sequence[int], domains: dict[int, str]
) -> dict[str, Any]:
    """A method's figures."""
    usages, truth = Table.of(mine, keep).usages(), newest(plain)
    return {
        "same_text": sum(texts(s) == texts(truth[i]) for i, s in newest(mine).items()),
        "all": figures(mine, plain, every),
        "not_looping": figures(mine, plain, keep),
        "alpha": [d.rate.value for d in metrics.depths(usages)],
        "milliseconds_per_round": vars(metrics.round_ms(usages)),
        "domains": {
            name: figures(mine, plain, [i for i in keep if domains[i] == name])
            for name in dict.fromkeys(domains.values())
        },
    }


def texts(sample: Sample) -> list[list[list[int]]]:
    return [turn.tokens for turn in sample.turns]


def figures(mine: Sequence[Sample], plain: Sequence[Sample], chunks: Sequence[int]) -> dict[str, Any]:
    """tau and speed with their intervals; tau is 0 where a method counts no rounds."""
    if not chunks:
        return {}
    table = Table.of(mine, chunks)
    usages, faster = table.usages(), table.faster(plain)
    assert faster is not None, "all methods answered the same prompts in turn"
    return {
        "prompts": len(chunks),
        "tau": list(metrics.tau(usages).estimate) if usages else [0.0, 0.0, 0.0],
        "speedup": list(faster.estimate),
        "tokens_per_second": list(table.rate().estimate),
    }


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.write_text(json.dumps(pooled(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
