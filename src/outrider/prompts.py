"""JSON lines, for every command that reads prompts or data: rows with their places, and rows as prompts.

A row is a text, or an object with `prompt` (a text or messages), `messages`, `turns` or `text`. Lines end at newlines
alone (a U+2028 within a text ends none), a byte order mark is skipped, blank lines are left out, and whatever is wrong
is reported with its line's number. `-` is the standard input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .params import InputError

Messages = list[dict[str, str]]
BOM = b"\xef\xbb\xbf"
KINDS = '{"prompt": text}, {"messages": [...]}, {"turns": [...]} or {"text": text}'


def read(path: str | Path, limit: int | None = None) -> list[str | Messages]:
    """The prompts of a file (or of the standard input, `-`), the first `limit` of them. All lines are checked."""
    prompts = [prompt(where, value) for where, value in rows(path)]
    if not prompts:
        raise InputError(f"{_name(path)} has no prompts")
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, not {limit}")
    return prompts[:limit]


def rows(path: str | Path, what: str = "prompts file") -> Iterator[tuple[str, Any]]:
    """(where it stands, for messages; the JSON value) of each line that is not blank, one at a time."""
    if str(path) == "-":
        yield from parse(_name(path), sys.stdin.buffer)
        return
    if Path(path).is_dir():
        raise InputError(f"{path} is a folder; name a {what} in it")
    if not Path(path).exists():
        count = f"; a number of prompts is --limit {path}" if str(path).isdecimal() else ""
        raise InputError(f"there is no {what} {path}{count}")
    with Path(path).open("rb") as lines:
        yield from parse(str(path), lines)


def parse(origin: str, lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """The same of lines in memory. Raises InputError at the first line that is not UTF-8 or not JSON."""
    for number, line in enumerate(lines, 1):
        where = f"{origin}, line {number}"
        try:
            text = (line.removeprefix(BOM) if number == 1 else line).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not UTF-8 text (byte {error.start} of the line); convert the file") from None
        if not text.strip():
            continue
        try:
            value = json.loads(text)
            if "\\u" in text:
                json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(
                f"{where}: half of a surrogate pair (\\ud800 to \\udfff) is no character; correct it"
            ) from None
        except (ValueError, RecursionError) as error:
            kinds = {json.JSONDecodeError: getattr(error, "msg", ""), RecursionError: "nested too deeply"}
            reason = kinds.get(type(error), "a number of too many digits")
            raise InputError(f"{where}: not JSON ({reason}); write one JSON value a line") from None
        yield where, value


def prompt(where: str, value: Any) -> str | Messages:
    """A row as a prompt: text to continue, or messages for the model's chat template.

    Of several `turns`, a conversation whose answers are still to be written, the first is taken.
    """
    text = value
    if isinstance(value, dict):
        if "messages" in value:
            return messages(where, value["messages"])
        if "turns" in value:
            turns = [value["turns"]] if isinstance(value["turns"], str) else value["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
                raise InputError(f'{where}: "turns" must be a list of texts, none of them empty')
            return messages(where, [{"role": "user", "content": turns[0]}])
        text = value.get("prompt", value.get("text"))
        if isinstance(text, list):
            return messages(where, text)
    if not isinstance(text, str) or not text:
        raise InputError(f"{where}: give a text, {KINDS}")
    return text


def messages(where: str, given: Any) -> Messages:
    """Chat messages, checked: a list of {"role": text, "content": text}; other keys are left out."""
    good = isinstance(given, list) and bool(given)
    for message in given if good else ():
        keys = isinstance(message, dict) and isinstance(message.get("role"), str)
        good = good and keys and isinstance(message.get("content"), str)
    if not good:
        raise InputError(f'{where}: "messages" must be a list of {{"role": text, "content": text}}')
    return [{"role": m["role"], "content": m["content"]} for m in given]


def _name(path: str | Path) -> str:
    return "standard input" if str(path) == "-" else str(path)
