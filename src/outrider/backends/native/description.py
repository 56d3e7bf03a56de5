"""A model as data: its sizes, and for each layer its options, made of the values of a config.json.

A family is a function from such values to the options of its layers. Defaults are those of the config classes of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.types import Array
from ...params import InputError
from .rope import Rope

WIDTHS = 32  # what widths are multiples of
MOST, MOST_LAYERS = 1 << 31, 1 << 16
REFUSED = "quantization_config", "rope_local_base_freq"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of a layer's MLP. A row's weights are the softmax of the router's logits: of all,
    or (`normalised`) of those that it chose."""

    count: int
    top_k: int  # experts that a row chooses
    intermediate: int  # of each
    normalised: bool = True
    shared: int = 0  # width of the expert that computes all rows, behind a gate of its own; 0: none
    first: bool = False  # do its weights come before the router's in transformers' modules?


@dataclass(frozen=True)
class LayerOptions:
    """What the layers of the supported families differ in."""

    qk_norm: bool = False  # an RMS norm of every head's query and key
    qkv_bias: bool = False
    o_bias: bool = False
    rope: bool = True  # rotary position embeddings
    window: int = 0  # of sliding-window attention; 0: none
    experts: Experts | None = None


@dataclass(frozen=True)
class Description:
    """A decoder of pre-norm layers with rotary attention and a gated MLP."""

    family: str
    vocab: int
    hidden: int
    intermediate: int  # of layers without experts; 0: there are none
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    eps: float
    rope: Rope
    tied: bool  # is the head's matrix the table of embeddings?
    layers: tuple[LayerOptions, ...]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all parameters, in the hub's names and in the order of transformers' modules. Each expert
        has matrices of its own, named as Qwen's are."""
        wide, narrow, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for i, options in enumerate(self.layers):
            at = f"model.layers.{i}."
            for name, rows, width, bias in (
                ("q", wide, hidden, options.qkv_bias),
                ("k", narrow, hidden, options.qkv_bias),
                ("v", narrow, hidden, options.qkv_bias),
                ("o", hidden, wide, options.o_bias),
            ):
                yield f"{at}self_attn.{name}_proj.weight", (rows, width)
                if bias:
                    yield f"{at}self_attn.{name}_proj.bias", (rows,)
            for name in ("q_norm", "k_norm") if options.qk_norm else ():
                yield f"{at}self_attn.{name}.weight", (self.head_dim,)
            if options.experts is None:
                yield from _gated(f"{at}mlp.", self.intermediate, hidden)
            else:
                yield from _mixture(f"{at}mlp.", options.experts, hidden)
            yield f"{at}input_layernorm.weight", (hidden,)
            yield f"{at}post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, hidden)


def _gated(at: str, inner: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}gate_proj.weight", (inner, hidden)
    yield f"{at}up_proj.weight", (inner, hidden)
    yield f"{at}down_proj.weight", (hidden, inner)


