"""Structured output: the tokens that a grammar allows next, computed only at the nodes that the walk visits.

The mask is part of the row's distribution, like a temperature: the walk samples from the masked distribution, so a text
is the same with any draft. Parsing is done by llguidance (`pip install outrider[serve]`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..core.types import Array
from ..params import first_line
from .protocol import Refusal, ResponseFormat, StructuredOutputs

BRACKETED = re.compile("<.*>", re.DOTALL)
LARGEST = 64 << 10  # characters of a grammar or schema
# Less than llguidance's defaults (50,000 and 200,000): the batch waits for a mask.
ITEMS, FUEL = 10_000, 100_000  # per step
GRACE, SHARE = 0.5, 0.01  # seconds for the masks of a request: a constant, and per mask


@dataclass
class Effort:
    """The time that the masks of one request have taken in the decoding thread."""

    seconds: float = 0.0
    masks: int = 0

    @property
    def excessive(self) -> bool:
        return self.seconds > GRACE + SHARE * self.masks


@dataclass
class Guide:
    """A grammar's position in one row's text. It follows the walk, back out of branches and forward."""

    start: Any  # llguidance.LLMatcher at the start of the grammar, shared by all texts of a request
    ends: frozenset[int]  # the tokens that end a text
    source: str  # the field of the request
    have: list[int] = field(default_factory=list)  # tokens that the matcher has consumed
    broken: str = ""  # why the grammar failed; the row must end
    effort: Effort = field(default_factory=Effort)  # shared by all texts of a request

    @cached_property
    def matcher(self) -> Any:
        """This text's matcher, created when the text begins: for a large grammar it takes half a megabyte."""
        return self.start.deep_copy()

    def close(self) -> None:
        """Free the matcher after the text has ended."""
        self.__dict__.pop("matcher", None)

    def __call__(self, output: Sequence[int], logits: Array) -> Array:
        """Scores [v] with -inf for tokens that the grammar forbids after `output`. If `broken` is set afterwards,
        nothing is masked and the sampled token must not be used."""
        if self.effort.excessive:
            self.sound("its masks take too long; make it simpler")
        began = time.thread_time()
        scores = self.masked(logits) if self.follow(output) else logits
        self.effort.seconds += time.thread_time() - began
        self.effort.masks += 1
        return scores

    def masked(self, logits: Array) -> Array:
        """Masked scores [v] at the matcher's position."""
        scores = np.full_like(logits, -np.inf)
        if self.matcher.is_stopped():  # the grammar is complete and nothing can follow
            ends = sorted(self.ends)
            scores[ends] = logits[ends]
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
        """Advance the matcher to the end of `output`; False if nothing is left to mask: the text has ended, or the
        grammar is broken."""
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
            if token in self.ends:
                return False  # later drafts are cut off
            if self.matcher.try_consume_tokens([token]) != 1:
                return self.sound("it does not allow the text so far")
            self.have.append(token)
        return self.sound()

    def sound(self, why: str = "") -> bool:
        """Whether the matcher is still valid. A limit of llguidance, or `why`, breaks it permanently."""
        if self.matcher.is_error():
            why = first_line(ValueError(self.matcher.get_error()))
            why = "no token can follow" if why == "NoExtensionBias" else why
        if why:
            self.broken = f"the grammar or schema failed: {why}"
        return not why

    def fork(self) -> Guide:
        """A guide at the start, for another text of the same request."""
        return Guide(self.start, self.ends, self.source, effort=self.effort)


@dataclass(frozen=True)
class Calls:
    """Tool calls as a model writes them: JSON between two tags, once or several times."""

    opening: str
    closing: str
    schema: dict[str, Any]
    single: bool = False


