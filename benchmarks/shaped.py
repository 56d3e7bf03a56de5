"""Models with random weights in the shapes of Gemma 3 (270M), Phi-3 and gpt-oss, as .gguf files for `plain.py`.

    PYTHONPATH=tests/support python benchmarks/shaped.py runs/shaped
    python benchmarks/plain.py runs/shaped/*.gguf --llama llama/bin

What they write means nothing: only the time of their passes counts. Each has about 300 million weights: Gemma's mostly
in its embeddings of 262,144 tokens, gpt-oss' in sixteen experts of which a token meets four, in MXFP4.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SLIDES = "sliding_attention", "full_attention"
SHAPES: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # file -> configuration, architecture, kind, sizes
    "gemma3-270m-q8_0": (
        "Gemma3TextConfig", "gemma3", "Q8_0",
        {
            "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
            "sliding_window": 512, "layer_types": [SLIDES[i % 6 == 5] for i in range(18)],
        },
    ),
    "phi3-340m-q4_0": (
        "Phi3Config", "phi3", "Q4_0",
        {
            "vocab_size": 32064, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 16, "sliding_window": None,
        },
    ),
    "gpt-oss-390m-mxfp4": (
        "GptOssConfig", "gpt-oss", "MXFP4",
        {
            "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 6,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 16,
            "num_experts_per_tok": 4, "sliding_window": 128, "layer_types": [SLIDES[i % 2] for i in range(6)],
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
}  # fmt: skip
ALL = {"max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files are written")
    given = parser.parse_args()

    try:
        import torch
        import transformers
        from gguf_files import write  # of tests/support
    except ImportError as error:
        parser.error(f"{error}; run it in a clone after `make test`, with PYTHONPATH=tests/support")

    given.folder.mkdir(parents=True, exist_ok=True)
    for name, (config, architecture, kind, sizes) in SHAPES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**ALL, **sizes))
        file = write(given.folder / f"{name}.gguf", model, kind, architecture)
        print(f"{file}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million weights")


if __name__ == "__main__":
    main()
