"""Mamba checkpoints in their authors' layout (`mamba_ssm`), converted to that of transformers.

`config.json` has `d_model`, `n_layer`, `vocab_size` (padded up to a multiple of `pad_vocab_size_multiple` in the
weights) and `ssm_cfg`, whose `layer` names Mamba-2; weights are keyed `backbone.*`, mostly like those of transformers.
Tokenizers are not included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..params import InputError
from .files import folder_of, json_of, weights_of

KNOWN = {"layer", "d_state", "d_conv", "expand", "headdim", "ngroups", "dt_rank", "dt_min", "dt_max", "dt_init_floor",
         "bias", "conv_bias", "chunk_size", "dt_limit", "A_init_range"}  # fmt: skip


def original(path: str | Path) -> bool:
    """Whether a folder is in the authors' layout."""
    file = Path(path) / "config.json"
    if not file.is_file():
        return False
    given = json_of(file)
    return "model_type" not in given and {"d_model", "n_layer"} <= given.keys()


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of transformers' MambaForCausalLM or Mamba2ForCausalLM."""
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


def _integer(given: Mapping[str, Any], name: str, default: int, path: str | Path) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} in the config of {path} must be a positive integer, not {value!r}")
    return value


def _config(given: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    ssm = given.get("ssm_cfg") or {}
    if not isinstance(ssm, Mapping):
        raise InputError(f"ssm_cfg in the config of {path} must hold names and values, not {ssm!r}")
    unknown = sorted(ssm.keys() - KNOWN)
    if unknown or given.get("attn_layer_idx") or given.get("d_intermediate") or not given.get("rms_norm", True):
        what = f"ssm_cfg.{unknown[0]}" if unknown else "attention layers, MLPs or a LayerNorm"
        raise InputError(f"{path} has {what}, which no Mamba drafter here has; name a plain Mamba or Mamba-2")
    layer = ssm.get("layer", "Mamba1")
    if layer not in ("Mamba1", "Mamba2"):
        raise InputError(f"{path} has layers of the kind {layer!r}; a state-space drafter is Mamba1 or Mamba2")
    width, expand = _integer(given, "d_model", 0, path), _integer(ssm, "expand", 2, path)
    shared = {
        "hidden_size": width,
        "num_hidden_layers": _integer(given, "n_layer", 0, path),
        "expand": expand,
        "conv_kernel": _integer(ssm, "d_conv", 4, path),
        "use_bias": bool(ssm.get("bias", False)),
        "use_conv_bias": bool(ssm.get("conv_bias", True)),
        "residual_in_fp32": bool(given.get("residual_in_fp32", True)),
        "tie_word_embeddings": bool(given.get("tie_embeddings", True)),
        "layer_norm_epsilon": 1e-5,
    }
    if layer == "Mamba1":
        auto = ssm.get("dt_rank", "auto") == "auto"
        rank = math.ceil(width / 16) if auto else _integer(ssm, "dt_rank", 0, path)
        state = _integer(ssm, "d_state", 16, path)
        return {"model_type": "mamba", **shared, "state_size": state, "time_step_rank": rank}
    head, groups, limit = _integer(ssm, "headdim", 64, path), _integer(ssm, "ngroups", 1, path), ssm.get("dt_limit")
    if expand * width % head or expand * width // head % groups:
        raise InputError(f"heads of {head} in {groups} groups do not divide the {expand * width} channels of {path}")
    if limit is not None and not (isinstance(limit, list) and len(limit) == 2):
        raise InputError(f"dt_limit in the config of {path} must be two numbers, not {limit!r}")
    return {
        "model_type": "mamba2", **shared, "state_size": _integer(ssm, "d_state", 128, path), "head_dim": head,
        "num_heads": expand * width // head, "n_groups": groups, "time_step_limit": tuple(limit or (0.0, math.inf)),
    }  # fmt: skip
