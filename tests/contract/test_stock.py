"""The drop-in behind `model.generate`: stock texts, stock processors, stock criteria, stock shapes."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from contract_world import PROMPTS, NoEven, World, needs
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import outrider
from outrider.budgets.budgeter import FixedBudget
from outrider.engine import Request, generate
from outrider.integrations import transformers as integration
from outrider.integrations.transformers import KEPT
from outrider.params import InputError, Sampling

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
def test_greedy_texts_of_padded_rows_are_stocks(world: World, options: dict[str, Any]) -> None:
    stock, ours = both(world, PROMPTS, **options)
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


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_drafters_know_the_temperature(world: World, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They race with the target's own noise; at another temperature they would guess other tokens."""
    seen: list[Request] = []
    monkeypatch.setattr(
        integration,
        "generate",
        lambda engine, requests, size: seen.extend(requests) or generate(engine, requests, size),
    )
    options = {"max_new_tokens": 4, "do_sample": True, "temperature": temperature, "top_k": 0, "pad_token_id": PAD}
    how = {"custom_generate": outrider.custom_generate, "drafter": "lookup", "seed": 1}
    world.model.generate(**padded(PROMPTS[:1]), **options, repetition_penalty=1.3, **how)
    (request,) = seen
    assert request.sampling == Sampling(temperature=temperature)
    logits = np.random.default_rng(0).standard_normal(world.model.config.vocab_size).astype(np.float32)
    assert request.process is not None
    apart = request.process([], logits) - logits
    assert np.abs(np.delete(apart, sorted(set(PROMPTS[0]) | {PAD}))).max() < 1e-6, "but for what is penalised"
    assert np.abs(apart[PROMPTS[0]]).max() > 0.01


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
        eos_token_id=60,  # without one, stock decoding goes on writing after a row's end
    )
    assert torch.equal(stock, ours)


class Counts(LogitsProcessor):
    """Counts the tokens that it is called for."""

    asked = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert bool((input_ids >= 0).all())
        self.asked += len(input_ids)
        return scores


