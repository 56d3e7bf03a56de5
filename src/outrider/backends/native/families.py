"""Families of models: what the values of a config.json mean, in the names of transformers 4 or 5.

A family is a function from these values to a description. Defaults are those of the config classes of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import ge
from typing import Any

from ...core.types import Array
from ...params import InputError, understood
from .abi import BLOCK_WEIGHTS, MAX_HEAD_DIM
from .description import ALL_HEADS, EACH_HEAD, Description, Experts, LayerOptions, Names
from .rope import Rope

MXFP4 = "gpt_oss", "mxfp4"  # whose experts are kept so
MOST, MOST_LAYERS = 1 << 31, 1 << 16
ACTIVATIONS = {
    "silu": "SILU", "swish": "SILU", "gelu": "GELU", "gelu_python": "GELU", "gelu_pytorch_tanh": "GELU_TANH",
    "gelu_new": "GELU_TANH", "gelu_fast": "GELU_TANH", "relu": "RELU", "relu2": "RELU2",
}  # fmt: skip


def supports(config: Mapping[str, Any]) -> str:
    """Why a model of this config has no native passes; empty where it has."""
    try:
        describe(config)
    except InputError as error:
        return str(error)
    return ""


def describe(config: Mapping[str, Any], factors: Array | None = None) -> Description:
    """The model of a config.json, in the names of transformers 4 or 5, whose sizes passes can have.

    Args:
        config: its values.
        factors: float32 [rotary_dim / 2], by which rotary frequencies are divided; None: 1.

    Raises:
        InputError: the family or an option of it is not supported, or a value is missing or makes no sense.
    """
    with understood("the model's config"):
        made = read(config, factors)
    if made.hidden % BLOCK_WEIGHTS:
        raise InputError(f"native passes support hidden sizes that are multiples of {BLOCK_WEIGHTS}, not {made.hidden}")
    if made.head_dim > MAX_HEAD_DIM:
        raise InputError(f"native passes support heads of at most {MAX_HEAD_DIM} elements, not {made.head_dim}")
    return made


def read(config: Mapping[str, Any], factors: Array | None = None) -> Description:
    """The same for a model of any size."""
    config = text_part(config)
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise InputError(f"{family} is not a family with native passes, which are {', '.join(FAMILIES)}")
    quantised = config.get("quantization_config")
    kind = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if quantised and (family, kind) != MXFP4:
        raise InputError("native passes do not support the config's quantization_config")
    return FAMILIES[family](Values(config, family, factors))


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of the part that writes text, where a model also reads images."""
    own = config.get("text_config")
    if config.get("model_type") != "gemma3" or not isinstance(own, Mapping):
        return config
    return {"model_type": "gemma3_text", "tie_word_embeddings": config.get("tie_word_embeddings", True), **own}


def renamed(config: Mapping[str, Any], name: str) -> str:
    """The name of a parameter in the family's modules, where its checkpoints keep other ones."""
    for theirs, ours in RENAMED.get(str(config.get("model_type")), ()):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def yarn_context(rope: Mapping[str, Any]) -> int:
    """The context that YaRN extends the original one to; 0 for values that make no sense."""
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    extended = factor * original if isinstance(factor, int | float) and isinstance(original, int | float) else 0
    return int(extended) if 0 < extended < MOST else 0


