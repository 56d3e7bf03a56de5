"""Tasks by name: `load("gsm8k", folder)`. What a name means stands in `data/tasks.json`, a catalogue of data.

A name is a task (`mt-bench`), a task whose prompts are cut (`narrativeqa@4096`), or a path that ends in .jsonl. Groups
(`eagle`, `spec-bench`) stand for several tasks: `expand` says which. Rows come from the folder that the user gives,
then from the hub; where neither has them an error says so, and nothing else is taken instead. What differs from the
papers' own prompts is written in `Task.note`, which stands beside every figure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import prompts as lines_of
from ..params import InputError
from .sources import Rows, Source, from_file, from_hub, from_package
from .types import Prompt, Task

NUMBER = re.compile(r"(?<!\d)-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|(?<!\d)-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Entry:
    """A task of the catalogue."""

    name: str
    kind: str
    about: str
    sources: tuple[Source, ...]
    count: int | None = 80  # prompts that are taken, from the first on: the papers' number; None takes all
    raw: bool = False
    longest: int | None = None  # prompts of more tokens are left out before anything is cut
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Tasks that can be asked for by one name."""

    about: str
    tasks: tuple[str, ...]


@cache
def catalogue() -> tuple[dict[str, Group], dict[str, Entry]]:
    """Groups and tasks by name."""
    data = json.loads((files("outrider") / "bench" / "data" / "tasks.json").read_text(encoding="utf-8"))
    groups = {name: Group(g["about"], tuple(g["tasks"])) for name, g in data["groups"].items()}
    return groups, {e["name"]: Entry(**{**e, "sources": tuple(map(_source, e["sources"]))}) for e in data["tasks"]}


def names() -> dict[str, str]:
    """What can be asked for, groups first, each with a few words on it."""
    groups, tasks = catalogue()
    return {**{n: g.about for n, g in groups.items()}, **{n: f"{t.kind}: {t.about}" for n, t in tasks.items()}}


def expand(wanted: Sequence[str]) -> list[str]:
    """Groups as their tasks, `@N` passed on to each; every task once, in the order asked for. Unknown: InputError.

    >>> expand(["longbench@1024"])[:2]
    ['narrativeqa@1024', 'qasper@1024']
    """
    groups, tasks = catalogue()
    found: list[str] = []
    for name in wanted:
        base, at = _parts(name)
        if base not in groups and base not in tasks and not is_file(base):
            raise InputError(_unknown(base, names()))
        found += [f"{task}{at}" for task in (groups[base].tasks if base in groups else (base,))]
    return list(dict.fromkeys(found))


def load(
    name: str, folder: str | Path | None = None, limit: int | None = None, tokens: Callable[[str], int] | None = None
) -> Task:
    """The task of that name (not a group's: see `expand`), or of the user's own JSON lines.

    `folder`: where the published files lie, looked at before the hub. `limit`: so many prompts at most, spread evenly
    over the set, so that sets which are ordered by category keep every category. `tokens` counts the tokens of a text;
    LongBench's sets need it, since their longest prompts are left out.

    Raises InputError for a name that is unknown, a file that cannot be used and a set that cannot be had.
    """
    base, at = _parts(name)
    if limit is not None and limit < 1:
        raise InputError(f"a task needs at least one prompt, not {limit}")
    if is_file(base):
        task = own(Path(base))
    elif base in catalogue()[1]:
        task = _published(catalogue()[1][base], Path(folder) if folder else None, tokens)
    else:
        raise InputError(_unknown(base, catalogue()[1]))
    length = int(at[1:]) if at else None
    if length is not None and length < 2:
        raise InputError(f"{name}: prompts are cut to at least 2 tokens")
    if length is not None:
        note = f"prompts of more than {length} tokens are cut to their first and last halves"
        task = replace(task, note=_joined(task.note, note))
    return replace(task, name=name, cut=length, prompts=spread(task.prompts, limit))


def is_file(name: str) -> bool:
    """Does a task's name mean a file of the user's own, or the standard input?"""
    return name == "-" or name.endswith(".jsonl") or (name not in catalogue()[1] and Path(name).is_file())


def own(file: Path) -> Task:
    """The user's JSON lines: {"id", "turns"}; or what `outrider generate` reads (`outrider.prompts`).

    Turns and messages are chats (`sources.user_turns` says which messages count); texts and prompts are raw, to be gone
    on from. One file holds one of the two; with turns on any line, it has them on all. `id`, `category` and `reference`
    are kept where a line has them.
    """
    rows = from_file(file)
    chats = [isinstance(row, dict) and ("turns" in row or "messages" in row) for _, row in rows]
    if any(chats) != all(chats):
        where = rows[chats.index(not chats[0])][0]
        raise InputError(f"{where}: one file holds chats (turns or messages) or texts to go on from, not both")
    raw = not chats[0]
    dicts: Rows = [(where, dict(row) if isinstance(row, dict) else {}) for where, row in rows]
    for (where, fields), (_, row) in zip(dicts, rows, strict=True):
        if "turns" not in fields:
            fields["messages" if "messages" in fields else "prompt"] = lines_of.prompt(where, row)
    return Task(str(file), _distinct(str(file), Source(turns="prompt" if raw else "turns").prompts(dicts)), raw=raw)


