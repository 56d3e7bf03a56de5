"""The public face: text in, text out. `outrider.load(...)` gives an `LLM`; everything else is the engine's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from . import drafters, encoding, names
from .backends import choose as backends
from .budgets import parse
from .budgets.adaptive import AdaptiveBudget
from .budgets.bandit import BanditBudget
from .budgets.budgeter import Budgeter
from .budgets.memory import Memory, file_of
from .core.noise import GumbelNoise
from .core.protocols import Drafter, Target
from .core.text import Detokenizer, detokenizer, text_of
from .drafters._choice import ChoiceDrafter
from .encoding import Prompt
from .engine import Engine, generate
from .engine.prefixes import Prefixes
from .engine.request import Chunk, Output, Request, Row, check_prompt, spread_seeds
from .engine.stopping import Stop
from .params import LOSSY, InputError, Rule, Sampling, check_rule, integer

logger = logging.getLogger(__name__)

OPTIONS = (
    "max_new_tokens", "n", "seed", "batch_size", "rule", "budget", "stop", "ignore_eos", "sampling", "prediction",
)  # fmt: skip


class Stream(Iterator[str]):
    """A text as it comes, never half a character, never the start of a stop string; from `LLM.stream`.

    Iterate over it for text, or over `chunks()`, which keep drafted text and the target's own apart.
    """

    def __init__(self, llm: LLM, engine: Engine, request: Request, stop: Stop):
        self.llm, self.stop, self.rule, self.row = llm, stop, engine.rule, Row(request, 0)
        self._chunks = self._decode(engine, request)

    def __next__(self) -> str:
        return next(text for chunk in self._chunks if (text := chunk.text))

    def chunks(self) -> Iterator[Chunk]:
        """The rest of the text, a `Chunk` a round; the texts of chunks may be empty."""
        return self._chunks

    def close(self) -> None:
        """Decode no further."""
        self._chunks.close()

    @property
    def output(self) -> Output:
        """What there is so far: text, tokens and usage."""
        return self.llm.output(self.row, 0, self.stop, self.rule)

    def _decode(self, engine: Engine, request: Request) -> Any:
        text = self.stop.stream(request.prompt)
        for piece in generate(engine, [request]):
            self.row, shown = piece.row, self.stop.visible(piece.tokens)
            yield Chunk(text.push(shown[: piece.drafted]), text.push(shown[piece.drafted :]))
        self.llm.remember()
        yield Chunk("", text.flush())


@dataclass(repr=False)
class LLM:
    """A target, its tokenizer and a drafter; made by `load`.

    `target.model` is the stock transformers model (with full weights) and `tokenizer` its own (None without one):
    nobody is locked in.

    Thread-safe: rounds of different threads alternate, and every text is the one that a single thread would have
    written. No lock is held between rounds, so one thread may also iterate over several streams alternately. The
    model's own `forward` and `generate` do not take the lock: while they run, no thread may decode here.
    """

    target: Target
    tokenizer: Any
    drafter: Drafter
    name: str = ""
    drafter_name: str = ""
    eos: frozenset[int] = frozenset()  # every token that ends a text
    budget: Budgeter | str = "auto"  # where a call names none
    budgets: dict[tuple[Rule, str], Budgeter] = field(default_factory=dict)  # by spelling: what was learned stays
    gumbel: GumbelNoise | None = None
    kept_as: str = ""  # the model's name among what is kept between runs; "": nothing is
    memories: list[Memory] = field(default_factory=list)
    # What this target read and wrote last, for calls that ask for one text; None: every prompt is read whole.
    prefixes: Prefixes | None = None

    def __repr__(self) -> str:
        return f"LLM({self.name}, drafter {self.drafter_name}, {self.target.arithmetic}, {self.target.device})"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        n: int = 1,
        seed: int | Sequence[int] | None = None,
        batch_size: int = 8,
        rule: Rule = "coupled",
        budget: Budgeter | str | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        sampling: Sampling | None = None,
        prediction: str = "",
        **fields: Any,
    ) -> list[Output]:
        """Texts for one prompt or many, in the order of the prompts, `n` for each.

        A call for one text reads only the part of its prompt that the previous text does not cover (native passes of
        models loaded by name): the next turn of a chat costs its own tokens.

        Args:
            prompts: text, token ids (list, tensor or array) or chat messages; or a list of prompts.
            max_new_tokens: at most so many tokens a text.
            n: texts per prompt, at most 4096; text j of a prompt uses seed + j.
            seed: one int for every prompt, a list with one int per prompt, or None (a fresh one for each). Seeds act
                modulo 2^64.
            batch_size: texts decoded at a time. The texts do not depend on it.
            rule: coupled, rejection, block, or typical (which changes the distribution).
            budget: how much to draft: auto, 16x6, 3,2,1, ... (`outrider.budgets.parse`), or a budget object. Default:
                the one given to `load`.
            stop: end a text before any of these strings.
            ignore_eos: continue after the model's end of text.
            sampling: a `Sampling`; or its fields one by one, as in `temperature=0.7, top_p=0.9`.
            prediction: what the texts may contain, such as the file that they change. Suffix decoding and prompt lookup
                draft from it; under the default rule no text depends on it.

        Returns:
            An `Output` for each text: the first prompt's `n`, then the second's, and so on.

        Raises:
            InputError: an argument that is unknown or makes no sense, before anything is computed.
        """
        count = integer("batch_size", batch_size)
        engine = self.engine(rule, budget)
        requests, stops = self.requests(
            prompts, max_new_tokens=max_new_tokens, n=n, seed=seed, stop=stop, ignore_eos=ignore_eos,
            sampling=sampling, prediction=prediction, **fields,
        )  # fmt: skip
        if len(requests) == 1:
            engine = replace(engine, prefixes=self.prefixes)
        rows = {piece.row.index: piece.row for piece in generate(engine, requests, count)}
        self.remember()
        return [self.output(rows[i], i // n, stops, rule) for i in range(len(requests))]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        seed: int | None = None,
        rule: Rule = "coupled",
        budget: Budgeter | str | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        sampling: Sampling | None = None,
        prediction: str = "",
        **fields: Any,
    ) -> Stream:
        """The text of one prompt as it comes, a `Stream` of strings; arguments and errors are those of `generate`."""
        engine = self.engine(rule, budget)
        requests, stops = self.requests(
            prompt, max_new_tokens=max_new_tokens, seed=seed, stop=stop, ignore_eos=ignore_eos, sampling=sampling,
            prediction=prediction, **fields,
        )  # fmt: skip
        if len(requests) > 1:
            raise InputError(f"a stream is for one prompt, not {len(requests)}; use generate for several")
        return Stream(self, replace(engine, prefixes=self.prefixes), requests[0], stops)

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        n: int = 1,
        seed: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        sampling: Sampling | None = None,
        prediction: str = "",
        **fields: Any,
    ) -> tuple[list[Request], Stop]:
        """The engine's requests for these prompts, `n` in a row for each, and how their texts end.

        For those who drive batches themselves; arguments and errors are those of `generate`.
        """
        if sampling is not None and fields:
            raise InputError(f"give sampling or {', '.join(fields)}, not both")
        if not isinstance(sampling, Sampling | None):
            raise InputError(f"sampling is an outrider.Sampling, not {sampling!r}; or give its fields one by one")
        made = Sampling.of(fields, OPTIONS) if sampling is None else sampling
        texts = self.prompts(prompts)
        seeds = spread_seeds(seed, len(texts), n)
        stops = self._stop(integer("max_new_tokens", max_new_tokens), stop, ignore_eos)
        pairs = [(text, s) for text, own in zip(texts, seeds, strict=True) for s in own]
        copied = self.predicted(prediction)
        requests = [Request(text, s, max_new_tokens, made, stops.cutting(text), prediction=copied) for text, s in pairs]
        for request in requests:
            check_prompt(request, self.target)
        return requests, stops

    def engine(self, rule: Rule = "coupled", budget: Budgeter | str | None = None) -> Engine:
        """The engine that serves this model under a rule; a budget that is spelled remembers what it learned.

        Raises InputError for a rule or budget that there is not, or that does not go with the drafter.
        """
        chosen = self.budget if budget is None else budget
        with self.target.turn():
            if self.gumbel is None:
                self.gumbel = GumbelNoise(self.target.vocab)
            if isinstance(chosen, str):
                key = check_rule(rule), chosen
                chosen = self.budgets[key] if key in self.budgets else self._begin(key)
        if chooses(chosen) != isinstance(self.drafter, ChoiceDrafter):
            raise InputError(
                "a budget that names drafters ('1:3,2,1 2:1,1') and choose=True need one another; give both or neither"
            )
        return Engine.of(self.target, self.drafter, chosen, rule, self.gumbel)

    def _begin(self, key: tuple[Rule, str]) -> Budgeter:
        """A fresh budget; the adaptive one begins with what was learned in earlier runs."""
        made = self.budgets[key] = parse(key[1])
        if self.kept_as and isinstance(made, AdaptiveBudget):
            target = self.target
            about = self.kept_as, self.drafter_name, target.arithmetic, target.exact
            way = ("compiled", target.kernels) if target.kernels else ()
            self.memories.append(Memory(file_of(target.device, *about, *way, *key), made, self.drafter.learners))
            self.memories[-1].recall()
        return made

    def remember(self) -> None:
        """Keep what the automatic budget has learned for later runs, in the user's cache directory."""
        with self.target.turn():  # what is being learned must not change while it is written
            for memory in self.memories:
                memory.keep()

    def prompts(self, prompts: Any) -> list[list[int]]:
        """Token ids of one prompt or many, a list for each; errors are those of `encode`."""
        return [self.encode(p) for p in encoding.listed(prompts)]

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """What the tokenizer's ids are as bytes."""
        return detokenizer(self.tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids: text as the tokenizer has it, chat messages through the model's own template, ids as they are.

        Raises InputError for what is no prompt, is empty, or needs a tokenizer or template that the model lacks.
        """
        return encoding.encode(prompt, self.tokenizer, self.name)

    def predicted(self, text: str) -> list[int]:
        """Token ids of what a text may contain, as many as a context has. Raises InputError for what is no text."""
        if not isinstance(text, str):
            raise InputError(f"a prediction is text, not {type(text).__name__}")
        if not text:
            return []
        if self.tokenizer is None:
            raise InputError("a prediction needs a tokenizer, and this model has none")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])[: self.target.context]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out; empty for a model in memory that has no tokenizer."""
        return text_of(self.detokenizer.open(), [int(token) for token in tokens])

    def _stop(self, max_new_tokens: int, strings: Any, ignore_eos: bool) -> Stop:
        wanted = (strings,) if isinstance(strings, str) else strings or ()
        if not isinstance(wanted, Sequence) or not all(isinstance(s, str) for s in wanted):
            raise InputError(f"stop is a string or a list of strings, not {strings!r}")
        if "" in wanted:
            raise InputError("a stop string is empty; leave it out")
        if wanted and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer, and this model has none")
        return self.stops(frozenset() if ignore_eos else self.eos, tuple(wanted), max_new_tokens)

    def stops(self, eos: frozenset[int], strings: tuple[str, ...], max_new_tokens: int, min_tokens: int = 0) -> Stop:
        """How this model's texts end; see `Stop`."""
        apart = self.target.separate
        return Stop(eos, strings, max_new_tokens, self.detokenizer, min_tokens, apart)

    def output(self, row: Row, prompt: int, stops: Stop, rule: Rule = "coupled") -> Output:
        """A row as the caller sees it; `prompt` is the index of its prompt, `rule` what it was decoded under."""
        text, request = stops.text(row.request.prompt, row.output), row.request
        exact: str = self.target.exact
        if rule in LOSSY:
            exact = "lossy"
        elif rule != "coupled" and request.sampling.temperature > 0:
            exact = "distribution"
        return Output(prompt, text, row.output, row.finish or "interrupted", request.seed, row.usage, exact)


def load(
    model: Any = None,
    drafter: str | Sequence[str] | Drafter | None = None,
    *,
    budget: Budgeter | str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    exact: str = "auto",
    weights: str = "auto",
    trust_remote_code: bool = False,
    compile: bool | None = None,
    choose: bool = False,
    **options: Any,
) -> LLM:
    """A model with a drafter.

    Args:
        model: a name: "demo" (the target that ships with the package, computing in float32), "smollm2"
            (SmolLM2-135M-Instruct), a .gguf file, a folder or a hub id; or a transformers model in memory. Default:
            smollm2 where its package is installed, else demo.
        drafter: a SPEC such as "lookup?ngram=3" or "model:DIR", several SPECs, or a loaded drafter. Default: the best
            trained one that ships for the model, else suffix decoding (the adaptive budget turns it off where it does
            not pay).
        budget: how much to draft where a call does not say: auto, 16x6, 3,2,1, ... (`outrider.budgets.parse`).
        dtype: auto (the checkpoint's; float32 on CPUs without bfloat16 instructions), float64, float32, bfloat16 or
            float16. It and `device` are for models that are loaded by name.
        device: auto, cpu, cuda, ...
        exact: bits: refuse a target whose logits with drafts are not bit for bit those without (docs/exactness.md);
            native passes promise that, others up to rounding. rounding and auto: either.
        weights: full: as the checkpoint has them; native: the quants of a .gguf file's blocks, multiplied by
            activations that are rounded to int8; int8: the same with weights rounded to int8. The last two are for
            CPUs and models of native passes, and change the target's distribution a little. auto: native for a
            .gguf file where that can be, else full.
        trust_remote_code: run code that comes with the model.
        compile: False: run the model's own forward, where native passes would serve it.
        choose: do not mix several drafters: the budget names one of them each round (a bandit over drafters and
            shapes). Set by a budget that names them, as in "1:3,2,1 2:1,1".
        options: for transformers' `from_pretrained` (revision, quantization_config, ...).

    Returns:
        An `LLM`, ready to write.

    Raises:
        InputError: in one sentence, why the model or the drafter cannot be had.
    """
    drafter = str(drafter) if isinstance(drafter, Path) else drafter
    fixed = parse(budget) if isinstance(budget, str) else budget  # complains before a model is loaded
    choose = choose or chooses(fixed)
    if choose and (isinstance(drafter, str) or not isinstance(drafter, Sequence) or len(drafter) < 2):
        raise InputError(
            "choose=True, or a budget that names drafters, is for two drafters or more; give a list of their SPECs"
        )
    specs = [drafter] if isinstance(drafter, str) else drafter
    if not isinstance(specs, Drafter | Sequence | None) or (
        isinstance(specs, Sequence) and not (specs and all(isinstance(spec, str) for spec in specs))
    ):
        raise InputError(f"a drafter is a SPEC such as 'lookup?ngram=3', or a list of some, not {drafter!r}")
    loaded = backends.load(
        model, dtype=dtype, device=device, exact=exact, weights=weights, trust_remote_code=trust_remote_code,
        compile=compile, **options,
    )  # fmt: skip
    target, place, tokenizer = loaded.target, loaded.place, loaded.tokenizer
    name = loaded.name + (f", {loaded.weights} weights" if loaded.weights != "full" else "")
    chosen = drafter if drafter is not None else (place.drafter if place else names.DEFAULT)
    if named := isinstance(chosen, str | Sequence):
        label = chosen if isinstance(chosen, str) else drafters.MIX.join(chosen)
        chosen = drafters.load(chosen, target, tokenizer, choose)
    else:
        chosen, label = drafters.alone(chosen), type(chosen).__name__
    kept_as = name if place is not None and named else ""
    # A target up to rounding would write another text from a copy, and one in memory may change between calls.
    prefixes = Prefixes(rows=1) if place is not None and target.exact == "bits" else None
    made = LLM(target, tokenizer, chosen, name, label, loaded.eos, budget, kept_as=kept_as, prefixes=prefixes)
    _ = made.detokenizer  # checked while nobody waits for text
    return made


def chooses(budget: Any) -> bool:
    """Does this budget choose among drafters?"""
    return isinstance(budget, BanditBudget) and any(part for part, _ in budget.arms)
