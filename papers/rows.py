"""Rows: the tables, figures and findings of the papers, who judges each, and what was measured for it.

A *row* is a line of `papers/PAPER/claims.csv`. A judge takes what was measured of one model (`Measured`) and says
which of the row's statements hold; the same judge serves every model. Nothing here knows a paper.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from outrider.bench.document import Depth

from . import document as documents
from .document import Cell, Document, Mean, pooled_bins
from .figures import ONE, Check, Figure, beside, computed, higher, inverse, open_, ratio_of, true
from .reliability import Bin

HERE = Path(__file__).resolve().parent
ROOT, RESULTS = HERE.parent, HERE / "results"
PAPERS = {
    "speculative_sampling": "Leviathan et al. 2023, Chen et al. 2023: speculative sampling",
    "medusa": "Cai et al. 2024: Medusa",
    "eagle": "Li et al. 2024a: EAGLE",
    "eagle2": "Li et al. 2024b: EAGLE-2",
    "hass": "Zhang et al. 2024: HASS",
    "mamba": "Choi et al. 2025: Mamba drafters",
}
MODELS = ("SmolLM2", "demo")
PUBLISHED = "1 rejection"  # a training's T = 1 under the papers' rule
FIELDS = ("where", "target", "method", "task", "metric")  # of a published fact
STRAY = 0.005  # a share: pairs whose quotient lies further from their figure are of other prompts


class Missing(LookupError):
    """A results file, or what a judge needs of it, is not there."""


@dataclass(frozen=True)
class Source:
    """Where a judge's name stands: a method of a results file, at these temperatures."""

    file: str
    method: str
    temperatures: tuple[float, ...] = (0.0,)


Sources = Mapping[str, Sequence[Source]]  # by the names that judges use


def sources(file: str, names: Mapping[str, str], *temperatures: float) -> dict[str, Source]:
    """Names and the methods of one file that they stand for."""
    return {name: Source(file, method, temperatures or (0.0,)) for name, method in names.items()}


def merged(*tables: Mapping[str, Source]) -> dict[str, tuple[Source, ...]]:
    """Several tables of sources; the first that was run counts."""
    return {name: tuple(t[name] for t in tables if name in t) for name in dict.fromkeys(n for t in tables for n in t)}


@dataclass(frozen=True)
class Evidence:
    """All that is stored: claims by row, published facts by paper, results by file."""

    claims: Mapping[str, Mapping[str, str]]
    facts: Mapping[str, Sequence[Mapping[str, str]]]
    results: Mapping[str, Any]

    @classmethod
    def read(cls) -> Evidence:
        facts = {paper: rows_of(HERE / paper / "facts.csv") for paper in PAPERS}
        claims = {r["row"]: {**r, "paper": p} for p in PAPERS for r in rows_of(HERE / p / "claims.csv")}
        return cls(claims, facts, {path.stem: read(path.stem) for path in sorted(RESULTS.glob("*.json"))})

    def published(self, query: str, paper: str) -> list[Mapping[str, str]]:
        """The facts that a query such as "Table 5; EAGLE chain; tau; T=0" names: each of its words is a whole field.
        The paper is the row's own, or another one that the query begins with, as in "eagle2: Table 1; mean"."""
        other, _, words = query.rpartition(": ")
        asked = set(words.split("; "))
        matches = [f for f in self.facts[other or paper] if asked <= {f"T={f['temperature']}", *(f[k] for k in FIELDS)}]
        if not matches or len({row["metric"] for row in matches}) > 1:
            raise ValueError(f"{query!r} must name facts of {paper}, all of one metric; it names {len(matches)}")
        return matches

    def span(self, query: str, paper: str) -> str:
        """The published value as it was printed, or the lowest and the highest of several."""
        values = sorted({row["value"] for row in self.published(query, paper)}, key=float)
        return values[0] if len(values) == 1 else f"{values[0]}-{values[-1]}"

    def published_text(self, row: str) -> str:
        """What a row says was published, its queries answered."""
        claim = self.claims[row]
        return re.sub(r"\{(.+?)\}", lambda query: self.span(query[1], claim["paper"]), claim["published"])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def read(name: str) -> Any:
    """The report of a study; of ablations and of other engines, which are no run of `outrider bench`, a document of
    their own."""
    path = RESULTS / f"{name}.json"
    own = name.endswith("ablations") or name.startswith("engines/")
    return json.loads(path.read_text(encoding="utf-8")) if own else documents.read(path)


# ------------------------------------------------------------------------------------------------ measured


