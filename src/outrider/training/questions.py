"""The questions of JSONL files, and the answers that a file already has."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from .. import files
from ..params import InputError
from ..prompts import prompt, rows

Asked = str | list[dict[str, str]]


def questions(paths: Sequence[str | Path]) -> Iterator[tuple[str, Asked]]:
    """(position, question) of each line: messages up to the first answer, a prompt, or the opening of a text."""
    for path in map(Path, paths):
        if not path.is_file():
            raise InputError(f"there is no file {path}; give JSONL with prompts")
        for where, row in rows(path):
            items = prompt(where, row)
            if not isinstance(items, str):
                items = list(takewhile(lambda m: m["role"] != "assistant", items))
                if not items:
                    raise InputError(f"{where} starts with an answer; put a question before it")
            yield where, items


def keys(items: Sequence[Asked]) -> list[str]:
    """A hash of 16 hexadecimal digits for each question; equal questions have different ones."""
    seen: Counter[str] = Counter()
    hashes = []
    for what in items:
        text = json.dumps(what, sort_keys=True)
        hashes.append(hashlib.sha256(f"{seen[text]} {text}".encode()).hexdigest()[:16])
        seen[text] += 1
    return hashes


def finished(out: Path, kind: type = int) -> set[Any]:
    """The ids of the answered questions; a line truncated by an interruption is removed.

    Args:
        out: the file of answers, which may be absent.
        kind: of ids: int (numbers of questions) or str (`keys`).

    Raises:
        InputError: it is not a regular file, or not written by this command.
    """
    if not files.regular(out).exists():
        return set()
    with files.writing(out):
        *lines, rest = out.read_bytes().split(b"\n")
        if rest:
            os.truncate(out, out.stat().st_size - len(rest))
    done = set()
    for number, line in enumerate(lines, 1):
        try:
            key = json.loads(line)["id"]
        except (ValueError, KeyError, TypeError):
            key = None
        if not isinstance(key, kind):
            raise InputError(f"{out}:{number} was not written by this command; give another --out")
        done.add(key)
    return done
