"""Where a text ends: EOS, stop strings, the length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..core.text import Decoding, Detokenizer, Pattern, TextStream

Finish = Literal["eos", "stop", "length"]
Cut = Callable[[Sequence[int], Sequence[int]], tuple[int, "Finish | None"]]


@dataclass(frozen=True)
class Stop:
    """The ways a row can end. Nothing after the token that ends it is returned or counted; that token is kept.

    Attributes:
        eos: tokens that end a text; they are no part of it.
        strings: stop strings; the text ends before them, at the first token that completes one.
        max_new_tokens: tokens of a text at most.
        detokenizer: of the tokens; stop strings and `text` need it.
        min_tokens: stop strings that are completed by one of the first so many tokens do not count.
        apart: the text does not continue its prompt (encoder-decoder models).
    """

    eos: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    max_new_tokens: int = 1 << 30
    detokenizer: Detokenizer | None = None
    min_tokens: int = 0
    apart: bool = False

    def __post_init__(self) -> None:
        assert all(self.strings), "a stop string is not empty"
        assert not self.strings or self.detokenizer is not None, "stop strings need a detokenizer"

    def cutting(self, prompt: Sequence[int]) -> Cut:
        """`Request.cut` of one row: (output so far, new tokens) -> how many of the new ones are kept, and why the row
        ends there (None: it continues)."""
        return Ending(self, prompt).cut if self.strings else self.cut

    def cut(self, output: Sequence[int], new: Sequence[int]) -> tuple[int, Finish | None]:
        """The same without stop strings, for any row."""
        kept = max(0, min(len(new), self.max_new_tokens - len(output)))
        for i, token in enumerate(new[:kept], 1):
            if token in self.eos:
                return i, "eos"
        return kept, "length" if len(output) + len(new) >= self.max_new_tokens else None

    def visible(self, tokens: Sequence[int]) -> list[int]:
        """The tokens without the EOS that ends them: what a reader is shown."""
        return [*tokens[:-1], *(t for t in tokens[-1:] if t not in self.eos)]

    def open(self, prompt: Sequence[int]) -> Decoding:
        """The decoding of an output after its prompt."""
        assert self.detokenizer is not None
        return self.detokenizer.open(() if self.apart else prompt)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """The text of an output after its prompt, as it comes. It is given the `visible` tokens."""
        return TextStream(self.open(prompt), self.patterns, self.min_tokens)

    def text(self, prompt: Sequence[int], output: Sequence[int]) -> str:
        """An output's text, cut before the stop string that ended it."""
        stream = self.stream(prompt)
        return stream.push(self.visible(output)) + stream.flush()

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """The stop strings, prepared once for all rows."""
        return tuple(Pattern(s.encode(errors="surrogatepass")) for s in dict.fromkeys(self.strings))


class Ending:
    """Where one row's stop strings end it; tokens are decoded once, as they come."""

    def __init__(self, stop: Stop, prompt: Sequence[int]):
        self.stop, self.prompt = stop, prompt
        self.stream = stop.stream(prompt)
        self.output: Sequence[int] | None = None  # the list that was decoded so far

    def cut(self, output: Sequence[int], new: Sequence[int]) -> tuple[int, Finish | None]:
        """As `Stop.cut`, with stop strings."""
        kept, reason = self.stop.cut(output, new)
        if output is not self.output or len(output) != self.stream.tokens:  # the request runs again
            self.output, self.stream = output, self.stop.stream(self.prompt)
            self.stream.push(output)
        for i, token in enumerate(new[: kept - (reason == "eos")], 1):
            self.stream.push([token])
            if self.stream.stopped:
                return i, "stop"
        return kept, reason
