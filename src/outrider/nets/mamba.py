"""Mamba and Mamba-2 as functions of their state: one token or many, from any state, ragged.

The weights are those of the stock models of transformers (`MambaForCausalLM`, `Mamba2ForCausalLM`). Their own forward
is not used: several tokens from a cached state are silently wrong there for Mamba-1, and it walks token by token. Here
many tokens take a chunked parallel scan, exact up to rounding and differentiable; a single token takes one step.

A row's state is constant in the length of its text. Rows are ragged by `count`: a token beyond it has a time step of 0,
which neither lets the state decay nor adds to it. Scans work in float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ..backends.torch.padding import padded
from ..params import InputError
from .scan import scan, scan2

KINDS = ("mamba", "mamba2")
PIECE = 256  # tokens read at once


@dataclass(frozen=True)
class State:
    """What a model of l layers remembers of b rows."""

    conv: Float[Tensor, "l b c w"]  # the last w inputs of every layer's convolution (its kernel - 1)
    ssm: Float[Tensor, "l b *s"]  # Mamba: [d, n]; Mamba-2: [heads, p, n]

    def select(self, index: Int[Tensor, " k"]) -> State:
        """Copies of these rows, in this order."""
        return State(self.conv.index_select(1, index), self.ssm.index_select(1, index))

    @staticmethod
    def join(parts: Sequence[State]) -> State:
        return State(torch.cat([p.conv for p in parts], 1), torch.cat([p.ssm for p in parts], 1))

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.conv, self.ssm))


def check(net: Any) -> None:
    """Refuse a model that these functions do not know."""
    kind = net.config.model_type
    if kind not in KINDS:
        raise InputError(f"a state-space drafter is {' or '.join(KINDS)}, not {kind}")
    if net.config.hidden_act not in ("silu", "swish"):
        raise InputError(f"this {kind} has the activation {net.config.hidden_act}; only silu is known")


def empty(net: Any, rows: int) -> State:
    """The state before the first token."""
    layers, first = len(net.backbone.layers), net.backbone.layers[0].mixer
    weight = first.conv1d.weight
    work = torch.promote_types(weight.dtype, torch.float32)
    conv = torch.zeros(layers, rows, weight.shape[0], weight.shape[2] - 1, dtype=weight.dtype, device=weight.device)
    if net.config.model_type == "mamba":
        size: tuple[int, ...] = (first.intermediate_size, first.ssm_state_size)
    else:
        size = (first.num_heads, first.head_dim, first.ssm_state_size)
    return State(conv, torch.zeros(layers, rows, *size, dtype=work, device=weight.device))


def run(
    net: Any,
    tokens: Int[Tensor, "b m"],
    state: State,
    count: Int[Tensor, " b"] | None = None,
    fresh: Bool[Tensor, "b m"] | None = None,
) -> tuple[Float[Tensor, "b m h"], State]:
    """Features after the last norm, and the state after each row's first `count` tokens (all of them by default).

    `fresh` (without `count`): the tokens that begin a document of their own, which must know nothing of what stands
    before in its row.
    """
    mix = _mamba if net.config.model_type == "mamba" else _mamba2
    x = net.backbone.embeddings(tokens)
    dtype, work = x.dtype, torch.promote_types(x.dtype, torch.float32)
    live = None
    if count is not None:
        live = (torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]).to(work)
    convs, states = [], []
    for i, block in enumerate(net.backbone.layers):
        read = _norm(x, block.norm).to(dtype)
        y, conv, ssm = mix(block.mixer, read, state.conv[i], state.ssm[i], live, count, fresh)
        x = (x.to(work) if block.residual_in_fp32 else x) + y
        convs.append(conv)
        states.append(ssm)
    return _norm(x, net.backbone.norm_f).to(dtype), State(torch.stack(convs), torch.stack(states))


@torch.no_grad()
def read(net: Any, texts: Sequence[Sequence[int]], state: State | None = None, piece: int = PIECE) -> State:
    """The state after whole texts, read `piece` tokens at a time: the memory does not grow with their length."""
    device = net.backbone.embeddings.weight.device
    state = state or empty(net, len(texts))
    for first in range(0, max(map(len, texts)), piece):
        part = [list(text[first : first + piece]) for text in texts]
        longest = max(map(len, part))
        tokens = padded(part, device)
        even = all(len(p) == longest for p in part)
        count = None if even else torch.tensor([len(p) for p in part], device=device)
        _, state = run(net, tokens, state, count)
    return state


def _norm(x: Float[Tensor, "*b h"], norm: Any) -> Float[Tensor, "*b h"]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * wide.to(norm.weight.dtype)


Mixed = tuple[Tensor, Tensor, Tensor]  # what the layer adds, and its new states


def _mamba(
    mixer: Any, x: Tensor, conv: Tensor, ssm: Tensor, live: Tensor | None, count: Tensor | None, fresh: Tensor | None
) -> Mixed:
    """Mamba (Gu and Dao 2023, algorithm 2): a state of n numbers for each of d channels, every one with its decay."""
    inner, gate = mixer.in_proj(x).chunk(2, -1)
    inner, conv = _convolved(mixer.conv1d, inner, conv, count, fresh)
    n = mixer.ssm_state_size
    low, b, c = (t.to(ssm.dtype) for t in mixer.x_proj(inner).split([mixer.time_step_rank, n, n], -1))
    dt = functional.softplus(functional.linear(low, *(t.to(ssm.dtype) for t in mixer.dt_proj.parameters())))
    if live is not None:
        dt = dt * live[..., None]
    wide = inner.to(ssm.dtype)
    y, ssm = scan(wide, dt, -mixer.A_log.to(ssm.dtype).exp(), b, c, ssm, fresh)
    y = (y + wide * mixer.D.to(ssm.dtype)) * functional.silu(gate.to(ssm.dtype))
    return mixer.out_proj(y.to(x.dtype)), conv, ssm


def _mamba2(
    mixer: Any, x: Tensor, conv: Tensor, ssm: Tensor, live: Tensor | None, count: Tensor | None, fresh: Tensor | None
) -> Mixed:
    """Mamba-2 (Dao and Gu 2024): heads of p channels that share a decay, with a state of p x n."""
    inner, groups, n = mixer.intermediate_size, mixer.n_groups, mixer.ssm_state_size
    gate, xbc, dt = mixer.in_proj(x).split([inner, mixer.conv_dim, mixer.num_heads], -1)
    xbc, conv = _convolved(mixer.conv1d, xbc, conv, count, fresh)
    wide, b, c = xbc.to(ssm.dtype).split([inner, groups * n, groups * n], -1)
    wide = wide.unflatten(-1, (mixer.num_heads, mixer.head_dim))
    dt = functional.softplus((dt + mixer.dt_bias).to(ssm.dtype)).clamp(*mixer.time_step_limit)
    if live is not None:
        dt = dt * live[..., None]
    b, c = (t.unflatten(-1, (groups, n)) for t in (b, c))
    y, ssm = scan2(wide, dt, -mixer.A_log.to(ssm.dtype).exp(), b, c, ssm, fresh)
    y = (y + wide * mixer.D.to(ssm.dtype)[:, None]).flatten(-2) * functional.silu(gate.to(ssm.dtype))
    size = getattr(mixer.norm, "group_size", y.shape[-1])  # older versions of transformers, 5.19 too, have one group
    grouped = y.unflatten(-1, (-1, size))
    y = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + mixer.norm.variance_epsilon)).flatten(-2)
    return mixer.out_proj(mixer.norm.weight * y.to(x.dtype)), conv, ssm


def _convolved(
    conv: Any,
    x: Float[Tensor, "b m c"],
    past: Float[Tensor, "b c w"],
    count: Int[Tensor, " b"] | None,
    fresh: Bool[Tensor, "b m"] | None,
) -> tuple[Float[Tensor, "b m c"], Float[Tensor, "b c w"]]:
    """A causal convolution by channel, and the inputs that the next one will need."""
    line = torch.cat((past, x.transpose(1, 2)), 2)
    w = past.shape[2]
    if fresh is not None:
        document = functional.pad(fresh.long().cumsum(1), (w, 0))
        y = _apart(conv, line, document)
        line = line * (document == document[:, -1:])[:, None]
    elif x.shape[1] == 1:
        y = (line * conv.weight[:, 0]).sum(2)[:, None]
        y = y if conv.bias is None else y + conv.bias
    else:
        y = functional.conv1d(line, conv.weight, conv.bias, groups=line.shape[1]).transpose(1, 2)
    if count is None:
        return functional.silu(y), line[..., line.shape[2] - w :]
    at = count[:, None] + torch.arange(w, device=x.device)
    return functional.silu(y), line.gather(2, at[:, None].expand(-1, line.shape[1], -1))


def _apart(conv: Any, line: Float[Tensor, "b c l"], document: Int[Tensor, "b l"]) -> Float[Tensor, "b m c"]:
    """The convolution tap by tap, each document by itself."""
    w = conv.weight.shape[2] - 1
    m = line.shape[2] - w
    y = line.new_zeros(()) if conv.bias is None else conv.bias[:, None]
    for tap in range(w + 1):
        same = document[:, tap : tap + m] == document[:, w:]
        y = y + line[:, :, tap : tap + m] * conv.weight[:, :, tap] * same[:, None]
    return y.transpose(1, 2)