class Values:
    """A config's values, checked, and the descriptions that are made of them.

    Args:
        config: the values.
        family: its `model_type`.
        factors: as in `describe`.
    """

    def __init__(self, config: Mapping[str, Any], family: str, factors: Array | None) -> None:
        own = {name: config[theirs] for name, theirs in OTHER_NAMES.get(family, {}).items() if theirs in config}
        self.config: dict[str, Any] = {**COMMON, **DEFAULTS.get(family, {}), **config, **own}
        self.family, self.factors = family, factors

    def count(self, name: str, default: int = 0, most: int = MOST) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < most:
            raise InputError(f"the config's {name} is {value!r}, not a positive whole number; fetch it again")
        return value

    def number(self, name: str, default: float = 0.0) -> float:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or not 0 < value < 1e30:
            raise InputError(f"the config's {name} is {value!r}, not a positive number; fetch it again")
        return float(value)

    def optional(self, name: str) -> float:
        """A number, or 0 where it is null or left out."""
        return 0.0 if self.config.get(name) is None else self.number(name)

    def factor(self, name: str, inverse: bool = False) -> float:
        """A factor, or by what is divided; 0: 1."""
        value = 1.0 if self.config.get(name) is None else self.number(name)
        return 0.0 if value == 1.0 else 1.0 / value if inverse else value

    def normed(self, names: Mapping[str, str], flag: str) -> dict[str, str]:
        """The names of a layer's parts, without the norms of queries and keys where this flag is not set."""
        without = {"q_norm", "k_norm"} if not flag or not self.flag(flag) else set()
        return {part: name for part, name in names.items() if part not in without}

    def flag(self, name: str) -> bool:
        return bool(self.config.get(name))

    def listed(self, name: str, count: int) -> list[Any] | None:
        value = self.config.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != count):
            raise InputError(f"the config's {name} is not a list of {count} entries; fetch it again")
        return value

    @property
    def layers(self) -> int:
        return self.count("num_hidden_layers", most=MOST_LAYERS)

    def activation(self, name: str = "hidden_act") -> str:
        activation = self.config.get(name) or "gelu_pytorch_tanh"  # null in Gemma's configs
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise InputError(f"native passes do not support the activation {activation!r}")
        return ACTIVATIONS[activation]

    def window(self) -> int:
        window = self.config.get("sliding_window")
        if window is not None and (type(window) is not int or not 0 <= window < MOST):
            raise InputError(f"the config's sliding_window is {window!r}, not a whole number; fetch it again")
        return window or 0

    def slides(self, default: Callable[[int], bool]) -> list[bool]:
        """Which layers have a sliding window: by `layer_types`, or else those that `default` names."""
        kinds = self.listed("layer_types", self.layers)
        if kinds is None:
            return [default(i) for i in range(self.layers)]
        if other := set(map(str, kinds)) - {"sliding_attention", "full_attention"}:
            raise InputError(f"native passes do not support layers of the type {min(other)!r}")
        return [kind == "sliding_attention" for kind in kinds]

    def experts(self, width: str, normalised: bool = True, **options: Any) -> Experts:
        """The experts of a layer; `width`: the entry that says how wide they are."""
        names = ("num_experts", "num_local_experts")
        count = self.count(next((name for name in names if self.config.get(name) is not None), names[1]))
        top_k, inner, hidden = self.count("num_experts_per_tok"), self.count(width), self.count("hidden_size")
        made = Experts(count, top_k, inner, normalised, **options)
        if not top_k <= count <= hidden:
            raise InputError(f"{top_k} of {count} experts cannot be chosen in layers of width {hidden}")
        return made

    def rope(self, kind: str = "", theta: str = "rope_theta", plain: bool = False) -> dict[str, Any]:
        """`rope_parameters` as transformers 5 completes them.

        Args:
            kind: of the layers, where these differ.
            theta: the name of the base in configs of transformers 4.
            plain: is `rope_scaling` of other layers?
        """
        parameters = self.config.get("rope_parameters") or {}
        if not isinstance(parameters, Mapping):
            raise InputError("the rotary embeddings of the model's config cannot be understood; fetch it again")
        if any(isinstance(value, Mapping) for value in parameters.values()):
            if kind not in parameters:
                raise InputError("native passes do not support rotary embeddings that differ between layers")
            parameters, plain = parameters[kind] or {}, True
        scaling = parameters if plain else self.config.get("rope_scaling") or parameters
        if not isinstance(scaling, Mapping):
            raise InputError("the rotary embeddings of the model's config cannot be understood; fetch it again")
        values = {"rope_theta": self.config.get(theta) or self.config["rope_default"], **scaling}
        values["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
        most = self.count("max_position_embeddings")
        name = "original_max_position_embeddings"
        values[name] = self.config.get(name) or scaling.get(name) or most
        if not isinstance(values[name], int | float) or not 1 <= values[name] < MOST:
            raise InputError(f"the config's {name} is {values[name]!r}, not a positive number; fetch it again")
        values.setdefault("partial_rotary_factor", self.config.get("partial_rotary_factor") or 1.0)
        if values["rope_type"] == "longrope" and values.get("factor") is None:
            values["factor"] = most / int(values["original_max_position_embeddings"])
        return values

    def description(self, names: Names, layers: Sequence[LayerOptions], **options: Any) -> Description:
        """A description of the usual sizes, with these options. `ropes`: `rope_parameters`; left out: those of all."""
        heads, hidden = self.count("num_attention_heads"), self.count("hidden_size")
        kv_heads = self.count("num_key_value_heads", heads)
        head_dim = self.count("head_dim", max(1, hidden // heads))
        dense = any(layer.experts is None for layer in layers)
        intermediate = self.count("intermediate_size", 4 * hidden) if dense else 0
        if heads % kv_heads:
            raise InputError(f"{heads} attention heads cannot share {kv_heads} heads of keys and values")
        ropes, context = options.pop("ropes", None), self.count("max_position_embeddings")
        ropes = [self.rope()] if ropes is None else ropes
        rotary_dim = int(head_dim * float(ropes[0]["partial_rotary_factor"])) if ropes else head_dim
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise InputError(f"rotary embeddings of {rotary_dim} elements of a head are not supported")
        for rope in ropes:
            if rope["rope_type"] == "longrope":  # beyond it the frequencies depend on a text's length
                context = min(context, int(rope["original_max_position_embeddings"]))
            elif rope["rope_type"] == "yarn":  # configs may have its factor beside the original length alone
                context = max(context, yarn_context(rope))
        options.setdefault("activation", self.activation())
        eps = "layer_norm_eps" if options.get("layer_norm") else "rms_norm_eps"
        return Description(
            family=self.family, names=names, vocab=self.count("vocab_size"), hidden=hidden, intermediate=intermediate,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, context=context, eps=self.number(eps),
            ropes=tuple(Rope.of(rope, rotary_dim, self.factors) for rope in ropes), rotary_dim=rotary_dim,
            tied=self.flag("tie_word_embeddings"), layers=tuple(layers), **options,
        )  # fmt: skip


ATTENTION = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
}  # fmt: skip
QK_NORM = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
BOTH_NORMS = {
    "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
LLAMA = Names({**ATTENTION, **MLP, **NORMS})
QWEN3 = Names({**ATTENTION, **QK_NORM, **MLP, **NORMS})
ALL_BIASES = frozenset(["q", "k", "v", "qkv", "o", "up", "down"])
NORM_BIASES = frozenset(["attention_norm", "mlp_norm", "norm"])


def _biases(known: Values) -> frozenset[str]:
    """Of families with the flags `attention_bias` and `mlp_bias`."""
    attention = ATTENTION if known.flag("attention_bias") else {}
    return frozenset([*attention, *(MLP if known.flag("mlp_bias") else {})])


def _llama(known: Values) -> Description:
    return known.description(LLAMA, [LayerOptions()] * known.layers, biases=_biases(known))


def _mistral(known: Values) -> Description:
    return known.description(LLAMA, [LayerOptions(window=known.window())] * known.layers)


def _sliding(known: Values, windowed: Callable[[int, int], bool] = ge) -> list[int]:
    """The windows of Qwen's layers; windowed: has a layer one, by its number and `max_window_layers`?"""
    bound = known.config.get("max_window_layers") or 0
    window = known.window() if known.flag("use_sliding_window") else 0
    return [window if slides else 0 for slides in known.slides(lambda i: windowed(i, bound))]


def _qwen2(known: Values) -> Description:
    return known.description(LLAMA, [LayerOptions(w) for w in _sliding(known)], biases=frozenset("qkv"))


def _qwen3(known: Values) -> Description:
    return known.description(QWEN3, [LayerOptions(w) for w in _sliding(known)], biases=_biases(known))


def _smollm3(known: Values) -> Description:
    every = known.count("no_rope_layer_interval", 4)
    rotary = known.listed("no_rope_layers", known.layers) or [int((i + 1) % every != 0) for i in range(known.layers)]
    window = known.window() if known.flag("use_sliding_window") else 0
    slides = known.slides(lambda i: not rotary[i])
    layers = [LayerOptions(window * s, int(bool(r))) for s, r in zip(slides, rotary, strict=True)]
    return known.description(LLAMA, layers, biases=_biases(known))


def _mixtral(known: Values) -> Description:
    layer = LayerOptions(window=known.window(), experts=known.experts("intermediate_size"))
    return known.description(LLAMA, [layer] * known.layers)


def _sparse(known: Values, **options: Any) -> list[Experts | None]:
    """The experts of Qwen's layers, some of which have none."""
    every, normalised = known.count("decoder_sparse_step", 1), known.flag("norm_topk_prob")
    own = known.experts("moe_intermediate_size", normalised=normalised, **options)
    plain = known.config.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise InputError("the config's mlp_only_layers is not a list; fetch it again")
    return [None if i in plain or (i + 1) % every else own for i in range(known.layers)]


def _qwen3_moe(known: Values) -> Description:
    window = known.window() if known.flag("use_sliding_window") else 0
    layers = [LayerOptions(window, experts=experts) for experts in _sparse(known, first=True)]
    return known.description(QWEN3, layers, biases=_biases(known))


def _qwen2_moe(known: Values) -> Description:
    experts = _sparse(known, shared=known.count("shared_expert_intermediate_size"))
    windows = _sliding(known, lambda i, bound: i % 2 == 0 and i < bound)
    layers = [LayerOptions(window, experts=own) for window, own in zip(windows, experts, strict=True)]
    return known.description(LLAMA, layers, biases=frozenset("qkv" if known.flag("qkv_bias") else ""))


def _olmoe(known: Values) -> Description:
    if known.optional("clip_qkv"):
        raise InputError("native passes do not support clipped queries, keys and values")
    experts = known.experts("intermediate_size", normalised=known.flag("norm_topk_prob"))
    layers = [LayerOptions(experts=experts)] * known.layers
    return known.description(QWEN3, layers, biases=_biases(known), qk_norm=ALL_HEADS)


def _gpt_oss(known: Values) -> Description:
    window = known.window()
    experts = known.experts(
        "intermediate_size", router="router", biases=True, alpha=known.number("swiglu_alpha"),
        limit=known.number("swiglu_limit"),
    )  # fmt: skip
    names = Names({"sinks": "self_attn.sinks", **ATTENTION, **MLP, **NORMS})
    layers = [LayerOptions(window * slides, experts=experts) for slides in known.slides(lambda i: i % 2 == 0)]
    return known.description(names, layers, biases=_biases(known))


def _gemma_options(known: Values, activation: str) -> dict[str, Any]:
    """What all Gemmas share. (The exact GELU of the first configs was never meant.)"""
    return {
        "norm_offset": 1.0, "embedding_scale": math.sqrt(known.count("hidden_size")), "rounds_scale": True,
        "biases": _biases(known),
        "activation": "GELU_TANH" if known.config.get(activation) == "gelu" else known.activation(activation),
    }  # fmt: skip


def _gemma(known: Values) -> Description:
    return known.description(LLAMA, [LayerOptions()] * known.layers, **_gemma_options(known, "hidden_act"))


def _gemma2(known: Values) -> Description:
    window = known.window()
    layers = [LayerOptions(window * slides) for slides in known.slides(lambda i: i % 2 == 0)]
    return known.description(
        Names({**ATTENTION, **MLP, **BOTH_NORMS}), layers, **_gemma_options(known, "hidden_activation"),
        **_capped(known),
    )  # fmt: skip


def _gemma3(known: Values) -> Description:
    every, window = known.count("sliding_window_pattern", 6), known.window()
    slides = known.slides(lambda i: (i + 1) % every != 0)
    ropes = [known.rope("full_attention"), known.rope("sliding_attention", "rope_local_base_freq", plain=True)]
    return known.description(
        Names({**ATTENTION, **QK_NORM, **MLP, **BOTH_NORMS}),
        [LayerOptions(window * s, 2 if s else 1) for s in slides], ropes=ropes,
        **_gemma_options(known, "hidden_activation"), **_capped(known),
    )  # fmt: skip


def _capped(known: Values) -> dict[str, float]:
    return {
        "attention_scale": known.number("query_pre_attn_scalar") ** -0.5,
        "score_cap": known.optional("attn_logit_softcapping"), "logit_cap": known.optional("final_logit_softcapping"),
    }  # fmt: skip


def _phi3(known: Values) -> Description:
    fused = {"o": "self_attn.o_proj", "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj", "down": MLP["down"]}
    rope = known.rope()
    if rope["rope_type"] in ("su", "yarn"):  # older names
        rope |= {"rope_type": "longrope"}
        rope.setdefault("factor", known.count("max_position_embeddings") / rope["original_max_position_embeddings"])
    return known.description(Names({**fused, **NORMS}), [LayerOptions(known.window())] * known.layers, ropes=[rope])


def _phi(known: Values) -> Description:
    names = {
        **ATTENTION, "o": "self_attn.dense", "q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm",
        "up": "mlp.fc1", "down": "mlp.fc2", "attention_norm": "input_layernorm",
    }  # fmt: skip
    biases = ALL_BIASES | NORM_BIASES | {"head", "q_norm", "k_norm"}
    return known.description(
        Names(known.normed(names, "qk_layernorm"), norm="model.final_layernorm"), [LayerOptions()] * known.layers,
        biases=biases, layer_norm=True, parallel=True,
    )  # fmt: skip


def _granite(known: Values) -> Description:
    return known.description(
        LLAMA, [LayerOptions()] * known.layers, biases=_biases(known),
        attention_scale=known.number("attention_multiplier"), embedding_scale=known.factor("embedding_multiplier"),
        residual_scale=known.factor("residual_multiplier"), logit_scale=known.factor("logits_scaling", inverse=True),
    )  # fmt: skip


OLMO = Names({**ATTENTION, **QK_NORM, **MLP, **POST_NORMS})


def _olmo2(known: Values) -> Description:
    return known.description(OLMO, [LayerOptions()] * known.layers, biases=_biases(known), qk_norm=ALL_HEADS)


def _olmo3(known: Values) -> Description:
    window = known.window()
    slides = known.slides(lambda i: (i + 1) % 4 != 0)
    ropes = [known.rope("full_attention"), known.rope("sliding_attention", plain=True)]
    layers = [LayerOptions(window * s, 2 if s else 1) for s in slides]
    return known.description(OLMO, layers, ropes=ropes, biases=_biases(known), qk_norm=ALL_HEADS)


COHERE = {**ATTENTION, **QK_NORM, **MLP, "attention_norm": "input_layernorm"}


def _cohere_options(known: Values) -> dict[str, Any]:
    return {
        "biases": _biases(known), "layer_norm": True, "qk_norm": EACH_HEAD, "adjacent": True, "parallel": True,
        "logit_scale": known.factor("logit_scale"),
    }  # fmt: skip


def _cohere(known: Values) -> Description:
    names = Names(known.normed(COHERE, "use_qk_norm"))
    return known.description(names, [LayerOptions()] * known.layers, **_cohere_options(known))


def _cohere2(known: Values) -> Description:
    every, window = known.count("sliding_window_pattern", 4), known.window()
    slides = known.slides(lambda i: (i + 1) % every != 0)
    layers = [LayerOptions(window * s, int(s and window > 0)) for s in slides]  # where all is seen nothing is rotated
    return known.description(Names(known.normed(COHERE, "")), layers, **_cohere_options(known))


def _stablelm(known: Values) -> Description:
    each = {"q_norm": "self_attn.q_layernorm.norms.{}", "k_norm": "self_attn.k_layernorm.norms.{}"}
    parallel = known.flag("use_parallel_residual")
    names = known.normed({**ATTENTION, **each, **MLP, **NORMS}, "qk_layernorm")
    if parallel:
        names.pop("mlp_norm")
    return known.description(
        Names(names), [LayerOptions()] * known.layers, layer_norm=True, qk_norm=EACH_HEAD, parallel=parallel,
        biases=NORM_BIASES | (frozenset("qkv") if known.flag("use_qkv_bias") else frozenset()),
    )  # fmt: skip


def _starcoder2(known: Values) -> Description:
    names = Names({**ATTENTION, "up": "mlp.c_fc", "down": "mlp.c_proj", **NORMS})
    biases = NORM_BIASES | (ALL_BIASES if known.flag("use_bias") else frozenset())
    layers = [LayerOptions(window=known.window())] * known.layers
    return known.description(names, layers, layer_norm=True, biases=biases)


def _gpt2(known: Values) -> Description:
    if known.flag("scale_attn_by_inverse_layer_idx") or not known.flag("scale_attn_weights"):
        raise InputError("native passes do not support attention scores that are scaled by layer")
    names = Names(
        {
            "attention_norm": "ln_1", "qkv": "attn.c_attn", "o": "attn.c_proj", "mlp_norm": "ln_2", "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        "transformer.h.", "transformer.wte", "transformer.wpe", "transformer.ln_f", transposed=True,
    )  # fmt: skip
    layers = [LayerOptions(rope=0)] * known.layers
    return known.description(names, layers, ropes=[], layer_norm=True, biases=ALL_BIASES | NORM_BIASES)


def _gpt_neox(known: Values) -> Description:
    names = Names(
        {
            **NORMS, "qkv": "attention.query_key_value", "o": "attention.dense", "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
        "gpt_neox.layers.", "gpt_neox.embed_in", norm="gpt_neox.final_layer_norm",
    )  # fmt: skip
    biases = ALL_BIASES if known.flag("attention_bias") else ALL_BIASES - {"qkv", "o"}
    known.config["num_key_value_heads"] = None
    return known.description(
        names, [LayerOptions()] * known.layers, ropes=[known.rope(theta="rotary_emb_base")], layer_norm=True,
        biases=biases | NORM_BIASES, by_group=True, parallel=known.flag("use_parallel_residual"),
    )  # fmt: skip


def _falcon(known: Values) -> Description:
    if known.flag("alibi"):
        raise InputError("native passes do not support ALiBi, the position biases of this Falcon")
    new, parallel = known.flag("new_decoder_architecture"), known.flag("parallel_attn")
    two = parallel and new and known.config.get("num_ln_in_parallel_attn") in (None, 2)
    norms = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"} if two else {"attention_norm": "input_layernorm"}
    if not parallel:
        norms = {"mlp_norm": "post_attention_layernorm", "attention_norm": "input_layernorm"}
    if not new:
        known.config["num_key_value_heads"] = 1 if known.flag("multi_query") else None
    names = Names(
        {
            "qkv": "self_attention.query_key_value", "o": "self_attention.dense", "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h", **norms,
        },
        "transformer.h.", "transformer.word_embeddings", norm="transformer.ln_f",
    )  # fmt: skip
    return known.description(
        names, [LayerOptions()] * known.layers, layer_norm=True, by_group=True, parallel=parallel or new,
        biases=NORM_BIASES | (ALL_BIASES if known.flag("bias") else frozenset()),
    )  # fmt: skip


FAMILIES: dict[str, Callable[[Values], Description]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "phi": _phi,
    "granite": _granite,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
}
COMMON: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-5, "rope_default": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096}
GEMMA2 = {
    **GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
}  # fmt: skip
QWEN = {
    "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
COHERES = {
    "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64,
    "max_position_embeddings": 8192, "logit_scale": 0.0625, "tie_word_embeddings": True,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {  # what differs from `COMMON`
    "mistral": {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32,
        "sliding_window": 4096,
    },
    "qwen2": QWEN,
    "qwen3": {**QWEN, "head_dim": 128},
    "smollm3": {
        "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "rope_default": 2000000.0, "tie_word_embeddings": True,
    },
    "mixtral": {
        "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "rms_norm_eps": 1e-5,
        "intermediate_size": 14336, "rope_default": 1000000.0, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "qwen2_moe": {
        **QWEN, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "qkv_bias": True, "num_local_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    },
    "olmoe": {
        "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_local_experts": 64, "num_experts_per_tok": 8,
    },
    "gpt_oss": {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_default": 150000.0, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
        "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
    "gemma": {
        **GEMMA, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma2": {**GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        **GEMMA2, "max_position_embeddings": 131072, "rope_default": 1000000.0, "rope_local_base_freq": 10000.0,
        "vocab_size": 262208,
    },
    "phi3": {
        "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    },
    "phi": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
    },
    "granite": {"attention_multiplier": 1.0},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_default": 500000.0, "sliding_window": 4096},
    "cohere": {**COHERES, "rope_default": 500000.0},
    "cohere2": {**COHERES, "sliding_window": 4096},
    "stablelm": {
        "hidden_size": 2560, "intermediate_size": 6912, "num_key_value_heads": 32, "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
    },
    "starcoder2": {
        "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30, "num_attention_heads": 24,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "hidden_act": "gelu_pytorch_tanh", "use_bias": True,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "hidden_size": 768, "intermediate_size": None, "num_hidden_layers": 12, "num_attention_heads": 12,
        "max_position_embeddings": 1024, "hidden_act": "gelu_new", "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {
        "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64,
        "hidden_act": "gelu", "attention_bias": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25,
    },
    "falcon": {
        "hidden_size": 4544, "intermediate_size": None, "num_attention_heads": 71, "hidden_act": "gelu",
        "multi_query": True, "parallel_attn": True, "tie_word_embeddings": True,
    },
}  # fmt: skip
OTHER_NAMES: dict[str, dict[str, str]] = {  # of values: ours, and those of the family's config
    "starcoder2": {"layer_norm_eps": "norm_epsilon"},
    "gpt2": {
        "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head", "max_position_embeddings": "n_positions", "hidden_act": "activation_function",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    "gpt_neox": {"partial_rotary_factor": "rotary_pct"},
    "falcon": {
        "intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads", "hidden_act": "activation",
        "layer_norm_eps": "layer_norm_epsilon",
    },
}  # fmt: skip
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {  # how names of parameters begin in files, and in modules
    "gemma3": (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    "gpt2": tuple((name, f"transformer.{name}") for name in ("wte.", "wpe.", "h.", "ln_f.")),
    "gpt_neox": (("embed_out.", "lm_head."),),
}  # fmt: skip
