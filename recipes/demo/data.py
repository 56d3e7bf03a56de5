"""Sources -> documents -> a held-out split and one flat token file per domain.

A *document* is one dialogue, one exercise, one help page, one story, or a stretch of about 3,000
characters of a source file or book. Documents that must not be told apart by the split (the same
file, the same book, the same opening question, the same command) share a *group*, and a group is held
out as a whole: groups are ranked by a hash of their name, and the lowest ones are held out until they
hold 2 % of the domain's documents and at least 60. Exact duplicates are dropped first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT_SHARE, HELD_OUT_LEAST, CHUNK = 0.02, 60, 3000
CALCULATOR_MARK = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True)
class Document:
    """`messages` for a dialogue, else `text`; `ends` is False for an inner stretch of a longer text."""

    domain: str
    group: str
    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    ends: bool = True

    @property
    def content(self) -> str:
        """All words of the document: what duplicates are found by."""
        return self.text or "\n".join(f"{role}: {words}" for role, words in self.messages)

    def as_json(self) -> dict:
        body = (
            {"messages": [{"role": r, "content": c} for r, c in self.messages]}
            if self.messages
            else {"text": self.text}
        )
        return {"domain": self.domain, "group": self.group, "ends": self.ends, **body}

    @staticmethod
    def from_json(row: dict) -> Document:
        messages = tuple((m["role"], m["content"]) for m in row.get("messages", ()))
        return Document(row["domain"], row["group"], row.get("text", ""), messages, row.get("ends", True))


def stretches(text: str, size: int = CHUNK) -> list[str]:
    """Cuts at blank lines into pieces of about `size` characters; the pieces join to the text."""
    pieces, current = [], ""
    for paragraph in re.split(r"(?<=\n)(?=\n*\S)(?<=\n\n)", text):
        if current and len(current) + len(paragraph) > size:
            pieces.append(current)
            current = ""
        current += paragraph
    return [*pieces, current] if current.strip() else pieces


def long_texts(domain: str, parts: Iterator[tuple[str, str]]) -> Iterator[Document]:
    for name, text in parts:
        pieces = stretches(text.strip("\n") + "\n")
        for i, piece in enumerate(pieces):
            yield Document(domain, name, text=piece, ends=i == len(pieces) - 1)


def python_files(domain: str, path: Path) -> Iterator[Document]:
    parts = re.split(r"^# file: (.+)\n", path.read_text(encoding="utf-8"), flags=re.M)
    files = ((n, t) for n, t in zip(parts[1::2], parts[2::2], strict=True) if len(t.strip()) > 40)
    return long_texts(domain, files)


def books(domain: str, path: Path) -> Iterator[Document]:
    parts = re.split(r"^# ([^/\n]+/[^\n]+)\n", path.read_text(encoding="utf-8"), flags=re.M)
    return long_texts(domain, zip(parts[1::2], parts[2::2], strict=True))


def pages(domain: str, path: Path) -> Iterator[Document]:
    for page in re.split(r"^(?=# )", path.read_text(encoding="utf-8"), flags=re.M):
        if page.strip():
            yield Document(domain, page.split("\n", 1)[0].lower(), text=page.strip() + "\n")


def stories(domain: str, path: Path) -> Iterator[Document]:
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            yield Document(domain, line.strip(), text=line.strip() + "\n")


def dialogues(domain: str, path: Path) -> Iterator[Document]:
    """`User:` / `Bot:` lines, a blank line between dialogues; neighbours of one role are joined."""
    roles = {"User": "user", "Bot": "assistant"}
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        turns: list[list[str]] = []
        for line in block.strip().split("\n"):
            mark, colon, words = line.partition(": ")
            role = roles.get(mark) if colon else None
            if turns and role in (None, turns[-1][0]):
                turns[-1][1] += "\n" + (words if role else line)
            elif role:
                turns.append([role, words])
        if turns and turns[0][0] == "assistant":
            turns = turns[1:]
        if len(turns) > 1:
            messages = tuple((role, words.strip()) for role, words in turns)
            yield Document(domain, "\n".join(w for _, w in messages), messages=messages)


def conversations(domain: str, path: Path) -> Iterator[Document]:
    """JSON lines of `messages`; grouped by the first question. Calculator marks are removed."""
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line:
            continue
        rows = json.loads(line)["messages"]
        messages = tuple((m["role"], CALCULATOR_MARK.sub("", m["content"]).strip()) for m in rows)
        yield Document(domain, messages[0][1], messages=messages)


@dataclass(frozen=True)
class Source:
    """Where a domain comes from, and its share of the training tokens."""

    file: str
    read: Callable[[str, Path], Iterator[Document]]
    share: float


SOURCES = {
    "gsm8k": Source("gsm8k_train.jsonl", conversations, 0.15),
    "oasst": Source("oasst_en100_trees.jsonl", conversations, 0.035),
    "self_dialogue": Source("self_dialogue.txt", dialogues, 0.135),
    "sgd": Source("sgd_train.txt", dialogues, 0.14),
    "stdlib": Source("cpython_3_11_7_stdlib.txt", python_files, 0.21),
    "algorithms": Source("thealgorithms_python.txt", python_files, 0.11),
    "tldr": Source("tldr_pages_en.md", pages, 0.10),
    "stories": Source("tinystories_1000.txt", stories, 0.04),
    "books": Source("classic_books_en.txt", books, 0.08),
}


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out) of one domain, both in the order of their hashes, without duplicates."""
    unique = {digest(" ".join(d.content.split())): d for d in reversed(documents)}
    ordered = [unique[key] for key in sorted(unique)]
    sizes: dict[str, int] = {}
    for d in ordered:
        sizes[d.group] = sizes.get(d.group, 0) + 1
    wanted, held, count = max(HELD_OUT_LEAST, round(HELD_OUT_SHARE * len(ordered))), set(), 0
    for group in sorted(sizes, key=lambda g: digest("held out " + g)):
        if count >= wanted:
            break
        held.add(group)
        count += sizes[group]
    return [d for d in ordered if d.group not in held], [d for d in ordered if d.group in held]


