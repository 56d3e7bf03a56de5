"""Mamba checkpoints in the layout of their authors (`mamba_ssm`), told in the words of transformers.

`config.json` has `d_model`, `n_layer`, `vocab_size` (padded up to a multiple of `pad_vocab_size_multiple` in the
weights) and `ssm_cfg`, which names Mamba-2 by its `layer`; weights are keyed `backbone.*`, mostly as transformers keys
them. Tokenizers are not part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..types import InputError
from .files import folder_of, json_of, weights_of

KNOWN = {"layer", "d_state", "d_conv", "expand", "headdim", "ngroups", "dt_rank", "dt_min", "dt_max", "dt_init_floor",
         "bias", "conv_bias", "chunk_size", "dt_limit", "A_init_range"}  # fmt: skip


def original(path: str | Path) -> bool:
    """Is this a folder in the authors' layout?"""
    file = Path(path) / "config.json"
    if not file.is_file():
        return False
    given = json_of(file)
    return "model_type" not in given and {"d_model", "n_layer"} <= given.keys()


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors as transformers' MambaForCausalLM or Mamba2ForCausalLM has them."""
    folder = folder_of(path)
    config = _config(json_of(folder / "config.json"), path)
    weights = weights_of(folder, "model.safetensors", "pytorch_model.bin")
    tensors = {_key(name): weights[name] for name in weights}
    head, embeddings = "lm_head.weight", "backbone.embeddings.weight"
    if embeddings not in tensors:
        raise InputError(f"the weights of {path} lack backbone.embedding.weight; fetch them again")
    config["vocab_size"] = len(tensors[embeddings])
    if config["tie_word_embeddings"] and head not in tensors:
        tensors[head] = tensors[embeddings]
    return config, tensors


def _key(name: str) -> str:
    return name.replace("backbone.embedding.", "backbone.embeddings.")


def _config(given: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    ssm = dict(given.get("ssm_cfg") or {})
    unknown = sorted(ssm.keys() - KNOWN)
    if unknown or given.get("attn_layer_idx") or given.get("d_intermediate") or not given.get("rms_norm", True):
        what = f"ssm_cfg.{unknown[0]}" if unknown else "attention layers, MLPs or a LayerNorm"
        raise InputError(f"{path} has {what}, which no Mamba drafter here has; name a plain Mamba or Mamba-2")
    layer = ssm.get("layer", "Mamba1")
    if layer not in ("Mamba1", "Mamba2"):
        raise InputError(f"{path} has layers of the kind {layer!r}; a state-space drafter is Mamba1 or Mamba2")
    width, expand = int(given["d_model"]), int(ssm.get("expand", 2))
    shared = {
        "hidden_size": width,
        "num_hidden_layers": int(given["n_layer"]),
        "expand": expand,
        "conv_kernel": int(ssm.get("d_conv", 4)),
        "use_bias": bool(ssm.get("bias", False)),
        "use_conv_bias": bool(ssm.get("conv_bias", True)),
        "residual_in_fp32": bool(given.get("residual_in_fp32", True)),
        "tie_word_embeddings": bool(given.get("tie_embeddings", True)),
        "layer_norm_epsilon": 1e-5,
    }
    if layer == "Mamba1":
        rank = ssm.get("dt_rank", "auto")
        rank = math.ceil(width / 16) if rank == "auto" else int(rank)
        return {"model_type": "mamba", **shared, "state_size": int(ssm.get("d_state", 16)), "time_step_rank": rank}
    head = int(ssm.get("headdim", 64))
    limit = ssm.get("dt_limit", (0.0, math.inf))
    return {
        "model_type": "mamba2", **shared, "state_size": int(ssm.get("d_state", 128)), "head_dim": head,
        "num_heads": expand * width // head, "n_groups": int(ssm.get("ngroups", 1)),
        "time_step_limit": tuple(float(x) for x in limit),
    }  # fmt: skip
