"""The drop-in for stock transformers: `model.generate(**inputs, custom_generate=outrider.custom_generate)`.

transformers prepares the logits processors and the stopping criteria; both are applied row by row, with exactly the ids
that stock decoding would pass (left padding included).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from .. import drafters, names
from ..backends.torch.carrier import CARRIERS
from ..backends.torch.load import load_tokenizer, origin_of, target_of
from ..backends.torch.module import refused
from ..backends.torch.padding import padded
from ..backends.torch.tensors import array
from ..budgets import parse
from ..budgets.budgeter import Budgeter
from ..core.noise import GumbelNoise
from ..core.protocols import Drafter, Target
from ..core.types import Array, Process
from ..engine import Engine, generate
from ..engine.request import Cut, Request, Row, check_prompt
from ..params import NOT_FINITE, InputError, Rule, Sampling, check_rule, integer

# Refused fields of GenerationConfig: the value equivalent to None, and why, or what to do instead. All other fields are
# supported, or have no effect without these (docs/howto/transformers.md lists all).
OTHER = "is another decoding method than custom_generate; leave it out"
REFUSED: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "means beam search, which is not supported; set num_beams=1"),
    "num_beam_groups": (1, "means beam search, which is not supported; leave it out"),
    "diversity_penalty": (0.0, "means beam search, which is not supported; leave it out"),
    "constraints": (None, "means beam search, which is not supported; leave it out"),
    "force_words_ids": (None, "means beam search, which is not supported; leave it out"),
    "penalty_alpha": (0.0, OTHER),
    "dola_layers": (None, OTHER),
    "use_mtp": (False, f"{OTHER} and give a drafter"),
    "prompt_lookup_num_tokens": (None, f"{OTHER} and give drafter='lookup?tokens=N'"),
    "assistant_early_exit": (None, f"{OTHER} and give a drafter"),
    "is_assistant": (False, "is for the draft models of transformers; leave it out"),
    "use_cache": (True, "must be true, since drafts are verified with a cache; leave it out"),
    "cache_implementation": ("dynamic", "names another cache than the one for verification; set 'dynamic'"),
    "cache_config": (None, "is for another cache than the one for verification; leave it out"),
    "guidance_scale": (1, "needs passes of the model for each token of a draft; leave it out"),
    "encoder_repetition_penalty": (1.0, "depends on a row's index in the batch; leave it out"),
    "encoder_no_repeat_ngram_size": (0, "depends on a row's index in the batch; leave it out"),
    "token_healing": (False, "needs a tokenizer, which transformers does not pass; heal the prompt beforehand"),
    "output_scores": (False, "is not recorded while speculating; leave it out"),
    "output_logits": (False, "is not recorded while speculating; leave it out"),
    "output_attentions": (False, "is not recorded while speculating; leave it out"),
    "output_hidden_states": (False, "is not recorded while speculating; leave it out"),
}
# Processors and criteria that run the model, have state, or depend on a row's index in the batch, with the argument of
# `generate` that enables them.
REFUSED_PARTS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "AlternatingCodebooksLogitsProcessor": "logits_processor",
    "BarkEosPrioritizerLogitsProcessor": "logits_processor",
    "WhisperTimeStampLogitsProcessor": "logits_processor",
    "WhisperNoSpeechDetection": "logits_processor",
    "DiaClassifierFreeGuidanceLogitsProcessor": "logits_processor",
    "DiaEOSChannelFilterLogitsProcessor": "logits_processor",
    "DiaEOSDelayPatternLogitsProcessor": "logits_processor",
    "ConfidenceCriteria": "assistant_confidence_threshold",
}
INPUTS = ("attention_mask", "logits_to_keep", "use_cache")  # of the model: supported, or without effect
KEPT = 8  # cached drafters per model
logger = logging.getLogger(__name__)


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafter: str | Sequence[str] | Drafter = names.DEFAULT,
    seed: int | None = None,
    rule: Rule = "coupled",
    batch_size: int = 8,
    budget: str | Budgeter = "auto",
    stream_to: Any = None,
    **stock: Any,
) -> Any:
    """Speculative decoding behind `model.generate`: `input_ids` [b, l] left-padded -> ids [b, l + new] right-padded.

    Args:
        drafter: a SPEC, several, or a drafter.
        seed: sample j of a prompt uses seed + j; None draws one from torch's generator.
        rule: coupled, rejection, block or typical.
        batch_size: maximum rows decoded together.
        budget: how much to draft (`outrider.budgets.parse`).
        stream_to: a streamer of transformers. `generate` does not pass its argument `streamer` to a decoding function,
            hence this name.
        The other arguments are those that transformers passes to a decoding method.

    Returns:
        The ids, prompts included; with `return_dict_in_generate` transformers' output with them as `sequences`.

    Raises:
        InputError: names an unsupported option of `model.generate`. `assistant_model`, `streamer`, `synced_gpus` and
            `tokenizer` are not passed here, so they are ignored.

    State between calls (the model as a target, drafters by SPEC, what budgets learnt) is stored in
    `model.outrider_engines`, and not in copies and pickles of the model.
    """
    check(model, logits_processor, stopping_criteria, generation_config, rule)
    mask, batch_size = check_inputs(input_ids, stock), integer("batch_size", batch_size)
    seed = None if seed is None else integer("seed", seed, least=0)
    copies = generation_config.num_return_sequences or 1
    if stream_to is not None and len(input_ids) > 1:
        raise InputError(f"stream_to is for one text, not {len(input_ids)}; leave it out")
    with evaluating(model):
        engine = engine_of(model, drafter, rule, budget)
        sampled = generation_config.do_sample or rule != "coupled"  # else the seed changes nothing
        fresh = [0] * (len(input_ids) // copies)
        if seed is None and sampled:
            fresh = torch.randint(2**62, (len(fresh),)).tolist()
        temperature = _temperature(logits_processor) if generation_config.do_sample else 0.0
        limit, longest = generation_config.max_length - input_ids.shape[1], int(mask.sum(1).max())
        if longest + limit > engine.target.context:
            logger.warning(
                "texts end at the %d positions that the model was made for, where max_length allows %d",
                engine.target.context, longest + limit,
            )  # fmt: skip
        if generation_config.max_time is not None:
            batch_size = len(input_ids)  # the time is that of all rows
        requests = [
            Request(
                prompt=ids[m.bool()].tolist(),
                seed=(fresh[i // copies] if seed is None else seed) + i % copies,
                max_new_tokens=limit,
                sampling=Sampling(temperature=temperature),
                cut=_cut(ids, stopping_criteria),
                process=_process(ids, _of_row(logits_processor, i), temperature) if len(logits_processor) else None,
            )
            for i, (ids, m) in enumerate(zip(input_ids, mask, strict=True))
        ]
        for request in requests:
            check_prompt(request, engine.target)
        rows: dict[int, Row] = {}
        if stream_to is not None:
            stream_to.put(input_ids.cpu())
        try:
            for piece in generate(engine, requests, batch_size):
                rows[piece.row.index] = piece.row
                for token in piece.tokens if stream_to is not None else ():
                    stream_to.put(torch.tensor([token]))
        finally:
            if stream_to is not None:
                stream_to.end()
    if any(row.finish == "error" for row in rows.values()):
        raise InputError(NOT_FINITE)
    sequences = _pad(input_ids, [rows[i].output for i in range(len(requests))], _pad_id(generation_config))
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences.long())  # type: ignore[arg-type]
    return sequences


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout inside, and put back as it was, in each of its modules, once the last thread has left."""
    engines = engines_of(model)
    with engines.lock:
        engines.users += 1
        engines.training += [module for module in model.modules() if module.training]
        model.eval()
    try:
        yield
    finally:
        with engines.lock:
            engines.users -= 1
            for module in engines.training if not engines.users else ():
                module.training = True
            if not engines.users:
                engines.training = []


