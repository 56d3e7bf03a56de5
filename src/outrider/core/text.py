"""A text is bytes: from token ids to bytes for every kind of tokenizer, and from bytes to what a reader is shown.

The text of an output is, by definition, the UTF-8 of the bytes that its tokens add after the prompt, with U+FFFD in
place of what is no UTF-8. Special tokens add nothing. Whatever depends on a token's place (the leading space that
SentencePiece drops) depends on its place in prompt and output together, so prompt and output joined are the text that
the tokenizer decodes from both, wherever their bytes are valid. Nothing is cleaned up afterwards
(`clean_up_tokenization_spaces` of transformers would change characters that were already shown).
"""

from __future__ import annotations

import codecs
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

logger = logging.getLogger(__name__)

# (a token's text so far, does it begin the text?) -> its text. Bytes that are no UTF-8 are surrogate escapes.
Step = Callable[[str, bool], str]
Decode = Callable[[list[int], bool], str]  # (token ids, leave special ones out?) -> text

HALF = "\ufffd"  # what decoders write for an unfinished UTF-8 character
CONTEXT, PATIENCE = 8, 8  # of `Windows`, in tokens
SINGLES, RUNS = 200, 60  # tokens and runs of tokens that are compared with the tokenizer's own decoding
CLEANED = {
    " .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " do not": " don't",
    " 's": "'s", " 've": "'ve", " 're": "'re",
}  # fmt: skip


@runtime_checkable
class Decoding(Protocol):
    """One text while it is decoded, token by token."""

    def peek(self, token: int) -> bytes:
        """What this token would be here; a special one, which may add nothing, is its name."""

    def push(self, token: int) -> bytes:
        """Add a token: the bytes that it adds."""

    def flush(self) -> bytes:
        """The text has ended: bytes that were waiting for more tokens."""


@runtime_checkable
class Detokenizer(Protocol):
    """What a tokenizer's ids are as bytes; shared by all texts."""

    def open(self, prompt: Sequence[int] = (), special: bool = False) -> Decoding:
        """The decoding of a text after `prompt`. `special`: are special tokens shown?"""

    def name(self, token: int) -> bytes:
        """A single token as bytes, special ones by their names; for lists of tokens."""


def detokenizer(tokenizer: Any) -> Detokenizer:
    """The detokenizer of any tokenizer: a table of bytes where its decoder is known, windows of its `decode` elsewhere.

    `tokenizer`: a `tokenizers.Tokenizer`, an object that holds one as `backend_tokenizer`, or anything with `decode`.
    None: every text is empty, and a token's name is its id.
    """
    if tokenizer is None:
        return Windows(lambda ids, skip: "" if skip else " ".join(map(str, ids)))
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    own = tokenizer is backend and hasattr(backend, "id_to_token")  # a bare one cleans nothing up
    options = {} if own else {"clean_up_tokenization_spaces": False}

    def decode(ids: list[int], skip: bool) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=skip, **options))

    try:
        table = TokenBytes.of(backend)
        table.check(decode, [backend.token_to_id(f"<0x{byte:02X}>") for byte in "漢\n".encode()])
    except Unknown as reason:
        logger.info("text is decoded in windows, by the tokenizer's own decode: %s", reason)
        return Windows(decode)
    return table


def text_of(decoding: Decoding, tokens: Sequence[int]) -> str:
    """The text of tokens."""
    return b"".join([*map(decoding.push, tokens), decoding.flush()]).decode(errors="replace")


# ------------------------------------------------------------------------------------------------ known decoders


