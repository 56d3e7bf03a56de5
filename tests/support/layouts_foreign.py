"""Foreign folders with random weights, built from the published key tables; and a target's folder beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

H, HEADS, KV, D, M, V, VD, LAYERS = 32, 4, 2, 8, 40, 61, 17, 12
SIZES = {"heads": HEADS, "kv": KV, "d": D, "theta": 10000.0, "eps": 1e-6}
LLAMA = {
    "model_type": "llama", "hidden_size": H, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "intermediate_size": M, "vocab_size": V, "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 128,
}  # fmt: skip
Tensors = dict[str, Tensor]


def some(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(s * 31**i for i, s in enumerate(shape)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3


def fill(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    return {name: some(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def layer(at: str, inputs: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    made: dict[str, tuple[int, ...]] = {
        f"{at}self_attn.q_proj.weight": (HEADS * D, inputs),
        f"{at}self_attn.k_proj.weight": (KV * D, inputs),
        f"{at}self_attn.v_proj.weight": (KV * D, inputs),
        f"{at}self_attn.o_proj.weight": (H, HEADS * D),
        f"{at}mlp.gate_proj.weight": (M, H),
        f"{at}mlp.up_proj.weight": (M, H),
        f"{at}mlp.down_proj.weight": (H, M),
        f"{at}post_attention_layernorm.weight": (H,),
    }
    if bias:
        made |= {f"{at}self_attn.{n}_proj.bias": (w,) for n, w in (("q", HEADS * D), ("k", KV * D), ("v", KV * D))}
    return made


def embedding() -> Tensor:
    return some(V, H, seed=99)


def head() -> Tensor:
    return some(V, H, seed=98)


def eagle(bias: bool = True, qkv: bool = False) -> Tensors:
    made = fill({"fc.weight": (H, 2 * H), **({"fc.bias": (H,)} if bias else {}), **layer("layers.0.", H, qkv)})
    return {**made, "embed_tokens.weight": embedding()}


DRAFTED = [0, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53]  # the target's ids, VD of them


def mapping() -> Tensors:
    ids = torch.tensor(DRAFTED)
    marked = torch.zeros(V, dtype=torch.bool)
    marked[ids] = True
    return {"d2t": ids - torch.arange(VD), "t2d": marked}


def eagle3(at: str = "midlayer.", wide: int = H, few: int = VD, **flags: bool) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * wide), **layer(at, 2 * H)}
    shapes |= {f"{at}hidden_norm.weight": (H,), f"{at}input_layernorm.weight": (H,)}
    shapes |= {"norm.weight": (H,), "lm_head.weight": (few, H)}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * wide,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(3)}
    return {**fill(shapes), **(mapping() if few == VD else {})}


def medusa(prefix: str = "", heads: int = 3, layers: int = 2, share: bool = False) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(layers):
            shapes |= {f"{prefix}{i}.{j}.linear.weight": (H, H), f"{prefix}{i}.{j}.linear.bias": (H,)}
        if not share:
            shapes[f"{prefix}{i}.{layers}.weight"] = (V, H)
    return fill(shapes)


def hydra(heads: int = 3, layers: int = 3, prefix: bool = False) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        at, wide = f"hydra_mlp.{i}.", H * (i + 2)
        shapes |= {f"{at}1.linear.weight": (H, wide), f"{at}1.linear.bias": (H,)}
        shapes |= {f"{at}1.res_connection.weight": (H, wide), f"{at}1.res_connection.bias": (H,)}
        for j in range(1, layers):
            shapes |= {f"{at}{2 * j + 1}.linear.weight": (H, H), f"{at}{2 * j + 1}.linear.bias": (H,)}
        shapes |= {f"hydra_lm_head.{i}.1.weight": (V, H), f"hydra_lm_head.{i}.1.bias": (V,)}
    if prefix:
        at = "prefix_embeding_layer."
        shapes |= layer(f"{at}layers.0.", H)
        shapes |= {f"{at}layers.0.input_layernorm.weight": (H,), f"{at}norm.weight": (H,)}
        shapes[f"{at}embed_tokens.weight"] = (V, H)
    return {**fill(shapes), "input_embed_fn.weight": embedding()}


def folder(at: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    at.mkdir(parents=True, exist_ok=True)
    (at / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({k: t.clone().contiguous() for k, t in tensors.items()}, at / file)
    else:
        torch.save(tensors, at / file)
    return at


def target(at: Path, tied: bool = False, **changes: Any) -> Path:
    """The folder of a Llama: those of its tensors that checkpoints need, and one that none needs."""
    config = {
        **LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "tie_word_embeddings": tied,
        "rope_theta": 10000.0, "head_dim": D, **changes,
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": embedding(), "model.norm.weight": some(H)}
    if not tied:
        tensors["lm_head.weight"] = head()
    return folder(at, config, tensors)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def speculators(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": VD, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
        "transformer_layer_config": {**LLAMA, "head_dim": D, "rope_parameters": {"rope_theta": 500.0}},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/model"}}, **changes,
    }  # fmt: skip
