"""The README describes what is there: every drafter in its table, every link to a file, code with public names."""

from __future__ import annotations

import re
from pathlib import Path

import outrider
from outrider import drafters

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_drafter_has_a_row() -> None:
    table = TEXT[TEXT.index("## Methods") : TEXT.index("## Models")]
    named = set(re.findall(r"`(\w+)(?::\w+)?`", table))
    assert set(drafters.names()) <= named


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert "://" in link or (ROOT / link).exists(), link


def test_the_python_of_the_readme_names_public_things() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.S | re.M)
    compile(code, "README.md", "exec")
    assert len(code.strip().splitlines()) <= 8
    for name in re.findall(r"outrider\.(\w+)", code):
        assert name in outrider.__all__
    for name in re.findall(r"llm\.(\w+)", code):
        assert hasattr(outrider.LLM, name)