class Unknown(Exception):
    """Why a tokenizer's tokens have no table of bytes."""


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of each token of a `tokenizers.Tokenizer`, by its own decoder, computed when first needed.

    A token adds the same bytes wherever it stands, but for two things: the first token of a text may lack its leading
    space, and decoders with an end-of-word suffix write a word's space when the next token comes.
    """

    names: Callable[[int], str | None] = field(repr=False)  # token id -> its name; None: there is no such token
    size: int  # ids lie below
    special: frozenset[int] = field(repr=False)
    steps: tuple[Step, ...] = field(repr=False)
    suffix: str = ""  # of names that end a word
    spaced: bool = False  # are there spaces between tokens that no token holds?
    cache: dict[int, tuple[bytes, bytes, bytes]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, backend: Any) -> TokenBytes:
        """The table of a `tokenizers.Tokenizer`. Raises Unknown for what is none, and for decoders not known here."""
        if not hasattr(backend, "decoder") or not hasattr(backend, "id_to_token"):
            raise Unknown("it is not backed by the tokenizers package")
        try:
            layout = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        except Exception as error:  # a decoder in Python, which cannot be inspected
            raise Unknown(str(error)) from None
        added = backend.get_added_tokens_decoder()
        special = frozenset(i for i, token in added.items() if token.special)
        size = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        flat = [] if layout is None else list(_flat(layout))
        suffix = next((str(part["suffix"]) for part in flat if part["type"] == "BPEDecoder"), "")
        spaced = layout is None or any(part["type"] in ("WordPiece", "BPEDecoder") for part in flat)
        steps = (_spaced,) if layout is None else tuple(_steps(flat))
        return cls(lambda token: _name(backend, token), size, special, steps, suffix, spaced)

    def open(self, prompt: Sequence[int] = (), special: bool = False) -> TableDecoding:
        """See `Detokenizer.open`."""
        shown = (token for token in reversed(prompt) if self.shown(token, special))
        return TableDecoding(self, special, next(shown, None))

    def name(self, token: int) -> bytes:
        """See `Detokenizer.name`."""
        _, later, owed = self.forms(token)
        return later + owed

    def shown(self, token: int, special: bool) -> bool:
        """Has this token text?"""
        return bool(self.forms(token)[1]) and (special or token not in self.special)

    def forms(self, token: int) -> tuple[bytes, bytes, bytes]:
        """A token's bytes at the beginning of a text, and elsewhere, and what it puts before the next token. Empty for
        ids that no token has."""
        forms = self.cache.get(token)
        if forms is None:
            name = self.names(token)
            forms = self.cache[token] = (b"", b"", b"") if name is None else self._render(name)
        return forms

    def _render(self, name: str) -> tuple[bytes, bytes, bytes]:
        first = later = name
        for step in self.steps:
            first, later = step(first, True), step(later, False)
        owed = b" " if self.suffix and name.endswith(self.suffix) else b""
        return first.encode(errors="surrogateescape"), later.encode(errors="surrogateescape"), owed

    def check(self, decode: Decode, bare: Sequence[int | None]) -> None:
        """Compare a sample of tokens and runs with the tokenizer's own decoding. Raises Unknown where they differ.

        `bare`: the tokens of the bytes of a text, where there are such tokens.
        """
        dice, run = random.Random(0), [token for token in bare if token is not None]
        pool = [*range(0, self.size, max(1, self.size // SINGLES)), *sorted(self.special)[:20], *run]
        runs = [dice.choices(pool, k=dice.randint(2, 12)) for _ in range(RUNS)]
        for number, ids in enumerate([*([token] for token in pool), *runs, run, pool[:3] + run + pool[3:6]]):
            skip = number % 3 > 0
            decoding = self.open(special=not skip)
            spelt = b"".join(map(decoding.push, ids))
            try:
                text = spelt.decode()
            except UnicodeDecodeError:  # decoders differ in how much of such bytes they replace
                continue
            if text != decode(ids, skip):
                raise Unknown(f"tokens {ids} are {decode(ids, skip)!r} to it, not {text!r}")


@dataclass
class TableDecoding:
    """One text, by a table of bytes."""

    table: TokenBytes
    special: bool
    before: int | None  # the last token that had text; None: the text begins here

    def peek(self, token: int) -> bytes:
        """See `Decoding.peek`."""
        first, later, _ = self.table.forms(token)
        return first if self.before is None else self.table.forms(self.before)[2] + later

    def push(self, token: int) -> bytes:
        """See `Decoding.push`."""
        if not self.table.shown(token, self.special):
            return b""
        spelt, self.before = self.peek(token), token
        return spelt

    def flush(self) -> bytes:
        """See `Decoding.flush`."""
        return b""


def _name(backend: Any, token: int) -> str | None:
    return backend.id_to_token(token) if 0 <= token < 1 << 32 else None


def _flat(layout: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of a decoder, sequences within sequences opened."""
    if layout["type"] == "Sequence":
        for part in layout["decoders"]:
            yield from _flat(part)
    else:
        yield layout


