"""The tables of docs/results.md are those of the checked-in results: none typed, none old."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from papers import page, picture, tables
from papers.rows import read

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    tables = page.results()
    assert page.filled(text, tables) == text, "run python -m papers page: docs/results.md has old tables"
    missing = [mark for mark, table in tables.items() if table == "Not measured."]
    assert not missing, f"no results for {missing}"
    made = re.sub(r"<!-- (?P<mark>[^/].*?) -->.*?<!-- /(?P=mark) -->", "", text, flags=re.DOTALL)
    assert "\n|--" not in made, "a table that no stored run makes: it belongs to notes/"


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    """Each with its study and date; there are none beside them that another run might contradict."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page.filled(text, {"results": picture.note()}) == text, "run python -m papers.picture"
    rest = text.replace(picture.note(), "")
    assert not re.findall(r"\d+ tokens/s|\d+ tokens a second|[\d.]+ times", rest)


def test_the_rows_that_fit_into_memory_are_those_of_a_batch_that_is_complete() -> None:
    """Of stored batches some had lost rows, and what the others held was divided by all."""
    table = tables.batches(read("batches"))
    fits: dict[str, set[str]] = {}
    for line in table.splitlines()[2:]:
        method, *_, rows = (cell.strip() for cell in line.strip("|").split("|"))
        fits.setdefault(method, set()).add(rows)
    assert fits["HASS"] == {"106"}
    assert all(len(result) == 1 for result in fits.values())


def test_an_old_table_would_be_seen() -> None:
    text = "before\n<!-- a -->\nold\n<!-- /a -->\nafter\n"
    assert page.filled(text, {"a": "new"}) == text.replace("old", "new")
    with pytest.raises(AssertionError, match="no place for b"):
        page.filled(text, {"b": "new"})
