"""Text to rows of tokens: files, chat templates, loss masks, the held-out split, packing.

A line of JSONL has `messages` (the loss is on the assistant's turns), `prompt` and `completion` (on the completion),
`text` (on all of it), or the token ids `prompt_token_ids` and `token_ids` (on the latter). Any other file is plain
text. Documents longer than a row are cut, short ones are packed; within a row every document has its own number and
positions and attends to itself only.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .. import prompts
from ..encoding import has_template
from ..params import InputError
from . import hidden_states

DATE = date(2026, 1, 1)  # "today" in a chat template
TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
MARK = "outrider: an answer"  # where a template writes it
PIECE = 3000  # characters per document of a plain text file
TEXTS = 256  # tokenised at once
SMALLEST, LARGEST, COVERED = 12, 15, 0.99  # draft vocabularies: log2 of the sizes, share of tokens to cover
STEP = 32  # lengths are multiples of STEP tokens, so that GEMMs have few sizes (`sizes.py`)


@dataclass(frozen=True)
class Document:
    """Token ids with their loss mask. `key` decides whether it is held out."""

    tokens: tuple[int, ...]
    learn: tuple[bool, ...]
    key: str


@dataclass(frozen=True)
class Text:
    """A document before tokenisation: its parts in order, each with its loss mask."""

    parts: list[tuple[str, bool]]
    ends: bool  # whether to add the end-of-text token
    special: bool = True  # whether to add the tokenizer's special tokens


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents. documents: their numbers within the row, -1 for padding. keys: names of the rows."""

    tokens: Int[Tensor, "b n"]
    positions: Int[Tensor, "b n"]
    documents: Int[Tensor, "b n"]
    learn: Bool[Tensor, "b n"]
    keys: tuple[int, ...]

    def rows(self, index: Sequence[int]) -> Batch:
        """Some of the rows, cut to the longest of them, rounded up to a multiple of STEP where possible."""
        at = torch.tensor(list(index), dtype=torch.long)
        used = int((self.documents[at] >= 0).sum(1).max()) if len(at) else 0
        used = min(-(-used // STEP) * STEP, self.documents.shape[1])
        parts = (self.tokens, self.positions, self.documents, self.learn)
        tokens, positions, documents, learn = (x[at, :used] for x in parts)
        return Batch(tokens, positions, documents, learn, tuple(self.keys[i] for i in index))

    def silent(self) -> Batch:
        """The same tokens without loss: all padding."""
        return replace(self, documents=torch.full_like(self.documents, -1), learn=torch.zeros_like(self.learn))

    def only(self, places: Sequence[tuple[int, Int[Tensor, " n"]]]) -> Batch:
        """The same with all documents but these, given by row and positions, as padding."""
        documents = torch.full_like(self.documents, -1)
        for row, at in places:
            documents[row, at] = self.documents[row, at]
        return replace(self, documents=documents, learn=self.learn & (documents >= 0))

    def to(self, device: torch.device | str) -> Batch:
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "positions", "documents", "learn")}
        return replace(self, **moved)

    def same(self, reach: int) -> Bool[Tensor, "b n"]:
        """Whether the token `reach` positions ahead is in the same document."""
        n = self.documents.shape[1]
        ahead = torch.full_like(self.documents, -1)
        ahead[:, : max(0, n - reach)] = self.documents[:, reach:]
        return (ahead == self.documents) & (self.documents >= 0)

    def wanted(self, reach: int) -> Bool[Tensor, "b n"]:
        """Whether the token `reach` positions ahead is in the same document and in the loss mask."""
        learn = torch.zeros_like(self.learn)
        learn[:, : max(0, learn.shape[1] - reach)] = self.learn[:, reach:]
        return learn & self.same(reach)

    def ahead(self, reach: int) -> Int[Tensor, "b n"]:
        """The token `reach` positions ahead; 0 beyond the row."""
        return torch.nn.functional.pad(self.tokens[:, reach:], (0, min(reach, self.tokens.shape[1])))


def read(paths: Sequence[str | Path], tokenizer: Any) -> Iterator[Document]:
    """Load documents from JSONL and plain text files and SpecForge's folders, in order.

    Raises InputError for anything else, with the line's number.
    """
    coming = _texts(paths, tokenizer)
    while some := list(islice(coming, TEXTS)):
        yield from tokenised(some, tokenizer)


