"""Families that derive positions from cache indices: code that replaces theirs while a tree is read.

In a tree, and in a batch of unequal rows, slot and position differ. Each function gives a context, entered for the
time of one of our passes over a tree, in which one model takes its biases from the true positions:

    bloom     `build_alibi_tensor` of the one model is replaced by an attribute of the instance
    mpt       `build_mpt_alibi_tensor`, in the same way
    gpt_neo   the `bias` buffers of the one model's attention layers hold another mask
    falcon    `build_alibi_tensor` of transformers' Falcon module is replaced, for the model looks it up there. Another
              Falcon that runs in another thread at that time gets the stock function: our passes are known by their
              four-dimensional mask. Models without ALiBi (all but the first Falcons) are left alone

All of it is put back when the pass ends, also when it fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .session import Pass


def _gathered(
    stock: Callable[[Tensor, int, torch.dtype], Tensor], where: Int[Tensor, "b view"], heads: int, dtype: torch.dtype
) -> Float[Tensor, "bh 1 view"]:
    """The stock ALiBi bias of positions 0, 1, 2, ..., looked up at the slots' true positions."""
    line = stock(torch.ones(1, where.shape[1], dtype=torch.long, device=where.device), heads, dtype)
    return line[:, 0][:, where].transpose(0, 1).flatten(0, 1)[:, None]


@contextmanager
def bloom(model: Any, pass_: Pass) -> Iterator[None]:
    """Bloom: a method of the model builds the bias."""
    core, where = model.base_model, pass_.where()

    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        return _gathered(type(core).build_alibi_tensor.__get__(core), where, num_heads, dtype)

    core.build_alibi_tensor = build
    try:
        yield
    finally:
        del core.build_alibi_tensor


@contextmanager
def falcon(model: Any, pass_: Pass) -> Iterator[None]:
    """Falcon: a function of the module builds the bias, where the model uses ALiBi at all."""
    if not model.config.alibi:
        yield
        return
    module, where = sys.modules[type(model.base_model).__module__], pass_.where()
    stock = module.build_alibi_tensor

    def build(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        if attention_mask.ndim != 4:  # somebody else's Falcon
            return stock(attention_mask, num_heads, dtype)
        return _gathered(stock, where, num_heads, dtype)

    module.build_alibi_tensor = build  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.build_alibi_tensor = stock  # type: ignore[attr-defined]


class _RowBias:
    """A bias [b, heads, 1, view] that answers as the [heads, 1, view] that MPT expects, and slices to itself."""

    def __init__(self, bias: Float[Tensor, "b heads 1 view"]):
        self.bias, self.shape = bias, bias.shape[1:]

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def __getitem__(self, _: Any) -> _RowBias:
        return self

    def __radd__(self, scores: Tensor) -> Tensor:
        return scores + self.bias


@contextmanager
def mpt(model: Any, pass_: Pass) -> Iterator[None]:
    """MPT: a bias that ends at 0; only differences count, so slope * position serves."""
    core, where = model.base_model, pass_.where()
    stock = type(core).build_mpt_alibi_tensor.__get__(core)

    def build(num_heads: int, sequence_length: int, alibi_bias_max: int = 8, device: Any = None) -> _RowBias:
        line = stock(num_heads, max(pass_.bound + 1, where.shape[1]), alibi_bias_max, device)
        return _RowBias(line[:, 0][:, where].transpose(0, 1)[:, :, None])

    core.build_mpt_alibi_tensor = build
    try:
        yield
    finally:
        del core.build_mpt_alibi_tensor


@contextmanager
def gpt_neo(model: Any, pass_: Pass) -> Iterator[None]:
    """GPT-Neo: each layer holds a triangle [1, 1, most, most] of who may see whom, by slots, local layers a band.

    Our mask forbids more than the triangle ever does, so a global layer gets a plain yes; a local one its window.
    """
    m, view, device = pass_.places.shape[1], pass_.view, pass_.spots.device
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device).expand(1, 1, view, view)
    local, window = everything, model.config.window_size
    if max(view, pass_.bound + 1) > window:
        near = pass_.where()[:, None] > pass_.places[..., None] - window
        local = torch.nn.functional.pad(near, (0, 0, view - m, 0), value=True)[:, None]
    modules = [block.attn.attention for block in model.base_model.h]
    before = [module.bias for module in modules]
    for module, kind in zip(modules, model.config.attention_layers, strict=True):
        module.bias = everything if kind == "global" else local
    try:
        yield
    finally:
        for module, bias in zip(modules, before, strict=True):
            module.bias = bias