def _mixture(at: str, own: Experts, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    router = f"{at}gate.weight", (own.count, hidden)
    if not own.first:
        yield router
    for e in range(own.count):
        yield from _gated(f"{at}experts.{e}.", own.intermediate, hidden)
    if own.first:
        yield router
    if own.shared:
        yield from _gated(f"{at}shared_expert.", own.shared, hidden)
        yield f"{at}shared_expert_gate.weight", (1, hidden)


def supports(config: Mapping[str, Any]) -> str:
    """Why a model of this config has no native passes; empty where it has."""
    try:
        describe(config)
    except InputError as error:
        return str(error)
    return ""


def describe(config: Mapping[str, Any], factors: Array | None = None) -> Description:
    """The model of a config.json, in the names of transformers 4 or 5.

    Args:
        config: its values.
        factors: float32 [head_dim / 2], by which rotary frequencies are divided; None: 1.

    Raises:
        InputError: the family or an option of it is not supported, or a value is missing or makes no sense.
    """
    known = _Values(config)
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise InputError(f"{family} is not a family with native passes, which are {', '.join(FAMILIES)}")
    for name in REFUSED:
        if config.get(name):
            raise InputError(f"native passes do not support the config's {name}")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError(f"native passes do not support the activation {config['hidden_act']!r}")
    if config.get("mlp_bias"):
        raise InputError("native passes do not support biases of the MLP")
    heads, hidden = known.count("num_attention_heads", 32), known.count("hidden_size", 4096)
    kv_heads = known.count("num_key_value_heads", known.kv_heads(family, heads))
    head_dim = known.count("head_dim", 128 if family == "qwen3" else max(1, hidden // heads))
    if heads % kv_heads:
        raise InputError(f"{heads} attention heads cannot share {kv_heads} heads of keys and values")
    layers = tuple(FAMILIES[family](known, known.count("num_hidden_layers", LAYERS.get(family, 32), most=MOST_LAYERS)))
    intermediate = 0
    if any(layer.experts is None for layer in layers):
        intermediate = known.count("intermediate_size", INTERMEDIATE.get(family, 22016))
    if any(size % WIDTHS for size in (hidden, intermediate, head_dim)) or head_dim > 256:
        raise InputError(
            f"its widths {(hidden, intermediate, head_dim)} are not multiples of {WIDTHS}, or a head is wider than 256"
        )
    parameters = known.rope({"smollm3": 2000000.0, "mixtral": 1000000.0}.get(family, 10000.0))
    return Description(
        family=family,
        vocab=known.count("vocab_size", 0),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=known.count("max_position_embeddings", CONTEXTS[family]),
        eps=known.number("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
        rope=Rope.of(parameters, head_dim, factors),
        tied=bool(config.get("tie_word_embeddings", family == "smollm3")),
        layers=layers,
    )


class _Values:
    """A config's values, checked."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def count(self, name: str, default: int, most: int = MOST) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < most:
            raise InputError(f"the config's {name} is {value!r}, not a positive whole number; fetch it again")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if not isinstance(value, int | float) or not 0 < value < 1e30:
            raise InputError(f"the config's {name} is {value!r}, not a positive number; fetch it again")
        return float(value)

    def kv_heads(self, family: str, heads: int) -> int:
        """The default, where the config has no entry; null means one for each head."""
        if "num_key_value_heads" in self.config:
            return heads
        return {"llama": heads, "smollm3": 4, "mistral": 8, "mixtral": 8, "qwen3_moe": 4, "qwen2_moe": 16}.get(
            family, 32
        )

    def experts(self, width: str, count: int, top_k: int, normalised: bool, first: bool = False) -> Experts:
        """The experts of a layer. `width`: the entry that says how wide they are; count and top_k: defaults."""
        name = "num_experts" if "num_experts" in self.config else "num_local_experts"
        count, top_k = self.count(name, count), self.count("num_experts_per_tok", top_k)
        inner, hidden = self.count(width, 768), self.count("hidden_size", 4096)
        if not top_k <= count <= hidden:
            raise InputError(f"{top_k} of {count} experts cannot be chosen in layers of width {hidden}")
        if inner % WIDTHS:
            raise InputError(f"the width of its experts, {inner}, is not a multiple of {WIDTHS}")
        return Experts(count, top_k, inner, normalised, first=first)

    def sparse(self, layers: int, count: int, top_k: int, first: bool = False) -> list[Experts | None]:
        """The experts of Qwen's layers, some of which have none."""
        normalised, every = bool(self.config.get("norm_topk_prob", False)), self.count("decoder_sparse_step", 1)
        own = self.experts("moe_intermediate_size", count, top_k, normalised, first)
        plain = self.config.get("mlp_only_layers") or []
        if not isinstance(plain, list):
            raise InputError("the config's mlp_only_layers is not a list; fetch it again")
        return [None if i in plain or (i + 1) % every else own for i in range(layers)]

    def rope(self, theta: float) -> dict[str, Any]:
        """`rope_parameters` as transformers 5 completes them."""
        given = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise InputError("native passes do not support rotary embeddings that differ between layers")
        found = {"rope_theta": self.config.get("rope_theta") or theta, **given}
        found.setdefault("rope_type", given.get("type", "default"))
        found["original_max_position_embeddings"] = (
            self.config.get("original_max_position_embeddings")
            or given.get("original_max_position_embeddings")
            or self.config.get("max_position_embeddings")
        )
        partial = given.get("partial_rotary_factor", self.config.get("partial_rotary_factor"))
        if partial not in (None, 1.0):
            raise InputError("native passes do not support rotary embeddings of a part of each head")
        return found

    def windows(self, layers: int, default: int | None, of: Callable[[int], bool]) -> list[int]:
        """The window of each layer: by `layer_types`, or else of the layers that `of` names."""
        window = self.config.get("sliding_window", default) if self.config.get("use_sliding_window") else None
        if window is not None and (type(window) is not int or not 0 < window < MOST):
            raise InputError(f"the config's sliding_window is {window!r}, not a positive whole number; fetch it again")
        kinds = self.listed("layer_types", layers)
        slides = [of(i) for i in range(layers)] if kinds is None else [kind == "sliding_attention" for kind in kinds]
        if kinds is not None and (other := set(kinds) - {"sliding_attention", "full_attention"}):
            raise InputError(f"native passes do not support layers of the type {min(map(str, other))!r}")
        return [(window or 0) if slide else 0 for slide in slides]

    def listed(self, name: str, count: int) -> list[Any] | None:
        value = self.config.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != count):
            raise InputError(f"the config's {name} is not a list of {count} entries; fetch it again")
        return value


def _llama(known: _Values, layers: int) -> list[LayerOptions]:
    bias = bool(known.config.get("attention_bias", False))
    return [LayerOptions(qkv_bias=bias, o_bias=bias)] * layers


def _mistral(known: _Values, layers: int) -> list[LayerOptions]:
    window = known.config.get("sliding_window", 4096)
    if window is not None and (type(window) is not int or not 0 <= window < MOST):
        raise InputError(f"the config's sliding_window is {window!r}, not a whole number; fetch it again")
    return [LayerOptions(window=window or 0)] * layers


def _qwen2(known: _Values, layers: int) -> list[LayerOptions]:
    first = known.config.get("max_window_layers", 28)
    return [LayerOptions(qkv_bias=True, window=w) for w in known.windows(layers, 4096, lambda i: i >= first)]


def _qwen3(known: _Values, layers: int) -> list[LayerOptions]:
    first, bias = known.config.get("max_window_layers", 28), bool(known.config.get("attention_bias", False))
    windows = known.windows(layers, 4096, lambda i: i >= first)
    return [LayerOptions(qk_norm=True, qkv_bias=bias, o_bias=bias, window=w) for w in windows]


def _mixtral(known: _Values, layers: int) -> list[LayerOptions]:
    window = known.config.get("sliding_window")
    if window is not None and (type(window) is not int or not 0 <= window < MOST):
        raise InputError(f"the config's sliding_window is {window!r}, not a whole number; fetch it again")
    return [LayerOptions(window=window or 0, experts=known.experts("intermediate_size", 8, 2, True))] * layers


def _qwen3_moe(known: _Values, layers: int) -> list[LayerOptions]:
    bias = bool(known.config.get("attention_bias", False))
    return [
        LayerOptions(qk_norm=True, qkv_bias=bias, o_bias=bias, window=window, experts=experts)
        for window, experts in zip(
            known.windows(layers, 4096, lambda i: True), known.sparse(layers, 128, 8, first=True), strict=True
        )
    ]


def _qwen2_moe(known: _Values, layers: int) -> list[LayerOptions]:
    first, bias = known.config.get("max_window_layers", 28), bool(known.config.get("qkv_bias", True))
    shared = known.count("shared_expert_intermediate_size", 5632)
    if shared % WIDTHS:
        raise InputError(f"the width of its shared expert, {shared}, is not a multiple of {WIDTHS}")
    return [
        LayerOptions(qkv_bias=bias, window=window, experts=experts and replace(experts, shared=shared))
        for window, experts in zip(
            known.windows(layers, 4096, lambda i: i >= first), known.sparse(layers, 60, 4), strict=True
        )
    ]


def _smollm3(known: _Values, layers: int) -> list[LayerOptions]:
    every, bias = known.count("no_rope_layer_interval", 4), bool(known.config.get("attention_bias", False))
    turned = known.listed("no_rope_layers", layers) or [int((i + 1) % every != 0) for i in range(layers)]
    windows = known.windows(layers, None, lambda i: not turned[i])
    return [
        LayerOptions(qkv_bias=bias, o_bias=bias, rope=bool(r), window=w) for r, w in zip(turned, windows, strict=True)
    ]


FAMILIES: dict[str, Callable[[_Values, int], list[LayerOptions]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
}
LAYERS = {"smollm3": 36, "qwen3_moe": 24, "qwen2_moe": 24}
INTERMEDIATE = {"smollm3": 11008, "llama": 11008, "mistral": 14336, "qwen3_moe": 6144, "qwen2_moe": 5632}
CONTEXTS = {
    "llama": 2048, "mistral": 4096 * 32, "qwen2": 32768, "qwen3": 32768, "smollm3": 32768, "mixtral": 4096 * 32,
    "qwen3_moe": 32768, "qwen2_moe": 32768,
}  # fmt: skip