def _texts(paths: Sequence[str | Path], tokenizer: Any) -> Iterator[Text | Document]:
    """The texts of the files; those given as token ids are documents already."""
    for path in map(Path, paths):
        if path.is_dir():
            yield from _folder(path)
            continue
        if not path.is_file():
            raise InputError(f"there is no file {path}; give JSONL or plain text to train on")
        try:
            if path.suffix.lower() in (".jsonl", ".json", ".ndjson"):
                for where, given in prompts.rows(path):
                    yield _text(given, where, tokenizer)
            else:
                for piece in pieces(path.read_text(encoding="utf-8")):
                    yield _plain(piece, str(path), True)
        except UnicodeDecodeError:
            raise InputError(f"{path} is not UTF-8 text; convert it first") from None


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """A long text, split at blank lines into documents of about `size` characters."""
    held = ""
    for paragraph in text.split("\n\n"):
        if held.strip() and len(held) + len(paragraph) > size:
            yield held
            held = ""
        held += paragraph + "\n\n"
    if held.strip():
        yield held


def document(given: Any, where: str, tokenizer: Any) -> Document:
    """Parse a line of JSONL; `where` names it. Raises InputError if it is not training data."""
    return tokenised([_text(given, where, tokenizer)], tokenizer)[0]


def _text(given: Any, where: str, tokenizer: Any) -> Text | Document:
    if isinstance(given, dict) and given.get("token_ids") is not None:
        return tokens(given.get("prompt_token_ids"), given["token_ids"], where)
    ends = not isinstance(given, dict) or bool(given.get("ends", True))
    if isinstance(given, dict) and isinstance(given.get("messages"), list):
        return _chat(given["messages"], tokenizer, where, ends)
    if isinstance(given, dict) and isinstance(given.get("text"), str):
        return _plain(given["text"], where, ends)
    if isinstance(given, dict) and isinstance(given.get("prompt"), str) and isinstance(given.get("completion"), str):
        if not given["completion"].strip():
            raise InputError(f"{where} has an empty completion, so there is nothing to learn; fill or remove the line")
        return Text([(given["prompt"], False), (given["completion"], True)], ends)
    raise InputError(f"{where} has neither messages, nor prompt and completion, nor text; give one of them")


def _made(tokens: Sequence[int], learn: Sequence[bool]) -> Document:
    """A document keyed by its tokens, so that whether it is held out does not depend on the file's format."""
    ids = tuple(tokens)
    return Document(ids, tuple(learn), hashlib.sha256(repr(ids).encode()).hexdigest())


def _folder(path: Path) -> Iterator[Document]:
    """Texts of a folder of hidden states whose files have a loss mask."""
    there = list(hidden_states.paths(path))
    for file in there:
        yield _made(*hidden_states.learned(file))
    if not there:
        raise InputError(f"{path} is a folder without hidden states; give files of JSONL or plain text to train on")


def tokens(asked: Any, answer: Any, where: str) -> Document:
    """Token ids of a prompt and of its answer, which has the loss. Raises InputError if they are not token ids."""
    for ids in (asked, answer):
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise InputError(f"{where}: prompt_token_ids and token_ids must be lists of token ids; correct the line")
    return _made((*asked, *answer), (False,) * len(asked) + (True,) * len(answer))


def _plain(text: str, where: str, ends: bool) -> Text:
    """A text with loss on every token. Raises InputError for an empty one."""
    if not text.strip():
        raise InputError(f"{where} is empty; fill or remove the line")
    return Text([(text, True)], ends)


