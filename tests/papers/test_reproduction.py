"""docs/reproduction.md is what its generator makes of the inventory, the facts and the results; verdicts can fail."""

from __future__ import annotations

import copy
import csv
import re
from typing import Any

import pytest

from outrider.bench.document import Estimate, RunInfo
from papers import figures as fig
from papers import reproduction
from papers.document import Cell, Document, Mean, Position
from papers.evidence import Evidence
from papers.figures import FAILS, HOLDS, NOISE, OPEN, PARTLY, Figure
from papers.findings import ENTRIES, SECOND
from papers.studies import STUDIES

WAITING = {"Ma-F3"}  # judged as soon as the run is there that their commands make


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return Evidence.read(reproduction.DATA)


def ids_of(text: str) -> list[str]:
    return [i.strip() for i in text.split(",")]


def test_the_page_is_what_the_generator_makes(evidence: Evidence) -> None:
    written = reproduction.PAGE.read_text(encoding="utf-8")
    assert written == reproduction.page(evidence), "run `python -m papers.reproduction`"
    assert "`python -m papers.reproduction`" in written[:200]


def test_every_id_is_a_heading_once_and_linked_once(evidence: Evidence) -> None:
    ids = [i for cell in evidence.inventory for i in ids_of(cell)]
    assert len(ids) == len(set(ids)) == 58
    page = reproduction.page(evidence)
    rows = page[: page.index("\n## Commands")]
    headings = re.findall(r"^### (.+)$", rows, flags=re.M)
    assert [i for heading in headings for i in ids_of(heading)] == ids
    anchors = [heading.lower().replace(", ", "-") for heading in headings]
    assert sorted(re.findall(r"\]\(#([\w-]+)\)", rows.partition("\n## ")[0])) == sorted(anchors)
    counts = [map(int, row) for row in re.findall(r"^\| [a-z ]+ \| (\d+) \| (\d+) \| (\d+) \|$", rows, flags=re.M)]
    second, first, free = map(sum, zip(*counts, strict=True))
    assert second == first == len([i for cell in SECOND for i in ids_of(cell)])
    assert first + free == len(ids)
    for name in re.findall(r"\.json\]\(#(\w+)\)", rows):
        assert f"\n### {name}\n" in page, "a command"


def test_the_inventory_is_in_the_papers_order() -> None:
    with (reproduction.DATA / "inventory.csv").open(encoding="utf-8", newline="") as lines:
        papers = [row["paper"] for row in csv.DictReader(lines)]
    assert list(dict.fromkeys(papers)) == list(reproduction.PAPERS)


def test_the_facts(evidence: Evidence) -> None:
    assert len(evidence.facts) == 1002
    columns = ["paper", "where", "target", "method", "task", "temperature", "metric", "value"]
    assert all(list(fact) == columns and float(fact["value"]) for fact in evidence.facts)
    assert evidence.span("Table 5; EAGLE chain; tau", "EAGLE") == "2.97 to 3.23"
    assert evidence.span("EAGLE-2: Table 1; mean; Vicuna 7B; EAGLE-2; speedup; T=0", "EAGLE") == "3.39"
    with pytest.raises(ValueError, match="names 0"):
        evidence.span("Table 5; EAGLE chain; speed", "EAGLE")
    with pytest.raises(ValueError, match="one metric"):
        evidence.span("Table 6; fixed dataset", "EAGLE")


def test_every_row_is_judged_or_says_why_not(evidence: Evidence) -> None:
    assert set(ENTRIES) == set(evidence.inventory)
    for ids, entry in ENTRIES.items():
        checks = entry.checks(evidence)
        assert checks, ids
        if isinstance(entry.judge, str):
            assert len(entry.judge.split()) > 3, ids
            assert entry.source.startswith("outrider ") or "; do outrider " in entry.source, ids
        elif ids not in WAITING:
            assert fig.verdict(checks) != OPEN, (ids, checks)
        assert {entry.source} <= {*STUDIES, "ablations"} or " " in entry.source, ids
        assert not re.search(r"\d\.\d", entry.note), f"{ids}: a note holds no figure"


def test_every_row_is_judged_on_smollm2_or_says_why_not(evidence: Evidence) -> None:
    assert set(SECOND) < set(evidence.inventory)
    page = reproduction.page(evidence)
    for ids, entry in SECOND.items():
        row = page.partition(f"\n### {ids}\n")[2].partition("\n### ")[0]
        checks = entry.checks(evidence)
        assert f"\n- SmolLM2: **{fig.verdict(checks)}**" in row, ids
        assert "\n- demo: **" in row, ids
        if isinstance(entry.judge, str):
            assert len(entry.judge.split()) > 3, ids
            assert f"**not measured**, {entry.judge}." in row, ids
        else:
            assert set(entry.files) <= {*STUDIES, "smollm2_ablations"}, ids
            assert entry.files, ids
            assert all(name.startswith("smollm2") for name in entry.files), f"{ids}: of another model"
            assert fig.verdict(checks) != OPEN, (ids, checks)
        assert not re.search(r"\d\.\d", entry.note), f"{ids}: a note holds no figure"


