"""Two runs side by side: what is marked, what is left out, and what must be said before."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from made_document import made

from outrider.bench.compare import change, compare, markdown, sentence, show


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found = made()
    return {**found, "cells": [c for c in found["cells"] if c["method"] in ("none", "HASS", "EAGLE-2, 60x6")]}


def row(comparison: dict[str, Any], **identity: Any) -> dict[str, Any]:
    (found,) = [r for r in comparison["rows"] if all(r[k] == v for k, v in identity.items())]
    return found


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ((1.5, 1.4, 1.6), (1.8, 1.61, 2.0), True), ((1.5, 1.4, 1.6), (1.8, 1.6, 2.0), False),
        ((1.5, 1.4, 1.6), (1.2, 1.1, 1.39), True), ((1.5, 1.4, 1.6), (1.5, 1.0, 2.0), False),
        ((1.5, 1.5, 1.5), (1.5, 1.5, 1.5), False),
    ],
)  # fmt: skip
def test_a_change_is_significant_where_the_intervals_do_not_meet(a: Any, b: Any, apart: bool) -> None:
    found = change(a, b)
    assert found is not None
    assert found["significant"] is apart
    assert found["ratio"] == pytest.approx(b[0] / a[0])


def test_a_run_beside_itself(document: dict[str, Any]) -> None:
    found = compare(document, document)
    assert not found["warnings"]
    assert not found["only_a"] + found["only_b"]
    assert len(found["rows"]) + len(found["no_result"]) == len(document["cells"])
    assert not any(c["significant"] for r in found["rows"] for c in (r["speedup"], r["tau"]) if c)
    assert json.loads(json.dumps(found)) == found


def test_changes_gaps_and_faults_are_told(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    b = copy.deepcopy(document)
    here = {"task": "chat", "temperature": 0.0, "batch": 1}
    cells = {c["method"]: c for c in b["cells"] if {k: c[k] for k in here} == here}
    cells["HASS"] |= {"speedup": [3.0, 2.9, 3.1], "tau": None}
    cells["EAGLE-2, 60x6"] |= {"speedup": [0.5, 0.4, 0.6]}
    cells["none"]["method"] = "none [bold]|"
    b["run"] |= {"target": "another", "arguments": {**b["run"]["arguments"], "tokens": 64}}
    b["run"]["machine"]["threads"] = 4
    found = compare(document, b)
    assert row(found, method="HASS", **here)["speedup"]["significant"]
    assert row(found, method="HASS", **here)["tau"] is None
    assert [c["method"] for c in found["only_a"]] == ["none"]
    assert [c["method"] for c in found["only_b"]] == ["none [bold]|"]
    assert [(c["method"], c["a"], c["b"]) for c in found["no_result"]] == [("EAGLE-2, 60x6", "invalid", "invalid")]
    targets, machine, arguments = found["warnings"]
    assert "outrider/demo, another" in targets
    assert machine == "The machines differ: threads 2, 4."
    assert arguments == "The arguments differ: tokens 32, 64."
    assert "1 are faster in B and 1 slower" in sentence(found)
    show(found)
    said = capsys.readouterr().out
    assert "only in B: none [bold]|" in said
    assert "no result: EAGLE-2, 60x6" in said
    text = markdown(found)
    assert "3.00 (2.90–3.10) |" in text
    assert text.count(r"\* |") == 2
    assert r"only in B: none \[bold\]\|" in text
    assert len({line.count(" | ") for line in text.splitlines() if line.startswith("| ")}) == 1


def test_a_cell_that_is_invalid_in_one_run_is_not_compared(document: dict[str, Any]) -> None:
    b = copy.deepcopy(document)
    broken = next(c for c in b["cells"] if c["method"] == "HASS")
    broken |= {"state": "invalid", "speedup": [98.7, 98.6, 98.8]}
    found = compare(document, b)
    assert "98.7" not in json.dumps(found)
    assert {"a": "done", "b": "invalid"}.items() <= found["no_result"][0].items()
