"""One small decoder layer, shared by the trained drafters.

    q, k, v = W x                      x: [b, m, inputs]; grouped heads, rotary positions
    h       = residual + W_o attention(q, K, V)
    out     = h + W_down(silu(W_gate n) * W_up n),  n = RMSNorm(h)

Training uses the plain parameters. `Layer.fuse` makes one matrix of q, k, v and one of gate, up (the parameters become
views of them), since a draft step is many tiny kernels whose number is what costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from .configs import LayerShape as LayerShape

# Given a layer's keys and values [b, g, m, d], what its queries attend to: [b, g, s, d] twice. Called layer by layer.
Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys, values [b, heads, m, d] -> [b, m, heads * d]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Float[Tensor, "*s h"]) -> Float[Tensor, "*s h"]:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Rope:
    """Rotary positions as tables that grow: [n, 2, 1, d], cosines and signed sines. No module state: casting a network
    must not round its frequencies."""

    def __init__(self, shape: LayerShape):
        self.shape = shape
        self.tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.moved: dict[torch.device, Tensor] = {}  # frequencies; moving them anew would wait for the device

    @cached_property
    def frequencies(self) -> tuple[Float[Tensor, " half"], float]:
        """In float32 and with their scaling, as transformers makes them; only when positions are first rotated."""
        return _frequencies(self.shape)

    def table(self, n: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "n 2 1 d"]:
        """A table of at least n positions."""
        result = self.tables.get((dtype, device))
        if result is None or result.shape[0] < n:
            with torch.inference_mode(False), torch.no_grad():
                at = torch.arange(max(512, 1 << (n - 1).bit_length()), device=device).float()
                result = self.tables[dtype, device] = self._rotary(at).to(dtype)
        return result

    def at(self, positions: Int[Tensor, "b m"], dtype: torch.dtype) -> Float[Tensor, "b m 2 1 d"]:
        """The same for positions of which the host knows no bound."""
        return self._rotary(positions.float()).to(dtype)

    def _rotary(self, positions: Float[Tensor, "*s"]) -> Float[Tensor, "*s 2 1 d"]:
        frequencies, scaling = self.frequencies
        if positions.device not in self.moved:
            self.moved[positions.device] = frequencies.to(positions.device)
        angles = positions[..., None] * self.moved[positions.device]
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], -2)[..., None, :]


def apply_rotary(x: Float[Tensor, "b m heads d"], rotary: Float[Tensor, "#b #m 2 1 d"]) -> Float[Tensor, "b m heads d"]:
    """Rotated halves: [a, b] -> [a cos - b sin, b cos + a sin]."""
    half = x.shape[-1] // 2
    swapped = x.unflatten(-1, (2, half)).flip(-2).flatten(-2)
    return torch.addcmul(x * rotary[:, :, 0], swapped, rotary[:, :, 1])


def _frequencies(shape: LayerShape) -> tuple[Float[Tensor, " half"], float]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        rope_parameters={"rope_type": "default", **shape.rope},
    )
    with torch.inference_mode(False), torch.device("cpu"):
        stock = LlamaRotaryEmbedding(config)
    return stock.inv_freq.float().clone(), float(stock.attention_scaling)


class Attention(nn.Module):
    """The four projections of attention."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.inputs, wide, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.inputs, narrow, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.inputs, narrow, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)


class MLP(nn.Module):
    """The gated feed-forward part: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)


@dataclass(frozen=True)
class Fused:
    """A layer's products for inference, a few attribute look-ups away."""

    qkv: nn.Linear
    o: nn.Linear
    norm: Tensor
    gate_up: nn.Linear
    down: nn.Linear


