"""The drop-in behind `model.generate`: stock texts, stock processors, stock criteria, stock shapes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from contract_world import PROMPTS, World
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, TextStreamer

import outrider
from outrider.targets import load_target
from outrider.types import InputError

PAD = 0


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    n = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (n - len(r)) + r for r in rows]),
        "attention_mask": torch.tensor([[0] * (n - len(r)) + [1] * len(r) for r in rows]),
    }


def both(world: World, rows: list[list[int]], **options: Any) -> tuple[Any, Any]:
    """(stock, ours) for the same call."""
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, **options}
    stock = world.model.generate(**padded(rows), **options)
    ours = world.model.generate(**padded(rows), **options, custom_generate=outrider.custom_generate, drafter="lookup")
    return stock, ours


@pytest.mark.parametrize("rows", [PROMPTS[:1], PROMPTS], ids=["one", "left-padded"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[36], [5, 33]], "min_new_tokens": 6, "eos_token_id": 58},
        {"suppress_tokens": [1, 2, 3], "forced_eos_token_id": 9},
        {"eos_token_id": [36, 31, 10]},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_greedy_equals_stock(world: World, rows: list[list[int]], options: dict[str, Any]) -> None:
    stock, ours = both(world, rows, **options)
    assert torch.equal(stock, ours)


def test_a_draft_model_and_a_dict_in_return(world: World) -> None:
    drafter = world.drafter("model")
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "do_sample": False,
        "pad_token_id": PAD,
        "return_dict_in_generate": True,
    }
    stock = world.model.generate(**padded(PROMPTS), **options)
    ours = world.model.generate(**padded(PROMPTS), **options, custom_generate=outrider.custom_generate, drafter=drafter)
    assert torch.equal(stock.sequences, ours.sequences)


def test_sampling_depends_on_the_seed_alone(world: World) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 16,
        "do_sample": True,
        "temperature": 0.9,
        "top_p": 0.8,
        "pad_token_id": PAD,
    }

    def run(rows: list[list[int]], drafter: str, **more: Any) -> torch.Tensor:
        return world.model.generate(
            **padded(rows), **options, custom_generate=outrider.custom_generate, drafter=drafter, **more
        )

    a, b = run(PROMPTS[:1], "none", seed=3), run(PROMPTS[:1], "lookup", seed=3)
    assert torch.equal(a, b)
    assert not torch.equal(a, run(PROMPTS[:1], "lookup", seed=4))
    torch.manual_seed(11)
    free = run(PROMPTS[:1], "lookup")
    torch.manual_seed(11)
    assert torch.equal(free, run(PROMPTS[:1], "suffix"))
    several = run(PROMPTS[:1], "lookup", seed=3, num_return_sequences=3)
    assert torch.equal(several[:1], a)
    assert torch.equal(several[1:2], run(PROMPTS[:1], "lookup", seed=4))


class NoEven(LogitsProcessor):
    """A user's own processor."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(0, scores.shape[1], 2), float("-inf"))


