"""Prompts from a JSONL file: one JSON value a line, checked before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .types import InputError


def read(path: str | Path) -> list[Any]:
    """Each line is a string, {"prompt": text} or {"messages": [{"role", "content"}, ...]}; blank lines are skipped."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no prompts file {file}")
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text (byte {error.start}); convert it first") from None
    prompts = [_parse(file, i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not prompts:
        raise InputError(f"{file} has no prompts")
    return prompts


def _parse(file: Path, number: int, line: str) -> Any:
    where = f"{file}, line {number}"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg}); write one JSON value a line") from None
    if isinstance(value, dict) and "messages" in value:
        return _messages(where, value["messages"])
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f'{where}: give a text, {{"prompt": text}} or {{"messages": [...]}}')
    return prompt


def _messages(where: str, messages: Any) -> list[dict[str, str]]:
    good = isinstance(messages, list) and bool(messages)
    for message in messages if good else ():
        keys = isinstance(message, dict) and isinstance(message.get("role"), str)
        good = good and keys and isinstance(message.get("content"), str)
    if not good:
        raise InputError(f'{where}: "messages" must be a list of {{"role": text, "content": text}}')
    return [{"role": m["role"], "content": m["content"]} for m in messages]
