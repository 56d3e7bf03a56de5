"""Tiny .gguf files, written with the `gguf` package as llama.cpp's converter would write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from quantised_blocks import random_blocks

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokens(count: int) -> list[str]:
    made = [
        "<|endoftext|>",
        "<end>",
        "<user>",
        "<assistant>",
        "<system>",
        "th",
        "\u0120",
        "\u010a",
        *(chr(b) for b in range(33, 127)),
    ]
    return [*made, *(f"<unused{i}>" for i in range(count - len(made)))]


def write(
    file: Path,
    model: Any,
    kind: str = "F32",
    arch: str = "llama",
    leave_out: str = "",
    extra: str = "",
    change: Callable[[str, np.ndarray], np.ndarray] = lambda name, array: array,
    template: str = TEMPLATE,
    **ids: int,
) -> Path:
    """A tiny model as a file of this kind; the queries' and keys' rows in llama.cpp's order.

    Args:
        leave_out: a tensor that it lacks.
        extra: one that no Llama has.
        change: of its tensors, in F32 or F16.
        ids: of special tokens besides `bos` and `eos`: `eot=7`.
    """
    config, out = model.config, gguf.GGUFWriter(str(file), arch)
    hidden, heads = config.hidden_size, config.num_attention_heads
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(hidden)
    out.add_block_count(config.num_hidden_layers)
    inner = {"gpt2": "n_inner", "falcon": "ffn_hidden_size"}.get(config.model_type, "intermediate_size")
    out.add_feed_forward_length(getattr(config, inner) or 4 * hidden)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads(config))
    if (eps := first(config, "rms_norm_eps")) is not None:
        out.add_layer_norm_rms_eps(eps)
    else:
        out.add_layer_norm_eps(first(config, "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"))
    if getattr(config, "head_dim", None) and config.model_type != "falcon":
        out.add_key_length(config.head_dim)
        out.add_value_length(config.head_dim)
    about_rope(out, config, getattr(config, "head_dim", None) or hidden // heads)
    about_options(out, config)
    out.add_vocab_size(config.vocab_size)
    words = tokens(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(words)
    out.add_token_merges(["t h"])
    out.add_token_types([3 if word.startswith("<") and len(word) > 1 else 1 for word in words])
    out.add_bos_token_id(1)
    out.add_eos_token_id(1)
    for name, token in ids.items():
        out.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    out.add_chat_template(template)
    if mixture := getattr(config, "num_experts_per_tok", None):
        out.add_expert_count(config.num_local_experts)
        out.add_expert_used_count(mixture)
        qwen = config.model_type.startswith("qwen")
        out.add_expert_feed_forward_length(config.moe_intermediate_size if qwen else config.intermediate_size)
    for name, tensor in converted(model, arch).items():
        if name == leave_out:
            continue
        array = tensor.float().numpy()
        if (
            array.ndim > 1
            and kind not in ("F32", "F16")
            and not any(word in name for word in ("norm", "ffn_gate_inp", "bias"))
        ):
            out.add_tensor(name, blocks_of(array, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            wide = array.ndim > 1 and "norm" not in name
            out.add_tensor(name, change(name, array.astype(np.float16) if kind == "F16" and wide else array))
    if extra:
        out.add_tensor(extra, change(extra, np.zeros(8, np.float32)))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


SMALL = range(0x1000, 0x1400)  # bit patterns of float16 scales of about 0.001


def blocks_of(array: np.ndarray, kind: str) -> np.ndarray:
    """A matrix in blocks; random ones of its shape, where the `gguf` package does not quantise to this kind."""
    try:
        return quantize(array, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        made = random_blocks(kind, array.size // array.shape[-1], array.shape[-1], SMALL, seed=array.size)
        return made.reshape(*array.shape[:-1], -1)


def unstacked(name: str, tensor: torch.Tensor, arch: str) -> list[tuple[str, torch.Tensor]]:
    """Gates and ups of experts, which are stacked apart in a .gguf file. GPT-OSS has them in turn, and transposed."""
    if ".experts." not in name:
        return [(f"{name}.weight" if name.endswith("sinks") else name, tensor)]
    stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    own = tensor.transpose(1, -1) if arch == "gpt-oss" else tensor
    if not stem.endswith("gate_up_proj"):
        return [(f"{stem}.{kind}", own)]
    gates, ups = (own[:, ::2], own[:, 1::2]) if arch == "gpt-oss" else own.chunk(2, 1)
    return [(f"{stem.replace('gate_up', part)}.{kind}", half) for part, half in (("gate", gates), ("up", ups))]


def first(config: Any, *names: str) -> Any:
    """The first of these values that a config has."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def kv_heads(config: Any) -> int:
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else config.num_attention_heads
    return first(config, "num_key_value_heads", "num_kv_heads") or config.num_attention_heads