def test_rows_without_a_model_are_judged_without_results(evidence: Evidence) -> None:
    gone = Evidence(evidence.inventory, evidence.facts, {})
    free = {ids: entry for ids, entry in ENTRIES.items() if ids not in SECOND}
    assert reproduction.MODELS["without a model"] == free
    for ids, entry in free.items():
        assert entry.checks(gone) == entry.checks(evidence), ids
        assert fig.verdict(entry.checks(gone)) != OPEN, ids
    for ids, entry in SECOND.items():
        assert fig.verdict(entry.checks(gone)) == OPEN, f"{ids}: a verdict without a measurement"


def test_smollm2_is_judged_by_its_own_figures(evidence: Evidence) -> None:
    """The demo's verdict stays where SmolLM2's figures change, and the other way round."""

    def both(ids: str, found: Evidence) -> list[str]:
        return [fig.verdict(table[ids].checks(found)) for table in (ENTRIES, SECOND)]

    def taus(**of: float) -> Document:
        rows = {"HASS, 16x6": of["full"], **{f"HASS without {x}": of[x] for x in ("value", "both")},
                "HASS without re-ranking": of["rerank"]}  # fmt: skip
        figures = {name: Estimate(x, x - 0.1, x + 0.1) for name, x in rows.items()}
        return report(pooled=[Mean(t, 1, name, tau=tau) for t in (0.0, 1.0) for name, tau in figures.items()])

    before = both("E2-T3", evidence)
    up = changed(evidence, smollm2_findings=taus(full=3.0, rerank=2.7, value=2.4, both=2.0))
    down = changed(evidence, smollm2_findings=taus(full=2.0, rerank=2.3, value=2.6, both=2.9))
    assert both("E2-T3", up) == [before[0], HOLDS]
    assert both("E2-T3", down) == [before[0], FAILS]
    assert both("E2-T3", changed(evidence, drafters=report()))[1] == before[1]


def test_prompts_decide_in_pairs(evidence: Evidence) -> None:
    """Methods of SmolLM2 decode the same prompts: where intervals overlap, as many on one side as 6 of 6 decide."""

    def verdicts(*sparse: float) -> list[str]:
        wide = {name: Estimate(x, x - 0.5, x + 0.5) for name, x in (("Medusa, tuned", 1.7), ("Medusa, 3 x 2 x 1", 1.6))}
        taus = {"Medusa, tuned": list(sparse), "Medusa, 3 x 2 x 1": [1.6] * len(sparse)}
        of = {name: {"0": each, "1": each} for name, each in taus.items()}
        rows = [Mean(t, 1, name, tau=tau) for t in (0.0, 1.0) for name, tau in wide.items()]
        found = Document(RunInfo("smollm2", methods=of), pooled=rows)
        checks = SECOND["M-sparse"].checks(changed(evidence, smollm2_findings=found))
        assert all("domains" not in check.words for check in checks)
        return [check.outcome for check in checks]

    assert verdicts(*[1.7] * 6) == [HOLDS, HOLDS]
    assert verdicts(*[1.7] * 5, 1.5) == [NOISE, NOISE]
    assert verdicts(*[1.7] * 5, 1.6) == [NOISE, NOISE], "equal prompts say nothing"
    assert verdicts() == [NOISE, NOISE]


def test_the_formula_is_held_against_smollm2s_chains(evidence: Evidence) -> None:
    def chains(off: float) -> Document:
        rows = [
            Mean(t, 1, f"HASS chain, {size}, {rule}", tau=Estimate(off * told), alpha=Estimate(0.5))
            for t in (0.0, 1.0)
            for rule in ("coupled", "rejection")
            for size, told in (("4x3", 1.875), ("6x5", 1.96875))
        ]
        return report(pooled=rows)

    for off, expected in ((1.0, HOLDS), (0.93, HOLDS), (0.8, FAILS)):
        checks = SECOND["L-tau"].checks(changed(evidence, smollm2_findings=chains(off)))
        assert fig.verdict(checks) == expected
        assert [re.search(r"the worst of (\d)", c.words)[1] for c in checks] == ["4", "2"]  # type: ignore[index]


