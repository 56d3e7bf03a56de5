"""The public face: text in, text out. `outrider.load(...)` gives an `LLM`; everything else is the engine's."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from . import drafters
from .bandit import BanditBudget, part_of
from .budget import AdaptiveBudget, Budgeter
from .drafters._choice import ChoiceDrafter
from .engine import Engine, Piece, Request, Row, check_prompt, generate
from .noise import RaceNoise
from .stopping import Stop, TextStream
from .targets import HFTarget, load_target, load_tokenizer
from .types import RULES, Drafter, InputError, Rule, Sampling, Target, Usage

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

DEMO_DRAFTER = "eagle:demo/hass"  # the best of those that ship: docs/results.md


@dataclass(frozen=True)
class Output:
    """One finished text. `prompt` is the index of its prompt."""

    prompt: int
    text: str
    tokens: list[int]
    finish_reason: str
    seed: int
    usage: Usage


@dataclass
class LLM:
    """A target, its tokenizer and a drafter. `target.model` is the stock transformers model: nobody is locked in."""

    target: Target
    tokenizer: Any
    drafter: Drafter
    name: str = ""
    drafter_name: str = ""
    eos: frozenset[int] = frozenset()
    budgets: dict[str, Budgeter] = field(default_factory=dict)  # by rule: what was learnt on this machine stays
    race: RaceNoise | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        n: int = 1,
        seed: int | Sequence[int] | None = None,
        batch_size: int = 8,
        rule: Rule = "coupled",
        budget: Budgeter | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **law: Any,
    ) -> list[Output]:
        """Texts for one prompt or many (strings, token ids, or chat messages), in order, `n` for each.

        `law` holds the fields of `Sampling`: temperature, top_k, top_p, min_p, penalties, logit_bias.
        `seed` is one int for every prompt, a list with one int per prompt, or None (fresh for each); sample j of a
        prompt uses seed + j.
        """
        texts = self.prompts(prompts)
        seeds = spread_seeds(seed, len(texts), n)
        stops = self._stop(max_new_tokens, stop, ignore_eos)
        requests = [
            self._request(texts[i], seeds[i][j], max_new_tokens, Sampling(**law), stops)
            for i in range(len(texts))
            for j in range(n)
        ]
        rows: dict[int, Row] = {}
        for piece in generate(self.engine(rule, budget), requests, check_batch(batch_size)):
            rows[piece.row.index] = piece.row
        return [self.output(rows[i], i // n, stops) for i in range(len(requests))]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        seed: int | None = None,
        rule: Rule = "coupled",
        budget: Budgeter | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **law: Any,
    ) -> Iterator[str]:
        """The text of one prompt as it comes; never half a character, never the start of a stop string."""
        request, stops = self.request(
            prompt, max_new_tokens=max_new_tokens, seed=seed, stop=stop, ignore_eos=ignore_eos, **law
        )
        text = self.text_stream(stops)
        for piece in self.pieces(request, rule, budget):
            if fresh := text.push(stops.visible(piece.tokens)):
                yield fresh
        if rest := text.flush():
            yield rest

    def request(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **law: Any,
    ) -> tuple[Request, Stop]:
        """One prompt as the engine takes it, and its ends: for those who show more than text."""
        stops = self._stop(max_new_tokens, stop, ignore_eos)
        first = spread_seeds(seed, 1, 1)[0][0]
        return self._request(self.prompts(prompt)[0], first, max_new_tokens, Sampling(**law), stops), stops

    def pieces(self, request: Request, rule: Rule = "coupled", budget: Budgeter | None = None) -> Iterator[Piece]:
        """What each round adds to one request."""
        return generate(self.engine(rule, budget), [request])

    def engine(self, rule: Rule = "coupled", budget: Budgeter | None = None) -> Engine:
        """The engine that serves this model under a rule; its budget remembers what it learnt."""
        if rule not in RULES:
            raise InputError(f"there is no rule {rule!r}; choose one of {', '.join(RULES)}")
        if self.race is None:
            self.race = RaceNoise(self.target.vocab, getattr(self.target, "device", "cpu"))
        pairs = isinstance(budget, BanditBudget) and any(map(part_of, budget.arms))
        if pairs != isinstance(self.drafter, ChoiceDrafter):
            raise InputError("a bandit over pairs of drafter and shape, and choose=True, need one another")
        chosen = budget or self.budgets.setdefault(rule, AdaptiveBudget())
        return Engine(self.target, self.drafter, chosen, self.race, rule)

    def prompts(self, prompts: Any) -> list[list[int]]:
        """Token ids of one prompt or many."""
        if not prompts:
            raise InputError("the prompt is empty; give some text")
        one = isinstance(prompts, str) or isinstance(prompts[0], int | Mapping)
        return [self.encode(p) for p in ([prompts] if one else prompts)]

    def encode(self, prompt: Prompt) -> list[int]:
        """Text as the tokenizer has it, chat messages through the model's own template, ids as they are."""
        if not isinstance(prompt, str):
            if prompt and isinstance(prompt[0], Mapping):
                if not getattr(self.tokenizer, "chat_template", None):
                    raise InputError(f"{self.name} has no chat template; give the prompt as plain text")
                ids = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
                return list(ids["input_ids"])
            return [int(t) for t in prompt]  # type: ignore[arg-type]
        if not prompt:
            raise InputError("the prompt is empty; give some text")
        if self.tokenizer is None:
            raise InputError("this model has no tokenizer; give the prompt as token ids")
        return list(self.tokenizer(prompt)["input_ids"])

    def text_stream(self, stops: Stop) -> TextStream:
        return TextStream(self.decode, stops.strings)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out; empty for a model in memory that has no tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _request(self, prompt: list[int], seed: int, limit: int, law: Sampling, stops: Stop) -> Request:
        request = Request(prompt, seed, limit, law, stops.cut)
        check_prompt(request, self.target)
        return request

    def _stop(self, max_new_tokens: int, strings: str | Sequence[str], ignore_eos: bool) -> Stop:
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        wanted = (strings,) if isinstance(strings, str) else tuple(strings)
        if "" in wanted:
            raise InputError("a stop string is empty; leave it out")
        if wanted and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer, and this model has none")
        return Stop(frozenset() if ignore_eos else self.eos, wanted, max_new_tokens, self.decode)

    def output(self, row: Row, prompt: int, stops: Stop) -> Output:
        """A finished row as the caller sees it."""
        text = stops.text(row.output)
        return Output(prompt, text, row.output, row.finish or "length", row.request.seed, row.usage)