def _steps(parts: Sequence[Mapping[str, Any]]) -> Iterator[Step]:
    """The parts as steps on single tokens. Raises Unknown for a part that cannot be one."""
    fused = False  # what follows sees one text in place of tokens
    for part in parts:
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Replace" and "String" in part["pattern"] and (not fused or len(part["pattern"]["String"]) == 1):
            yield _replacing(part["pattern"]["String"], part["content"])
        elif kind == "Strip" and (not fused or (part["stop"] == 0 and part["start"] <= 1)):
            yield _stripping(part["content"], part["start"], part["stop"], fused)
        elif fused or kind not in KINDS:
            raise Unknown(f"a decoder of {' and '.join(p['type'] for p in parts)} is not known")
        else:
            yield KINDS[kind](part)
            fused = kind == "ByteLevel"


def _spaced(text: str, first: bool) -> str:
    return text if first else " " + text


def _replacing(old: str, new: str) -> Step:
    return lambda text, first: text.replace(old, new)


def _stripping(char: str, start: int, stop: int, fused: bool) -> Step:
    def strip(text: str, first: bool) -> str:
        if fused and not first:
            return text
        for _ in range(start):
            text = text.removeprefix(char)
        for _ in range(stop):
            text = text.removesuffix(char)
        return text

    return strip


def _byte_level(part: Mapping[str, Any]) -> Step:
    table = alphabet()

    def read(text: str, first: bool) -> str:
        if not all(char in table for char in text):  # an added token
            return text
        return bytes(table[char] for char in text).decode(errors="surrogateescape")

    return read


def alphabet() -> dict[str, int]:
    """How byte-level tokenizers show bytes: printable ones as they are, the others from U+0100 on, in order."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _byte_fallback(part: Mapping[str, Any]) -> Step:
    table = {f"<0x{b:02{x}}>": bytes([b]).decode(errors="surrogateescape") for b in range(256) for x in "xX"}
    return lambda text, first: table.get(text, text)


def _metaspace(part: Mapping[str, Any]) -> Step:
    mark, drops = part["replacement"], part["prepend_scheme"] != "never"
    return lambda text, first: text.replace(mark, "" if first and drops else " ")


def _word_piece(part: Mapping[str, Any]) -> Step:
    def join(text: str, first: bool) -> str:
        if not first:
            text = text.removeprefix(part["prefix"]) if text.startswith(part["prefix"]) else " " + text
        for dirty, clean in CLEANED.items() if part["cleanup"] else ():
            text = text.replace(dirty, clean)
        return text

    return join


def _end_of_word(part: Mapping[str, Any]) -> Step:
    """Without the space of a name's last suffix, which comes with the next token."""
    suffix = part["suffix"]
    return lambda text, first: text.removesuffix(suffix).replace(suffix, " ") if suffix else text


KINDS: dict[str, Callable[[Mapping[str, Any]], Step]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
    "BPEDecoder": _end_of_word,
}


# ------------------------------------------------------------------------------------------------ unknown decoders


@dataclass(frozen=True)
class Windows:
    """Any tokenizer, by its own `decode` of a few tokens at a time, always token by token.

    A token adds what the window's text gains by it. While that ends in U+FFFD it waits for the tokens that may complete
    the character, but no longer than `PATIENCE` tokens.
    """

    decode: Decode

    def open(self, prompt: Sequence[int] = (), special: bool = False) -> WindowDecoding:
        """See `Detokenizer.open`."""
        return WindowDecoding(self.decode, not special, list(prompt[-CONTEXT:]))

    def name(self, token: int) -> bytes:
        """See `Detokenizer.name`."""
        return self.decode([token], False).encode(errors="replace")


