"""Tiny random models of every family, and the slow, obvious reference: one text, one token at a time, a stock cache.

Weights are wide (initializer_range 0.2) so that logits differ clearly; windows are smaller than the texts.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from outrider.backends.torch.carrier import carrying
from outrider.core.tree import from_lists
from outrider.core.types import DraftTree

VOCAB, WINDOW = 97, 8
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 96, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GQA = {"num_key_value_heads": 2}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip

# name -> (the config class's prefix, what differs from BASE)
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GQA),
    "qwen2": ("Qwen2", GQA),
    "qwen2-sliding": ("Qwen2", {**GQA, **SLIDING, "use_sliding_window": True}),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 8}),
    "mistral": ("Mistral", {**GQA, "sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 4, "sliding_window": None}),
    "qwen3_moe": ("Qwen3Moe", {**GQA, **MOE, "num_experts": 4, "head_dim": 8}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {}),
    "gemma": ("Gemma", {**GQA, "head_dim": 8}),
    "gemma2": ("Gemma2", {**GQA, **SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", {**GQA, **SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "phi": ("Phi", GQA),
    "phi3": ("Phi3", GQA),
    "phi3-sliding": ("Phi3", {**GQA, "sliding_window": WINDOW}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}),
    "bloom": ("Bloom", {"n_layer": 3, "n_head": 4}),
    "falcon-rotary": ("Falcon", {"alibi": False, "multi_query": True, "bias": False, "parallel_attn": True}),
    "falcon-alibi": ("Falcon", {"alibi": True, "multi_query": False, "bias": True, "parallel_attn": False}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 96}),
    "deepseek_v3": ("DeepseekV3", {**MOE, **MLA}),
    "granite": (
        "Granite",
        {
            **GQA, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
            "attention_multiplier": 0.4,
        },
    ),
    "cohere": ("Cohere", {**GQA, "logit_scale": 0.3}),
    "cohere2": ("Cohere2", {**GQA, **SLIDING, "logit_scale": 0.3}),
    "olmo2": ("Olmo2", GQA),
    "olmo3": ("Olmo3", {**GQA, **SLIDING}),
    "smollm3": ("SmolLM3", {**GQA, "no_rope_layers": [1, 0, 1]}),
    "stablelm": ("StableLm", GQA),
    "starcoder2": ("Starcoder2", {**GQA, "sliding_window": WINDOW}),
    "gpt_neo": ("GPTNeo", {"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "local"], 1]]}),
    "gpt_oss": (
        "GptOss",
        {
            **GQA, **SLIDING, **MOE, "num_local_experts": 4, "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}  # fmt: skip
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {  # families that native passes alone serve
    "qwen2_moe": ("Qwen2Moe", {**GQA, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "olmoe": ("Olmoe", {**GQA, "num_experts_per_tok": 2, "num_experts": 4}),
}
# Families that compute in float32, whatever their precision: softmax, whole attention, or router.
ROUNDS_TO_32 = {
    "gemma2": "softmax", "bloom": "softmax", "mpt": "softmax", "gpt_neo": "attention", "deepseek_v3": "router",
}  # fmt: skip

PROMPTS = [[(7 * i + 3) % VOCAB for i in range(13)], [5, 80, 33], [(11 * i) % VOCAB for i in range(1, 8)]]
# Per round: tokens and parents of each row's tree, and the node ids of the path it accepts (`tree_of` makes the tree).
ROUNDS = [
    {
        "tokens": [[9, 5, 6, 7, 8, 1, 2], [4, 60, 61], [70, 1, 2, 3, 4, 5]],
        "parents": [[0, 0, 1, 1, 0, 4, 5], [0, 0, 0], [0, 0, 0, 2, 2, 4]],
        "paths": [[0, 4, 5, 6], [0], [0, 2, 4]],
    },
    {
        "tokens": [[90, 3, 4], [8, 9, 10, 11, 12, 13, 14, 15], [44]],
        "parents": [[0, 0, 1], [0, 0, 1, 2, 3, 0, 5, 6], [0]],
        "paths": [[0, 1], [0, 5, 6, 7], [0]],
    },
]


def tree_of(tokens: Sequence[list[int]], parents: Sequence[list[int]]) -> DraftTree:
    """A ragged batch of rows without values."""
    return from_lists([(ids, ups, [0.0] * len(ids)) for ids, ups in zip(tokens, parents, strict=True)], values=False)


def config_of(name: str, **more: Any) -> Any:
    prefix, differing = {**ZOO, **NATIVE}[name]
    settings = {**BASE, **differing, **more}
    if prefix in ("Cohere2", "Qwen3Moe"):
        settings["pad_token_id"] = None
    if name == "gpt_neo":
        settings["window_size"] = WINDOW
    return getattr(transformers, f"{prefix}Config")(**settings)


def build(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A fresh random model; biases and norms are shaken too, so that none is idle."""
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config_of(name, **more), dtype=dtype).eval()
    if dtype == torch.float64 and getattr(model.config, "_experts_implementation", None):
        model.set_experts_implementation("batched_mm")  # the stock default, grouped_mm, knows no double precision
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tiny_llama(vocab: int, layers: int = 2, dtype: torch.dtype = torch.float64, seed: int = 3, **sizes: Any) -> Any:
    """A random Llama of width 16 whose texts have no end."""
    torch.manual_seed(seed)
    settings = {
        "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 96, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    config = LlamaConfig(vocab_size=vocab, num_hidden_layers=layers, **{**settings, **sizes})
    return LlamaForCausalLM(config).to(dtype).eval()


def noised(model: Any, share: float) -> Any:
    """A copy whose weights have noise of `share` of their standard deviation."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p) * share * p.std())
    return made


def saved(folder: Path, name: str, **more: Any) -> str:
    """The folder of a tiny random model in float32 with the demo's tokenizer."""
    build(name, torch.float32, vocab_size=4096, **more).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(str(files("outrider") / "demo" / "target" / file), folder)
    return str(folder)


@torch.no_grad()
def sequential(model: Any, text: Sequence[int], taps: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits [len, v] and features of one text, by the stock model over its own cache, one token at a time."""
    cache, logits, hidden = DynamicCache(config=model.config), [], []
    for at, token in enumerate(text):
        out = model(
            torch.tensor([[token]]), position_ids=torch.tensor([[at]]), **carrying(model, cache),
            output_hidden_states=bool(taps),
        )  # fmt: skip
        logits.append(out.logits[0, -1])
        hidden.append(out.hidden_states)
    return torch.stack(logits), {t: torch.stack([h[t][0, -1] for h in hidden]) for t in taps}
