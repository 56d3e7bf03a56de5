"""Tiny .gguf files, written with the `gguf` package as llama.cpp's converter would write them."""

from __future__ import annotations

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


def write(file: Path, model: Any, kind: str = "F32", arch: str = "llama", leave_out: str = "", extra: str = "") -> Path:
    """A tiny model as a file of this kind; the queries' and keys' rows in llama.cpp's order.

    `leave_out`: a tensor that it lacks; `extra`: one that no Llama has.
    """
    config, out = model.config, gguf.GGUFWriter(str(file), arch)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        out.add_key_length(config.head_dim)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    words = tokens(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(words)
    out.add_token_merges(["t h"])
    out.add_token_types([3 if word.startswith("<") and len(word) > 1 else 1 for word in words])
    out.add_bos_token_id(1)
    out.add_eos_token_id(1)
    out.add_chat_template(TEMPLATE)
    if mixture := getattr(config, "num_experts_per_tok", None):
        out.add_expert_count(config.num_local_experts)
        out.add_expert_used_count(mixture)
        out.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    for name, tensor in (part for whole in model.state_dict().items() for part in unstacked(*whole)):
        if renamed(name) == leave_out:
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = (permuted(name, tensor, config) if arch in ("llama", "smollm3") else tensor).float().numpy()
        wide = array.ndim > 1 and kind not in ("F32", "F16") and "ffn_gate_inp" not in renamed(name)
        if wide:
            out.add_tensor(renamed(name), blocks_of(array, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            out.add_tensor(renamed(name), array.astype(np.float16) if kind == "F16" and array.ndim > 1 else array)
    if extra:
        out.add_tensor(extra, np.zeros(8, np.float32))
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


def unstacked(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Gates and ups of experts, which are stacked apart in a .gguf file."""
    if not name.endswith("experts.gate_up_proj"):
        return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor)]
    gates, ups = tensor.chunk(2, 1)
    return [(f"{name.replace('gate_up', part)}.weight", own) for part, own in (("gate", gates), ("up", ups))]


def permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            return tensor.view(count, 2, len(tensor) // count // 2, -1).transpose(1, 2).reshape(tensor.shape)
    return tensor


def renamed(name: str) -> str:
    """transformers' names to llama.cpp's."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
    }  # fmt: skip
    if name in whole:
        return whole[name]
    _, _, layer, part = name.split(".", 3)
    stem, _, kind = part.rpartition(".")
    return f"blk.{layer}.{parts[stem]}.{kind}"