def _chat(messages: Sequence[Mapping[str, str]], tokenizer: Any, where: str, ends: bool) -> Text:
    """A dialogue in the model's chat template; without one, lines of `User: ...` and `Assistant: ...`.

    The loss is on everything from the start of an assistant's turn to the next turn, since the model generates the end
    of its turn. ends: False if the last turn is truncated and has no end.
    """
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise InputError(f"{where}: every message needs a role and a content; correct the line")
        if message["role"] == "assistant" and not message["content"].strip():
            raise InputError(f"{where} has an empty assistant turn, so there is nothing to learn; fill or remove it")
    if not any(m["role"] == "assistant" for m in messages):
        raise InputError(f"{where} has no assistant turn, so there is nothing to learn; remove the line")
    if not has_template(tokenizer):
        parts: list[tuple[str, bool]] = []
        for m in messages:
            parts += [(f"{m['role'].capitalize()}: ", False), (m["content"] + "\n", m["role"] == "assistant")]
        if not ends:
            parts[-1] = (parts[-1][0].removesuffix("\n"), parts[-1][1])
        return Text(parts, ends)

    def written(some: Sequence[Mapping[str, str]], prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(some), tokenize=False, add_generation_prompt=prompt, **timeless(tokenizer.chat_template)
            )
        except Exception as error:  # a template may fail in any way
            raise InputError(f"{where}: the chat template refuses these messages: {error}; correct the line") from None

    parts, done = [], ""
    for i, m in enumerate(messages):
        if m["role"] != "assistant":
            continue
        after = written(messages[: i + 1])
        # no template opens an empty chat
        before = written(messages[:i], True) if i else written([{**m, "content": MARK}]).partition(MARK)[0]
        if not before.startswith(done) or not after.startswith(before):
            raise InputError(f"{where}: this chat template rewrites earlier turns; give prompt and completion instead")
        parts += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    last = messages[-1]["content"].rstrip()
    if not ends and parts and messages[-1]["role"] == "assistant" and last in parts[-1][0]:
        parts[-1] = (parts[-1][0][: parts[-1][0].rindex(last) + len(last)], True)
    return Text(parts, ends=False, special=False)


def timeless(template: Any) -> dict[str, str]:
    """Arguments for a chat template that writes today's date: it writes DATE, so that a run which goes on tomorrow
    meets the same documents."""
    if not isinstance(template, str) or not TODAY.search(template):
        return {}
    return {"chat_template": TODAY.sub(lambda call: repr(DATE.strftime(call[2])), template)}


def tokenised(given: Sequence[Text | Document], tokenizer: Any) -> list[Document]:
    """Tokenise texts, in order; documents pass through."""
    documents = {i: one for i, one in enumerate(given) if isinstance(one, Document)}
    end = getattr(tokenizer, "eos_token_id", None)
    for special in (True, False):
        texts = {i: one for i, one in enumerate(given) if isinstance(one, Text) and one.special == special}
        if texts:
            joined = ["".join(words for words, _ in text.parts) for text in texts.values()]
            made = tokenizer(joined, add_special_tokens=special, return_offsets_mapping=True)
            for (i, text), ids, places in zip(texts.items(), made["input_ids"], made["offset_mapping"], strict=True):
                documents[i] = _spans(text, ids, places, end)
    return [documents[i] for i in range(len(given))]


def _spans(text: Text, tokens: Sequence[int], places: Sequence[tuple[int, int]], end: int | None) -> Document:
    """A token has the loss mask of its first character."""
    begins = [0, *accumulate(len(words) for words, _ in text.parts)][:-1]
    learned = [known for _, known in text.parts]
    marks = [first < last and learned[bisect_right(begins, first) - 1] for first, last in places]
    ids = list(tokens)
    if text.ends and end is not None and (not ids or ids[-1] != end):
        ids, marks = [*ids, end], [*marks, learned[-1]]
    elif text.ends and ids and ids[-1] == end:
        marks[-1] = learned[-1]
    return _made(ids, marks)


def name_of(document: Document) -> str:
    """A hash of a document's key."""
    return hashlib.sha256(document.key.encode()).hexdigest()


