"""The facts about a target that checkpoints depend on: sizes, embedding, LM head. No model is built."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import hub
from ..backends.torch.tensors import dtype_of, embed, head
from ..core.protocols import Target
from ..params import InputError, first_line
from .files import Weights, json_of

EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
SIZES = {  # the names of a size in the configs of families
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "inner": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}


def size_of(config: Mapping[str, Any], what: str) -> int:
    """A size (a key of SIZES) that a config states; 0 if it does not."""
    return next((config[name] for name in SIZES[what] if type(config.get(name)) is int), 0)


@dataclass(frozen=True)
class Facts:
    """`embedding` and `head` include the model's scales; `head` has no soft cap."""

    name: str
    vocab: int
    hidden: int
    layers: int
    context: int
    config: Mapping[str, Any]
    embedding: Callable[[], Tensor]  # [V, h]
    head: Callable[[], Tensor]  # [V, h]
    scaled: bool = False  # whether the embedding differs from the one in the model's file

    @classmethod
    def of(cls, target: Target) -> Facts:
        """The facts of a loaded target."""

        @torch.no_grad()
        def embedding() -> Tensor:
            return embed(target, torch.arange(target.vocab, device=target.device)).cpu()

        def head() -> Tensor:
            return linear_head(target)[0].cpu()

        given = target.config_dict
        name = str(given.get("_name_or_path") or "the target")
        scaled = _scales(given)[0] != 1.0
        return cls(name, target.vocab, target.hidden, target.layers, target.context, given, embedding, head, scaled)

    @classmethod
    def at(cls, model: str | Path) -> Facts:
        """The facts of a folder or hub id, from its config and two of its tensors."""
        raw = json_of(_file(model, "config.json"))
        config = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else raw
        weights = _weights(model)
        table = _one(weights, EMBEDDINGS, model)
        tail = table if config.get("tie_word_embeddings", True) else _one(weights, HEADS, model)
        if any(name in weights for name in HEADS):
            tail = _one(weights, HEADS, model)
        scale, logits = _scales(config)

        def embedding() -> Tensor:
            weight = weights[table]
            return weight if scale == 1.0 else weight * torch.tensor(scale, dtype=weight.dtype)

        def head() -> Tensor:
            weight = weights[tail]
            return weight if logits == 1.0 else weight * logits

        vocab, hidden = weights.shape(tail)
        layers, context = size_of(config, "layers"), size_of(config, "context") or 2048
        return cls(str(model), vocab, hidden, layers, context, config, embedding, head, scale != 1.0)

    @property
    def architectures(self) -> list[str]:
        """The names of its classes in transformers: a .gguf file's by its family."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

        known = CLASSES.get(str(self.config.get("model_type")))
        return list(self.config.get("architectures") or ([known] if isinstance(known, str) else []))


@torch.no_grad()
def linear_head(target: Target) -> tuple[Float[Tensor, "v h"], Float[Tensor, " v"]]:
    """The target's LM head as a matrix and a bias: its outputs for the unit vectors, with the family's scale.

    A soft cap is not linear. Near zero it is the identity, so small vectors give the map before it.
    """
    like: dict[str, Any] = {"dtype": dtype_of(target), "device": target.device}
    unit = 2.0**-10 if target.config_dict.get("final_logit_softcapping") else 1.0
    zero, each = torch.zeros(1, target.hidden, **like), torch.eye(target.hidden, **like) * unit
    bias, weight = (head(target, features) for features in (zero[:1], each))
    return ((weight - bias) / unit).T.contiguous(), bias[0]


def _scales(config: Mapping[str, Any]) -> tuple[float, float]:
    """The scales of embeddings and of logits."""
    scale = float(config.get("embedding_multiplier") or 1.0)
    if str(config.get("model_type", "")).startswith("gemma"):
        scale = float(config["hidden_size"]) ** 0.5
    return scale, float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)


def _one(weights: Weights, names: tuple[str, ...], model: object) -> str:
    for name in weights:
        if name in names or name.endswith(tuple(f".{n}" for n in names)):
            return name
    raise InputError(f"the weights of {model} have none of {', '.join(names)}; Outrider does not support this target")


def _file(model: str | Path, name: str) -> Path:
    if Path(model).is_dir():
        return Path(model) / name
    if Path(model).exists():
        raise InputError(f"{model} is a file; name the folder of a model or a hub id")
    hub.ensure(str(model))
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(model), name))
    except Exception as error:
        why = first_line(error)
        raise InputError(f"there is no folder {model}, and the hub does not give its {name} ({why})") from None


def _weights(model: str | Path) -> Weights:
    """The shards with the embedding and the head."""
    local = Path(model).is_dir()
    if not local or not (Path(model) / "model.safetensors").is_file():
        try:
            places = json.loads(_file(model, "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
        except (InputError, OSError, KeyError, ValueError):
            if local:
                raise InputError(f"{model} has no safetensors weights; name the target's own folder") from None
        else:
            ends = (*EMBEDDINGS, *HEADS)
            files = {file for name, file in places.items() if name.endswith(ends)}
            return Weights([_file(model, file) for file in sorted(files)], model)
    return Weights([_file(model, "model.safetensors")], model)