def test_processors_are_called_for_written_tokens_alone(world: World) -> None:
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
        ({"num_beams": 2}, "num_beams=2 means beam search"),
        ({"prefix_allowed_tokens_fn": lambda i, ids: [1, 2]}, "PrefixConstrainedLogitsProcessor"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0 needs passes"),
        ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty=1.5 depends on a row"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True is not recorded"),
        ({"rule": "magic"}, "there is no rule 'magic'"),
        ({"prompt_lookup_num_tokens": 5}, "prompt_lookup_num_tokens=5 is another decoding method .* drafter='lookup"),
        ({"use_cache": False}, "use_cache=False must be true"),
        ({"budget": "much"}, "a budget is auto"),
        ({"drafter": "magic"}, "there is no drafter 'magic'"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_cannot_be_honoured_is_refused_by_name(world: World, options: dict[str, Any], sentence: str) -> None:
    settings = {"drafter": "lookup", **options}
    with pytest.raises(InputError, match=sentence):
        world.model.generate(
            **padded(PROMPTS[:1]),
            max_new_tokens=4,
            pad_token_id=PAD,
            custom_generate=outrider.custom_generate,
            **settings,
        )


def generated(model: Any, **more: Any) -> torch.Tensor:
    options = {**padded(PROMPTS[:1]), "max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, **more}
    return model.generate(**options)


def drafted(model: Any, drafter: Any = "lookup", **more: Any) -> torch.Tensor:
    return generated(model, custom_generate=outrider.custom_generate, drafter=drafter, **more)


def test_a_budget_is_taken_and_engines_stay_out_of_copies(world: World) -> None:
    stock = generated(world.model)
    assert torch.equal(stock, drafted(world.model, budget="3,2"))
    assert ("coupled", "3,2") in world.model.outrider_engines.kept[-1].budgets
    other = copy.deepcopy(world.model)
    assert other.outrider_engines == {}, "its engines would be another model's"
    assert torch.equal(stock, drafted(other))
    assert other.outrider_engines.target.model is other


def test_a_pickled_model_needs_nothing_of_this_package(world: World) -> None:
    model = type(world.model)(world.model.config).to(world.model.dtype)  # without the hooks of tests before
    text = drafted(model)
    kept = pickle.dumps(model)
    assert b"outrider." not in kept
    assert torch.equal(drafted(pickle.loads(kept)), text)


def test_a_prompt_that_does_not_fit_is_refused_before_any_is_decoded(world: World) -> None:
    class Streamer:
        ended = 0

        def put(self, value: Any) -> None:
            raise AssertionError("nothing is written")

        def end(self) -> None:
            self.ended += 1

    long = [5] * world.target.context
    with pytest.raises(InputError, match="context"):
        world.model.generate(
            **padded([PROMPTS[0], long]), max_new_tokens=4, pad_token_id=PAD, batch_size=1,
            custom_generate=outrider.custom_generate,
        )  # fmt: skip
    streamer = Streamer()
    with pytest.raises(InputError, match="context"):
        world.model.generate(
            **padded([long]), max_new_tokens=4, pad_token_id=PAD, stream_to=streamer,
            custom_generate=outrider.custom_generate,
        )  # fmt: skip


def test_a_model_in_training_stays_evaluated_until_its_last_thread_has_left(world: World) -> None:
    model = copy.deepcopy(world.model).train()
    with integration.evaluating(model):
        with integration.evaluating(model):
            pass
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())


CASTS = torch.bfloat16, torch.float32, torch.float64, torch.float32, torch.float64


def test_casts_are_seen(world: World) -> None:
    """An engine of another precision fails, or writes another text from some token on."""
    model = copy.deepcopy(world.model)
    for dtype in CASTS:
        model.to(dtype)
        text = drafted(model, seed=1)
        assert f"torch.{model.outrider_engines.target.precision}" == str(dtype)
        if dtype != torch.bfloat16:  # there stock decoding may round otherwise
            assert torch.equal(text, generated(model))
        assert torch.equal(text, drafted(model, "none")) or model.outrider_engines.target.exact != "bits"


def test_changed_weights_are_seen(world: World) -> None:
    """In place, by new tensors, by another head, and by a vocabulary of another size."""
    model, eagle = copy.deepcopy(world.model), needs("eagle", world.folder)
    for change in (
        lambda: model.lm_head.weight.data.mul_(-1),
        lambda: model.load_state_dict({name: t.clone() * 1.25 for name, t in model.state_dict().items()}),
        lambda: setattr(model.model.norm.weight, "data", model.model.norm.weight.data * -0.5),
        lambda: model.set_output_embeddings(copy.deepcopy(model.lm_head).requires_grad_(False)),
    ):
        with torch.no_grad():
            change()
        assert torch.equal(generated(model), drafted(model))
        assert torch.equal(generated(model), drafted(model, eagle))
    model.resize_token_embeddings(model.config.vocab_size + 8)
    assert torch.equal(generated(model), drafted(model))
    assert model.outrider_engines.target.vocab == model.config.vocab_size


def test_a_drafter_that_reads_hidden_states_is_loaded_anew_with_other_weights_alone(world: World) -> None:
    model, eagle = copy.deepcopy(world.model), needs("eagle", world.folder)

    def loaded(spec: str) -> Any:
        drafted(model, spec)
        return model.outrider_engines.kept[-1].drafter

    first, lookup = loaded(eagle), loaded("lookup")
    assert loaded(eagle) is first
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    assert loaded(eagle) is not first
    assert loaded("lookup") is lookup


def test_what_is_kept_is_bounded_and_goes_with_the_model(world: World) -> None:
    """Neither budget objects nor drafters pile up, nor does a new object get what belongs to one that is gone."""
    model = copy.deepcopy(world.model)
    seen: list[weakref.ref[Any]] = []
    for i in range(20):
        drafter, budget = copy.copy(world.drafter("lookup")), FixedBudget(2 + i % 5, 3)
        drafted(model, drafter, budget=budget)
        assert model.outrider_engines.kept[-1].spec is drafter
        seen += [weakref.ref(drafter), weakref.ref(budget)]
    del drafter, budget
    gc.collect()
    assert sum(ref() is not None for ref in seen[1::2]) == 0, "budgets"
    assert sum(ref() is not None for ref in seen[::2]) <= KEPT, "drafters"
    target = weakref.ref(model.outrider_engines.target)
    del model
    gc.collect()
    assert target() is None


def test_what_a_spelled_budget_learnt_is_kept(world: World) -> None:
    model = copy.deepcopy(world.model)
    for drafter in ("lookup", world.drafter("lookup")):
        drafted(model, drafter)
        budget = model.outrider_engines.kept[-1].budgets["coupled", "auto"]
        rounds = budget.rounds
        drafted(model, drafter)
        assert model.outrider_engines.kept[-1].budgets["coupled", "auto"] is budget
        assert budget.rounds > rounds


def test_threads_call_generate_on_one_model(world: World) -> None:
    """As many engines as threads were made of one model, and their passes changed its config under each other."""
    model, specs = copy.deepcopy(world.model), ("lookup", "suffix", "none", "lookup")
    right = generated(model)
    with ThreadPoolExecutor(len(specs)) as pool:
        texts = list(pool.map(lambda spec: drafted(model, spec), specs * 2))
    assert all(torch.equal(text, right) for text in texts)
    assert len(model.outrider_engines.kept) == len(set(specs))


def test_nothing_walks_the_stack() -> None:
    """Options come by arguments, or not at all."""
    assert "_getframe" not in inspect.getsource(inspect.getmodule(outrider.custom_generate))  # type: ignore[arg-type]


def test_right_padding_is_refused(world: World) -> None:
    with pytest.raises(InputError, match="right-padded"):
        world.model.generate(
            input_ids=torch.tensor([[1, 2, 0]]), attention_mask=torch.tensor([[1, 1, 0]]), max_new_tokens=4,
            do_sample=False, pad_token_id=PAD, custom_generate=outrider.custom_generate,
        )  # fmt: skip


def test_a_sharded_model_is_refused(world: World) -> None:
    """Its processes would have to decode in step."""
    model = copy.deepcopy(world.model)
    model._is_fsdp_managed_module = True
    with pytest.raises(InputError, match="FSDP"):
        drafted(model)


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