@dataclass(frozen=True)
class Measured:
    """What was measured of one model for one paper.

    A name is looked up in the paper's own study, under the paper's rule, then in that study's run with times
    (`SPEEDS`), then where `uses` says. "X, coupled" is X under our rule, which at T = 0 accepts
    as every rule does, in another time.
    """

    evidence: Evidence
    paper: str
    model: str = ""
    uses: Sources = field(default_factory=dict)
    files: list[str] = field(default_factory=list)  # that were read

    @property
    def study(self) -> str:
        """The paper's own study of this model."""
        return f"{self.paper}_{self.model.lower()}"

    def at(self, file: str) -> Any:
        """A report: a `Document`, or a dict of the ablations."""
        if file not in self.evidence.results:
            raise Missing(f"{file} was not run")
        if file not in self.files:
            self.files.append(file)
        return self.evidence.results[file]

    def find(self, name: str, t: float, of: str = "tau", batch: int = 1) -> tuple[str, Mean]:
        """(file, mean over all prompts) of a name, the first source that has the figure `of`."""
        names = (name, f"{name}, coupled") if t == 0 and of in COUNTED else (name,)
        own = [Source(file, each, (t,)) for file in (self.study, self.study + SPEEDS) for each in names]
        for source in (*own, *self.uses.get(name, ())):
            if t not in source.temperatures or source.file not in self.evidence.results:
                continue
            report: Document = self.evidence.results[source.file]
            for row in (*report.pooled, *report.macro):
                named = (row.method, row.temperature) == (source.method, t) and getattr(row, of, None) is not None
                if named and (row.batch == batch or (batch == 1 and of in COUNTED)):
                    return source.file, row
        rule = "" if t == 0 or name.endswith("coupled") else " under the papers' rule"
        raise Missing(f"{of} of {name} at T = {t:g}{rule} was not run")

    def __call__(self, name: str, t: float, of: str = "tau", batch: int = 1) -> Figure:
        """A figure over all prompts, with those of the tasks and, of tau, of each batch of prompts."""
        file, row = self.find(name, t, of, batch)
        self.at(file)
        parts = {c.task: f.value for c in self._cells(file, row) if (f := getattr(c, of, None))}
        figure = Figure.of(getattr(row, of), parts)
        pairs = self._pairs(file, row.method, t) if of == "tau" else ()
        if pairs and abs(ratio_of(pairs) - figure.value) > STRAY * figure.value:
            pairs = ()  # counted over other prompts than the figure was
        return Figure(figure.value, figure.low, figure.high, parts, figure.measured, pairs, file)

    def _pairs(self, file: str, method: str, t: float) -> tuple[tuple[float, float], ...]:
        each = self.at(file).run.methods.get(method, {})
        counts = each.get(f"{t:g}", ()) if isinstance(each, Mapping) else ()
        return tuple((x[0], x[1]) if isinstance(x, Sequence) else (x, 1.0) for x in counts)

    def _cells(self, file: str, row: Mean) -> list[Cell]:
        key = (row.method, row.temperature, row.batch)
        return [c for c in self.at(file).cells if (c.method, c.temperature, c.batch) == key]

    def cells(self, name: str, t: float, of: str = "tau") -> list[Cell]:
        """The cells of a name, one for each task."""
        file, row = self.find(name, t, of)
        self.at(file)
        return self._cells(file, row)

    def rates(self, name: str, t: float) -> list[Figure]:
        """Acceptance by depth, of the first five, each given that the depth before was accepted."""
        file, row = self.find(name, t, "alpha")
        self.at(file)
        return [of_depth(depth) for depth in row.depths[:5]]

    def same_text(self, t: float, older: str) -> Check:
        """The statement that every text under `coupled` is plain decoding's: of the paper's study, or of an older one
        that compares more texts."""
        there = [file for file in (self.study, older) if file in self.evidence.results]
        by = {f: [m for m in self.evidence.results[f].pooled if m.temperature == t and m.compared] for f in there}
        file = max(there, key=lambda f: sum(m.compared for m in by[f]), default=older)
        self.at(file)
        means = by[file]
        if not means:
            raise Missing(f"{file} compares no texts at T = {t:g}")
        least = min(means, key=lambda m: m.same_text / m.compared)
        words = f"texts under `coupled` are plain decoding's at T = {t:g}"
        figures = f"{least.same_text} of {least.compared}, the least of {len(means)} methods"
        holds = least.same_text == least.compared
        return true(words, holds, figures, f"{least.same_text}/{least.compared}", f"1 text in {least.compared / 3:.0f}")

    def bins(self, name: str, t: float) -> list[Bin]:
        """The reliability diagram of a name, all tasks together."""
        cells = [c for c in self.cells(name, t) if c.reliability and c.reliability.bins]
        if not cells:
            raise Missing(f"confidences of {name} at T = {t:g} were not observed")
        return pooled_bins(cells)

    # trainings of one setting each

    @property
    def table(self) -> str:
        """The file of this model's trainings."""
        return "ablations" if self.model == "demo" else f"{self.model.lower()}_ablations"

    def training(self, name: str) -> Mapping[str, Any]:
        for row in self.at(self.table)["runs"]:
            if row["name"] == name:
                return row
        raise Missing(f"{name!r} was not trained")

    def trained(self, name: str, t: str) -> Figure:
        """tau of a training."""
        row = self.training(name)
        pairs = tuple((a, b) for a, b in row.get("counts", {}).get(t, ()))
        figure = Figure.of(row["tau"][t])
        return Figure(figure.value, figure.low, figure.high, pairs=pairs, run=f"{self.table} {row.get('asked')}")

    def versus(self, words: str, a: str, b: str, t: str) -> Check:
        """The statement that one training's tau lies above another's: by their ratio on the same prompts where it is
        stored (to "eagle", or from counts), else by the two figures. At T = 1 it counts for nothing where the papers'
        rule was not run."""
        if t == "1" and all(PUBLISHED in self.training(name)["tau"] for name in (a, b)):
            return higher(words, self.trained(a, PUBLISHED), self.trained(b, PUBLISHED))
        x, y = self.trained(a, t), self.trained(b, t)
        if t == "1":
            return beside(words, x, y)
        ratio = self.training(b if a == "eagle" else a).get("ratio", {}).get(t)
        if ratio and not (x.pairs and y.pairs) and "eagle" in (a, b):
            of = inverse(Figure.of(ratio)) if a == "eagle" else Figure.of(ratio)
            return higher(words, of, ONE)
        return higher(words, x, y)