class Layer(nn.Module):
    """The layer of this page. Its caller normalises `x` (or does not: EAGLE's layer has no norm before attention)."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.shape, self.rope = shape, Rope(shape)
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.groups = shape.heads // shape.kv_heads
        self.fused: Fused | None = None

    def fuse(self) -> None:
        """For inference: one matrix for q, k, v and one for gate, up. Call it after casting and moving."""
        attention, mlp = self.self_attn, self.mlp
        three, two = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        with torch.inference_mode(False), torch.no_grad():
            bias = torch.cat([p.bias for p in three]) if self.shape.qkv_bias else None
            self.fused = Fused(
                frozen(_shared(three), bias), attention.o_proj, self.post_attention_layernorm.weight,
                frozen(_shared(two)), mlp.down_proj,
            )  # fmt: skip

    def _project(self, x: Float[Tensor, "b m inputs"]) -> Float[Tensor, "b m heads d"]:
        """Queries, keys and values, one after the other."""
        if self.fused is not None:
            made = self.fused.qkv(x)
        else:
            a = self.self_attn
            made = torch.cat([a.q_proj(x), a.k_proj(x), a.v_proj(x)], -1)
        return made.view(*x.shape[:2], -1, self.shape.head_dim)

    def _finish(self, residual: Float[Tensor, "b m hidden"], seen: Tensor) -> Float[Tensor, "b m hidden"]:
        """Behind attention: the output projection and the feed-forward block."""
        fused, shape = self.fused, self.shape
        if fused is None:
            h = residual + self.self_attn.o_proj(seen)
            x = self.post_attention_layernorm(h)
            return h + self.mlp.down_proj(functional.silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x))
        h = residual + fused.o(seen)
        x = functional.rms_norm(h, (shape.hidden,), fused.norm, shape.eps)
        gate, up = fused.gate_up(x).chunk(2, -1)
        return h + fused.down(functional.silu(gate).mul_(up))

    def forward(
        self,
        x: Float[Tensor, "b m inputs"],
        residual: Float[Tensor, "b m hidden"],
        positions: Int[Tensor, "#b m"] | None,
        mask: Float[Tensor, "#b 1 gm s"] | None = None,
        store: Store | None = None,
        rotary: Float[Tensor, "#b #m 2 1 d"] | None = None,
        attention: Attend | None = None,
    ) -> Float[Tensor, "b m hidden"]:
        """`mask` is added to the scores; None: plainly causal, or one query that sees everything. `store` decides where
        keys and values go and what is attended to (None: themselves). `rotary`: rotations that were looked up already.
        `attention` replaces attention as a whole, where a training pass attends to what no mask can say cheaply."""
        shape = self.shape
        made = self._project(x)
        if rotary is None:
            assert positions is not None, "give positions, or the rotations of them"
            rotary = self.rope.at(positions, x.dtype)
        qk = apply_rotary(made[:, :, : shape.heads + shape.kv_heads], rotary)
        q, k = qk[:, :, : shape.heads].transpose(1, 2), qk[:, :, shape.heads :].transpose(1, 2)
        v = made[:, :, shape.heads + shape.kv_heads :].transpose(1, 2)
        if attention is not None:
            return self._finish(residual, attention(q, k, v))
        keys, values = (k, v) if store is None else store(k, v)
        return self._finish(residual, attend(q, keys, values, mask, self.fused is not None))


def frozen(weight: Float[Tensor, "o i"], bias: Tensor | None = None) -> nn.Linear:
    """x W^T + b with weights that no longer change."""
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made


def _shared(projections: Sequence[nn.Linear]) -> Tensor:
    """One matrix of several, which become views of it."""
    joined = torch.cat([p.weight for p in projections])
    for p, part in zip(projections, joined.split([p.out_features for p in projections]), strict=True):
        p.weight = nn.Parameter(part, requires_grad=False)
    return joined


def attend(
    q: Float[Tensor, "b h m d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s d"],
    mask: Float[Tensor, "#b 1 gm s"] | None,
    fold: bool = False,
) -> Float[Tensor, "b m hd"]:
    """Attention in which h / g heads share a key head. `fold` puts the heads of a group side by side, so that keys are
    not repeated (inference: the mask is repeated instead, unless it comes repeated)."""
    b, h, m, _ = q.shape
    groups, sdpa = int(h) // int(k.shape[1]), functional.scaled_dot_product_attention
    if mask is None and m > 1:
        assert k.shape[2] == m, "without a mask, queries and keys are the same tokens"
        out = sdpa(q, k, v, is_causal=True, enable_gqa=groups > 1)
    elif fold and groups > 1:
        wide = mask
        if mask is not None and mask.shape[2] == m > 1:
            wide = mask.repeat(1, 1, groups, 1)
        out = sdpa(q.reshape(b, h // groups, groups * m, -1), k, v, attn_mask=wide).reshape(b, h, m, -1)
    else:
        out = sdpa(q, k, v, attn_mask=mask, enable_gqa=groups > 1)
    return out.transpose(1, 2).flatten(2)