@dataclass
class WindowDecoding:
    """One text, by windows."""

    decode: Decode
    skip: bool
    before: list[int]  # tokens whose text is out
    waiting: list[int] = field(default_factory=list)

    def peek(self, token: int) -> bytes:
        """See `Decoding.peek`."""
        return self.decode([token], False).encode(errors="replace")

    def push(self, token: int) -> bytes:
        """See `Decoding.push`."""
        self.waiting.append(token)
        gained = self._gain()
        if len(self.waiting) < PATIENCE and (not gained or gained.endswith(HALF)):
            return b""
        self.before, self.waiting = [*self.before, *self.waiting][-CONTEXT:], []
        return gained.encode(errors="replace")

    def flush(self) -> bytes:
        """See `Decoding.flush`."""
        gained, self.waiting = self._gain(), []
        return gained.encode(errors="replace")

    def _gain(self) -> str:
        return self.decode([*self.before, *self.waiting], self.skip)[len(self.decode(self.before, self.skip)) :]


# ------------------------------------------------------------------------------------------------ the reader


@dataclass(frozen=True)
class Pattern:
    """A stop string, searched in bytes by Knuth, Morris and Pratt."""

    text: bytes

    @cached_property
    def borders(self) -> list[int]:
        """[i]: the longest proper prefix of text[: i + 1] that is a suffix of it, too."""
        borders = [0]
        for byte in self.text[1:]:
            borders.append(self._next(borders, borders[-1], byte))
        return borders

    def step(self, matched: int, byte: int) -> int:
        """How many bytes of it the text ends in after one more byte; `matched`: before it, not all of them."""
        return self._next(self.borders, matched, byte)

    def _next(self, borders: list[int], matched: int, byte: int) -> int:
        while matched and self.text[matched] != byte:
            matched = borders[matched - 1]
        return matched + (self.text[matched] == byte)


class TextStream:
    """Tokens in, text out: never half a character, nothing that may turn out to begin a stop string.

    The pieces, joined, are the text of all tokens up to the stop string that ends it. It ends at the first token that
    completes one; if that token completes several, before the one that begins first. Pieces depend on the tokens
    alone, not on how they are divided among calls.

    Args:
        decoding: of the text, after its prompt.
        stops: the stop strings.
        least: a stop string that one of the first so many tokens completes does not count.
    """

    def __init__(self, decoding: Decoding, stops: Sequence[Pattern] = (), least: int = 0):
        self.decoding, self.stops, self.least = decoding, stops, least
        self.matched = [0] * len(stops)  # bytes of each stop string that the text ends in
        self.pending = b""  # may begin a stop string
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.tokens = 0
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """What can be shown now that these tokens have come."""
        return "".join([self._add(self.decoding.push(token), 1) for token in tokens if not self.stopped])

    def flush(self) -> str:
        """The rest: the text has ended."""
        if self.stopped:
            return ""
        shown = self._add(self.decoding.flush(), 0)
        pending, self.pending = self.pending, b""
        return shown + ("" if self.stopped else self.characters.decode(pending, final=True))

    def _add(self, spelt: bytes, tokens: int) -> str:
        self.tokens += tokens
        if not self.stops:
            return self.characters.decode(spelt)
        self.pending += spelt
        end = self._search(spelt)
        if self.stopped:
            shown, self.pending = self.pending[:end], b""
        else:
            end = len(self.pending) - max(self.matched)
            shown, self.pending = self.pending[:end], self.pending[end:]
        return self.characters.decode(shown, final=self.stopped)

    def _search(self, spelt: bytes) -> int:
        """Where in `pending`, which ends in `spelt`, the text ends, if a stop string is completed."""
        begin, starts = len(self.pending) - len(spelt), []
        for which, stop in enumerate(self.stops):
            matched = self.matched[which]
            if not matched and stop.text[:1] not in spelt:
                continue
            for place, byte in enumerate(spelt, begin + 1):
                matched = stop.step(matched, byte)
                if matched == len(stop.text):
                    starts.append(place - matched)
                    matched = stop.borders[-1]
            self.matched[which] = matched
        self.stopped = bool(starts) and self.tokens > self.least
        return min(starts, default=0)


class Places:
    """Where in a text its tokens begin, in characters; inside a character that takes several: where that begins."""

    def __init__(self, decoding: Decoding):
        self.decoding = decoding
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.at = 0

    def push(self, token: int) -> int:
        """The place of this token, the next one of the text."""
        place = self.at
        self.at += len(self.characters.decode(self.decoding.push(token)))
        return place
