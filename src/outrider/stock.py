"""The drop-in for stock transformers: `model.generate(**inputs, custom_generate=outrider.custom_generate)`.

transformers prepares the logits processors and the stopping criteria; both are honoured row by row, each row seeing
exactly the ids that stock decoding would show it (left padding included).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from . import drafters
from .budget import AdaptiveBudget
from .engine import Cut, Engine, Process, Request, Row, generate
from .noise import RaceNoise
from .targets import load_target, load_tokenizer
from .types import RULES, Drafter, InputError, Rule, Sampling

# Processors that run the model, keep a state of their own, or look a row up by its number in the batch.
REFUSED = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "WhisperNoSpeechDetection",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "ConfidenceCriteria",
}
UNSUPPORTED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafter: str | Sequence[str] | Drafter = "lookup",
    seed: int | None = None,
    rule: Rule = "coupled",
    batch_size: int = 8,
    **stock: Any,
) -> Any:
    """Speculative decoding behind `model.generate`: `input_ids` [b, l] left-padded -> ids [b, l + new] right-padded.

    Own arguments: `drafter` (a SPEC or a drafter), `seed` (sample j of a prompt uses seed + j; None draws one from
    torch's generator), `rule`, `batch_size` (rows decoded at a time).
    """
    check(model, logits_processor, stopping_criteria, generation_config, rule)
    engine = _engine(model, drafter, rule)
    # Not an argument of our own: transformers would then pass it twice. It is None where all tokens count.
    given = stock.get("attention_mask")
    mask = torch.ones_like(input_ids) if given is None else given
    if bool((mask[:, -1] == 0).any()):
        raise InputError("the batch is right-padded; pad on the left (tokenizer.padding_side = 'left') to generate")
    copies = generation_config.num_return_sequences or 1
    fresh = torch.randint(2**62, (len(input_ids) // copies,)).tolist() if seed is None else []
    law = Sampling(temperature=1.0 if generation_config.do_sample else 0.0)
    limit = generation_config.max_length - input_ids.shape[1]
    requests = [
        Request(
            prompt=ids[m.bool()].tolist(),
            seed=(fresh[i // copies] if seed is None else seed) + i % copies,
            max_new_tokens=limit,
            sampling=law,
            cut=_cut(ids, stopping_criteria),
            process=_process(ids, _of_row(logits_processor, i)) if len(logits_processor) else None,
        )
        for i, (ids, m) in enumerate(zip(input_ids, mask, strict=True))
    ]
    rows: dict[int, Row] = {}
    for piece in generate(engine, requests, batch_size):
        rows[piece.row.index] = piece.row
    sequences = _pad(input_ids, [rows[i].output for i in range(len(requests))], _pad_id(generation_config))
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences.long())  # type: ignore[arg-type]
    return sequences


def check(model: Any, processors: Any, criteria: Any, config: Any, rule: str) -> None:
    """Refuse by name what cannot be honoured."""
    if rule not in RULES:
        raise InputError(f"there is no rule {rule!r}; choose one of {', '.join(RULES)}")
    if model.config.is_encoder_decoder:
        raise InputError("custom_generate serves decoder-only models; load an encoder-decoder with outrider.load")
    if (config.num_beams or 1) > 1:
        raise InputError("beam search cannot be speculated; set num_beams=1")
    for name in UNSUPPORTED:
        if config.return_dict_in_generate and getattr(config, name, False):
            raise InputError(f"{name} is not recorded while speculating; leave it out")
    for part in [*processors, *criteria]:
        if type(part).__name__ in REFUSED:
            raise InputError(f"{type(part).__name__} cannot be applied to one row of a draft; leave it out")


def _engine(model: Any, drafter: str | Sequence[str] | Drafter, rule: Rule) -> Engine:
    """One engine per model, drafter and rule: its budget keeps what it learnt. It lives as long as the model."""
    named = isinstance(drafter, str | list | tuple)
    key = (drafter if isinstance(drafter, str) else tuple(drafter) if named else id(drafter), rule)  # type: ignore[arg-type]
    found: dict[Any, Engine] = model.__dict__.setdefault("_outrider_engines", {})
    if key not in found:
        target = load_target(model)
        loaded = drafters.load(drafter, target, _tokenizer(model)) if named else drafter  # type: ignore[arg-type]
        race = RaceNoise(target.vocab, model.device)
        found[key] = Engine(target, loaded, AdaptiveBudget(), race, rule)  # type: ignore[arg-type]
    return found[key]


def _tokenizer(model: Any) -> Any:
    """The tokenizer that lies beside the model, if it came from a folder or a hub: corpora and draft models need it."""
    try:
        return load_tokenizer(model.config._name_or_path)
    except InputError:
        return None


def _of_row(processors: Any, row: int) -> Any:
    """The processors for one row alone: where they hold the padding of every row, that row's."""
    found = type(processors)()
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            processor = copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
        found.append(processor)
    return found


def _process(prompt: Tensor, processors: Any) -> Process:
    """The processors as a function of one row's output so far; `prompt` is the row with its padding."""

    def process(output: list[int], logits: Tensor) -> Tensor:
        ids = torch.cat([prompt, prompt.new_tensor(output)])[None]
        return processors(ids, logits)

    return process


def _cut(prompt: Tensor, criteria: Any) -> Cut:
    """The stopping criteria, asked after every token as stock decoding would."""

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
    longest = max(map(len, outputs))
    tail = [[*o, *[pad] * (longest - len(o))] for o in outputs]
    return torch.cat([prompts, prompts.new_tensor(tail)], 1)
