"""A Llama-shaped model as the compiled pass reads it: the addresses of the model's own weights, or of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..native.abi import MAX_HEAD_DIM, W4A8, W8A8, Pointer, Struct, address, ffi, struct
from ..native.pages import stretch as memory
from .kernel_blocks import Packed, plain

SHAPED = {"llama", "mistral", "qwen2", "qwen3", "smollm3"}  # families whose layers are these
STEP = 32  # what widths are multiples of
Hold = Callable[[Tensor], Struct]  # a weight as `Matrix`, kept as long as the model


@dataclass
class Weights:
    """The structure, the precision of the weights in it, and what must live as long as it does."""

    model: Struct  # `Model`
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
    if any(size % STEP for size in sizes) or width > MAX_HEAD_DIM:
        return f"its widths {sizes} are not multiples of {STEP}, or a head is wider than {MAX_HEAD_DIM}"
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

    def hold(weight: Tensor) -> Struct:
        kept.append(packed.get(id(weight)) or plain(weight))
        return kept[-1].struct

    core = model.model
    kinds = getattr(config, "layer_types", None) or [""] * len(core.layers)
    layers = ffi.new("Layer[]", len(core.layers))
    for i, (part, layer) in enumerate(zip(layers, core.layers, strict=True)):
        attention = layer.self_attn
        projections(part, kept, hold, attention, layer.mlp)
        part.attention_norm.weight = small(kept, layer.input_layernorm)
        part.mlp_norm.weight = small(kept, layer.post_attention_layernorm)
        part.q_norm.weight = small(kept, getattr(attention, "q_norm", None))
        part.k_norm.weight = small(kept, getattr(attention, "k_norm", None))
        part.window = windows.get(kinds[i] if kinds[i] in windows else "") or 0
        part.rope = int(bool(getattr(attention, "use_rope", True)))
    model_ = struct(
        "Model", hidden=config.hidden_size, intermediate=config.intermediate_size, heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads, head_dim=_width(config), layers=len(core.layers),
        vocab=model.lm_head.weight.shape[0],
        eps=config.rms_norm_eps, attention_scale=core.layers[0].self_attn.scaling, layer=layers,
        norm={"weight": small(kept, core.norm)}, head=hold(model.lm_head.weight),
    )  # fmt: skip
    shapes = {id(weight): weight.shape for weight in model.parameters()}
    whole = [(one, *shapes[key]) for key, one in packed.items() if one.kind in (W4A8, W8A8)]
    return Weights(model_, model.lm_head.weight.dtype, [layers, *kept], whole)


def projections(layer: Struct, kept: list[Any], hold: Hold, attention: Any, mlp: Any) -> None:
    """Write the weights of a layer's projections to its `Layer`, with the biases of those around attention."""
    for name in ("q", "k", "v", "o"):
        module = getattr(attention, f"{name}_proj")
        setattr(layer, name, hold(module.weight))
        setattr(layer, f"{name}_bias", small(kept, module, "bias"))
    for name in ("gate", "up", "down"):
        setattr(layer, name, hold(getattr(mlp, f"{name}_proj").weight))


def small(kept: list[Any], module: Any, name: str = "weight") -> Pointer:
    """The address of a norm's weights or of a bias, copied in float32 to `kept`; NULL where there is none."""
    tensor = getattr(module, name, None)
    if tensor is None:
        return address(None)
    kept.append(tensor.detach().float().clone())
    return address(kept[-1])


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
    return [torch.from_numpy(room) for room in memory(sizes)]


def _width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
