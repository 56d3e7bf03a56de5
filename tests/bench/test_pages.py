"""The tables of docs/results.md are those of the checked-in results: none typed, none old."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # where its scripts find one another

import page  # noqa: E402


def test_the_page_is_up_to_date() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    tables = page.results()
    assert page.filled(text, tables) == text, "run python benchmarks/page.py: docs/results.md has old tables"
    missing = [mark for mark, table in tables.items() if table == "Not measured."]
    assert not missing, f"no results for {missing}"


def test_an_old_table_would_be_seen() -> None:
    text = "before\n<!-- a -->\nold\n<!-- /a -->\nafter\n"
    assert page.filled(text, {"a": "new"}) == text.replace("old", "new")
    with pytest.raises(AssertionError, match="no place for b"):
        page.filled(text, {"b": "new"})
