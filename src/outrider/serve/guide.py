"""Structured output: which tokens a grammar allows next, computed at the nodes that the walk visits and nowhere else.

The mask is a part of the row's law, as a temperature is: the walk draws from the masked law, so a text is the same with
any draft. llguidance does the parsing (`pip install outrider[serve]`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..core.types import Array
from .protocol import Refusal, ResponseFormat, StructuredOutputs

LARGEST = 64 << 10  # characters of a grammar or schema
# Less than llguidance allows by itself (50,000 and 200,000): everybody waits for a mask.
ITEMS, FUEL = 10_000, 100_000  # of a step
GRACE, SHARE = 0.5, 0.01  # seconds that a request's masks may take, and so many more for each of them


@dataclass
class Effort:
    """What the masks of one request have cost the thread that decodes for all."""

    seconds: float = 0.0
    masks: int = 0

    @property
    def excessive(self) -> bool:
        return self.seconds > GRACE + SHARE * self.masks


@dataclass
class Guide:
    """A grammar's place in one row's text. It follows the walk: back where a branch was left, forward where it goes."""

    start: Any  # llguidance.LLMatcher at the grammar's beginning, shared by all texts of a request
    end: int  # the token that ends a text
    source: str  # the request's field that it came in
    have: list[int] = field(default_factory=list)  # what the matcher has consumed
    broken: str = ""  # why the grammar cannot be followed any further: the row must end
    effort: Effort = field(default_factory=Effort)  # shared by all texts of a request

    @cached_property
    def matcher(self) -> Any:
        """This text's own matcher, made when the text begins: that of a large grammar takes half a megabyte."""
        return self.start.deep_copy()

    def close(self) -> None:
        """The text has ended: give its matcher's memory back."""
        self.__dict__.pop("matcher", None)

    def __call__(self, output: Sequence[int], logits: Array) -> Array:
        """Scores [v]: -inf for what the grammar forbids after `output`. Where `broken` is set, nothing is forbidden
        and nothing that is drawn may be used."""
        if self.effort.excessive:
            self.sound("its masks take too long; make it simpler")
        began = time.thread_time()
        scores = self.masked(logits) if self.follow(output) else logits
        self.effort.seconds += time.thread_time() - began
        self.effort.masks += 1
        return scores

    def masked(self, logits: Array) -> Array:
        """Scores [v] at the matcher's place."""
        scores = np.full_like(logits, -np.inf)
        if self.matcher.is_stopped():  # the grammar is complete and nothing can follow
            scores[self.end] = logits[self.end]
            return scores
        mask = self.matcher.compute_bitmask()
        if not self.sound():
            return logits
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = bits[: len(logits)].astype(bool)
        n = len(allowed)
        scores[:n] = np.where(allowed, logits[:n], -np.inf)
        return scores

    def follow(self, output: Sequence[int]) -> bool:
        """Bring the matcher behind `output`; False where nothing is left to forbid: the text has ended, or the grammar
        is broken."""
        if self.broken:
            return False
        same = 0
        for mine, theirs in zip(self.have, output, strict=False):
            if mine != theirs:
                break
            same += 1
        if same < len(self.have):
            self.matcher.rollback(len(self.have) - same)
            del self.have[same:]
        for token in output[same:]:
            if token == self.end:
                return False  # what may be drafted behind it is cut off
            if self.matcher.try_consume_tokens([token]) != 1:
                return self.sound("it does not allow the text that was written")
            self.have.append(token)
        return self.sound()

    def sound(self, why: str = "") -> bool:
        """Is the matcher in order? A limit of llguidance ends it for good, and so does `why`."""
        if self.matcher.is_error():
            why = str(self.matcher.get_error()).strip().splitlines()[0]
            why = "no token can follow" if why == "NoExtensionBias" else why
        if why:
            self.broken = f"the grammar or schema cannot be followed any further: {why}"
        return not why

    def fork(self) -> Guide:
        """The grammar's beginning, for another text of the same request."""
        return Guide(self.start, self.end, self.source, effort=self.effort)


@dataclass
class Grammars:
    """Grammars for one tokenizer, compiled as they are asked for."""

    tokenizer: Any
    vocab: int
    eos: frozenset[int]

    @cached_property
    def words(self) -> Any:
        """The tokenizer as llguidance reads it."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise Refusal("structured output needs llguidance: pip install outrider[serve]", status=501) from None
        backend = getattr(self.tokenizer, "backend_tokenizer", None)  # none: it has no tokenizer.json
        if backend is None or not self.eos:
            raise Refusal("structured output needs a tokenizer and an end-of-text token, and this model lacks one")
        whole = copy(backend)
        whole.no_padding()
        whole.no_truncation()
        return LLTokenizer(whole.to_str(), n_vocab=max(self.vocab, len(self.tokenizer)), eos_token=min(self.eos))

    def guide(self, grammar: str, source: str) -> Guide:
        """A grammar at its beginning, or a Refusal that says what is wrong with it and names its field."""
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar) > LARGEST:
            raise Refusal(f"the grammar or schema has {len(grammar)} characters; {LARGEST} are allowed", source)
        matcher = LLMatcher(
            self.words, grammar, log_level=0, limits=LLParserLimits(step_max_items=ITEMS, step_lexer_fuel=FUEL)
        )
        matcher.compute_bitmask()  # here, and not where everybody waits: its copies begin with what this has found
        if matcher.is_error():
            lines = matcher.get_error().strip().splitlines()
            raise Refusal(f"the grammar or schema cannot be used: {lines[0]}", source)
        return Guide(matcher, min(self.eos), source)

    @staticmethod
    def of_format(given: ResponseFormat | None) -> str | None:
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return of_schema({"type": "object"}, "response_format")
        if given.json_schema is None:
            raise Refusal("response_format of type json_schema needs json_schema", "response_format.json_schema")
        return of_schema(given.json_schema.json_schema, "response_format")

    @staticmethod
    def of_structure(given: StructuredOutputs | None) -> str | None:
        if given is None:
            return None
        asked = {name: value for name in ("json_", "regex", "choice", "grammar") if (value := getattr(given, name))}
        if len(asked) != 1:
            raise Refusal("structured_outputs takes one of json, regex, choice and grammar", "structured_outputs")
        ((name, value),) = asked.items()
        if name == "json_":
            return of_schema(value, "structured_outputs")
        if name == "choice":
            return lark("start: " + " | ".join(json.dumps(word) for word in value))
        if name == "regex":
            from llguidance import LLMatcher

            return str(LLMatcher.grammar_from_regex(value))
        return lark(value)


def lark(grammar: str) -> str:
    """A grammar in Lark's notation, as llguidance wants it."""
    from llguidance import grammar_from

    return str(grammar_from("grammar", grammar))


def of_schema(schema: dict[str, Any] | str, source: str) -> str:
    """A JSON schema as llguidance's grammar. Raises Refusal, which names the field, for one that it does not know."""
    from llguidance import LLMatcher

    try:
        return str(LLMatcher.grammar_from_json_schema(schema if isinstance(schema, str) else json.dumps(schema)))
    except ValueError as error:
        raise Refusal(f"the schema cannot be used: {error}", source) from None