def check(model: Any, processors: Any, criteria: Any, config: Any, rule: str) -> None:
    """Raise InputError for unsupported parts of a generation config, its processors and criteria, by name."""
    check_rule(rule)
    if model.config.is_encoder_decoder:
        raise InputError("custom_generate supports decoder-only models; load an encoder-decoder with outrider.load")
    if is_fsdp_managed_module(model) or is_deepspeed_zero3_enabled():  # synced_gpus, which is not passed
        raise InputError("custom_generate does not support models sharded by FSDP or ZeRO-3; gather its weights first")
    for name, (neutral, why) in REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            shown = f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name
            raise InputError(f"{shown} {why}")
    for part in [*processors, *criteria]:
        if (kind := type(part).__name__) in REFUSED_PARTS:
            raise InputError(f"{REFUSED_PARTS[kind]} ({kind}) cannot be applied to one row of a draft; leave it out")


def check_inputs(input_ids: Tensor, given: Mapping[str, Any]) -> Tensor:
    """The mask [b, l] of tokens, as opposed to padding, among `input_ids` [b, l]. Raises InputError for all other
    inputs of the model, by name, unless they are transformers' defaults."""
    cache = next((given[name] for name in CARRIERS if given.get(name) is not None), None)
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise InputError("past_key_values (cache) cannot be continued: give all tokens as input_ids, and leave it out")
    for name, value in given.items():
        if value is not None and name not in (*INPUTS, *CARRIERS, "position_ids"):
            raise InputError(f"{name} is not supported by custom_generate; give input_ids alone")
    # None: all tokens. (Not a named argument of custom_generate, or transformers would pass it twice.)
    mask = given.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if bool((mask[:, -1] == 0).any()):
        raise InputError("the batch is right-padded; pad on the left (tokenizer.padding_side = 'left') to generate")
    places, usual = given.get("position_ids"), mask.long().cumsum(-1) - 1
    if places is not None and bool(((places != usual) & (mask != 0)).any()):
        raise InputError("position_ids other than 0, 1, 2, ... of each row's tokens are not supported; leave them out")
    return mask


@dataclass
class Kept:
    """A drafter as given, with the state of its budgets."""

    spec: Any  # a SPEC, a tuple of them, or the drafter itself
    drafter: Drafter | None = None
    budgets: dict[tuple[str, str], Budgeter] = field(default_factory=dict)  # by rule and budget


