"""The tables of docs/results.md and docs/benchmarks.md are those of the checked-in results: none typed, none old."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # where its scripts find one another

import page  # noqa: E402


@pytest.mark.parametrize(("name", "made"), [("results", page.results), ("benchmarks", page.engines)])
def test_pages_are_up_to_date(name: str, made: object) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    tables = made()  # type: ignore[operator]
    assert page.filled(text, tables) == text, f"run python benchmarks/page.py: docs/{name}.md has old tables"
    missing = [mark for mark, table in tables.items() if table == "Not measured."]
    assert not missing, f"no results for {missing}"


def test_an_old_table_would_be_seen() -> None:
    text = "before\n<!-- a -->\nold\n<!-- /a -->\nafter\n"
    assert page.filled(text, {"a": "new"}) == text.replace("old", "new")
    with pytest.raises(AssertionError, match="no place for b"):
        page.filled(text, {"b": "new"})