def split(
    documents: Sequence[Document], share: float = 0.02, least: int = 8, known: Collection[str] | None = None
) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, without duplicates; the order of those held out is independent of the data's.

    A document's tokens decide its side: a share `share` is held out, at least `least` (half of them if there are
    fewer).

    Args:
        known: names (`name_of`) of those that a run has held out. If some of them are there, they are held out and all
            others learned, so that no document is held out that was trained on before.
    """
    unique = list({d.key: d for d in documents}.values())
    if len(unique) < 2:
        count = f"{len(unique)} document{'' if len(unique) == 1 else 's'}"
        raise InputError(
            f"the data has {count}, and training needs two that differ, one of them held out; plain texts are split at "
            "blank lines"
        )
    before = frozenset(known or ())
    held = [d for d in unique if name_of(d) in before]
    if held and len(held) < len(unique):
        return [d for d in unique if name_of(d) not in before], sorted(held, key=name_of)
    ranked = sorted((name_of(d), d.key) for d in unique)
    chosen = sum(int(drawn[:8], 16) < share * 16**8 for drawn, _ in ranked)
    out = {key for _, key in ranked[: min(max(least, chosen), len(ranked) // 2)]}
    return [d for d in unique if d.key not in out], sorted((d for d in unique if d.key in out), key=name_of)


def pack(documents: Sequence[Document], length: int, seed: int = 0, share: bool = True) -> Batch:
    """Pack documents into rows of `length` tokens: long ones are cut, short ones share a row (first fit, shuffled).

    share: False puts one document in a row, for models without document masks.
    """
    if length < 4:
        raise InputError(f"rows of {length} tokens are too short to learn from; give at least 4")
    parts = [
        (d.tokens[i : i + length], d.learn[i : i + length])
        for d in documents
        for i in range(0, len(d.tokens), length)
        if any(d.learn[i + 2 : i + length])  # the first drafted token is the third of a text
    ]
    if not parts:
        raise InputError("no document is long enough to learn from; give longer texts")
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
    rows: list[list[int]] = []
    free: list[int] = []
    open_ = 0  # first row with space left
    for i in order:
        size = len(parts[i][0])
        at = next((r for r in range(open_, len(rows)) if free[r] >= size), None) if share else None
        if at is None:
            rows.append([])
            free.append(length)
            at = len(rows) - 1
        rows[at].append(i)
        free[at] -= size
        while open_ < len(rows) and (free[open_] < 16 or len(rows) - open_ > 64):
            open_ += 1
    shape = (len(rows), length)
    tokens, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    numbers, learn = torch.full(shape, -1, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for r, members in enumerate(rows):
        at = 0
        for number, i in enumerate(members):
            ids, marks = parts[i]
            here = slice(at, at + len(ids))
            tokens[r, here], learn[r, here] = torch.tensor(ids), torch.tensor(marks)
            positions[r, here], numbers[r, here] = torch.arange(len(ids)), number
            at += len(ids)
    return Batch(tokens, positions, numbers, learn, tuple(range(len(rows))))


@lru_cache(maxsize=2)
def order(rows: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch)).tolist()


def trimmed(documents: Sequence[Document], vocab: int, size: int) -> Int[Tensor, " size"] | None:
    """The tokens of a draft vocabulary; None for the full vocabulary. size: as in `draft_size`."""
    size = draft_size(documents, vocab, size)
    return frequent(documents, vocab, size) if size < vocab else None


def draft_size(documents: Sequence[Document], vocab: int, size: int = -1) -> int:
    """The size of a draft vocabulary.

    Args:
        documents: the training documents.
        vocab: the target's tokens.
        size: number of tokens; 0: all; -1: the least power of two from 4,096 to 32,768 that covers a share COVERED of
            the training tokens, and all if that is over half of the vocabulary.

    Raises:
        InputError: the size is out of range.
    """
    if not -1 <= size <= vocab:
        raise InputError(f"draft_vocab is 0 (all tokens), -1 (chosen by the data) or 1 to {vocab} tokens, not {size}")
    if size >= 0:
        return size or vocab
    counts = _counts(documents, vocab)[0].sort(descending=True).values
    covers = (1 << bits for bits in range(SMALLEST, LARGEST) if counts[: 1 << bits].sum() >= COVERED * counts.sum())
    chosen = next(covers, 1 << LARGEST)
    return chosen if 2 * chosen <= vocab else vocab


def frequent(documents: Iterable[Document], vocab: int, size: int) -> Int[Tensor, " size"]:
    """The `size` most frequent training tokens, ascending; ties by frequency in the input, then by id."""
    learned, read = _counts(documents, vocab)
    counts = learned * (int(read.sum()) + 1) + read
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def _counts(documents: Iterable[Document], vocab: int) -> tuple[Int[Tensor, " v"], Int[Tensor, " v"]]:
    """Counts of each token with loss, and in the input."""
    learned, read = torch.zeros(vocab, dtype=torch.long), torch.zeros(vocab, dtype=torch.long)
    coming = iter(documents)
    while some := list(islice(coming, 1024)):
        tokens = torch.tensor([token for d in some for token in d.tokens], dtype=torch.long)
        learn = torch.tensor([known for d in some for known in d.learn], dtype=torch.bool)
        read += torch.bincount(tokens, minlength=vocab)[:vocab]
        learned += torch.bincount(tokens[learn], minlength=vocab)[:vocab]
    return learned, read
