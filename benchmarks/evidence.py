"""What the papers' findings are held against: what was published, what was measured, and who judges which row.

An *entry* answers for one row of the inventory. Nothing here knows a paper: `findings/` does.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import ONE, Check, Figure, ahead, higher, inverse, open_
from outrider.bench.document import Cell
from outrider.bench.plots import pooled
from outrider.bench.results import from_json
from outrider.budgets.calibration import Bin

FIELDS = ("where", "target", "method", "task", "metric")  # of a published fact


class Missing(LookupError):
    """A results file, or what a finding needs of it, is not there."""


@dataclass(frozen=True)
class Evidence:
    """All that is read: the inventory's rows by their ids, the published facts, the results by their file's name."""

    inventory: Mapping[str, Mapping[str, str]]
    facts: Sequence[Mapping[str, str]]
    results: Mapping[str, Any]

    @classmethod
    def read(cls, data: Path, results: Path) -> Evidence:
        with (data / "inventory.csv").open(encoding="utf-8", newline="") as lines:
            inventory = {row["ids"]: row for row in csv.DictReader(lines)}
        with (data / "paper_facts.csv").open(encoding="utf-8", newline="") as lines:
            facts = list(csv.DictReader(lines))
        documents = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(results.glob("*.json"))}
        return cls(inventory, facts, documents)

    # what was published

    def published(self, query: str, paper: str) -> list[Mapping[str, str]]:
        """The facts that a query such as "Table 5; EAGLE chain; tau; T=0" names: each of its words is a whole field.
        The paper is the row's own, or another one that the query begins with, as in "EAGLE-2: Table 1; mean"."""
        other, _, words = query.rpartition(": ")
        mine = [fact for fact in self.facts if fact["paper"] == (other or paper)]
        asked = set(words.split("; "))
        rows = [f for f in mine if asked <= {f"T={f['temperature']}", *(f[k] for k in FIELDS)}]
        if not rows or len({row["metric"] for row in rows}) > 1:
            raise ValueError(f"{query!r} must name facts of {paper}, all of one metric; it names {len(rows)}")
        return rows

    def span(self, query: str, paper: str) -> str:
        """The published value as it was printed, or the lowest and the highest of several."""
        values = sorted({row["value"] for row in self.published(query, paper)}, key=float)
        return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"

    def told(self, ids: str) -> str:
        """What a row says was published, its queries answered."""
        row = self.inventory[ids]
        paper = "Mamba drafters" if row["paper"] == "Mamba" else row["paper"]
        return re.sub(r"\{(.+?)\}", lambda query: self.span(query[1], paper), row["published"])

    # what was measured

    def at(self, file: str, *keys: str) -> Any:
        found: Any = self.results
        for i, key in enumerate((file, *keys)):
            if key not in found:
                what = f"has no {key!r}" if i else "is not there"
                raise Missing(f"`benchmarks/results/{file}.json` {what}")
            found = found[key]
        return found

    def method(self, file: str, t: str, name: str, metric: str = "tau") -> Figure:
        """Of the prompts that do not loop, with the figures of the domains."""
        row = self.at(file, "temperatures", t, "methods", name)
        parts = {domain: found[metric][0] for domain, found in row["domains"].items() if found}
        return Figure.of(row["not_looping"][metric], parts)

    def domain(self, t: str, name: str, domain: str, metric: str = "speedup") -> Figure:
        return Figure.of(self.at("drafters", "temperatures", t, "methods", name, "domains", domain)[metric])

    def rates(self, t: str, name: str) -> list[Figure]:
        """Acceptance by depth, of the first five. The file has no counts: the intervals are those of as many rounds as
        the texts can have taken."""
        document, found = self.at("drafters", "temperatures", t), []
        tested = (
            document["not_looping"] * (document["arguments"]["tokens"] - 1) / self.method("drafters", t, name).value
        )
        for rate in self.at("drafters", "temperatures", t, "methods", name, "alpha")[:5]:
            half = 1.96 * math.sqrt(rate * (1 - rate) / tested)
            found.append(Figure(rate, rate - half, rate + half))
            tested *= rate
        return found

    def row(self, file: str, table: str, name: str) -> Mapping[str, Any]:
        """A named row of a list: a run of the ablations, a rung of the ladder."""
        for row in self.at(file, table):
            if row["name"] == name:
                return row
        raise Missing(f"`benchmarks/results/{file}.json` has no {name!r} in {table!r}")

    def run(self, name: str, t: str) -> Figure:
        """tau of an ablation."""
        return Figure.of(self.row("ablations", "runs", name)["tau"][t])

    def runs(self, words: str, a: str, b: str, t: str) -> Check:
        """The statement that one ablation's tau lies above another's: by their ratio on the same prompts, if it was
        measured (it is to "eagle"), else by the two figures."""
        x, y = self.run(a, t), self.run(b, t)
        ratio = self.row("ablations", "runs", b if a == "eagle" else a).get("ratio", {}).get(t)
        if ratio and "eagle" in (a, b):
            of = inverse(Figure.of(ratio)) if a == "eagle" else Figure.of(ratio)
            return Check(f"{words}: {x.value:.2f} against {y.value:.2f}, ratio {of}", ahead(of, ONE)[0])
        return higher(words, x, y)

    def rung(self, table: str, name: str, metric: str = "tau") -> Figure:
        return Figure.of(self.row("lossy", table, name)[metric])

    def mean(self, run: str, method: str, t: float, of: str = "speedup", batch: int = 1) -> Figure:
        """A macro mean of a report of `outrider bench`, with the tasks' figures."""
        keys = {"method": method, "temperature": t, "batch": batch}
        for row in self.at(run, "macro"):
            if all(row[k] == v for k, v in keys.items()):
                parts = {c["task"]: c[of][0] for c in self.cells(run, **keys) if c.get(of)}
                return Figure.of(row[of], parts)
        raise Missing(f"`benchmarks/results/{run}.json` has no mean of {method!r} at T = {t:g} and batch size {batch}")

    def bins(self, run: str, method: str, t: float) -> list[Bin]:
        """The reliability diagram of a method, all tasks together."""
        cells = [from_json(Cell, c) for c in self.cells(run, method=method, temperature=t)]
        if not any(c.reliability for c in cells):
            raise Missing(f"`benchmarks/results/{run}.json` has no confidences of {method!r} at T = {t:g}")
        return pooled(cells)

    def cells(self, run: str, **keys: Any) -> list[dict[str, Any]]:
        """The cells of a report that have these figures of identity."""
        return [c for c in self.at(run, "cells") if all(c[k] == v for k, v in keys.items())]


# ------------------------------------------------------------------------------------------------ entries


Judge = Callable[[Evidence], list[Check]]


@dataclass(frozen=True)
class Entry:
    """`judge`: or why nothing was measured. `source`: the results file whose command made the figures, or a command.
    `note`: what a reader should know beside the figures; it holds none."""

    judge: Judge | str
    source: str
    note: str = ""

    def checks(self, evidence: Evidence) -> list[Check]:
        if isinstance(self.judge, str):
            return [open_(self.judge)]
        try:
            return self.judge(evidence)
        except Missing as missing:
            return [open_(f"{missing}")]


ENTRIES: dict[str, Entry] = {}  # by the ids of the inventory's row


def finding(ids: str, source: str, note: str = "") -> Callable[[Judge], Judge]:
    """Decorates the function that judges these rows."""

    def add(judge: Judge) -> Judge:
        _enter(ids, Entry(judge, source, note))
        return judge

    return add


def unmeasured(ids: str, why: str, command: str) -> None:
    _enter(ids, Entry(why, command))


def _enter(ids: str, entry: Entry) -> None:
    assert ids not in ENTRIES, f"{ids} is judged twice"
    ENTRIES[ids] = entry
