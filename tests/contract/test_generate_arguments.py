"""Every argument of `model.generate` and every field of GenerationConfig beside `custom_generate`: honoured as stock
decoding does, refused by name, or without effect; as the table in docs/howto/transformers.md says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_world import PROMPTS, NoEven, World
from transformers import (
    CompileConfig,
    DynamicCache,
    EtaLogitsWarper,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextStreamer,
    WatermarkingConfig,
)

import outrider
from outrider.integrations.transformers import REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "transformers.md"
IDS, EOS = torch.tensor([PROMPTS[0]]), 5
USUAL: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
ONE = {"do_sample": True, "top_k": 0}  # sampling that a filter leaves one choice


# What each honoured argument is tried with; a call with it writes another text than one without it.
HONOURED: dict[str, dict[str, Any]] = {
    "inputs": {"inputs": torch.tensor([PROMPTS[1]])},
    "generation_config": {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0)},
    "logits_processor": {"logits_processor": LogitsProcessorList([NoEven()])},
    "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(17)])},
    "attention_mask": {"attention_mask": torch.tensor([[0] * 6 + [1] * (len(PROMPTS[0]) - 6)])},
    "max_length": {"max_length": 20, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 3},
    "min_length": {"min_length": 25, "eos_token_id": "first"},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": "first"},
    "max_time": {"max_time": 0.0},
    "do_sample": {**ONE, "top_p": 1e-9, "repetition_penalty": 1.3},
    "temperature": {**ONE, "temperature": 1e-6, "suppress_tokens": [36]},
    "top_k": {"do_sample": True, "top_k": 1, "suppress_tokens": [36]},
    "top_p": {**ONE, "top_p": 1e-9, "suppress_tokens": [36]},
    "min_p": {**ONE, "min_p": 1.0, "suppress_tokens": [36]},
    "top_h": {**ONE, "top_h": 1e-6, "suppress_tokens": [36]},
    "typical_p": {**ONE, "typical_p": 1e-6},
    "epsilon_cutoff": {**ONE, "epsilon_cutoff": 0.999, "suppress_tokens": [36]},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[36], [5, 33]]},
    "forced_bos_token_id": {"inputs": torch.tensor([[1]]), "forced_bos_token_id": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": EOS},
    "suppress_tokens": {"suppress_tokens": [1, 2, 3, 36]},
    "begin_suppress_tokens": {"begin_suppress_tokens": "first"},
    "sequence_bias": {"sequence_bias": [[[7], 30.0]]},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=20.0)},
    "num_return_sequences": {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
    "eos_token_id": {"eos_token_id": "first"},
    "pad_token_id": {
        "inputs": torch.tensor([PROMPTS[0], PROMPTS[0][::-1]]),
        "eos_token_id": "first",
        "pad_token_id": 60,
    },
    "bos_token_id": {"inputs": None, "bos_token_id": 3},
}
SAME = {  # honoured, but no text shows it
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
}
IDLE: dict[str, Any] = {  # without effect, here as there
    "negative_prompt_ids": IDS,
    "negative_prompt_attention_mask": torch.ones_like(IDS),
    "trust_remote_code": True,
    "logits_to_keep": 1,
    "early_stopping": True,
    "length_penalty": 2.0,
    "low_memory": True,
    "max_cache_len": 400,
    "prefill_chunk_size": 4,
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": {},
    "decoder_start_token_id": 4,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "max_matching_ngram_size": 3,
}
BAD: dict[str, Any] = {  # refused, each by its name
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [object()],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "use_mtp": True,
    "prompt_lookup_num_tokens": 5,
    "assistant_early_exit": 1,
    "is_assistant": True,
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"backend": "quanto"},
    "guidance_scale": 2.0,
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "prefix_allowed_tokens_fn": lambda batch, ids: [1, 2],
    "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]),
    "position_ids": torch.arange(3, 3 + IDS.shape[1])[None],
    "past_key_values": DynamicCache(),
    "labels": IDS,
    "inputs_embeds": torch.zeros(1, 3, 32, dtype=torch.float64),
}
THEIRS = {"stop_strings": ["x"], "token_healing": True}  # refused by transformers, which then wants a tokenizer
SILENT = ("assistant_model", "streamer", "synced_gpus", "tokenizer", "assistant_tokenizer")  # not handed over


def call(world: World, given: dict[str, Any], **more: Any) -> Any:
    """`model.generate` of the usual prompt with these arguments."""
    first = world.model.generate(IDS, **{**USUAL, "max_new_tokens": 1})[0, -1].item()
    given = {name: ([first] if value == "first" else value) for name, value in given.items() if name != "inputs"} | {
        name: value for name, value in given.items() if name == "inputs"
    }
    asked = {"inputs": IDS, **({} if "generation_config" in given else USUAL), **given, **more}
    return world.model.generate(**{name: value for name, value in asked.items() if value is not None})


def ours(world: World, given: dict[str, Any], **more: Any) -> Any:
    return call(world, given, custom_generate=outrider.custom_generate, drafter="lookup", budget="8x4", **more)


@pytest.mark.parametrize("name", [*HONOURED, *SAME])
def test_an_honoured_argument_writes_stocks_text(world: World, name: str) -> None:
    given = {**HONOURED, **SAME}[name]
    stock, result = call(world, given), ours(world, given, **({"seed": 2} if given.get("do_sample") else {}))
    if name == "return_dict_in_generate":
        stock, result = stock.sequences, result.sequences
    assert torch.equal(stock, result)
    if name in HONOURED:
        usual = call(world, {})
        assert not torch.equal(stock, usual), "or the argument would not be seen to be honoured"


def test_sampling_without_a_filter_is_not_that_text(world: World) -> None:
    """Or the filters above would not be seen to be honoured."""
    assert not torch.equal(ours(world, ONE, seed=2), ours(world, {}))


def test_eta_cutoff_is_the_filter_of_transformers(world: World) -> None:
    """It leaves several choices, so stock's text is not to be compared."""
    result = ours(world, {**ONE, "eta_cutoff": 0.5}, seed=2)
    given = ours(world, {**ONE, "logits_processor": LogitsProcessorList([EtaLogitsWarper(0.5)])}, seed=2)
    assert torch.equal(result, given)
    assert not torch.equal(result, ours(world, ONE, seed=2))


