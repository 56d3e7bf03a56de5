"""Prompt files: what is read, and the one sentence for each thing that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import prompts
from outrider.types import InputError


def test_the_three_kinds_of_line(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('"one"\n\n{"prompt": "two"}\n{"messages": [{"role": "user", "content": "thr\\u00e9e"}]}\n', "utf-8")
    assert prompts.read(file) == ["one", "two", [{"role": "user", "content": "thrée"}]]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'"fine"\n{"prompt": ', "line 2: not JSON"),
        (b'{"prompt": ""}', "line 1: give a text"),
        (b'{"text": "x"}', "line 1: give a text"),
        (b"[1, 2]", "line 1: give a text"),
        (b'"a"\n"b"\n{"messages": [{"role": "user"}]}', 'line 3: "messages" must be a list'),
        (b'{"messages": []}', 'line 1: "messages" must be a list'),
        (b"\n \n", "has no prompts"),
        (b'"caf\xe9"', "not UTF-8"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        prompts.read(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no prompts file"):
        prompts.read(tmp_path / "none.jsonl")