def about_rope(out: Any, config: Any, head_dim: int) -> None:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    if "full_attention" in rope:
        out.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    out.add_rope_freq_base(rope["rope_theta"])
    out.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        out.add_rope_scaling_type(gguf.RopeScalingType(kind))
        out.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        assert scale > 1
        out.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for name in ("short", "long"):
            out.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def about_options(out: Any, config: Any) -> None:
    """What some families have."""
    numbers = {
        "sliding_window": out.add_sliding_window, "attn_logit_softcapping": out.add_attn_logit_softcapping,
        "final_logit_softcapping": out.add_final_logit_softcapping, "attention_multiplier": out.add_attention_scale,
        "embedding_multiplier": out.add_embedding_scale, "residual_multiplier": out.add_residual_scale,
        "logits_scaling": out.add_logit_scale, "logit_scale": out.add_logit_scale,
        "use_parallel_residual": out.add_parallel_residual,
    }  # fmt: skip
    for name, add in numbers.items():
        if config.model_type not in ("qwen2", "qwen3", "smollm3") and getattr(config, name, None) is not None:
            add(getattr(config, name))
    if config.model_type in ("olmo3", "gemma2", "gemma3_text", "cohere2"):
        out.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def converted(model: Any, arch: str) -> dict[str, torch.Tensor]:
    """Tensors as llama.cpp's converter makes them."""
    config, result = model.config, {}
    state = {
        name: tensor for full in model.state_dict().items() for name, tensor in unstacked(*full, arch)
        if not (name == "lm_head.weight" and config.tie_word_embeddings) and not name.endswith(".attn.bias")
    }  # fmt: skip
    for name, tensor in state.items():
        made = tensor
        if arch in ("llama", "smollm3", "granite"):
            made = permuted(name, tensor, config)
        elif arch.startswith("gemma") and name.endswith("norm.weight"):
            made = tensor + 1
        elif arch == "gpt2" and ".c_" in name and name.endswith("weight"):
            made = tensor.T
        elif "query_key_value" in name:
            group = config.num_attention_heads // kv_heads(config)
            split = tensor.view(kv_heads(config), group + 2, -1, *tensor.shape[1:])
            parts = split[:, :-2], split[:, -2], split[:, -1]
            made = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
        if ".norms." in name:
            stem, _, rest = name.partition(".norms.")
            if rest != "0.weight":
                continue
            each = [state[f"{stem}.norms.{h}.weight"] for h in range(sum(stem in n for n in state))]
            name, made = f"{stem}.weight", torch.stack(each)
        result[renamed(name, arch, state)] = made.contiguous()
    return result


def permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            return tensor.view(count, 2, len(tensor) // count // 2, -1).transpose(1, 2).reshape(tensor.shape)
    return tensor


OUTSIDE = {
    "embed_tokens": "token_embd", "embed_in": "token_embd", "wte": "token_embd", "word_embeddings": "token_embd",
    "wpe": "position_embd", "norm": "output_norm", "final_layernorm": "output_norm", "final_layer_norm": "output_norm",
    "ln_f": "output_norm", "lm_head": "output",
}  # fmt: skip
INSIDE = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "dense": "attn_output",
    "qkv_proj": "attn_qkv", "query_key_value": "attn_qkv", "c_attn": "attn_qkv", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "gate_up_proj": "ffn_up", "fc1": "ffn_up", "c_fc": "ffn_up", "dense_h_to_4h": "ffn_up",
    "down_proj": "ffn_down", "fc2": "ffn_down", "dense_4h_to_h": "ffn_down", "input_layernorm": "attn_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "q_layernorm": "attn_q_norm", "k_layernorm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def renamed(name: str, arch: str, state: Any) -> str:
    """transformers' names to llama.cpp's."""
    parts = name.split(".")
    number = next((part for part in parts if part.isdecimal()), None)
    stem, kind = parts[-2], parts[-1]
    if number is None:
        return f"{OUTSIDE[stem]}.{kind}"
    after = arch == "gpt-oss" or any(
        "post_feedforward_layernorm" in other for other in state
    )  # norms after attention and the MLP
    given = {
        "post_attention_layernorm": "post_attention_norm" if after else "ffn_norm",
        "c_proj": "attn_output" if "attn" in parts else "ffn_down",
        "gate": "ffn_gate_inp", "router": "ffn_gate_inp", "sinks": "attn_sinks",
    }  # fmt: skip
    experts = "_exps" if "experts" in parts else ""
    return f"blk.{number}.{given.get(stem) or INSIDE[stem]}{experts}.{kind}"
