"""The networks once more, on the raw tensors of the foreign files: loops and pure torch, nothing of outrider."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Raw = Mapping[str, Tensor]


def rotated(x: Tensor, position: int, theta: float, factor: float = 1.0) -> Tensor:
    """Vectors of heads [..., d] at a position: RoPE of pairs (i, i + d/2)."""
    half = x.shape[-1] // 2
    angle = position / factor * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def layer(
    raw: Raw, at: str, inputs: list[Tensor], residuals: list[Tensor], heads: int, kv: int, d: int, theta: float,
    eps: float, factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """One decoder layer over a text, position by position. `inputs`: what attention reads."""

    def project(name: str, x: Tensor, n: int, turn: int | None) -> list[Tensor]:
        y = raw[f"{at}self_attn.{name}_proj.weight"] @ x
        if f"{at}self_attn.{name}_proj.bias" in raw:
            y = y + raw[f"{at}self_attn.{name}_proj.bias"]
        parts = [y[i * d : (i + 1) * d] for i in range(n)]
        return parts if turn is None else [rotated(p, turn, theta, factor) for p in parts]

    keys, values, made = [], [], []
    for i, x in enumerate(inputs):
        queries = project("q", x, heads, i)
        keys.append(project("k", x, kv, i))
        values.append(project("v", x, kv, None))
        outs = []
        for n, q in enumerate(queries):
            g = n // (heads // kv)
            scores = torch.stack([q @ k[g] / math.sqrt(d) for k in keys])
            weights = torch.softmax(scores, 0)
            outs.append(sum(w * v[g] for w, v in zip(weights, values, strict=True)))
        h = residuals[i] + raw[f"{at}self_attn.o_proj.weight"] @ torch.cat(outs)
        x = rms(h, raw[f"{at}post_attention_layernorm.weight"], eps)
        x = silu(raw[f"{at}mlp.gate_proj.weight"] @ x) * (raw[f"{at}mlp.up_proj.weight"] @ x)
        made.append(h + raw[f"{at}mlp.down_proj.weight"] @ x)
    return made


def eagle(raw: Raw, sizes: Mapping[str, Any], features: Tensor, embeds: Tensor) -> Tensor:
    """Features [m, h] and embeddings [m, h] of the tokens one further; foretold features [m, h]."""
    xs = []
    for f, e in zip(features, embeds, strict=True):
        x = raw["fc.weight"] @ torch.cat([e, f])
        xs.append(x + raw["fc.bias"] if "fc.bias" in raw else x)
    return torch.stack(layer(raw, "layers.0.", xs, xs, **sizes))


def eagle3(
    raw: Raw, sizes: Mapping[str, Any], features: Tensor, embeds: Tensor, at: str = "midlayer.", **flags: bool
) -> tuple[Tensor, Tensor]:
    """Features [m, 3 H], embeddings [m, h]; what the next step is fed, and logits over the draft vocabulary."""
    eps, inputs, residuals = sizes["eps"], [], []
    for f, e in zip(features, embeds, strict=True):
        if flags.get("norm_before_fc"):
            f = rms(f, raw["input_norm.weight"], eps)
        if flags.get("fc_norm"):
            f = torch.cat([rms(part, raw[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(f.chunk(3))])
        g = raw["fc.weight"] @ f
        normed = rms(g, raw[f"{at}hidden_norm.weight"], eps)
        inputs.append(torch.cat([rms(e, raw[f"{at}input_layernorm.weight"], eps), normed]))
        residuals.append(normed if flags.get("norm_before_residual") else g)
    hidden = layer(raw, at, inputs, residuals, **sizes)
    normed = [rms(x, raw["norm.weight"], eps) for x in hidden]
    logits = torch.stack([raw["lm_head.weight"] @ x for x in normed])
    return torch.stack(normed if flags.get("norm_output") else hidden), logits


def medusa(raw: Raw, prefix: str, heads: int, layers: int, feature: Tensor, end: Tensor | None) -> list[Tensor]:
    """Logits of every head of {i}.{l}.linear.*; `end`: the shared LM head [V, h]."""
    made = []
    for i in range(heads):
        x = feature
        for j in range(layers):
            w, b = (raw[f"{prefix}{i}.{j}.linear.{n}"] for n in ("weight", "bias"))
            x = x + silu(w @ x + b)
        made.append((end if end is not None else raw[f"{prefix}{i}.{layers}.weight"]) @ x)
    return made


def medusa_vllm(raw: Raw, heads: int, layers: int, feature: Tensor) -> list[Tensor]:
    made = []
    for i in range(heads):
        x = feature
        for j in range(layers):
            z = raw[f"blocks.{i}.layers.{j}.weight"] @ x
            z = z + raw[f"blocks.{i}.layers.{j}.bias"] if f"blocks.{i}.layers.{j}.bias" in raw else z
            x = x + silu(z)
        made.append(raw[f"lm_heads.{i}.weight"] @ x)
    return made


def hydra(raw: Raw, head: int, layers: int, feature: Tensor, embeds: Tensor) -> Tensor:
    """Logits of head `head` below the embeddings [head + 1, h] of the drafted path, the root first."""
    x, at = torch.cat([feature, *embeds]), f"hydra_mlp.{head}"
    kept = raw[f"{at}.1.res_connection.weight"] @ x + raw[f"{at}.1.res_connection.bias"]
    x = kept + silu(raw[f"{at}.1.linear.weight"] @ x + raw[f"{at}.1.linear.bias"])
    for j in range(1, layers):
        x = x + silu(raw[f"{at}.{2 * j + 1}.linear.weight"] @ x + raw[f"{at}.{2 * j + 1}.linear.bias"])
    return raw[f"hydra_lm_head.{head}.1.weight"] @ x + raw[f"hydra_lm_head.{head}.1.bias"]


def hydra_prefix(raw: Raw, sizes: Mapping[str, Any], features: Tensor) -> Tensor:
    at = "prefix_embeding_layer.layers.0."
    inputs = [rms(f, raw[f"{at}input_layernorm.weight"], sizes["eps"]) for f in features]
    made = layer(raw, at, inputs, list(features), **sizes)
    return torch.stack([rms(x, raw["prefix_embeding_layer.norm.weight"], sizes["eps"]) for x in made])
