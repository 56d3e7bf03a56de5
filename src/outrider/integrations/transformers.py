"""The drop-in for stock transformers: `model.generate(**inputs, custom_generate=outrider.custom_generate)`.

transformers prepares the logits processors and the stopping criteria; both are honoured row by row, each row seeing
exactly the ids that stock decoding would show it (left padding included).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import copy
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .. import drafters
from ..budgets.budgeter import Budgeter
from ..core.padding import padded
from ..engine import Engine, generate
from ..params import check_rule
from ..request import Cut, Process, Request, Row
from ..targets import load_target, load_tokenizer
from ..types import Drafter, InputError, Rule, Sampling

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
# Other ways to decode, which transformers would let us ignore in silence; what to do instead.
INSTEAD = {
    "assistant_model": "give drafter='model:DIR'",
    "streamer": "stream with outrider.load(model).stream(...)",
    "prompt_lookup_num_tokens": "give drafter='lookup?tokens=N'",
    "assistant_early_exit": "give a drafter",
}


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
    budget: str | Budgeter = "auto",
    **stock: Any,
) -> Any:
    """Speculative decoding behind `model.generate`: `input_ids` [b, l] left-padded -> ids [b, l + new] right-padded.

    Args:
        drafter: a SPEC, several, or a drafter.
        seed: sample j of a prompt uses seed + j; None draws one from torch's generator.
        rule: coupled, rejection, block or typical.
        batch_size: rows decoded at a time.
        budget: how much to draft (`outrider.budgets.parse`).
        The rest is what transformers gives to a decoding method.

    Returns:
        The ids, prompts included; with `return_dict_in_generate` transformers' output that holds them as `sequences`.

    Raises:
        InputError: an option of `model.generate` that cannot be honoured, by name.

    Engines, and what their budgets learnt, lie on the model as `model.outrider_engines`: they hold the model, so a
    registry elsewhere would keep it alive for good. Copies and pickles of the model leave them out.
    """
    check(model, logits_processor, stopping_criteria, generation_config, rule, _asked_of_generate(sys._getframe(1)))
    engine = _engine(model, drafter, rule, budget)
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


def _asked_of_generate(frame: FrameType | None) -> dict[str, Any]:
    """What `model.generate` was given and does not hand over to a decoding method of the user's own."""
    names = ("assistant_model", "streamer")
    while frame is not None:
        if frame.f_code.co_name == "generate" and names[0] in frame.f_locals:
            return {name: frame.f_locals.get(name) for name in names}
        frame = frame.f_back
    return {}


def check(model: Any, processors: Any, criteria: Any, config: Any, rule: str, asked: Mapping[str, Any]) -> None:
    """Refuse by name what cannot be honoured. `asked`: arguments of `generate` that are not in its config."""
    check_rule(rule)
    for name, instead in INSTEAD.items():
        if asked.get(name) is not None or getattr(config, name, None) is not None:
            raise InputError(f"{name} is another way to decode than custom_generate; leave it out and {instead}")
    if config.use_cache is False:
        raise InputError("use_cache=False cannot be honoured: drafts are checked over a cache; leave it out")
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


class Engines(dict[Any, Engine]):
    """The engines of one model by drafter, rule and budget; a copy or pickle of it is empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Engines, ()


def _engine(model: Any, drafter: str | Sequence[str] | Drafter, rule: Rule, budget: str | Budgeter) -> Engine:
    """One engine per model, drafter, rule and budget, which keeps what it learnt."""
    spec: Any = drafter if isinstance(drafter, str) else id(drafter)
    if isinstance(drafter, Sequence) and not isinstance(drafter, str):
        spec = tuple(drafter)
    key = spec, rule, budget if isinstance(budget, str) else id(budget)
    if not hasattr(model, "outrider_engines"):
        model.outrider_engines = Engines()
    if key not in model.outrider_engines:
        target = load_target(model, exact="auto")
        if isinstance(drafter, str | Sequence):
            loaded = drafters.load(drafter, target, _tokenizer(model))
        else:
            loaded = drafters.alone(drafter)
        model.outrider_engines[key] = Engine.of(target, loaded, budget, rule)
    return model.outrider_engines[key]


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
        if output and output[-1] < 0:
            return logits
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
    return torch.cat([prompts, padded(outputs, prompts.device, fill=pad)], 1)
