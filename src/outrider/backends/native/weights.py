"""A Llama-shaped model as the compiled pass reads it: the addresses of the model's own weights, or of their blocks."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import W4A8, W8A8, Packed, plain
from .pages import PAGE, in_large_pages
from .parts import WIDEST as WIDEST
from .parts import LayerPart, MatrixPart, ModelPart, project, small

SHAPED = {"llama", "mistral", "qwen2", "qwen3", "smollm3"}  # families whose layers are these
STEP = 32  # what widths are multiples of
LINE = 64  # bytes


@dataclass
class Weights:
    """The structure, the precision of the weights in it, and what must live as long as it does."""

    part: ModelPart
    dtype: torch.dtype
    kept: list[Any]
    whole: list[tuple[Packed, int, int]]  # what is multiplied as whole numbers, and its outputs and width

    @property
    def kinds(self) -> set[str]:
        """Of what is multiplied as whole numbers, by bits of weights and activations."""
        return {{W4A8: "W4A8", W8A8: "W8A8"}[one.kind] for one, *_ in self.whole}


def lacking(model: Any, config: Any) -> str:
    """Why the compiled pass does not read this model; empty where it does."""
    kind = config.model_type
    if kind not in SHAPED or type(model).__module__.partition(".")[0] != "transformers":
        return f"{kind} has other layers"
    tensors = list(model.parameters())
    if any(t.device.type != "cpu" for t in tensors):
        return "it is not on a CPU"
    if getattr(config, "quantization_config", None) or any(type(t.data) is not Tensor for t in tensors):
        return "its weights are quantised, or not plain tensors"
    if {t.dtype for t in tensors} not in ({torch.bfloat16}, {torch.float32}):
        return "its weights are neither all in bfloat16 nor all in float32"
    linear = [module for name, module in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    if any(type(module) is not nn.Linear or not module.weight.is_contiguous() for module in linear):
        return "its products are not plain ones"
    width = _width(config)
    sizes = int(config.hidden_size), int(config.intermediate_size), width
    if any(size % STEP for size in sizes) or width > WIDEST:
        return f"its widths {sizes} are not multiples of {STEP}, or a head is wider than {WIDEST}"
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    if model.get_output_embeddings().bias is not None or any(
        m.mlp.down_proj.bias is not None for m in model.model.layers
    ):
        return "its gated layers have biases"
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    return "" if partial == 1.0 else "it turns a part of each head alone"


def read(model: Any, config: Any, windows: dict[str, int | None], packed: dict[int, Packed]) -> Weights:
    """Addresses of all weights; norms and biases, which are small, are copied in float32. `packed`: by the id of a
    weight, what is read in its place."""
    kept: list[Any] = []

    def hold(weight: Tensor) -> MatrixPart:
        kept.append(packed.get(id(weight)) or plain(weight))
        return kept[-1].part

    core = model.model
    kinds = getattr(config, "layer_types", None) or [""] * len(core.layers)
    parts = (LayerPart * len(core.layers))()
    for i, (part, layer) in enumerate(zip(parts, core.layers, strict=True)):
        attention = layer.self_attn
        project(part, kept, hold, attention, layer.mlp)
        part.norm, part.norm_inner = small(kept, layer.input_layernorm), small(kept, layer.post_attention_layernorm)
        part.norm_q = small(kept, getattr(attention, "q_norm", None))
        part.norm_k = small(kept, getattr(attention, "k_norm", None))
        part.window = windows.get(kinds[i] if kinds[i] in windows else "") or 0
        part.turned = int(bool(getattr(attention, "use_rope", True)))
    model_ = ModelPart(
        hidden=config.hidden_size, inner=config.intermediate_size, heads=config.num_attention_heads,
        groups=config.num_key_value_heads, width=_width(config), layers=len(core.layers),
        vocabulary=model.lm_head.weight.shape[0],
        epsilon=config.rms_norm_eps, scale=core.layers[0].self_attn.scaling, layer=parts,
        norm=small(kept, core.norm), head=hold(model.lm_head.weight),
    )  # fmt: skip
    shapes = {id(weight): weight.shape for weight in model.parameters()}
    whole = [(one, *shapes[key]) for key, one in packed.items() if one.kind in (W4A8, W8A8)]
    return Weights(model_, model.lm_head.weight.dtype, [parts, *kept], whole)


def gather(model: Any, but: Container[int]) -> None:
    """Move a model's parameters to large pages of memory, except those with these ids."""
    places: dict[tuple[int, torch.Size], list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.is_contiguous() and id(parameter) not in but:  # tied ones lie at one place
            places.setdefault((parameter.data_ptr(), parameter.shape), []).append(parameter)
    for same, moved in zip(places.values(), together([same[0].data for same in places.values()]), strict=True):
        for parameter in same:
            parameter.data = moved


def together(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in one stretch of large pages of memory, for a pass reads all of them."""
    places = zip(tensors, stretch([tensor.nbytes for tensor in tensors]), strict=True)
    return [room.view(tensor.dtype).view(tensor.shape).copy_(tensor) for tensor, room in places]


def stretch(sizes: list[int]) -> list[Tensor]:
    """Room for so many bytes each, in one stretch of large pages of memory."""
    places = [0, *accumulate(-(-size // LINE) * LINE for size in sizes)]
    bytes_ = in_large_pages(torch.empty(places[-1] + PAGE, dtype=torch.uint8))
    first = -bytes_.data_ptr() % PAGE
    return [bytes_[first + at : first + at + size] for at, size in zip(places[:-1], sizes, strict=True)]


def _width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
