"""What the papers' findings are held against: what was published, what was measured, and who judges which row.

An *entry* answers for one row of the inventory. Nothing here knows a paper: `findings/` does.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import page
from .document import Cell, Document, Mean, pooled_bins
from .figures import ONE, Check, Figure, ahead, higher, inverse, open_, true
from .reliability import Bin

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
    def read(cls, data: Path) -> Evidence:
        with (data / "inventory.csv").open(encoding="utf-8", newline="") as lines:
            inventory = {row["ids"]: row for row in csv.DictReader(lines)}
        with (data / "paper_facts.csv").open(encoding="utf-8", newline="") as lines:
            facts = list(csv.DictReader(lines))
        return cls(inventory, facts, {p.stem: page.read(p.stem) for p in sorted(page.RESULTS.glob("*.json"))})

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

    def at(self, file: str) -> Any:
        """The report of a study: a `Document` of `outrider bench`, but for the ablations."""
        if file not in self.results:
            raise Missing(f"`papers/results/{file}.json` is not there")
        return self.results[file]

    def mean(self, file: str, name: str, t: float, batch: int = 1) -> Mean:
        """A method's figures over all prompts of a study; where a report has only those, over its tasks."""
        report: Document = self.at(file)
        for row in (*report.pooled, *report.macro):
            if (row.method, row.temperature, row.batch) == (name, t, batch):
                return row
        what = f"has no mean of {name!r} at T = {t:g} and batch size {batch}"
        raise Missing(f"`papers/results/{file}.json` {what}")

    def method(self, file: str, t: float, name: str, of: str = "tau", batch: int = 1) -> Figure:
        """A figure of such a mean, with those of the tasks."""
        parts = {c.task: f.value for c in self.cells(file, name, t, batch) if (f := getattr(c, of))}
        return Figure.of(getattr(self.mean(file, name, t, batch), of), parts)

    def cells(self, file: str, name: str, t: float, batch: int = 1) -> list[Cell]:
        """The cells of a method, one for each task."""
        return [c for c in self.at(file).cells if (c.method, c.temperature, c.batch) == (name, t, batch)]

    def rates(self, t: float, name: str, file: str = "drafters") -> list[Figure]:
        """Acceptance by depth, of the first five."""
        return [Figure.of(depth.rate) for depth in self.mean(file, name, t).depths[:5]]

    def at_task(self, file: str, name: str, t: float, task: str) -> Cell:
        """A method's cell on one task."""
        for cell in self.cells(file, name, t):
            if cell.task == task:
                return cell
        raise Missing(f"`papers/results/{file}.json` has no {name!r} on {task} at T = {t:g}")

    def same_text(self, file: str, t: float, rule: str) -> Check:
        """The statement that every text of a lossless method is plain decoding's, where the rule promises that."""
        found = [m for m in self.at(file).pooled if m.temperature == t and m.compared]
        least = min(found, key=lambda m: m.same_text / m.compared)
        words = f"texts equal to plain decoding's{rule} at T = {t:g}, the least of {len(found)} methods"
        return true(f"{words}: {least.same_text} of {least.compared}", least.same_text == least.compared)

    def bins(self, file: str, name: str, t: float) -> list[Bin]:
        """The reliability diagram of a method, all tasks together."""
        cells = [c for c in self.cells(file, name, t) if c.reliability]
        if not cells:
            raise Missing(f"`papers/results/{file}.json` has no confidences of {name!r} at T = {t:g}")
        return pooled_bins(cells)

    def ablation(self, name: str, file: str = "ablations") -> Mapping[str, Any]:
        for row in self.at(file)["runs"]:
            if row["name"] == name:
                return row
        raise Missing(f"`papers/results/{file}.json` has no {name!r}")

    def run(self, name: str, t: str, file: str = "ablations") -> Figure:
        """tau of an ablation."""
        return Figure.of(self.ablation(name, file)["tau"][t])

    def runs(self, words: str, a: str, b: str, t: str, file: str = "ablations") -> Check:
        """The statement that one ablation's tau lies above another's: by their ratio on the same prompts, if it was
        measured (it is to "eagle"), else by the two figures."""
        x, y = self.run(a, t, file), self.run(b, t, file)
        ratio = self.ablation(b if a == "eagle" else a, file).get("ratio", {}).get(t)
        if ratio and "eagle" in (a, b):
            of = inverse(Figure.of(ratio)) if a == "eagle" else Figure.of(ratio)
            return Check(f"{words}: {x.value:.2f} against {y.value:.2f}, ratio {of}", ahead(of, ONE)[0])
        return higher(words, x, y)


# ------------------------------------------------------------------------------------------------ entries


Judge = Callable[[Evidence], list[Check]]


@dataclass(frozen=True)
class Entry:
    """`judge`: or why nothing was measured. `source`: the results files whose commands made the figures, or a command.
    `note`: what a reader should know beside the figures; it holds none."""

    judge: Judge | str
    source: str = ""
    note: str = ""

    @property
    def files(self) -> list[str]:
        """The results files that it names; none where it is a command."""
        return self.source.split(", ") if re.fullmatch(r"\w+(, \w+)*", self.source) else []

    def checks(self, evidence: Evidence) -> list[Check]:
        if isinstance(self.judge, str):
            return [open_(self.judge)]
        try:
            return self.judge(evidence)
        except Missing as missing:
            return [open_(f"{missing}")]


ENTRIES: dict[str, Entry] = {}  # by the ids of the inventory's row
SECOND: dict[str, Entry] = {}  # the same on SmolLM2; a row that is not here is judged without any model


def finding(ids: str, source: str, note: str = "", of: dict[str, Entry] = ENTRIES) -> Callable[[Judge], Judge]:
    """Decorates the function that judges these rows."""

    def add(judge: Judge) -> Judge:
        _enter(ids, Entry(judge, source, note), of)
        return judge

    return add


def unmeasured(ids: str, why: str, command: str = "", of: dict[str, Entry] = ENTRIES) -> None:
    _enter(ids, Entry(why, command), of)


def _enter(ids: str, entry: Entry, of: dict[str, Entry]) -> None:
    assert ids not in of, f"{ids} is judged twice"
    of[ids] = entry