def by_domain(value: float, each: float, domains: int) -> Figure:
    return Figure(value, value - 0.2, value + 0.2, {f"domain {i}": each for i in range(domains)})


@pytest.mark.parametrize(
    ("a", "b", "outcome"),
    [
        (Figure(3.7, 3.5, 3.9), Figure(2.9, 2.7, 3.1), HOLDS),
        (Figure(2.9, 2.7, 3.1), Figure(3.7, 3.5, 3.9), FAILS),
        (Figure(3.1, 2.9, 3.3), Figure(3.0, 2.8, 3.2), NOISE),
        (by_domain(3.1, 3.1, 9), by_domain(3.0, 3.0, 9), HOLDS),
        (by_domain(3.1, 3.1, 5), by_domain(3.0, 3.0, 5), NOISE),
        (by_domain(3.1, 2.9, 9), by_domain(3.0, 3.0, 9), NOISE),
        (Figure.of(2.11), Figure.of(1.74), HOLDS),
        (Figure.of(2.04), Figure.of(2.09), NOISE),
        (Figure.of(Estimate(2.0, 1.9, 2.1)), Figure.of([2.3, 2.2, 2.4]), FAILS),
        (Figure.of(Estimate(2.04)), Figure.of(2.09), NOISE),
    ],
)  # fmt: skip
def test_comparisons(a: Figure, b: Figure, outcome: str) -> None:
    """Where nine domains say one thing and the whole another, nothing is decided; nor by five alone."""
    assert fig.ahead(a, b)[0] == outcome
    assert fig.ahead(b, a)[0] == {HOLDS: FAILS, FAILS: HOLDS, NOISE: NOISE}[outcome]


def test_figures() -> None:
    a, b = Figure(2.0, 1.8, 2.2), Figure(4.0, 3.6, 4.4)
    half = fig.quotient(a, b)
    assert half.value == 0.5
    assert half.low == pytest.approx(0.5 * (1 - 0.02**0.5))
    apart = fig.difference(b, a)
    assert (apart.value, apart.high) == (2.0, pytest.approx(2 + 0.2**0.5))
    both = fig.mean([a, b])
    assert (both.value, both.low) == (3.0, pytest.approx(3 - 0.2**0.5 / 2))
    assert fig.inverse(a) == Figure(0.5, 1 / 2.2, 1 / 1.8)
    assert Figure.of(-1.0).low < -1 < Figure.of(-1.0).high
    assert [str(a), str(Figure.of(2.0))] == ["2.00 (1.80-2.20)", "2.00"]
    assert [fig.close("x", Figure(v, v - 0.1, v + 0.4), 1.0).outcome for v in (0.95, 0.8, 1.4)] == [HOLDS, NOISE, FAILS]


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([HOLDS, HOLDS], HOLDS), ([HOLDS, FAILS], PARTLY), ([HOLDS, NOISE], PARTLY), ([HOLDS, OPEN], PARTLY),
        ([FAILS, NOISE], FAILS), ([FAILS, OPEN], FAILS), ([NOISE, OPEN], NOISE), ([OPEN], OPEN),
    ],
)  # fmt: skip
def test_verdicts_of_rows(outcomes: list[str], verdict: str) -> None:
    assert fig.verdict(fig.Check("", x) for x in outcomes) == verdict


def changed(evidence: Evidence, **results: Any) -> Evidence:
    return Evidence(evidence.inventory, evidence.facts, {**evidence.results, **results})


def verdict(ids: str, evidence: Evidence) -> str:
    return fig.verdict(ENTRIES[ids].checks(evidence))


def report(**parts: Any) -> Document:
    return Document(RunInfo("demo"), **parts)


@pytest.mark.parametrize(
    ("tree", "expected"), [([4.5, 4.4, 4.6], HOLDS), ([3.05, 2.9, 3.2], FAILS), ([3.6, 2.8, 4.4], NOISE)]
)
def test_trees_by_hand(evidence: Evidence, tree: list[float], expected: str) -> None:
    """E-T5 wants a tree ahead of its chain, by as much as was published."""
    of = {"EAGLE tree": Estimate(*tree), "EAGLE chain": Estimate(3.0, 2.95, 3.05)}
    rows = [Mean(t, 1, name, speedup=f, tau=f) for t in (0.0, 1.0) for name, f in of.items()]
    assert verdict("E-T5, E-F9", changed(evidence, drafters=report(pooled=rows))) == expected


def ablation(name: str, tau: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "tau": {"0": tau, "1": tau}, **more}