@dataclass
class Grammars:
    """Grammars for one tokenizer, compiled on request."""

    tokenizer: Any
    vocab: int
    eos: frozenset[int]

    @cached_property
    def words(self) -> Any:
        """The tokenizer in llguidance's form, its special tokens renamed: else a grammar that forces the text "<think>"
        would allow the token of this name alone, and then refuse it, since special tokens are no text."""
        return self._words(renamed)

    @cached_property
    def named(self) -> Any:
        """The same with their own names, for Lark grammars, which may name them, as in <|im_start|>."""
        return self._words(lambda tokenizer: tokenizer)

    def _words(self, change: Callable[[str], str]) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise Refusal("structured output needs llguidance: pip install outrider[serve]", status=501) from None
        backend = getattr(self.tokenizer, "backend_tokenizer", None)  # none: it has no tokenizer.json
        if backend is None or not self.eos:
            raise Refusal("structured output needs a tokenizer and an end-of-text token, and this model lacks one")
        unpadded = copy(backend)
        unpadded.no_padding()
        unpadded.no_truncation()
        count = max(self.vocab, len(self.tokenizer))
        try:
            return LLTokenizer(change(unpadded.to_str()), n_vocab=count, eos_token=sorted(self.eos))
        except ValueError as error:
            raise Refusal(f"structured output cannot use this model's tokenizer: {first_line(error)}") from None

    def guide(self, grammar: str, source: str, named: bool = False) -> Guide:
        """A guide at the start of a grammar. `named`: it may name special tokens. Raises Refusal, naming the field, for
        an invalid one."""
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar) > LARGEST:
            raise Refusal(f"the grammar or schema has {len(grammar)} characters; {LARGEST} are allowed", source)
        words, limits = self.named if named else self.words, LLParserLimits(step_max_items=ITEMS, step_lexer_fuel=FUEL)
        matcher = LLMatcher(words, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # here rather than in the decoding thread; copies share its caches
        if matcher.is_error():
            lines = matcher.get_error().strip().splitlines()
            raise Refusal(f"the grammar or schema cannot be used: {lines[0]}", source)
        return Guide(matcher, self.eos, source)

    def of_format(self, given: ResponseFormat | None, calls: Calls | None = None) -> str | None:
        """The grammar of a response, which may be calls instead."""
        if given is None or given.type == "text":
            return None
        if given.type == "json_schema" and given.json_schema is None:
            raise Refusal("response_format of type json_schema needs json_schema", "response_format.json_schema")
        schema = given.json_schema.json_schema if given.json_schema else {"type": "object"}
        if calls is None:
            return of_schema(schema, "response_format")
        rules = (
            "start: answer | call" + ("" if calls.single else " (SPACE call)*"), f"answer: %json {json.dumps(schema)}",
            f"call: {self.terminal(calls.opening)} SPACE body SPACE {self.terminal(calls.closing)}",
            f"body: %json {json.dumps(calls.schema)}", r"SPACE: /\s{0,2}/",
        )  # fmt: skip
        return lark("\n".join(rules), "response_format")

    def terminal(self, text: str) -> str:
        """A tag as a Lark terminal: the added token of this name, or else a string."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        token = None if backend is None else backend.token_to_id(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    @staticmethod
    def of_structure(given: StructuredOutputs | None) -> str | None:
        if given is None:
            return None
        options = {
            name: value
            for name in ("json_", "regex", "choice", "grammar")
            if (value := getattr(given, name)) is not None
        }
        if len(options) != 1:
            raise Refusal("structured_outputs takes one of json, regex, choice and grammar", "structured_outputs")
        ((name, value),) = options.items()
        if name == "json_":
            return of_schema(value, "structured_outputs")
        if name == "choice":
            return lark("start: " + " | ".join(json.dumps(word) for word in value))
        if name == "regex":
            from llguidance import LLMatcher

            return str(LLMatcher.grammar_from_regex(value))
        return lark(value)


def renamed(tokenizer: str) -> str:
    """A tokenizer's JSON (of `tokenizers`) with names that no text contains for all tokens that llguidance treats as
    special: those that are, and added tokens in angle brackets."""
    made = json.loads(tokenizer)
    merged = {"".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in made["model"].get("merges", ())}
    names = {
        token["content"]: f"<|\ue000{token['id']}|>"
        for token in made["added_tokens"]
        if (token["special"] or BRACKETED.fullmatch(token["content"])) and token["content"] not in merged
    }
    for token in made["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    words = made["model"]["vocab"]
    if isinstance(words, dict):
        made["model"]["vocab"] = {names.get(word, word): i for word, i in words.items()}
    else:
        made["model"]["vocab"] = [[names.get(word, word), score] for word, score in words]
    return json.dumps(made)


def lark(grammar: str, source: str = "structured_outputs") -> str:
    """A grammar in Lark's notation, in llguidance's form. Raises Refusal, naming the field."""
    from llguidance import grammar_from

    try:
        return str(grammar_from("grammar", grammar))
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the grammar cannot be used: {first_line(error)}", source) from None


def of_schema(schema: dict[str, Any] | str, source: str) -> str:
    """A JSON schema as llguidance's grammar. Raises Refusal, naming the field, for an unsupported one."""
    from llguidance import LLMatcher

    try:
        return str(LLMatcher.grammar_from_json_schema(schema if isinstance(schema, str) else json.dumps(schema)))
    except ValueError as error:
        raise Refusal(f"the schema cannot be used: {error}", source) from None