def load(
    model: Any = None,
    drafter: str | Sequence[str] | Drafter | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    compile: bool = False,
    choose: bool = False,
    **options: Any,
) -> LLM:
    """A model by hub id or folder (or a transformers model already in memory), with a drafter.

    Without a model: the demo target that ships with the package, computing in float32. Without a drafter: the demo's
    own trained one for the demo target, prompt lookup for any other (the adaptive budget turns it off where it does
    not pay). `drafter` is a SPEC such as "lookup?ngram=3" or "model:DIR", several SPECs, or a loaded drafter. With
    `choose`, several are not mixed: the budget names one of them each round (a bandit over drafters and shapes).

    `compile` records the models' passes and replays them without their Python: a second or two at load, and then the
    same logits sooner (`targets/graphs.py`); it pays most for small models.
    """
    demo = model is None
    where = str(files("outrider") / "demo" / "target") if demo else model
    if demo and dtype == "auto":
        dtype = "float32"
    target = load_target(where, dtype=dtype, device=device, trust_remote_code=trust_remote_code, **options)
    if compile:
        if not isinstance(target, HFTarget):
            raise InputError("only decoder-only models can be compiled; leave compile out")
        target.compile()
    stock = target.model
    origin = where if isinstance(where, str) else stock.config._name_or_path
    name = "demo" if demo else origin or type(stock).__name__
    tokenizer = load_tokenizer(origin, trust_remote_code)
    if choose and (isinstance(drafter, str) or not isinstance(drafter, Sequence) or len(drafter) < 2):
        raise InputError("choose is for two drafters or more; give their SPECs")
    chosen = drafter if drafter is not None else (DEMO_DRAFTER if demo else "lookup")
    if isinstance(chosen, str | Sequence):
        label = chosen if isinstance(chosen, str) else " + ".join(chosen)
        chosen = drafters.load(chosen, target, tokenizer, choose)
    else:
        label = type(chosen).__name__
    if compile and isinstance(target, HFTarget):
        target.warm(chosen.taps)
    return LLM(target, tokenizer, chosen, name, label, eos_of(stock, tokenizer))


def eos_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a text: the generation config's, else the tokenizer's."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = getattr(tokenizer, "eos_token_id", None)
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def spread_seeds(seed: int | Sequence[int] | None, prompts: int, n: int) -> list[list[int]]:
    """The seed of every sample [prompt][sample]: see `LLM.generate`."""
    if n < 1:
        raise InputError(f"n must be at least 1, not {n}")
    if isinstance(seed, Sequence) and len(seed) != prompts:
        raise InputError(f"give one seed, or one per prompt: there are {prompts} prompts and {len(seed)} seeds")
    first = [seed] * prompts if isinstance(seed, int) else list(seed or [secrets.randbits(63) for _ in range(prompts)])
    return [[s + j for j in range(n)] for s in first]


def check_batch(size: int) -> int:
    if size < 1:
        raise InputError(f"batch_size must be at least 1, not {size}")
    return size