def test_bare_figures_and_intervals_of_ablations(evidence: Evidence) -> None:
    def steps(*taus: Any) -> str:
        runs = [ablation(f"hass passes={n}", tau) for n, tau in enumerate(taus, 1)]
        return verdict("H-steps", changed(evidence, ablations={"runs": runs}))

    assert steps(2.0, 2.1, 2.3, 2.2, 2.1) == HOLDS
    assert steps(2.0, 2.3, 2.1, 2.1, 2.1) == FAILS
    assert steps(2.0, 2.1, 2.12, 2.1, 2.1) == NOISE
    wide = [[x, x - 0.2, x + 0.2] for x in (2.0, 2.1, 2.3, 2.2, 2.1)]
    assert steps(*wide) == NOISE


@pytest.mark.parametrize(("ratio", "expected"), [([0.8, 0.7, 0.9], HOLDS), ([1.2, 1.1, 1.3], FAILS), (None, NOISE)])
def test_a_ratio_on_the_same_prompts_decides(evidence: Evidence, ratio: Any, expected: str) -> None:
    wide = [2.0, 1.0, 3.0]
    told = {"ratio": {"0": ratio}} if ratio else {}
    both = changed(
        evidence, ablations={"runs": [ablation("eagle", wide), ablation("eagle inputs=token", wide, **told)]}
    )
    assert both.runs("", "eagle", "eagle inputs=token", "0").outcome == expected
    mirrored = {HOLDS: FAILS, FAILS: HOLDS, NOISE: NOISE}[expected]
    assert both.runs("", "eagle inputs=token", "eagle", "0").outcome == mirrored


def test_other_texts_refute_the_rule(evidence: Evidence) -> None:
    document = copy.deepcopy(evidence.results["drafters"])
    next(m for m in document.pooled if (m.method, m.temperature) == ("HASS", 1)).same_text -= 1
    assert verdict("L-alg", evidence) == HOLDS
    assert verdict("L-alg", changed(evidence, drafters=document)) == PARTLY


def test_published_numbers_that_the_theorems_do_not_give(evidence: Evidence) -> None:
    facts = [
        {**f, "value": "2.54"} if (f["value"], f["where"][:9]) == ("2.53", "numerical") else f for f in evidence.facts
    ]
    wrong = Evidence(evidence.inventory, facts, evidence.results)
    assert [c.words[-19:] for c in ENTRIES["L-num"].checks(wrong)] == ["5 of 6 as published", "6 of 6 as published"]
    assert [verdict("L-num", x) for x in (evidence, wrong)] == [HOLDS, PARTLY]


def speeds(chain: tuple[float, float], tree: tuple[float, float]) -> Document:
    """Speed-ups at batch sizes 1 and 8; tokens per second are a hundred times as many."""
    return report(
        macro=[
            Mean(
                0.0, batch, method, speedup=Estimate(x, x - 0.05, x + 0.05),
                tokens_per_second=Estimate(100 * x, 99 * x, 101 * x),
            )
            for method, mine in (("HASS chain", chain), ("HASS", tree))
            for batch, x in zip((1, 8), mine, strict=True)
        ]
    )  # fmt: skip


def test_a_report_of_outrider_bench_is_read(evidence: Evidence) -> None:
    gone = Evidence(evidence.inventory, evidence.facts, {})
    assert "batches.json` is not there" in ENTRIES["E-T7"].checks(gone)[0].words
    assert verdict("E-T7", changed(evidence, batches=speeds((3.0, 1.98), (3.1, 1.5)))) == HOLDS
    assert verdict("E-T7", changed(evidence, batches=speeds((1.2, 2.9), (1.3, 3.5)))) == FAILS
    assert verdict("E-T7", changed(evidence, batches=speeds((3.0, 1.98), (3.1, 2.5)))) == PARTLY

    def cells(low: float, high: float) -> Document:
        first = [Position(1, 9, 0.7, [low, 0.6, 0.7, 0.75, high])]
        return report(cells=[Cell("t", t, 1, "HASS, 16x6", positions=first) for t in (0.0, 1.0)])

    for spread, expected in (((0.4, 0.9), HOLDS), ((0.68, 0.72), FAILS)):
        assert verdict("E2-F5", changed(evidence, sizes=cells(*spread))) == expected
    assert verdict("E2-F5", changed(evidence, sizes=report())) == OPEN


def test_a_file_or_a_method_that_is_gone_is_told(evidence: Evidence) -> None:
    gone = Evidence(evidence.inventory, evidence.facts, {})
    (check,) = ENTRIES["M-ladder"].checks(gone)
    assert check == fig.Check("`papers/results/ladder.json` is not there", OPEN)
    (check,) = ENTRIES["M-cat"].checks(changed(evidence, drafters=report()))
    assert "has no 'Medusa'" in check.words
    assert "### drafters\n\nNot measured." in reproduction.page(gone)