class Engines:
    """State on a model between calls; a copy or pickle of it is empty.

    The target is rebuilt when the model was cast, moved or modified, and drafters that read its hidden states are
    reloaded when any of its weights changed.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.form: Any = None
        self.weights: Any = None
        self.target: Target | None = None
        self.noise: GumbelNoise | None = None
        self.kept: list[Kept] = []  # most recently used last
        self.users, self.training = 0, list[Any]()  # threads that decode, and the modules that were in training

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()  # so that a pickled model can be loaded without this package

    def engine(self, model: Any, drafter: str | Sequence[str] | Drafter, rule: Rule, budget: str | Budgeter) -> Engine:
        """The engine for the model's current state."""
        with self.lock:
            target = self._target(model)
            one = self._kept(tuple(drafter) if isinstance(drafter, list) else drafter)
            if isinstance(budget, str) and (rule, budget) not in one.budgets:
                one.budgets[rule, budget] = parse(budget)
            if one.drafter is None:
                spelled = isinstance(one.spec, str | tuple)
                one.drafter = (
                    drafters.load(one.spec, target, _tokenizer(model)) if spelled else drafters.alone(one.spec)
                )
            chosen = one.budgets[rule, budget] if isinstance(budget, str) else budget
            return Engine.of(target, one.drafter, chosen, rule, self.noise)

    def _target(self, model: Any) -> Target:
        form, weights = _form(model), _weights(model)
        if self.target is None or form != self.form:
            self.target, self.kept = target_of(model), []
            self.noise = GumbelNoise(self.target.vocab)
        elif weights != self.weights:
            for one in self.kept:
                if one.drafter is not None and one.drafter.taps:
                    one.drafter = None
        self.form, self.weights = form, weights
        return self.target

    def _kept(self, spec: Any) -> Kept:
        spelled = isinstance(spec, str | tuple)
        one = next((k for k in self.kept if (k.spec == spec if spelled else k.spec is spec)), None) or Kept(spec)
        self.kept = [*(k for k in self.kept if k is not one), one][-KEPT:]
        return one


def engine_of(model: Any, drafter: str | Sequence[str] | Drafter, rule: Rule, budget: str | Budgeter) -> Engine:
    """The engine of a model, from its state."""
    return engines_of(model).engine(model, drafter, rule, budget)


def engines_of(model: Any) -> Engines:
    """The state on a model."""
    there = vars(model).setdefault("outrider_engines", Engines())
    if not isinstance(there, Engines):  # of a copy or a pickle
        there = model.outrider_engines = Engines()
    return there


def _form(model: Any) -> tuple[Any, ...]:
    """All parameters and buffers by name, shape, dtype and device, and why native passes do not support it."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return refused(model), *((name, t.shape, t.dtype, t.device) for name, t in named)


def _weights(model: Any) -> tuple[Any, ...]:
    """Addresses and version counters of all parameters."""
    return tuple(
        (p.data_ptr() if type(p.data) is Tensor else 0, 0 if p.is_inference() else p._version)
        for p in model.parameters()
    )


def _tokenizer(model: Any) -> Any:
    """The tokenizer of the model's folder or hub id, if any: corpora and draft models need it."""
    try:
        return load_tokenizer(origin_of(model))
    except InputError:
        return None


def _of_row(processors: Any, row: int) -> Any:
    """The processors for a single row, with that row's padding."""
    kept = type(processors)()
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            processor = copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
        kept.append(processor)
    return kept


def _temperature(processors: Any) -> float:
    """By what the processors divide logits; 1.0 where it is out of all bounds."""
    given = next((float(p.temperature) for p in processors if isinstance(p, TemperatureLogitsWarper)), 1.0)
    return given if 1e-6 <= given <= 1e6 else 1.0


def _process(prompt: Tensor, processors: Any, temperature: float) -> Process:
    """The processors as a function of one row's output so far, without their temperature, which drafters must know:
    the row's sampling has it. `prompt` is the row with its padding."""
    scale = np.float32(temperature or 1.0)

    def process(output: list[int], logits: Array) -> Array:
        ids = torch.cat([prompt, prompt.new_tensor(output)])[None]
        return array(processors(ids, torch.from_numpy(logits).to(prompt.device)[None])[0]) * scale

    return process


def _cut(prompt: Tensor, criteria: Any) -> Cut:
    """The stopping criteria, applied after every token as in stock decoding."""

    def cut(output: Sequence[int], new: Sequence[int]) -> tuple[int, str | None]:
        ids = torch.cat([prompt, prompt.new_tensor([*output, *new])])[None]
        for kept in range(1, len(new) + 1):
            end = ids.shape[1] - len(new) + kept
            if bool(criteria(ids[:, :end], None).all()):
                return kept, "stop"
        return len(new), None

    return cut


def _pad_id(config: Any) -> int:
    pad = config._pad_token_tensor
    return 0 if pad is None else int(pad)


def _pad(prompts: Tensor, outputs: list[list[int]], pad: int) -> Tensor:
    return torch.cat([prompts, padded(outputs, prompts.device, fill=pad)], 1)
