"""Verdicts: every row's judge holds and fails by planted data, and pages are what is stored."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from outrider.bench.document import Depth, Estimate, RoundTime, RunInfo
from papers import contexts, departures, rows, runs, verdicts
from papers import figures as fig
from papers.document import Cell, DistributionTest, Document, Mean, Memory, Position, Quality, Reliability
from papers.figures import COMPUTED, FAILS, HOLDS, NOISE, OPEN, PARTLY, Check, Figure
from papers.formulas import Comparison, expected_tokens, speedup
from papers.mamba.judges import NAMES
from papers.medusa.runs import DENSE
from papers.reliability import Bin
from papers.rows import ROWS, Evidence
from papers.speculative_sampling.judges import follows

rows.load()
GAMMA = {"chain of 1": 1, "chain of 2": 2, "chain of 3": 3, "chain of 5": 5, "chain of 7": 7}
TASKS = ("gsm8k", "humaneval", "cnn-dm@600", "mt-bench")


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return Evidence.read()


def around(value: float, width: float = 0.005) -> Estimate:
    return Estimate(value, value - abs(value) * width, value + abs(value) * width)


# -- the page ----------------------------------------------------------------------------------------------------------


def test_pages_are_what_is_stored(evidence: Evidence) -> None:
    made = verdicts.made(evidence)
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"run `python -m papers page`: {path.name} is old"
    page = made[verdicts.PAGE]
    assert len(page.encode()) <= verdicts.BIGGEST
    for row, claim in evidence.claims.items():
        assert page.count(f"| {row} | {claim['finding']} |") == 1
    used = set(re.findall(r"^- \*\*([a-z0-9])\*\*: ", page, flags=re.M))
    assert used == {x for row in ROWS.values() for notes in row.notes.values() for x in notes} | {verdicts.UNSIGNED}


def test_every_row_has_a_judge_and_every_id_once(evidence: Evidence) -> None:
    assert set(ROWS) == set(evidence.claims)
    ids = [i for row in evidence.claims for i in row.split(", ")]
    assert len(ids) == len(set(ids)) == 58


def test_the_facts(evidence: Evidence) -> None:
    assert sum(map(len, evidence.facts.values())) == 1041
    assert evidence.span("Table 5; EAGLE chain; tau", "eagle") == "2.97-3.23"
    assert evidence.span("eagle2: Table 1; mean; Vicuna 7B; EAGLE-2; speedup; T=0", "eagle") == "3.39"
    with pytest.raises(ValueError, match="names 0"):
        evidence.span("Table 5; EAGLE chain; speed", "eagle")
    with pytest.raises(ValueError, match="one metric"):
        evidence.span("Table 6; fixed dataset", "eagle")
    both = [f["value"] for f in evidence.facts["eagle"] if (f["target"], f["task"]) == ("Vicuna 33B", "GSM8K")]
    assert {"3.25", "3.94"} <= set(both)


def test_tests_that_hold_closed_forms_are_there(evidence: Evidence) -> None:
    by = verdicts.judged(Evidence(evidence.claims, evidence.facts, {}))
    words = [c.words for row in by.values() for checks, _ in row.values() for c in checks]
    named = [w.removeprefix("held by ").split("::") for w in words if w.startswith("held by ")]
    assert len(named) == 5
    for file, function in named:
        assert f"def {function}(" in (rows.ROOT / file).read_text(encoding="utf-8")


def test_nothing_is_judged_without_a_measurement(evidence: Evidence) -> None:
    gone = Evidence(evidence.claims, evidence.facts, {})
    for row, by in verdicts.judged(gone).items():
        for model, (checks, files) in by.items():
            assert fig.verdict(checks) in ((COMPUTED, PARTLY) if model == verdicts.FREE else (OPEN,)), row
            assert not files


def test_figures_under_our_own_rule_are_never_judged(evidence: Evidence) -> None:
    """T = 1 of a stored run stands for a name under `rejection`, or for nothing."""
    for paper in rows.PAPERS:
        for table in getattr(__import__(f"papers.{paper}.runs", fromlist=["USES"]), "USES", {}).values():
            for source in (s for sources in table.values() for s in sources if 1.0 in s.temperatures):
                report = evidence.results[source.file]
                kept = report.run.methods.get(source.method) if report.run.methods else None
                spelt = [d for d in report.run.arguments.get("drafters", ()) if d.startswith(f"{source.method}=")]
                named = "rejection" in source.method or any("@rejection" in d for d in spelt)
                assert named or source.file == "calibration", (source, kept)
    for row, by in verdicts.judged(under_ours(evidence)).items():
        for checks, files in by.values():
            if files and all(file.endswith("ablations") for file in files):
                assert not [c for c in checks if "T = 1" in c.words and c.outcome in (HOLDS, FAILS, NOISE)], row


def under_ours(evidence: Evidence) -> Evidence:
    """What there is without the trainings' figures under the papers' rule."""
    results = dict(evidence.results)
    for file in (name for name in results if name.endswith("ablations")):
        runs = [
            {**run, "tau": {t: tau for t, tau in run["tau"].items() if t != rows.PUBLISHED}}
            for run in results[file]["runs"]
        ]
        results[file] = {**results[file], "runs": runs}
    return replace(evidence, results=results)


def test_causes_are_given_of_rows_that_fail(evidence: Evidence) -> None:
    by = verdicts.judged(evidence)
    failing = {row for row, models in by.items() if FAILS in {c.outcome for c in models.get("SmolLM2", ((), ()))[0]}}
    given = {name for names, _ in departures.CAUSES for name in names.split(", ")}
    assert {name for row in failing for name in row.split(", ")} == given


# -- every judge flips -------------------------------------------------------------------------------------------------

RATES = {True: (0.9, 0.7, 0.7, 0.7, 0.7), False: (0.5, 0.7, 0.5, 0.7, 0.3)}


class World:
    """A study in which a paper's findings hold, or in which they do not."""

    def __init__(self, paper: str, good: bool) -> None:
        self.paper, self.good = paper, good
        module = __import__(f"papers.{paper}.runs", fromlist=["METHODS", "USES"])
        uses = [name for table in getattr(module, "USES", {}).values() for name in table]
        self.names = list(dict.fromkeys([*module.METHODS, *uses, "none", "chain of 1", "chain of 2",
                                         "Medusa-2", "1 nodes", "2 nodes"]))  # fmt: skip

    def tau(self, name: str, t: float) -> float:
        return 1 + LEVELS[self.paper](name, t, self.good)

    def alpha(self, name: str, t: float) -> float:
        return (self.tau(name, t) - 1) / 4

    def report(self) -> Document:
        means: list[Mean] = []
        cells: list[Cell] = []
        for name in self.names:
            for t in (0.0, 0.7, 1.0):
                tau, alpha = self.tau(name, t), self.alpha(name, t)
                gamma = GAMMA.get(name)
                speed = tau / 2 if self.good else 0.4 + tau / 9
                if self.paper == "speculative_sampling" and gamma:
                    tau = expected_tokens(alpha, gamma) * (1 if self.good else 0.7)
                    speed = speedup(alpha, gamma, 0.2 / gamma) if self.good else speed
                depths = [Depth(i + 1, 999, 500, around(r)) for i, r in enumerate(self.depths(name))]
                same = 9 if self.good else 8
                row: dict[str, Any] = {
                    "tau": around(tau), "alpha": around(alpha), "speedup": around(speed),
                    "tokens_per_second": around(100 * tau), "depths": depths, "nodes": 6.0,
                    "round_ms": RoundTime(1.0, 5.0, 0.1),
                }  # fmt: skip
                distribution = DistributionTest(100_000, 0.5 if self.good else 1e-5)
                means.append(Mean(t, 1, name, distribution=distribution, same_text=same, compared=9, **row))
                cells += [self.cell(name, t, task, row) for task in TASKS]
        return Document(RunInfo("planted"), pooled=means, cells=cells)

    def depths(self, name: str) -> tuple[float, ...]:
        if name == "beta 0.5 chain":
            return (0.9, 0.7, 0.7, 0.7, 0.7) if self.good else (0.4, 0.7, 0.7, 0.7, 0.7)
        if name == "HASS chain":
            return (0.75, 0.75, 0.75, 0.75, 0.9) if self.good else (0.6, 0.7, 0.7, 0.7, 0.5)
        return (0.7, 0.6, 0.6, 0.6, 0.6) if self.paper == "hass" else RATES[self.good]

    def cell(self, name: str, t: float, task: str, row: dict[str, Any]) -> Cell:
        best = {"PLD": "cnn-dm@600"}.get(name, "humaneval")
        gain = 1.3 if (task == best) == self.good else 1.0
        mine = {**row, "tau": around(row["tau"].value * gain), "speedup": around(row["speedup"].value * gain)}
        high = (name == "typical, high") == self.good
        off = 0.0 if self.good != name.startswith("Llama") else 0.3
        bins = [Bin(x, x + 0.1, 4000, x + 0.05, min(1.0, x + 0.05 + off)) for x in (0.1, 0.3, 0.5)]
        shares = [0.9, 0.6, 0.5, 0.4, 0.3, 0.1] if self.good else [0.5, 0.6, 0.5, 0.4, 0.3, 0.9]
        positions = [Position(i + 1, 9, s, [], self.counts(s)) for i, s in enumerate(shares)]
        return Cell(
            task, t, 1, name, **mine, reliability=Reliability(0.1, 12000, bins), positions=positions,
            quality=Quality((-1.0 if high else -2.0) + 0.001 * len(task)),
        )  # fmt: skip

    def counts(self, share: float) -> list[list[int]]:
        """Thirty prompts of a hundred rounds each: of very different rates, or of the same."""
        low, high = max(0.0, share - 0.3), min(1.0, share + 0.3)
        return [[round(100 * (low if i % 2 else high)) if self.good else round(100 * share), 100] for i in range(30)]


