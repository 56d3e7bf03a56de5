"""Where a text ends, and how its pieces reach the reader: EOS, stop strings, the length, and streaming as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Finish = Literal["eos", "stop", "length"]
Decode = Callable[[list[int]], str]

HALF = "\ufffd"  # what decoders write for an unfinished UTF-8 character


@dataclass(frozen=True)
class Stop:
    """The ways a row can end. Nothing after the token that ends it is returned or counted; that token is kept."""

    eos: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    max_new_tokens: int = 1 << 30
    decode: Decode | None = None  # needed by stop strings

    def __post_init__(self) -> None:
        assert all(self.strings), "a stop string is not empty"
        assert not self.strings or self.decode is not None, "stop strings need a decoder"

    def cut(self, output: Sequence[int], new: Sequence[int]) -> tuple[int, Finish | None]:
        """How many of the `new` tokens are kept after `output`, and why the row ends there (None: it goes on)."""
        remaining = self.max_new_tokens - len(output)
        kept, reason = (remaining, "length") if len(new) >= remaining else (len(new), None)
        end = self._completes(output, new[:kept]) if self.strings else None
        if end is not None:
            kept, reason = end, "stop"
        for i, token in enumerate(new[:kept], 1):
            if token in self.eos:
                return i, "eos"
        return max(kept, 0), reason  # type: ignore[return-value]

    def _completes(self, output: Sequence[int], new: Sequence[int]) -> int | None:
        """How many new tokens it takes to complete a stop string."""
        assert self.decode is not None
        tail = self._tail(output)
        if not self._found(self.decode([*tail, *new])):
            return None
        return next(i for i in range(1, len(new) + 1) if self._found(self.decode([*tail, *new[:i]])))

    def _tail(self, output: Sequence[int]) -> Sequence[int]:
        """The last tokens of the output, enough to hold the beginning of any stop string."""
        assert self.decode is not None
        wanted = max(map(len, self.strings)) + 8  # a window may begin inside a character: leave a margin
        n = 16
        while n < len(output) and len(self.decode(list(output[-n:]))) < wanted:
            n *= 2
        return output[-n:]

    def _found(self, text: str) -> bool:
        return any(s in text for s in self.strings)

    def visible(self, tokens: Sequence[int]) -> list[int]:
        """The tokens without the EOS that ends them: what a reader is shown."""
        return [*tokens[:-1], *(t for t in tokens[-1:] if t not in self.eos)]

    def text(self, output: Sequence[int]) -> str:
        """A finished row's text, cut before the stop string that ended it."""
        assert self.decode is not None
        return before_stop(self.decode(self.visible(output)), self.strings)


def before_stop(text: str, strings: Sequence[str]) -> str:
    """The text before the first stop string in it: ("one. two", ["."]) -> "one"."""
    found = [i for i in (text.find(s) for s in strings) if i >= 0]
    return text[: min(found)] if found else text


class TextStream:
    """Tokens in, text out: never half a character, nothing that may turn out to begin a stop string.

    The pieces, joined, are the text of all tokens, cut before the first stop string. Only a short window is decoded
    each time: it begins at the last place where the text was whole, one push earlier (some decoders drop a space at
    the beginning).
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()):
        self.decode, self.stops = decode, tuple(stops)
        self.window: list[int] = []
        self.whole = 0  # window[:whole] decodes to whole characters
        self.shown = 0  # characters of the window's text that have been taken
        self.held = ""  # may begin a stop string
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """What can be shown now that these tokens have come."""
        self.window += tokens
        text = self.decode(self.window)
        ready = text.rstrip(HALF)
        fresh, self.shown = ready[self.shown :], max(self.shown, len(ready))
        if len(ready) == len(text) and len(self.window) > self.whole:
            self.window, self.whole = self.window[self.whole :], len(self.window) - self.whole
            self.shown = len(self.decode(self.window))
        return self._release(fresh)

    def flush(self) -> str:
        """The rest: the row has ended."""
        fresh = self.decode(self.window)[self.shown :]
        self.window, self.whole, self.shown = [], 0, 0
        out = self._release(fresh) + ("" if self.stopped else self.held)
        self.held = ""
        return out

    def _release(self, fresh: str) -> str:
        """Hold back the longest end of the text that begins a stop string."""
        if self.stopped:
            return ""
        text = self.held + fresh
        cut = before_stop(text, self.stops)
        if len(cut) < len(text):
            self.stopped, self.held = True, ""
            return cut
        longest = min(len(text), max(map(len, self.stops), default=1) - 1)
        for n in range(longest, 0, -1):
            if any(s.startswith(text[-n:]) for s in self.stops):
                self.held = text[-n:]
                return text[:-n]
        self.held = ""
        return text
