"""Two runs side by side: what is marked, what is left out, and what must be said before."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from made_document import made

from outrider.bench.compare import Change, Comparison, Row, compare, show
from outrider.bench.document import Document, Estimate
from outrider.bench.results import to_json
from outrider.schema import from_dict

CHAT = ("chat", 0.0, 1)


@pytest.fixture(scope="module")
def document() -> Document:
    result: Document = from_dict(Document, made())
    result.cells = [c for c in result.cells if c.method in ("none", "HASS", "EAGLE-2, 60x6")]
    return result


def row(result: Comparison, method: str) -> Row:
    (mine,) = [r for r in result.rows if (r.task, r.temperature, r.batch, r.method) == (*CHAT, method)]
    return mine


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ((1.5, 1.4, 1.6), (1.8, 1.61, 2.0), True), ((1.5, 1.4, 1.6), (1.8, 1.6, 2.0), False),
        ((1.5, 1.4, 1.6), (1.2, 1.1, 1.39), True), ((1.5, 1.4, 1.6), (1.5, 1.0, 2.0), False),
        ((1.5, 1.5, 1.5), (1.5, 1.5, 1.5), False), ((1.5,), (9.5,), False),
    ],
)  # fmt: skip
def test_a_change_is_significant_where_the_intervals_do_not_meet(a: Any, b: Any, apart: bool) -> None:
    result = Change.of(Estimate(*a), Estimate(*b))
    assert result is not None
    assert result.significant is apart
    assert result.ratio == pytest.approx(b[0] / a[0])


def test_a_run_beside_itself(document: Document) -> None:
    result = compare(document, document)
    assert not result.warnings
    assert not result.only_a + result.only_b
    assert len(result.rows) + len(result.no_result) == len(document.cells)
    assert not any(c.significant for r in result.rows for c in (r.speedup, r.tau) if c)
    messages = to_json(result)
    assert json.loads(json.dumps(messages)) == messages


def test_changes_gaps_and_faults_are_reported(document: Document, capsys: pytest.CaptureFixture[str]) -> None:
    b = copy.deepcopy(document)
    cells = {c.method: c for c in b.cells if c.key[:3] == CHAT}
    cells["HASS"].speedup, cells["HASS"].tau = Estimate(3.0, 2.9, 3.1), None
    cells["EAGLE-2, 60x6"].speedup = Estimate(0.5, 0.4, 0.6)
    cells["none"].method = "none [bold]|"
    b.run.target, b.run.arguments["tokens"], b.run.machine["threads"] = "another", 64, 4
    output = compare(document, b)
    changed = row(output, "HASS")
    assert changed.speedup is not None
    assert changed.speedup.significant
    assert changed.tau is None
    assert [k[-1] for k in output.only_a] == ["none"]
    assert [k[-1] for k in output.only_b] == ["none [bold]|"]
    assert [(k[-1], a, b) for k, a, b in output.no_result] == [("EAGLE-2, 60x6", "invalid", "invalid")]
    targets, machine, arguments = output.warnings
    assert "outrider/demo, another" in targets
    assert machine == "The machines differ: threads 2, 4."
    assert arguments == "The arguments differ: tokens 32, 64."
    assert "1 are faster in B and 1 slower" in output.sentence
    show(output)
    said = capsys.readouterr().out
    assert "only in B: none [bold]|" in said
    assert "no result: EAGLE-2, 60x6" in said


def test_a_cell_that_is_invalid_in_one_run_is_not_compared(document: Document) -> None:
    b = copy.deepcopy(document)
    broken = next(c for c in b.cells if c.method == "HASS")
    broken.state, broken.speedup = "invalid", Estimate(98.7, 98.6, 98.8)
    result = compare(document, b)
    assert "98.7" not in json.dumps(to_json(result))
    assert result.no_result[0] == (broken.key, "done", "invalid")
