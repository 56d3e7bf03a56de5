"""The recurrences of Mamba and Mamba-2 over many tokens, in chunks: exact up to rounding, and differentiable.

Both are h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t and y_t = h_t c_t. Mamba-2's heads share a decay, so a chunk is a few
matrix products. Mamba's d x n states each have their own: a chunk computes what needs no state side by side, takes its
steps (one fused product and sum each), and is small enough to stay in the processor's cache. Its backward keeps the
states between chunks only and walks each chunk anew, last token first. (`wide`: the form for other devices.)
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

CHUNK = {"mamba": 16, "mamba2": 64}  # tokens that one piece of a scan holds


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
    """Mamba (Gu and Dao 2023, algorithm 2): outputs, and the last state. `fresh` tokens begin from a state of 0."""
    if x.shape[1] == 1 and fresh is None:
        h = ((dt[:, 0, :, None] * a).exp() * h).addcmul_((dt * x)[:, 0, :, None], b[:, :1])
        return (h * c[:, :1]).sum(-1)[:, None], h  # a product of matrices this thin is four times slower
    if x.device.type != "cpu":
        return wide(x, dt, a, b, c, h, fresh)
    kept = torch.ones_like(x[..., 0]) if fresh is None else (~fresh).to(x.dtype)
    fed, dt, b, c, kept = (t.transpose(0, 1).contiguous() for t in (dt * x, dt, b, c, kept))
    with torch.autocast(x.device.type, enabled=False):
        y, h = _Scan.apply(fed, dt, a, b, c, h, kept, chunk)
    return y.transpose(0, 1), h


def wide(
    x: Float[Tensor, "b m d"],
    dt: Float[Tensor, "b m d"],
    a: Float[Tensor, "d n"],
    b: Float[Tensor, "b m n"],
    c: Float[Tensor, "b m n"],
    h: Float[Tensor, "b d n"],
    fresh: Bool[Tensor, "b m"] | None = None,
    chunk: int = CHUNK["mamba"],
) -> tuple[Float[Tensor, "b m d"], Float[Tensor, "b d n"]]:
    """The same for devices that like few large operations: all chunks take their steps side by side from zero, then
    their last states are carried along, chunk + m/chunk steps for m tokens. No factor exceeds 1: nothing overflows.
    """
    m = x.shape[1]
    x, dt, b, c = (_chunks(t, min(chunk, m)) for t in (x, dt, b, c))
    decay, add = (dt[..., None] * a).exp(), (dt * x)[..., None] * b[..., None, :]
    whole, reach = (dt.sum(2)[..., None] * a).exp(), (dt.cumsum(2)[..., None] * a).exp()
    if fresh is not None:
        begins = _chunks(fresh, min(chunk, m))
        unbroken = (begins.long().cumsum(2) == 0)[..., None, None]
        decay = decay * ~begins[..., None, None]
        whole, reach = whole * unbroken[:, :, -1], reach * unbroken
    s, local = torch.zeros_like(add[:, :, 0]), []
    for one, more in zip(decay.unbind(2), add.unbind(2), strict=True):
        s = one * s + more
        local.append(s)
    before, h = _carried(whole, s, h)
    states = torch.stack(local, 2) + reach * before[:, :, None]
    return (states @ c[..., None]).squeeze(-1).flatten(1, 2)[:, :m], h


class _Scan(torch.autograd.Function):
    """`fed` is dt x; `kept` 0 where a token begins a document and 1 elsewhere. Tokens first, rows second."""

    @staticmethod
    def forward(
        ctx: Any, fed: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, h: Tensor, kept: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        starts, out = [], []
        for i in range(0, len(fed), chunk):
            at = slice(i, i + chunk)
            starts.append(h)
            _, states = _walk(fed[at], dt[at], a, b[at], h, kept[at])
            out.append((states @ c[at, ..., None])[..., 0])
            h = states[-1].clone()
        ctx.save_for_backward(fed, dt, a, b, c, kept, *starts)
        ctx.chunk = chunk
        return torch.cat(out), h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        fed, dt, a, b, c, kept, *starts = ctx.saved_tensors
        d_fed, d_dt, d_b, d_c = (torch.empty_like(t) for t in (fed, dt, b, c))
        d_a, ones = torch.zeros_like(a), a.new_ones(a.shape[1])
        back = dh.clone()  # the gradient at the state before what was walked
        for k in reversed(range(len(starts))):
            at = slice(k * ctx.chunk, (k + 1) * ctx.chunk)
            decay, states = _walk(fed[at], dt[at], a, b[at], starts[k], kept[at])
            grad = dy[at, ..., None] * c[at, :, None]  # at every state
            for t in reversed(range(len(grad))):
                grad[t] += back
                torch.mul(decay[t], grad[t], out=back)
            d_c[at] = (dy[at, :, None] @ states)[..., 0, :]
            d_b[at] = (fed[at, :, None] @ grad)[..., 0, :]
            d_fed[at] = (grad @ b[at, ..., None])[..., 0]
            grad *= decay
            grad[0] *= starts[k]
            grad[1:] *= states[:-1]  # at every exponent dt a
            d_a += (grad * dt[at, ..., None]).sum((0, 1))
            d_dt[at] = grad.mul_(a) @ ones
        return d_fed, d_dt, d_a, d_b, d_c, back, None, None


def _walk(
    fed: Float[Tensor, "m b d"],
    dt: Float[Tensor, "m b d"],
    a: Float[Tensor, "d n"],
    b: Float[Tensor, "m b n"],
    h: Float[Tensor, "b d n"],
    kept: Float[Tensor, "m b"],
) -> tuple[Float[Tensor, "m b d n"], Float[Tensor, "m b d n"]]:
    """The decays and the states of one chunk, token by token."""
    decay = (dt[..., None] * a).exp_().mul_(kept[..., None, None])
    states = fed[..., None] * b[:, :, None]
    for t in range(len(states)):
        h = states[t].addcmul_(decay[t], h)
    return decay, states


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
        h = ((dt[:, 0] * a).exp()[..., None, None] * h).addcmul_((dt[..., None] * x)[:, 0, ..., None], b[:, :, None])
        return (h * c[:, :, None]).sum(-1)[:, None], h
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