def cut(ids: Sequence[int], length: int) -> list[int]:
    """At most `length` tokens: the first ceil(length / 2) and the last floor(length / 2).

    >>> cut([1, 2, 3, 4, 5, 6], 3)
    [1, 2, 6]
    """
    if len(ids) <= length:
        return list(ids)
    head = (length + 1) // 2
    return [*ids[:head], *ids[len(ids) - (length - head) :]]


def exact(kind: str, answer: str, reference: str) -> bool | None:
    """Whether an answer is right, where the kind of task can tell: None elsewhere, or without a reference.

    maths: the answer's number (the last after "####", or the last of the text) is the reference's. question answering:
    one of the reference's lines is in the answer, as whole words, whatever the case, punctuation and articles.
    """
    if kind == "maths":
        wanted = _number(reference)
        return None if wanted is None else _number(answer) == wanted
    if kind == "question answering":
        lines = [words for words in map(_words, reference.splitlines()) if words.strip()]
        return any(words in _words(answer) for words in lines) if lines else None
    return None


def spread(prompts: tuple[Prompt, ...], limit: int | None) -> tuple[Prompt, ...]:
    """`limit` of the prompts at equal distances, the first among them; all where there are no more."""
    if limit is None or limit >= len(prompts):
        return prompts
    return tuple(prompts[i * len(prompts) // limit] for i in range(limit))


def _published(entry: Entry, folder: Path | None, tokens: Callable[[str], int] | None) -> Task:
    source, rows = _rows(entry, folder)
    prompts = _distinct(entry.name, source.prompts(rows)[: entry.count])
    if not prompts:
        raise InputError(f"{source.file or source.repo} has no prompts of the task {entry.name}; fetch it again")
    dropped = ""
    if entry.longest is not None:
        if tokens is None:
            raise ValueError(f"{entry.name} leaves out prompts of more than {entry.longest} tokens: give `tokens`")
        short = tuple(p for p in prompts if tokens("\n".join(p.turns)) <= entry.longest)
        if not short:
            raise InputError(f"every prompt of {entry.name} has more than {entry.longest} tokens; leave this task out")
        dropped = (
            f"{len(prompts) - len(short)} of {len(prompts)} prompts have more than {entry.longest} tokens, left out"
        )
        prompts = short
    note = _joined(entry.note, source.note, dropped)
    return Task(entry.name, prompts, entry.raw, kind=entry.kind, note=note)


def _rows(entry: Entry, folder: Path | None) -> tuple[Source, Rows]:
    """From this package, else the folder, else the hub."""
    if folder is not None and not folder.is_dir():
        raise InputError(f"there is no folder {folder}; --data names the one that holds the tasks' files")
    for source in entry.sources:
        if source.package:
            return source, from_package(source.package)
        if folder is not None and source.file and (folder / source.file).is_file():
            return source, from_file(folder / source.file)
    why = "it is not on the hub"
    for source in entry.sources:
        if source.repo:
            try:
                return source, from_hub(source, entry.count)
            except ImportError:
                why = "the library `datasets`, which reads it from the hub, is not installed"
            except Exception as error:  # the hub's clients have a dozen types of their own
                why = f"the hub does not give {source.repo}: {_line(error)}"
    wanted = " or ".join(s.file for s in entry.sources if s.file)
    raise InputError(f"the task {entry.name} needs --data FOLDER with {wanted} ({why}); the task sample needs nothing")


def _source(fields: dict[str, Any]) -> Source:
    return Source(**{**fields, "only": tuple(fields.get("only", ()))})


def _parts(name: str) -> tuple[str, str]:
    """A name and its "@N", or "" where it has none."""
    base, at, length = name.rpartition("@")
    return (base, at + length) if at and length.isdecimal() else (name, "")


def _unknown(name: str, known: dict[str, Any]) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(catalogue()[0])} and more"
    return f"there is no task {name}: {advice} (`outrider bench --list` shows them; a path ends in .jsonl)"


def _distinct(name: str, prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """The same prompts; results are kept by id, so two of one id raise InputError."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InputError(f"{name} has two prompts with the id {prompt.id}; give each its own")
        seen.add(prompt.id)
    return prompts


def _number(text: str) -> Decimal | None:
    found = NUMBER.findall(text.rpartition("####")[2])
    return Decimal(found[-1].replace(",", "")) if found else None


def _words(text: str) -> str:
    words = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return f" {' '.join(w for w in words if w not in ('a', 'an', 'the'))} "


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _line(error: Exception) -> str:
    """What an error says, its first sentence."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).partition(". ")[0][:160].rstrip(".")
