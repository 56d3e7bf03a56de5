"""Models in memory, in native passes that read their parameters where they lie."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from bits import opened, text_of, trees_differ
from compiled_code import needs_code
from small import build
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import outrider
from outrider.backends.native import library as native
from outrider.backends.native import weights
from outrider.backends.native.weights import rounded
from outrider.backends.torch import HFTarget
from outrider.backends.torch.carrier import accepted
from outrider.backends.torch.load import target_of
from outrider.backends.torch.module import ModuleTarget
from outrider.backends.torch.validate import validate
from outrider.params import InputError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 2048}
PROMPT = text_of(1, 40)

pytestmark = needs_code


def model(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return build("llama", dtype, **{**SIZES, **more}).requires_grad_(False)


def generated(one: Any, **more: Any) -> torch.Tensor:
    ids = torch.tensor([PROMPT])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    return one.generate(**given, max_new_tokens=16, do_sample=False, **more)


def drafted(one: Any, drafter: str = "lookup") -> torch.Tensor:
    return generated(one, custom_generate=outrider.custom_generate, drafter=drafter)


def near(target: Any, one: Any) -> bool:
    """Does a new session write the stock model's logits?"""
    right = one(torch.tensor([PROMPT])).logits[0, -1]
    return torch.allclose(opened(target, [PROMPT])[1][0], right, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_what_is_copied_is_copied_again_where_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's matrices lie transposed: copying all of them took most of the time of a short text."""
    one = build("gpt2", torch.float32, **{**SIZES, "num_attention_heads": 2}).requires_grad_(False)
    target, copied = ModuleTarget(one), list[str]()
    read = weights.numbers

    def counted(code: Any, parameter: Any, *more: Any, **how: Any) -> Any:
        if len(parameter.shape) > 1:
            copied.append(parameter.name)
        return read(code, parameter, *more, **how)

    for again in target.forward.weights.copies:
        for cell in getattr(again, "__closure__", None) or ():
            held = cell.cell_contents
            if isinstance(held, partial):
                cell.cell_contents = partial(counted, *held.args, **held.keywords)
    assert near(target, one)
    assert not copied
    matrix = one.transformer.h[1].mlp.c_fc.weight
    for change in (
        lambda: matrix.data[5, 7].add_(3),
        lambda: matrix.mul_(2),
        lambda: matrix.data.copy_(matrix.flip(0)),
    ):
        change()
        assert near(target, one)
        assert len(copied) == 1
        copied.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_matrices_are_read_where_they_lie(dtype: torch.dtype) -> None:
    one = model(dtype)
    target = ModuleTarget(one)
    assert validate(target).verdict == "PASS bits"
    assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) == 0
    assert target.model is one
    first = target.forward.weights.model.layer[0]
    for part, given in (
        (first.q, one.model.layers[0].self_attn.q_proj),
        (first.down, one.model.layers[0].mlp.down_proj),
    ):
        assert int(native.abi.ffi.cast("uintptr_t", part.data)) == given.weight.data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.lm_head.weight.data.mul_(-1),
        lambda one: one.model.norm.weight.data.mul_(-0.5),
        lambda one: one.model.layers[1].mlp.up_proj.weight.copy_(torch.randn(96, 64)),
        lambda one: setattr(one.model.norm.weight, "data", one.model.norm.weight.data * -0.5),
        lambda one: setattr(one.model.layers[0].self_attn.v_proj.weight, "data", torch.randn(64, 64)),
        lambda one: one.load_state_dict({name: t * 1.25 for name, t in one.state_dict().items()}),
        lambda one: one.load_state_dict({name: t * 1.25 for name, t in one.state_dict().items()}, assign=True),
        lambda one: one.set_output_embeddings(copy.deepcopy(one.lm_head)),
        lambda one: one.set_output_embeddings(copy.deepcopy(one.lm_head)) or one.lm_head.weight.data.mul_(3),
    ],
    ids=["head", "norm", "projection", "new norm", "new projection", "state", "assigned state", "new head", "untied"],
)  # fmt: skip
@torch.no_grad()
def test_changed_weights_are_read(change: Callable[[Any], Any], request: pytest.FixtureRequest) -> None:
    """By a target, and by what is kept on a model for custom_generate."""
    one = model(tie_word_embeddings=request.node.callspec.id == "untied", num_key_value_heads=2)
    target = ModuleTarget(one)
    drafted(one)
    assert isinstance(one.outrider_engines.target, ModuleTarget)
    assert near(target, one)
    before = opened(target, [PROMPT])[1]
    change(one)
    assert near(target, one)
    assert torch.equal(drafted(one), generated(one))
    if request.node.callspec.id != "new head":
        assert not torch.equal(opened(target, [PROMPT])[1], before)