def read_domain(domain: str, data: Path) -> tuple[list[Document], list[Document]]:
    source = SOURCES[domain]
    return split(list(source.read(domain, data / source.file)))


def encode(tokenizer, document: Document) -> list[int]:
    """The token numbers of a document, as the models read it."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if not document.messages:
        ids = tokenizer(document.text, add_special_tokens=False)["input_ids"]
        return [bos, *ids, *([eos] if document.ends else [])]
    ids = [bos]
    for role, words in document.messages:
        ids.append(tokenizer.convert_tokens_to_ids(f"<|{role}|>"))
        ids += [*tokenizer(words, add_special_tokens=False)["input_ids"], eos]
    return ids


def write_split(data: Path, work: Path, domains=tuple(SOURCES)) -> None:
    """Writes `documents/{train,heldout}/DOMAIN.jsonl` under the work folder."""
    for domain in domains:
        if (work / "documents" / "heldout" / f"{domain}.jsonl").exists():
            continue
        for part, documents in zip(("train", "heldout"), read_domain(domain, data), strict=True):
            path = work / "documents" / part / f"{domain}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [json.dumps(d.as_json(), ensure_ascii=False) + "\n" for d in documents]
            path.with_suffix(".tmp").write_text("".join(rows), encoding="utf-8")
            path.with_suffix(".tmp").replace(path)


def documents(work: Path, part: str, domain: str) -> Iterator[Document]:
    with open(work / "documents" / part / f"{domain}.jsonl", encoding="utf-8") as lines:
        for line in lines:
            yield Document.from_json(json.loads(line))


def write_tokens(work: Path, tokenizer, domains=tuple(SOURCES)) -> dict[str, int]:
    """Writes `tokens/DOMAIN.bin`, the training documents end to end as uint16; returns the sizes."""
    sizes = {}
    for domain in domains:
        path = work / "tokens" / f"{domain}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            rows = [np.array(encode(tokenizer, d), np.uint16) for d in documents(work, "train", domain)]
            np.concatenate(rows).tofile(path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
        sizes[domain] = path.stat().st_size // 2
    return sizes


class Schedule:
    """Step k's batch as a function of (seed, k) alone, however long the run becomes.

    The unit is a block of `BLOCK` tokens (and the one after it). Slot by slot a domain is drawn by its
    share; a domain gives its blocks in a fresh permutation per epoch, and each epoch cuts them elsewhere.
    """

    BLOCK = 1024

    def __init__(self, work: Path, seed: int, per_step: int, steps: int, domains=tuple(SOURCES)) -> None:
        self.tokens = [np.memmap(work / "tokens" / f"{d}.bin", np.uint16, "r") for d in domains]
        shares = np.array([SOURCES[d].share for d in domains])
        draws = np.random.default_rng(seed).random(per_step * steps)
        self.domain = np.searchsorted(np.cumsum(shares / shares.sum())[:-1], draws, side="right")
        self.turn = np.zeros(len(self.domain), np.int64)  # how many earlier slots had this domain
        for i in range(len(domains)):
            mine = self.domain == i
            self.turn[mine] = np.arange(mine.sum())
        self.seed, self.per_step = seed, per_step

    def block(self, slot: int) -> np.ndarray:
        which, turn = int(self.domain[slot]), int(self.turn[slot])
        tokens = self.tokens[which]
        count = (len(tokens) - 1) // self.BLOCK - 1
        epoch, place = divmod(turn, count)
        order = np.random.default_rng([self.seed, which, epoch]).permutation(count)
        start = int(order[place]) * self.BLOCK + epoch * 389 % self.BLOCK
        return np.asarray(tokens[start : start + self.BLOCK + 1], np.int64)

    def batch(self, step: int, length: int) -> np.ndarray:
        """[rows, length + 1]: inputs and their successors; length divides the block."""
        slots = range(step * self.per_step, (step + 1) * self.per_step)
        blocks = [self.block(slot) for slot in slots]
        return np.stack([b[i : i + length + 1] for b in blocks for i in range(0, self.BLOCK, length)])