Level = Callable[[str, float, bool], float]


def ordered(*names: str) -> Level:
    """tau - 1, which falls along these names and lies higher at T = 0; or rises, and lies lower."""

    def level(name: str, t: float, good: bool) -> float:
        name = name.removesuffix(", coupled")
        place = names.index(name) if name in names else len(names) / 2
        up = 2.6 - 1.6 * place / len(names) - 0.05 * (t > 0)
        return up if good else 3.0 - up

    return level


def of_sizes(name: str, t: float, good: bool) -> float:
    """EAGLE-2's parts: the whole, then without re-ranking, without value, without both."""
    order = ordered("EAGLE-2", "EAGLE", "Hydra", "Medusa", "SpS", "PLD", "Lookahead")
    parts = ("", " without re-ranking", " without value", " without both")
    for place, part in enumerate(parts):
        if name in (f"16x5{part}", f"61x6{part}"):
            return 2.5 - 0.4 * place if good else 1.0 + 0.4 * place
    return order(name, t, good) + (1.0 if good and name.startswith("EAGLE-2") else 0.0)


def of_mamba(name: str, t: float, good: bool) -> float:
    """Mamba ahead of the Llama, like EAGLE and over all shapes; a bandit and a small Mamba ahead of all."""
    starts = {"another": (1.0, 0.1), "Mamba, bandit": (2.9, 0.2), "small Mamba": (2.95, 0.05), "EAGLE": (1.2, 2.9)}
    for start, levels in starts.items():
        if name.startswith(start):
            return levels[not good]
    if name in ("Mamba, tree", "Llama, tree"):
        return 1.2 if good == name.startswith("Mamba") else 0.1
    if name.startswith("Llama"):
        last = 0.5 if good else 2.6
        return (last if "2,2,2" in name else 1.5) if "," in name and "chain" not in name else 0.1 if good else 2.5
    for i, shape in enumerate(("3,3,2,1", "3,2,2,1,1", "2,2,2,1,1,1")):
        if shape in name:
            return 2.5 if good else 0.3 + 0.4 * i
    return 1.2


