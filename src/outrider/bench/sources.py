"""Where the rows of a task come from (a folder, the hub, this package), and how a row becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .. import prompts
from ..params import InputError
from .types import Prompt

IDS = ("id", "question_id", "task_id", "prompt_id", "_id")  # in the published sets
END = "<|endoftext|>"  # ends some of the published references
Rows = list[tuple[str, Any]]  # (its file and line, for messages; the row)


@dataclass(frozen=True)
class Source:
    """A place where a set is published, and the names of its fields; `data/tasks.json` lists all."""

    file: str = ""  # JSON lines in the user's folder, or within `archive`
    package: str = ""  # JSON lines of this package
    repo: str = ""  # a hub id, loaded by the library `datasets` ...
    config: str | None = None
    split: str = "test"
    archive: str = ""  # ... or the name of a zip file there, whose data/FILE has the rows
    only: tuple[str, ...] = ()  # rows whose field `key` is one of these; () takes all
    key: str = "category"
    template: str = ""  # of the single turn, over the row's fields; "" takes the turns from the field `turns`
    turns: str = "turns"
    reference: str = "reference"
    note: str = ""

    def prompts(self, rows: Rows) -> tuple[Prompt, ...]:
        """The prompts of the rows that `only` selects. Raises InputError for a row without the fields."""
        for where, row in rows:
            if not isinstance(row, Mapping):
                raise InputError(f"{where}: not a JSON object; a set's lines are objects with the field '{self.turns}'")
        kept = [r for r in rows if not self.only or str(r[1].get(self.key, "")) in self.only]
        return tuple(self.prompt(where, row, i) for i, (where, row) in enumerate(kept))

    def prompt(self, where: str, row: Mapping[str, Any], number: int) -> Prompt:
        """The prompt of one row."""
        name = next((str(row[k]) for k in IDS if row.get(k) is not None), str(number))
        answer = "\n".join(texts(row.get(self.reference))).removesuffix(END).rstrip()
        return Prompt(name, self._turns(where, row), str(row.get("category") or ""), answer)

    def _turns(self, where: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        names = ", ".join(row)
        if self.template:
            try:
                turns: Any = self.template.format(**row).strip()
            except KeyError as error:
                raise InputError(f"{where}: there is no field {error} (its fields are {names})") from None
        elif self.turns in row:
            turns = row[self.turns]
        elif "messages" in row:
            turns = user_turns(where, row["messages"])
        else:
            raise InputError(f"{where}: there is no field '{self.turns}' (its fields are {names})")
        turns = [turns] if isinstance(turns, str) else turns
        if not isinstance(turns, Sequence) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
            raise InputError(f"{where}: give a text for each turn of the user, none of them empty")
        return tuple(turns)


def user_turns(where: str, messages: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """The user's turns of a conversation; the model under test writes its own answers between them.

    Recorded answers are dropped. System messages are put before the first turn's text, since not every chat template
    supports them. Raises InputError for other roles, and without a message of the user.
    """
    by_role = {role: [m["content"] for m in messages if m["role"] == role] for role in ("system", "user", "assistant")}
    other = {m["role"] for m in messages} - by_role.keys()
    if other:
        raise InputError(
            f"{where}: messages are of the roles system, user and assistant, not {', '.join(sorted(other))}"
        )
    if not by_role["user"]:
        raise InputError(f"{where}: no message is the user's; give at least one")
    first, *rest = by_role["user"]
    return ("\n\n".join([*by_role["system"], first]), *rest)


def texts(value: Any) -> list[str]:
    """A text, or the texts of a nested list, as one list."""
    if isinstance(value, list | tuple):
        return [t for v in value for t in texts(v)]
    return [] if value is None else [str(value)]


def from_hub(source: Source, count: int | None) -> Rows:
    """The first `count` rows (None: all). Exceptions of the hub's libraries pass through."""
    if source.archive:
        from zipfile import ZipFile

        from huggingface_hub import hf_hub_download

        with ZipFile(hf_hub_download(source.repo, source.archive, repo_type="dataset")) as archive:
            origin, data = f"{source.file} of {source.repo}", archive.read(f"data/{source.file}")
            return list(prompts.parse(origin, data.split(b"\n")))[:count]
    from datasets import load_dataset  # not a dependency of this package

    rows = load_dataset(source.repo, source.config, split=source.split, streaming=True)
    return [(f"{source.repo}, row {i}", row) for i, row in enumerate(islice(rows, count))]
