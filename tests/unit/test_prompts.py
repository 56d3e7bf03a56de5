"""Prompt files: what is read, and the one sentence for each thing that is wrong."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from outrider import prompts
from outrider.params import InputError


def file_of(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    return file


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_every_kind_of_line(tmp_path: Path) -> None:
    lines = (
        '"one"', "", '{"prompt": "two"}', '{"messages": [{"role": "user", "content": "thr\\u00e9e", "name": "x"}]}',
        '{"turns": ["four", "and then?"]}', '{"text": "five"}', '{"prompt": [{"role": "user", "content": "six"}]}',
    )  # fmt: skip
    file = file_of(tmp_path, "\r\n".join(lines).encode())
    assert prompts.read(file) == ["one", "two", asked("thrée"), asked("four"), "five", asked("six")]
    assert prompts.read(str(file), limit=2) == ["one", "two"]


def test_a_byte_order_mark_is_skipped_and_only_newlines_end_lines(tmp_path: Path) -> None:
    file = file_of(tmp_path, b"\xef\xbb\xbf" + '"one\u2028still one\u0085"\n"two"'.encode())
    assert prompts.read(file) == ["one\u2028still one\u0085", "two"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'"one"\n{"prompt": 2}\n')))
    with pytest.raises(InputError, match="standard input, line 2: give a text"):
        prompts.read("-")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'"fine"\n{"prompt": ', "line 2: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b'{"prompt": ""}', "line 1: give a text"),
        (b'{"question": "x"}', "line 1: give a text"),
        (b"[1, 2]", "line 1: give a text"),
        (b'"a"\n"b"\n{"messages": [{"role": "user"}]}', 'line 3: "messages" must be a list'),
        (b'{"messages": []}', 'line 1: "messages" must be a list'),
        (b'{"turns": [""]}', 'line 1: "turns" must be a list'),
        (b"\n \n", "has no prompts"),
        (b'"a"\n\n"caf\xe9"', "line 3: not UTF-8"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", r"line 1: not JSON \(a number of too many digits"),
        (b"[" * 100_000, r"line 1: not JSON \(nested too deeply"),
        (b'"a\\ud800"', "line 1: half of a surrogate pair"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        prompts.read(file_of(tmp_path, content), limit=1)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no prompts file .*none\.jsonl$"):
        prompts.read(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="there is no prompts file 40; a number of prompts is --limit 40"):
        prompts.read("40")
    with pytest.raises(InputError, match="--limit must be at least 1, not 0"):
        prompts.read(file_of(tmp_path, b'"one"'), limit=0)
