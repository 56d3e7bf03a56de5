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
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from .types import InputError

KINDS = ("mamba", "mamba2")
PIECE = 256  # tokens read at once
CHUNK = {"mamba": 16, "mamba2": 64}  # tokens that one piece of a scan holds


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
        tokens = torch.tensor([p + [0] * (longest - len(p)) for p in part], device=device)
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
    grouped = y.unflatten(-1, (-1, mixer.norm.group_size))
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


def scan(
    x: Float[Tensor, "b m d"],
    dt: Float[Tensor, "b m d"],
    a: Float[Tensor, "d n"],
    b: Float[Tensor, "b m n"],
    c: Float[Tensor, "b m n"],
    h: Float[Tensor, "b d n"],
    fresh: Bool[Tensor, "b m"] | None = None,
    chunk: int = CHUNK["mamba"],
) -> tuple[Float[Tensor, "b m d"], Float[Tensor, "b d n"]]:
    """h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t and y_t = h_t c_t: outputs, and the last state.

    All chunks take their steps side by side from zero, then the chunks' last states are carried along: chunk + m/chunk
    steps for m tokens. Every factor is a decay of at most 1, so nothing overflows.
    """
    if x.shape[1] == 1 and fresh is None:
        h = (dt[:, 0, :, None] * a).exp() * h + (dt * x)[:, 0, :, None] * b[:, :1]
        return (h @ c[:, 0, :, None]).transpose(1, 2), h
    m = x.shape[1]
    chunk = min(chunk, m)
    x, dt, b, c = (_chunks(t, chunk) for t in (x, dt, b, c))
    decay, add = (dt[..., None] * a).exp(), (dt * x)[..., None] * b[..., None, :]
    whole, reach = (dt.sum(2)[..., None] * a).exp(), (dt.cumsum(2)[..., None] * a).exp()
    if fresh is not None:
        begins = _chunks(fresh, chunk)
        unbroken = (begins.long().cumsum(2) == 0)[..., None, None]
        decay = decay * ~begins[..., None, None]
        whole, reach = whole * unbroken[:, :, -1], reach * unbroken
    s, local = torch.zeros_like(add[:, :, 0]), []
    for i in range(chunk):
        s = decay[:, :, i] * s + add[:, :, i]
        local.append(s)
    before, h = _carried(whole, s, h)
    states = torch.stack(local, 2) + reach * before[:, :, None]
    return (states @ c[..., None]).squeeze(-1).flatten(1, 2)[:, :m], h


def scan2(
    x: Float[Tensor, "b m k p"],
    dt: Float[Tensor, "b m k"],
    a: Float[Tensor, " k"],
    b: Float[Tensor, "b m g n"],
    c: Float[Tensor, "b m g n"],
    h: Float[Tensor, "b k p n"],
    fresh: Bool[Tensor, "b m"] | None = None,
    chunk: int = CHUNK["mamba2"],
) -> tuple[Float[Tensor, "b m k p"], Float[Tensor, "b k p n"]]:
    """Mamba-2's recurrence, h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t and y_t = h_t c_t, as matrix products in chunks.

    k heads share the b and c of g groups. Within a chunk, y_i = sum_{j <= i} exp(cum_i - cum_j) (c_i . b_j) dt_j x_j.
    """
    k, g = x.shape[2], b.shape[2]
    if x.shape[1] == 1 and fresh is None:
        b, c = (t[:, 0].repeat_interleave(k // g, 1) for t in (b, c))
        h = (dt[:, 0] * a).exp()[..., None, None] * h + (dt[..., None] * x)[:, 0, ..., None] * b[:, :, None]
        return (h @ c[..., None]).squeeze(-1)[:, None], h
    m = x.shape[1]
    chunk = min(chunk, m)
    x, dt, b, c = (_chunks(t, chunk).transpose(2, 3) for t in (x, dt[..., None], b, c))  # [b, chunks, heads, chunk, .]
    cum = (dt[..., 0] * a[:, None]).cumsum(-1)
    fed = dt * x
    between = cum[..., :, None] - cum[..., None, :]
    hidden = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    toward, reach = (cum[..., -1:] - cum).exp(), cum.exp()  # of a token to the chunk's end, of its beginning to a token
    if fresh is not None:
        document = _chunks(fresh, chunk).long().cumsum(2)[:, :, None]
        hidden = hidden | (document[..., :, None] != document[..., None, :])
        toward, reach = toward * (document == document[..., -1:]), reach * (document == 0)
    weight = (c @ b.transpose(-1, -2)).repeat_interleave(k // g, 2) * between.masked_fill(hidden, -torch.inf).exp()
    b, c = b.repeat_interleave(k // g, 2), c.repeat_interleave(k // g, 2)
    added = fed.transpose(-1, -2) @ (b * toward[..., None])
    before, h = _carried(reach[..., -1, None, None], added, h)
    y = weight @ fed + (c * reach[..., None]) @ before.transpose(-1, -2)
    return y.transpose(2, 3).flatten(1, 2)[:, :m], h


def _chunks(t: Shaped[Tensor, "b m *s"], chunk: int) -> Shaped[Tensor, "b k chunk *s"]:
    """In chunks, filled up with zeros: time steps of 0 change nothing."""
    missing = -t.shape[1] % chunk
    if missing:
        t = torch.cat((t, t.new_zeros(t.shape[0], missing, *t.shape[2:])), 1)
    return t.unflatten(1, (-1, chunk))


def _carried(
    decay: Float[Tensor, "b k *#s"], added: Float[Tensor, "b k *s"], h: Tensor
) -> tuple[Float[Tensor, "b k *s"], Tensor]:
    """The state before every chunk, and the one after the last."""
    before = []
    for i in range(added.shape[1]):
        before.append(h)
        h = decay[:, i] * h + added[:, i]
    return torch.stack(before, 1), h