def of_depth(depth: Depth) -> Figure:
    """A rate with its interval over prompts; of its counts, where one batch of prompts gives none."""
    return Figure.share(depth.accepted, depth.tested) if depth.rate.low is None else Figure.of(depth.rate)


SPEEDS = "_speeds"  # of the file of a study that ran one text at a time on a quiet machine
COUNTED = ("tau", "alpha", "nodes")  # that a batch does not change


# ------------------------------------------------------------------------------------------------ rows


Statement = Check | Callable[[], Check]  # called before the judge goes on
Judge = Callable[[Measured], Iterable[Statement]]


@dataclass(frozen=True)
class Row:
    """Who judges a row.

    Args:
        models: those that it is judged on; none where it needs no model.
        notes: departures from the paper by model ("" for both): letters of `departures.DEPARTURES`.
        studies: what `run` runs for it, by model; empty: the paper's own study.
    """

    judge: Judge
    models: tuple[str, ...] = MODELS
    notes: Mapping[str, str] = field(default_factory=dict)
    studies: Mapping[str, str] = field(default_factory=dict)

    def checks(self, measured: Measured) -> list[Check]:
        """The checks. Each statement may lack its figures without taking the others with it."""
        checks: list[Check] = []
        statements = iter(self.judge(measured))
        while True:
            try:
                statement = next(statements)
                checks.append(statement() if callable(statement) else statement)
            except StopIteration:
                return checks
            except Missing as missing:
                checks.append(open_(f"{missing}"))


ROWS: dict[str, Row] = {}  # by the claim's name


def judges(row: str, models: Sequence[str] = MODELS, studies: Mapping[str, str] | None = None, **notes: str) -> Any:
    """Decorates the generator of a row's statements. `notes`: letters of departures by model."""

    def add(judge: Judge) -> Judge:
        assert row not in ROWS, f"{row} is judged twice"
        ROWS[row] = Row(judge, tuple(models), notes, studies or {})
        return judge

    return add


def computed_by(row: str, test: str) -> None:
    """A closed form or a count, which a test of ours holds: it is no finding."""
    judges(row, ())(lambda measured: [computed(f"held by {test}", True)])


def load() -> None:
    """Read all judges."""
    for paper in PAPERS:
        import_module(f"papers.{paper}.judges")


def measured(row: str, model: str, evidence: Evidence) -> Measured:
    """What a row's judge sees of a model."""
    paper = evidence.claims[row]["paper"]
    module = import_module(f"papers.{paper}.runs")
    return Measured(evidence, paper, model, getattr(module, "USES", {}).get(model, {}))