LEVELS: dict[str, Level] = {
    "speculative_sampling": ordered(
        "chain of 7", "chain of 5", "chain of 3", "smaller draft model", "bigrams", "unigrams"
    ),
    "medusa": ordered("Medusa-2", "self-distilled", "60 nodes",
                      *(f"sparse tree of {n}" for n in (11, 15, 16, 21, 23)), "Medusa",
                      *(f"dense tree {shape}" for shape in DENSE), "typical, low", "typical, high",
                      "4 nodes", "heads as a chain", "1 nodes"),
    "eagle": ordered("tree", "between", "chain", "none"),
    "eagle2": of_sizes,
    "hass": ordered("HASS", "HASS chain", "EAGLE-2", "EAGLE chain"),
    "mamba": of_mamba,
}  # fmt: skip


def trainings(good: bool) -> dict[str, Any]:
    """tau of all trainings: the papers' choices first, or last."""
    best = (
        "eagle",
        "eagle as published",
        "hass as published",
        "hass passes=3",
        "hass passes=4",
        "hass k=5",
        "hass topk=0.5",
        "hass k=5 topk=0.5",
        "hass beta=0.5",
        "eagle of few texts by the target",
    )
    names = (*best, "eagle inputs=feature+unshifted", "eagle inputs=feature", "eagle inputs=token", "hass", "hass k=1",
             "hass k=50", "hass topk=0", "hass passes=1", "hass passes=2", "hass passes=5", "eagle of few texts",
             "eagle on a mixture of experts", *(f"hass loss={x}" for x in (
                 "top-p", "normed-linear", "normed-softmax", "both-ways", "recall", "bild")))  # fmt: skip

    def level(name: str) -> float:
        up = {"hass as published": 2.4, "hass passes=3": 2.4, "eagle as published": 2.0, "hass k=5": 2.8,
              "hass topk=0.5": 2.8, "hass k=5 topk=0.5": 2.8, "hass beta=0.5": 2.8, "eagle": 2.6,
              "eagle inputs=feature+unshifted": 2.2}.get(name, 2.3 if name in best else 1.5)  # fmt: skip
        return up if good else 4.5 - up

    at = ("0", "1", rows.PUBLISHED)
    return {"runs": [{"name": n, "tau": {t: list(around(level(n))) for t in at}} for n in names]}


