"""Tasks by name: `load("gsm8k", folder)`. `data/tasks.json` is the catalogue.

A name is a task (`mt-bench`), a task whose prompts are cut (`narrativeqa@4096`), or a path that ends in .jsonl. Groups
(`eagle`, `spec-bench`) stand for several tasks; see `expand`. Rows come from the user's folder, else from the hub.
`Task.note` says what differs from the papers' prompts and is shown beside every figure.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path

from .. import prompts as lines_of
from ..params import InputError, first_line
from ..schema import from_dict
from .sources import Rows, Source, from_hub
from .types import Prompt, Task


@dataclass(frozen=True)
class Entry:
    """A task of the catalogue."""

    name: str
    kind: str
    about: str
    sources: tuple[Source, ...]
    count: int | None = 80  # the first N prompts, as in the papers; None: all
    raw: bool = False
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Tasks with a common name."""

    about: str
    tasks: tuple[str, ...]


@cache
def catalogue() -> tuple[dict[str, Group], dict[str, Entry]]:
    """Groups and tasks by name."""
    data = json.loads((files("outrider") / "bench" / "data" / "tasks.json").read_text(encoding="utf-8"))
    groups = {name: from_dict(Group, group) for name, group in data["groups"].items()}
    return groups, {entry["name"]: from_dict(Entry, entry) for entry in data["tasks"]}


def names() -> dict[str, str]:
    """All groups and tasks, each with a short description."""
    groups, tasks = catalogue()
    return {**{n: g.about for n, g in groups.items()}, **{n: f"{t.kind}: {t.about}" for n, t in tasks.items()}}


def expand(selected: Sequence[str]) -> list[str]:
    """The names of tasks, groups expanded (with their `@N`), each once. Raises InputError for an unknown name.

    >>> expand(["longbench@1024"])[:2]
    ['narrativeqa@1024', 'qasper@1024']
    """
    groups, tasks = catalogue()
    expanded: list[str] = []
    for name in selected:
        base, at = split(name)
        if base not in groups and base not in tasks and not is_file(base):
            raise InputError(unknown(base, names()))
        expanded += [f"{task}{at}" for task in (groups[base].tasks if base in groups else (base,))]
    return list(dict.fromkeys(expanded))


def load(name: str, folder: str | Path | None = None, limit: int | None = None) -> Task:
    """Load a task by name (not a group), or from the user's own JSON lines.

    folder: of the published files; the hub is used for those it lacks.
    limit: at most N prompts, spread evenly over the set, so that a set ordered by category keeps every category.

    Raises InputError for an unknown name, an unusable file and a set that is not available.
    """
    base, at = split(name)
    if limit is not None and limit < 1:
        raise InputError(f"a task needs at least one prompt, not {limit}")
    if is_file(base):
        task = own(Path(base))
    elif base in catalogue()[1]:
        task = published(catalogue()[1][base], Path(folder) if folder else None)
    else:
        raise InputError(unknown(base, catalogue()[1]))
    length = int(at[1:]) if at else None
    if length is not None:
        if length < 2:
            raise InputError(f"{name}: prompts are cut to at least 2 tokens")
        note = f"prompts of more than {length} tokens are cut to their first and last halves"
        task = replace(task, note="; ".join(filter(None, (task.note, note))))
    return replace(task, name=name, cut=length, prompts=spread(task.prompts, limit))


def is_file(name: str) -> bool:
    """Whether a task's name is a file of the user's own, or - for stdin."""
    return name == "-" or name.endswith(".jsonl") or (name not in catalogue()[1] and Path(name).is_file())


def own(file: Path) -> Task:
    """The user's JSON lines: {"id", "turns"}, or what `outrider generate` reads (`outrider.prompts`).

    Turns and messages are chats (`sources.user_turns`); texts and prompts are raw, to be continued. A file has one of
    the two kinds only. `id`, `category` and `reference` are optional.
    """
    rows = list(lines_of.rows(file))
    if not rows:
        raise InputError(f"{file} has no prompts")
    chats = [isinstance(row, dict) and ("turns" in row or "messages" in row) for _, row in rows]
    if any(chats) != all(chats):
        where = rows[chats.index(not chats[0])][0]
        raise InputError(f"{where}: one file has chats (turns or messages) or texts to continue, not both")
    raw = not chats[0]
    dicts: Rows = [(where, dict(row) if isinstance(row, dict) else {}) for where, row in rows]
    for (where, fields), (_, row) in zip(dicts, rows, strict=True):
        if "turns" not in fields:
            fields["messages" if "messages" in fields else "prompt"] = lines_of.prompt(where, row)
    return Task(str(file), distinct(str(file), Source(turns="prompt" if raw else "turns").prompts(dicts)), raw=raw)


def cut(ids: Sequence[int], length: int) -> list[int]:
    """At most `length` tokens: the first ceil(length / 2) and the last floor(length / 2).

    >>> cut([1, 2, 3, 4, 5, 6], 3)
    [1, 2, 6]
    """
    if len(ids) <= length:
        return list(ids)
    head = (length + 1) // 2
    return [*ids[:head], *ids[len(ids) - (length - head) :]]


def spread(prompts: tuple[Prompt, ...], limit: int | None) -> tuple[Prompt, ...]:
    """`limit` of the prompts at equal distances, the first among them; all if there are no more."""
    if limit is None or limit >= len(prompts):
        return prompts
    return tuple(prompts[i * len(prompts) // limit] for i in range(limit))


def published(entry: Entry, folder: Path | None) -> Task:
    """A task of the catalogue."""
    source, rows = fetch(entry, folder)
    prompts = distinct(entry.name, source.prompts(rows)[: entry.count])
    if not prompts:
        raise InputError(f"{source.file or source.repo} has no prompts of the task {entry.name}; fetch it again")
    note = "; ".join(filter(None, (entry.note, source.note)))
    return Task(entry.name, prompts, entry.raw, kind=entry.kind, note=note)


def fetch(entry: Entry, folder: Path | None) -> tuple[Source, Rows]:
    """The rows of a task, from this package, else the folder, else the hub."""
    if folder is not None and not folder.is_dir():
        raise InputError(f"there is no folder {folder}; --data names the one that has the tasks' files")
    for source in entry.sources:
        if source.package:
            return source, list(lines_of.rows(str(files("outrider") / source.package)))
        if folder is not None and source.file and (folder / source.file).is_file():
            return source, list(lines_of.rows(folder / source.file))
    why = "it is not on the hub"
    for source in entry.sources:
        if source.repo:
            try:
                return source, from_hub(source, entry.count)
            except ImportError:
                why = "the library `datasets`, which reads it from the hub, is not installed"
            except Exception as error:  # the hub's clients have a dozen types of their own
                why = f"the hub does not give {source.repo}: {first_line(error).partition('. ')[0]}"
    missing = " or ".join(s.file for s in entry.sources if s.file)
    raise InputError(f"the task {entry.name} needs --data FOLDER with {missing} ({why}); the task sample needs nothing")


def split(name: str) -> tuple[str, str]:
    """A name and its "@N", or "" without one."""
    base, at, length = name.rpartition("@")
    return (base, at + length) if at and length.isdecimal() else (name, "")


def unknown(name: str, known: Mapping[str, object]) -> str:
    """The message for an unknown name."""
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(catalogue()[0])} and more"
    return f"there is no task {name}: {advice} (`outrider bench tasks` lists them; a path ends in .jsonl)"


def distinct(name: str, prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """The same prompts. Raises InputError if two have the same id, since results are kept by id."""
    twice = [id for id, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        raise InputError(f"{name} has two prompts with the id {twice[0]}; give each its own")
    return prompts
