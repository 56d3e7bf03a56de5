"""The questions of JSONL files, and the answers that a file already has."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from .. import files
from ..params import InputError
from ..prompts import prompt, rows


@dataclass(frozen=True)
class Opening:
    """A text whose beginning the target continues."""

    text: str


Asked = str | Opening | list[dict[str, str]]


def questions(paths: Sequence[str | Path]) -> Iterator[tuple[str, Asked]]:
    """(position, question) of each line: messages up to the first answer, a prompt, or a text for its opening."""
    for path in map(Path, paths):
        for where, row in rows(path, "file"):
            asked: Asked = prompt(where, row)
            if isinstance(asked, list):
                asked = list(takewhile(lambda m: m["role"] != "assistant", asked))
                if not asked:
                    raise InputError(f"{where} starts with an answer; put a question before it")
            elif isinstance(asked, str) and isinstance(row, dict) and "prompt" not in row:
                asked = Opening(asked)
            yield where, asked


def keys(items: Sequence[Asked]) -> list[str]:
    """A hash of 16 hexadecimal digits for each question; equal questions have different ones."""
    seen: Counter[str] = Counter()
    hashes = []
    for what in items:
        text = json.dumps(what.text if isinstance(what, Opening) else what, sort_keys=True)
        hashes.append(hashlib.sha256(f"{seen[text]} {text}".encode()).hexdigest()[:16])
        seen[text] += 1
    return hashes


def mark(asked: Asked) -> str:
    """A hash of a question and of how it is asked, 16 hexadecimal digits."""
    return hashlib.sha256(f"{type(asked).__name__} {keys([asked])[0]}".encode()).hexdigest()[:16]


def finished(out: Path, kind: type = int) -> dict[Any, dict[str, Any]]:
    """The lines of the answered questions by their ids. A line truncated by an interruption is removed.

    Args:
        out: the file of answers, which may be absent.
        kind: of ids: int (numbers of questions) or str (`keys`).

    Raises:
        InputError: it is not a regular file, or not written by this command; then it is left as it is.
    """
    if not files.regular(out).exists():
        return {}
    with files.writing(out):
        *lines, rest = out.read_bytes().split(b"\n")
    answers = {}
    for number, line in enumerate(lines, 1):
        if (row := _line(line, kind)) is None:
            raise InputError(f"{out}:{number} was not written by this command; give another --out")
        answers[row["id"]] = row
    with files.writing(out):
        if (row := _line(rest, kind)) is not None:  # an editor took its end of line
            files.append(out, "")
            answers[row["id"]] = row
        elif rest and _cut_off(rest):
            os.truncate(out, out.stat().st_size - len(rest))
        elif rest:
            raise InputError(f"{out}:{len(lines) + 1} was not written by this command; give another --out")
    return answers


def _line(line: bytes, kind: type) -> dict[str, Any] | None:
    """An answer's line, if it is one."""
    try:
        row = json.loads(line)
        whole = isinstance(row["id"], kind) and isinstance(row.get("messages", []), list)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return row if whole else None


def _cut_off(line: bytes) -> bool:
    """Is it the beginning of an answer's line?"""
    begin = b'{"id": '
    try:
        json.loads(line)
    except ValueError:
        return line.startswith(begin) or begin.startswith(line)
    return False


def by(model: str, temperature: float, weights: str = "") -> dict[str, Any]:
    """Who answers, as a line of answers keeps it: the model (a name, or the last two parts of a folder's path), how its
    weights are kept, and the temperature."""
    parts = Path(model).resolve().parts if Path(model).is_dir() else (Path(model).name,)
    return {"model": "/".join(parts[-2:]), **({"weights": weights} if weights else {}), "temperature": temperature}


def same_author(out: Path, answers: Mapping[Any, dict[str, Any]], author: Mapping[str, Any] | None) -> None:
    """Raise InputError where an answer of `out` is another model's, or of other weights or another temperature."""
    for row in answers.values():
        theirs = row.get("by")
        if None not in (author, theirs) and theirs != author:  # older lines have no `by`
            said = " ".join(f"{name} {value}" for name, value in theirs.items()) if isinstance(theirs, dict) else theirs
            raise InputError(f"{out} has answers of {said}; give another --out")


def same_questions(out: Path, answers: Mapping[int, dict[str, Any]], items: Sequence[Asked]) -> None:
    """Raise InputError where an answer of `out` is that of another question than the one of its number."""
    for number, row in answers.items():
        if number >= len(items):
            continue
        asked, chat = items[number], row.get("messages")
        if (asked if chat is None else chat[:-1]) != asked or row.get("asked", mark(asked)) != mark(asked):
            raise InputError(f"{out} answers another question {number + 1} than the data has; give another --out")