def contexts_(good: bool) -> dict[str, Document]:
    """Only the Mamba's state is constant, and its tokens a round; or all but its."""
    results = {}
    for i, n in enumerate(contexts.LENGTHS):
        made = list[Cell]()
        for name in NAMES:
            grows = (name != "Mamba") == good
            size = (i + 1) * 4096 if grows else 4096
            memory = Memory(0, size * (1 if good == (name != "EAGLE") else 4), peak=(1 + i * (3 if grows else 1)) << 20)
            made.append(Cell("t", 0.0, 1, name, tau=around(2.0 - 0.3 * i * (not good)), memory=memory, nodes=6.0,
                             round_ms=RoundTime(1 + i * grows, 5.0, 0.1)))  # fmt: skip
        results[f"smollm2_context_{n}"] = Document(RunInfo("planted"), cells=made)
        demo = [replace(cell, method=NAMES[cell.method]) for cell in made]
        results[f"context_{n}"] = Document(RunInfo("planted"), cells=demo)
    return results


@cache
def planted(paper: str, good: bool) -> dict[str, Any]:
    """Everything that a judge may read, for both models."""
    report = World(paper, good).report()
    results: dict[str, Any] = {f"{paper}_{model.lower()}": report for model in rows.MODELS}
    results |= {
        "demo_distributions": report,
        "ablations": trainings(good),
        "smollm2_ablations": trainings(good),
        **contexts_(good),
    }
    older = ("smollm2", "medusa2", "medusa2_distilled", "ladder", "drafters")
    results |= dict.fromkeys(older, report)
    for file, speed in (("dense", 2.0), ("mixture", 1.5 if good else 2.5)):
        made = Mean(0.0, 1, "EAGLE", speedup=around(speed))
        results[file] = Document(RunInfo("planted"), pooled=[made, replace(made, temperature=1.0)])
    results["t5"] = of_t5(good)
    results |= variants(good)
    return results


def of_t5(good: bool) -> Document:
    """A chain of three that is as the formulas have it, or not."""
    theory = Comparison(0.6, 3, 0.1)
    tau, speed = (around(x if good else 0.6 * x) for x in (theory.tau, theory.promised))
    cell = Cell("t", 0.0, 1, "T5", rule="rejection", tau=tau, speedup=speed, theory=theory)
    return Document(RunInfo("planted"), cells=[cell])