@pytest.mark.parametrize("name", IDLE)
def test_an_argument_without_effect_changes_no_text(world: World, name: str) -> None:
    assert torch.equal(ours(world, {name: IDLE[name]}), call(world, {}))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # past_key_values has another name since transformers 5.24
@pytest.mark.parametrize("name", BAD)
def test_an_argument_that_cannot_be_honoured_is_refused_by_name(world: World, name: str) -> None:
    with pytest.raises(outrider.InputError, match=name):
        ours(world, {name: BAD[name]})
    assert name in REFUSED or name not in vars(GenerationConfig()) or name == "watermarking_config"


@pytest.mark.parametrize("name", REFUSED)
def test_the_neutral_value_of_a_refused_field_is_taken(world: World, name: str) -> None:
    assert torch.equal(ours(world, {name: REFUSED[name][0]}), call(world, {}))


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_refuses_what_wants_a_tokenizer(world: World, name: str) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        ours(world, {name: THEIRS[name]})


def test_the_usual_positions_and_an_open_mask_are_taken(world: World) -> None:
    usual = {"position_ids": torch.arange(IDS.shape[1])[None], "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(ours(world, usual), call(world, {}))


def test_what_transformers_keeps_to_itself_does_not_reach_a_function(world: World) -> None:
    """Should it be handed over one day, it must be honoured or refused."""
    seen: dict[str, Any] = {}

    def spy(model: Any, input_ids: Any, **given: Any) -> Any:
        seen.update(given)
        return input_ids

    given = {"assistant_model": world.model, "streamer": TextStreamer(None, skip_prompt=True), "synced_gpus": True}
    call(world, {**given, "tokenizer": object(), "assistant_tokenizer": object()}, custom_generate=spy)
    assert seen
    assert not {*SILENT} & {*seen}


class Heard(TextStreamer):
    def __init__(self) -> None:
        self.heard: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.heard += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_model_in_training_stays_there(world: World) -> None:
    """The first call and later ones write the text without dropout; each module is left in the mode that it had."""
    model = world.model
    kept = {module: module.training for module in model.modules()}
    try:
        wanted = ours(world, {})
        for first in (True, False):
            if first:
                vars(model).pop("outrider_engines", None)
            model.train()
            model.lm_head.eval()
            assert torch.equal(ours(world, {}), wanted)
            assert [m for m in model.modules() if not m.training] == [model.lm_head]
    finally:
        for module, training in kept.items():
            module.training = training


def test_logits_that_are_not_finite_are_an_error(world: World) -> None:
    """As stock sampling raises, and no text that ends somewhere."""
    kept = world.model.lm_head.weight.data.clone()
    try:
        world.model.lm_head.weight.data[7] = float("nan")
        with pytest.raises(outrider.InputError, match="NaN or infinite"):
            ours(world, {})
        assert ours(world, {"remove_invalid_values": True}).shape[1] > IDS.shape[1]
    finally:
        world.model.lm_head.weight.data.copy_(kept)


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("batch_size", -1), ("batch_size", 1.5), ("seed", -1)])
def test_sizes_that_make_no_sense_are_refused(world: World, name: str, value: Any) -> None:
    with pytest.raises(outrider.InputError, match=f"^{name} must be"):
        ours(world, {}, **{name: value})


def test_a_greedy_text_draws_nothing_from_torch(world: World) -> None:
    before = torch.get_rng_state()
    ours(world, {})
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_that_the_context_cuts_is_announced(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ours(world, {"max_new_tokens": 10_000})
    assert "texts end at the" in caplog.text


def test_a_streamer_is_given_as_stream_to(world: World) -> None:
    stock, mine = Heard(), Heard()
    text = call(world, {}, streamer=stock)
    assert torch.equal(ours(world, {}, stream_to=mine), text)
    assert (mine.heard, mine.ended) == (stock.heard, True)
    assert mine.heard == text[0].tolist()
    with pytest.raises(outrider.InputError, match="stream_to is for one text, not 2"):
        ours(world, {"inputs": IDS.expand(2, -1)}, stream_to=mine)


def table() -> dict[str, str]:
    """Argument -> what the page says becomes of it."""
    results: dict[str, str] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names, what, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            for name in re.findall(r"`([^`]+)`", names):
                assert name not in results, f"{name} stands twice in {PAGE.name}"
                results[name] = what
    return results


def test_the_page_describes_every_argument_correctly() -> None:
    """A field that a new transformers adds is missing here until somebody decides what becomes of it."""
    signature = {*inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs", "custom_generate"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    more = {"attention_mask", "position_ids", "inputs_embeds", "past_key_values", "logits_to_keep", "tokenizer"}
    more |= {"assistant_tokenizer", "trust_remote_code"}
    said = table()
    assert {*said} == signature | fields | more
    tried = {
        **dict.fromkeys([*HONOURED, *SAME, "eta_cutoff"], "honoured"),
        **dict.fromkeys(IDLE, "no effect"),
        **dict.fromkeys([*BAD, *THEIRS], "refused"),
        **dict.fromkeys(SILENT, "not seen"),
        "watermarking_config": "honoured",
        "position_ids": "refused",
    }
    del tried["labels"]  # any other input of a model
    assert tried == said
