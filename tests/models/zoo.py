"""One tiny random model per family: two layers, width 32, weights large enough that every mistake shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

VOCAB, CONTEXT = 61, 160
BASE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.25, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
WINDOW = 7  # shorter than the texts of the tests
HALF = ["sliding_attention", "full_attention"]


def _of(name: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        fields = {**BASE, **more}
        for key in [k for k, v in fields.items() if v is None]:
            del fields[key]
        kind = getattr(hf, f"{name}ForCausalLM", None) or getattr(hf, name)
        return kind, kind.config_class(**fields)

    return make


NO_KV = dict(num_key_value_heads=None)
ZOO: dict[str, Callable[[], Any]] = {
    "llama": _of("Llama"),
    "llama-tied": _of("Llama", tie_word_embeddings=True, num_key_value_heads=4),
    "qwen2": _of("Qwen2"),
    "qwen2-window": _of("Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": _of("Qwen3", head_dim=8),
    "mistral": _of("Mistral", sliding_window=WINDOW),
    "mixtral": _of("Mixtral", num_local_experts=4, sliding_window=WINDOW),
    "qwen3-moe": _of("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8),
    "gpt-neox": _of("GPTNeoX", **NO_KV),
    "gpt2": _of(
        "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, hidden_size=None, intermediate_size=None,
        num_hidden_layers=None, num_attention_heads=None, max_position_embeddings=None, num_key_value_heads=None,
    ),
    "gemma": _of("Gemma", head_dim=8),
    "gemma2": _of("Gemma2", head_dim=8, sliding_window=WINDOW, layer_types=HALF, query_pre_attn_scalar=8),
    "gemma3": _of("Gemma3", head_dim=8, sliding_window=WINDOW, layer_types=HALF, query_pre_attn_scalar=8),
    "phi": _of("Phi"),
    "phi3": _of("Phi3", sliding_window=WINDOW),
    "opt": _of("OPT", ffn_dim=48, word_embed_proj_dim=16, init_std=0.25, **NO_KV),
    "bloom": _of("Bloom", n_layer=2, n_head=4, seq_length=CONTEXT, num_hidden_layers=None, num_attention_heads=None),
    "falcon": _of("Falcon", alibi=False, new_decoder_architecture=False, multi_query=True, **NO_KV),
    "falcon-alibi": _of("Falcon", alibi=True, new_decoder_architecture=False, multi_query=False, **NO_KV),
    "mpt": _of(
        "Mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=CONTEXT, hidden_size=None, num_hidden_layers=None,
        num_attention_heads=None, num_key_value_heads=None,
    ),
    "gpt-neo": _of(
        "GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4, window_size=WINDOW,
        num_hidden_layers=None, num_attention_heads=None, num_key_value_heads=None,
    ),
    "deepseek-v3": _of(
        "DeepseekV3", n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=24, n_group=2,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=12, num_key_value_heads=4,
    ),
    "granite": _of(
        "Granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2
    ),
    "cohere": _of("Cohere", logit_scale=0.3),
    "cohere2": _of("Cohere2", sliding_window=WINDOW, layer_types=HALF, logit_scale=0.3),
    "olmo2": _of("Olmo2"),
    "olmo3": _of("Olmo3", sliding_window=WINDOW, layer_types=HALF),
    "smollm3": _of("SmolLM3"),
    "starcoder2": _of("Starcoder2", sliding_window=WINDOW),
    "stablelm": _of("StableLm"),
    "gpt-oss": _of("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=WINDOW, layer_types=HALF),
}  # fmt: skip
ROUGH = {"gemma2", "gpt-oss", "bloom", "mpt", "gpt-neo"}  # their stock attention computes its softmax in float32


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 3, **extra: Any) -> Any:
    """A model of the zoo. Norms, biases and soft spots are noised too: ones and zeros hide mistakes."""
    kind, config = ZOO[name]()
    torch.manual_seed(seed)
    model = kind._from_config(config, **extra) if extra else kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()