def variants(good: bool) -> dict[str, Document]:
    """Gains of drafting and of a variant that multiply, or do not; and batches."""

    def grid(drafter: str, names: tuple[str, ...]) -> Document:
        speeds = {f"{drafter}, eager": 2.0}
        for name in names:
            speeds |= {f"none{name}": 3.0, f"{drafter}{name}": 6.0 if good else 1.5}
        return Document(RunInfo("p"), macro=[Mean(0.0, 1, n, speedup=around(s)) for n, s in speeds.items()])

    def batched(tree: str, chain: str) -> Document:
        up = {(tree, 1): 3.0, (tree, 8): 1.5, (chain, 1): 3.0, (chain, 8): 1.98}
        down = {(tree, 1): 1.0, (tree, 8): 3.5, (chain, 1): 1.0, (chain, 8): 3.0}
        of = up if good else down
        return Document(
            RunInfo("p"),
            macro=[Mean(0.0, b, n, speedup=around(s), tokens_per_second=around(100 * s)) for (n, b), s in of.items()],
        )

    return {
        "smollm2_variants": grid("HASS", ("", ", native")),
        "variants": grid("HASS, 16x6", ("", ", eager+int8")),
        "eagle_batches": batched("tree", "chain"),
        "batches": batched("HASS", "HASS chain"),
    }


NEVER = {"E-cost", "E2-T2"}  # not run, whatever is stored
JUDGED = [(row, model) for row, entry in ROWS.items() if row not in NEVER for model in entry.models]


@pytest.mark.parametrize(("row", "model"), JUDGED)
def test_each_judge_flips(row: str, model: str, evidence: Evidence) -> None:
    """In a world where the findings hold no statement fails and one at least holds; in the other the reverse."""
    results = {}
    for good in (True, False):
        stored = Evidence(evidence.claims, evidence.facts, planted(evidence.claims[row]["paper"], good))
        checks = ROWS[row].checks(rows.measured(row, model, stored))
        results[good] = [c for c in checks if c.outcome in (HOLDS, FAILS)]
    if (row, model) == ("E-T3", "SmolLM2"):
        assert not results[True]
        return
    seen = {good: [(c.words, c.outcome, c.figures) for c in checks] for good, checks in results.items()}
    assert fig.verdict(results[True]) == HOLDS, seen[True]
    assert fig.verdict(results[False]) != HOLDS, seen[False]
    assert FAILS in {c.outcome for c in results[False]}, seen[False]
    assert all(c.seen or c.figures for c in results[True])


# -- figures -----------------------------------------------------------------------------------------------------------


def test_methods_on_the_same_prompts_are_compared_in_pairs() -> None:
    """Prompts of very different lengths: each a little better with a than with b."""
    b = tuple((10.0 * i, 10.0) for i in range(1, 31))
    a = tuple((1.05 * tokens, rounds) for tokens, rounds in b)
    wide = [Figure(15.5 * x, 10.0, 20.0, pairs=pairs, run="r") for x, pairs in ((1.05, a), (1.0, b))]
    assert fig.higher("", *wide).outcome == HOLDS
    assert fig.higher("", *wide[::-1]).outcome == FAILS
    apart = [Figure(f.value, f.low, f.high, pairs=f.pairs, run=str(i)) for i, f in enumerate(wide)]
    assert fig.higher("", *apart).outcome == NOISE, "of different runs"
    assert fig.quotient(*wide).value == pytest.approx(1.05)
    assert fig.difference(*wide).low > 0


def test_rates_that_follow_from_chance_do_not_count_as_spread() -> None:
    import random

    def prompts(spread: float, rounds: int, seed: int) -> list[tuple[int, int]]:
        dice = random.Random(seed)
        rates = [0.6 + spread * (i % 2 * 2 - 1) for i in range(40)]
        return [(sum(dice.random() < rate for _ in range(rounds)), rounds) for rate in rates]

    results = [fig.dispersed("", [prompts(0.0, 50, seed)]).outcome for seed in range(60)]
    assert results.count(HOLDS) <= 8, "at the level of 5 %"
    assert results.count(FAILS) >= 50, "where a spread of 0.1 would have been seen"
    assert [fig.dispersed("", [prompts(0.0, 8, seed)]).outcome for seed in range(60)].count(FAILS) == 0, "few rounds"
    assert [fig.dispersed("", [prompts(0.15, 50, seed)]).outcome for seed in range(20)] == [HOLDS] * 20
    tasks = [[(45, 50)] * 20, [(15, 50)] * 20]
    assert fig.dispersed("", tasks).outcome != HOLDS, "tasks may differ"
    assert fig.dispersed("", [[(3, 9)] * 5]).outcome == OPEN


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([HOLDS, HOLDS], HOLDS), ([HOLDS, FAILS], PARTLY), ([HOLDS, NOISE], PARTLY), ([HOLDS, OPEN], PARTLY),
        ([FAILS, NOISE], FAILS), ([FAILS, OPEN], FAILS), ([NOISE, OPEN], NOISE), ([OPEN], OPEN),
        ([COMPUTED], COMPUTED), ([COMPUTED, FAILS], PARTLY), ([fig.BESIDE, OPEN], OPEN),
    ],
)  # fmt: skip
def test_verdicts_of_rows(outcomes: list[str], verdict: str) -> None:
    assert fig.verdict(Check("", x) for x in outcomes) == verdict