@torch.no_grad()
def test_a_model_whose_layers_were_widened_is_read_anew() -> None:
    """No buffer is left of the old width."""
    one = model()
    target = ModuleTarget(one)
    assert near(target, one)
    one.config.intermediate_size = 1024
    for layer in one.model.layers:
        for part, shape in (("gate_proj", (1024, 64)), ("up_proj", (1024, 64)), ("down_proj", (64, 1024))):
            getattr(layer.mlp, part).weight = torch.nn.Parameter(torch.randn(shape) * 0.05, requires_grad=False)
    assert near(target, one)
    assert target.forward.workspace.model.intermediate == 1024


@torch.no_grad()
def test_a_cast_model_is_served_anew_or_refused() -> None:
    one = model()
    target = ModuleTarget(one)
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.float32):  # casts round the rotary frequencies
        one.to(dtype)
        text = drafted(one)
        served = one.outrider_engines.target
        assert isinstance(served, ModuleTarget) is (dtype != torch.float64)
        assert f"torch.{served.precision}" == str(dtype)
        assert dtype == torch.bfloat16 or torch.equal(text, generated(one))  # the stock forward may round otherwise
    assert near(target, one)
    one.to(torch.bfloat16)
    with pytest.raises(InputError, match="its sizes or its precision are others"):
        target.open(8)
    one.double()
    with pytest.raises(InputError, match="neither all bfloat16 nor all float32"):
        target.open(8)


def patched(one: Any) -> None:
    one.model.layers[0].mlp.forward = lambda x: x * 2


def hooked(one: Any) -> None:
    one.model.layers[0].mlp.register_forward_hook(lambda module, given, made: made * 2)


class Doubled(torch.nn.Linear):
    """A layer of the user's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def replaced(one: Any) -> None:
    made = Doubled(64, 96, bias=False)
    made.weight = one.model.layers[0].mlp.up_proj.weight
    one.model.layers[0].mlp.up_proj = made


@pytest.mark.parametrize("change", [patched, hooked, replaced])
@torch.no_grad()
def test_a_model_whose_code_is_not_transformers_own_keeps_it(change: Callable[[Any], None]) -> None:
    """Also one that was changed after it had been served."""
    one = model()
    drafted(one)
    change(one)
    with pytest.raises(InputError, match=r"hooks|not one of transformers'"):
        ModuleTarget(one)
    assert torch.equal(drafted(one), generated(one))
    assert not isinstance(target_of(one), ModuleTarget)
    assert near(target_of(one), one)


class HandsOn(LlamaForCausalLM):
    """A user's own subclass, which does not name what it takes."""

    def forward(self, *args: Any, **given: Any) -> Any:
        return super().forward(*args, **given)


def test_a_subclass_that_hands_everything_on_gets_its_positions() -> None:
    torch.manual_seed(3)
    one = HandsOn(model().config).eval()
    target = target_of(one)
    assert isinstance(target, HFTarget)
    assert not target.family.proved, "it may compute something else"
    assert {"position_ids", "logits_to_keep"} <= target.accepts
    assert torch.equal(drafted(one), generated(one))
    assert torch.equal(drafted(one, "none"), generated(one))


def test_a_model_whose_forward_is_wrapped_is_not_kept_alive() -> None:
    one = model()
    one.forward = partial(lambda own, **given: own(**given), one.forward)
    assert {"position_ids", "logits_to_keep"} <= accepted(one)
    there = weakref.ref(one)
    del one
    gc.collect()
    assert there() is None


def test_a_layer_that_is_patched_for_all_models_is_the_users_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a proof of the same configuration is kept, by another process or this one."""
    one = model()
    assert isinstance(target_of(one), ModuleTarget)
    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x) * 0.5)
    assert torch.equal(drafted(one), generated(one))
    assert not isinstance(target_of(one), ModuleTarget)


def test_a_model_that_is_loaded_in_memory_writes_its_own_text() -> None:
    one = model(eos_token_id=3)
    llm = outrider.load(one, "suffix")
    assert isinstance(llm.target, ModuleTarget)
    assert not isinstance(outrider.load(one, "none", compile=False).target, ModuleTarget)
    (output,) = llm.generate([PROMPT], max_new_tokens=16, temperature=0)
    assert output.tokens == generated(one)[0, len(PROMPT) :].tolist()
    assert output.exact == "bits"


@torch.no_grad()
def test_embeddings_and_head_rows_are_the_models() -> None:
    one = model(torch.bfloat16)
    target = ModuleTarget(one)
    bits = one.model.embed_tokens.weight.view(torch.int16).numpy().view(np.uint16)
    table = target.embeddings
    assert np.array_equal(rounded(table.rows(np.arange(len(bits)))), bits)
    assert np.shares_memory(table.parameter.tensor.data, bits)
    rows = target.head_rows(np.array([3, 90]))
    assert rows is not None
    assert np.array_equal(rows, one.lm_head.weight.view(torch.int16).numpy().view(np.uint16)[[3, 90]])