class Ends(StoppingCriteria):
    """A user's own criterion: ends when the last three tokens sum to a multiple of seven."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -3:].sum(1) % 7 == 0


def test_the_users_own_processor_and_criterion(world: World) -> None:
    stock, ours = both(
        world,
        PROMPTS,
        logits_processor=LogitsProcessorList([NoEven()]),
        stopping_criteria=StoppingCriteriaList([Ends()]),
        max_new_tokens=40,
        eos_token_id=60,  # without one, stock decoding goes on writing behind a row's end
    )
    assert torch.equal(stock, ours)


class Counts(LogitsProcessor):
    """Counts the tokens that it is asked about."""

    asked = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert bool((input_ids >= 0).all())
        self.asked += len(input_ids)
        return scores


def test_processors_are_asked_about_written_tokens_alone(world: World) -> None:
    """Not for rows whose walk has ended while others go on. At its end a row's walk may go as deep as the others'."""
    counts, options = Counts(), {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD}
    ours = world.model.generate(
        **padded(PROMPTS), **options, logits_processor=LogitsProcessorList([counts]), budget="12x4",
        custom_generate=outrider.custom_generate, drafter=world.drafter("model"),
    )  # fmt: skip
    assert torch.equal(ours, world.model.generate(**padded(PROMPTS), **options))
    assert 24 * len(PROMPTS) <= counts.asked < (24 + 4) * len(PROMPTS)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_beams": 2}, "beam search cannot be speculated"),
        ({"prefix_allowed_tokens_fn": lambda i, ids: [1, 2]}, "PrefixConstrainedLogitsProcessor"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidance"),
        ({"encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenalty"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores is not recorded"),
        ({"rule": "magic"}, "there is no rule 'magic'"),
        ({"assistant_model": "the draft model"}, "assistant_model is another way .* drafter='model:DIR'"),
        ({"streamer": TextStreamer(None, skip_prompt=True)}, "streamer is another way"),
        ({"prompt_lookup_num_tokens": 5}, "prompt_lookup_num_tokens is another way .* drafter='lookup"),
        ({"use_cache": False}, "use_cache=False cannot be honoured"),
        ({"budget": "much"}, "a budget is auto"),
        ({"drafter": "magic"}, "there is no drafter 'magic'"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_cannot_be_honoured_is_refused_by_name(world: World, options: dict[str, Any], sentence: str) -> None:
    asked = {"drafter": "lookup", **options}
    with pytest.raises(InputError, match=sentence):
        world.model.generate(
            **padded(PROMPTS[:1]), max_new_tokens=4, pad_token_id=PAD, custom_generate=outrider.custom_generate, **asked
        )


def test_a_budget_is_taken_and_engines_stay_out_of_copies(world: World) -> None:
    asked = {**padded(PROMPTS[:1]), "max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD}
    stock = world.model.generate(**asked)
    ours = world.model.generate(**asked, custom_generate=outrider.custom_generate, budget="3,2")
    assert torch.equal(stock, ours)
    assert ("lookup", "coupled", "3,2") in world.model.outrider_engines
    other = copy.deepcopy(world.model)
    assert other.outrider_engines == {}, "its engines would be another model's"
    assert torch.equal(stock, other.generate(**asked, custom_generate=outrider.custom_generate))
    assert all(e.target.model is other for e in other.outrider_engines.values())


def test_right_padding_is_refused(world: World) -> None:
    with pytest.raises(InputError, match="right-padded"):
        world.model.generate(
            input_ids=torch.tensor([[1, 2, 0]]), attention_mask=torch.tensor([[1, 1, 0]]), max_new_tokens=4,
            do_sample=False, pad_token_id=PAD, custom_generate=outrider.custom_generate,
        )  # fmt: skip


def test_the_model_is_left_as_it_was(world: World) -> None:
    model = copy.deepcopy(world.model)
    before = model.config._attn_implementation
    first = model.generate(**padded(PROMPTS[:1]), max_new_tokens=8, do_sample=False, pad_token_id=PAD)
    model.generate(
        **padded(PROMPTS[:1]), max_new_tokens=8, do_sample=False, pad_token_id=PAD,
        custom_generate=outrider.custom_generate,
    )  # fmt: skip
    assert model.config._attn_implementation == before
    again = model.generate(**padded(PROMPTS[:1]), max_new_tokens=8, do_sample=False, pad_token_id=PAD)
    assert torch.equal(first, again)


def test_drafts_change_no_text_in_bfloat16(world: World) -> None:
    """Where this machine's kernels allow the same bits."""
    model = copy.deepcopy(world.model).to(torch.bfloat16)
    stock: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    texts, before = [], model.generate(**padded(PROMPTS), **stock)
    for drafter in ("none", "lookup", "suffix"):
        options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "pad_token_id": PAD, "seed": 3}
        texts.append(
            model.generate(**padded(PROMPTS), **options, custom_generate=outrider.custom_generate, drafter=drafter)
        )
    engines = list(model.outrider_engines.values())
    assert {engine.target.exact for engine in engines} == {load_target(model, exact="auto").exact}
    if engines[0].target.exact == "bits":
        assert torch.equal(texts[0], texts[1])
        assert torch.equal(texts[0], texts[2])
    assert torch.equal(model.generate(**padded(PROMPTS), **stock), before)