def test_likeness_needs_an_interval_within_the_bounds() -> None:
    close = [fig.close("", Figure(v, v - w, v + w), 1.0).outcome for v, w in ((0.95, 0.04), (0.95, 0.2), (0.8, 0.05))]
    assert close == [HOLDS, NOISE, FAILS]


def sampled(p: float, tokens: int = 200_000) -> Document:
    test = DistributionTest(tokens, p)
    return Document(RunInfo("planted"), pooled=[Mean(1.0, 1, "chain", distribution=test, same_text=9, compared=9)])


@pytest.mark.parametrize(
    ("first", "again", "tokens", "outcome"),
    [(0.5, None, 200_000, HOLDS), (0.5, None, 9_000, NOISE), (1e-4, None, 200_000, FAILS), (1e-4, 0.5, 200_000, HOLDS),
     (1e-4, 0.04, 200_000, FAILS), (0.5, 0.04, 200_000, FAILS)],
)  # fmt: skip
def test_a_refused_test_is_decided_by_the_run_that_repeats_it(
    evidence: Evidence, first: float, again: float | None, tokens: int, outcome: str
) -> None:
    results = {"eagle_smollm2": sampled(first, tokens)}
    if again is not None:
        results["smollm2_distributions"] = sampled(again, 300_000)
    measured = rows.measured("L-alg", "SmolLM2", Evidence(evidence.claims, evidence.facts, results))
    check = follows(measured)
    assert check.outcome == outcome
    assert ("again" in check.figures) == (again is not None or first < 0.01)
    if again is not None:
        results["smollm2_distributions"] = sampled(0.5, tokens)
        assert follows(measured).outcome == (FAILS if first < 0.01 else HOLDS), "no more tokens"


def test_letters_of_a_cell() -> None:
    """Of what a row reads, and digits only where something was not run; nothing of a row that was not run at all."""
    checks = [Check("a", HOLDS), Check("b", OPEN)]
    assert verdicts.cell("M-ladder", "demo", checks, True).endswith("; i3")
    assert verdicts.cell("M-ladder", "demo", checks[:1], True).endswith("; i")
    assert verdicts.cell("M-ladder", "demo", checks[1:], True) == "not run; 3"
    assert verdicts.unsigned({"runs": []})
    assert verdicts.unsigned(Document(RunInfo("t", machine={"processor": "x86_64"})))
    assert not verdicts.unsigned(Document(RunInfo("t", machine={"processor": "AMD EPYC", "flags": ["avx2"]})))


def test_quiet_runs_leave_our_own_rule_out() -> None:
    """At T = 0 it would run in place of the paper's, whose time is another."""
    for paper in rows.PAPERS:
        whole, quiet = (runs.study(paper, "SmolLM2", quiet=quiet)[0].drafters for quiet in (False, True))
        assert quiet == tuple(d for d in whole if ", coupled=" not in d)


def test_a_drafter_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, lacks = runs.study("eagle2", "demo")
    assert not lacks
    assert any("tree=static" in d and d.endswith("@26x5@rejection") for d in grid.drafters)
    monkeypatch.setattr(runs, "there", lambda spec: "runs/" not in spec and "papers/" not in spec)
    grid, lacks = runs.study("eagle2", "SmolLM2")
    assert lacks == ["eagle", "hydra", "llm"]
    assert [d.partition("=")[0] for d in grid.drafters] == ["Medusa", "PLD", "Lookahead"]
    for paper in rows.PAPERS:
        for model in rows.MODELS:
            runs.study(paper, model)[0].check()
