"""Tiny block drafters as the library `speculators` writes them, with what it computes: files for our tests.

    python -m venv env
    env/bin/pip install torch==2.13.0
    env/bin/pip install speculators==0.9.0
    env/bin/python tools/speculators_files.py tests/checkpoints/speculators

For each of DFlash, DFlash 2 and DSpark: the folder that `save_pretrained` writes, and in it answers.safetensors,
computed in float64 (norms and rotations in float32). KIND_causal has the same weights and text, and slots that see no
later slot: the library has no key for that, but its layers with a window are so, unless `sliding_window_non_causal`.
The window is wider than the text. The answers:

    features [s, 2 h], tokens [s]   a text: the target's hidden states side by side, and its tokens
    table, head [v, h]              the target's embedding and head
    anchors [a]                     the positions from which blocks are drafted
    above [a, B]                    the text's own token above each slot
    hidden, logits [a, B, ...]      normed states and logits of every slot, before the pair head
    scores [a, B, v]                logits with the pair head, below those tokens; DFlash 2: -inf beside its candidates
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

KINDS = {
    "dflash": ("DFlashDraftModel", {}),
    "dflash2": ("DFlash2DraftModel", {"selector_rank": 6, "selector_top_k": 5, "conv_group_size": 8}),
    "dspark": ("DSparkDraftModel", {"markov_rank": 6}),
}
LENGTH, ANCHORS, BLOCK, VOCAB, HIDDEN = 24, 3, 4, 61, 16
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 64}


def made(model: Any, more: dict[str, Any], causal: bool) -> Any:
    """A random drafter."""
    layer = Qwen3Config(
        hidden_size=HIDDEN, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=24,
        num_hidden_layers=2, vocab_size=VOCAB, max_position_embeddings=64, **(WINDOWS if causal else {}),
    )  # fmt: skip
    layer._attn_implementation = "eager"
    config = model.config_class(
        transformer_layer_config=layer, draft_vocab_size=VOCAB, block_size=BLOCK, mask_token_id=60,
        aux_hidden_state_layer_ids=[2, 5], **more, **({"sliding_window_non_causal": False} if causal else {}),
    )  # fmt: skip
    drafter = model(config).float().eval()
    for name, p in drafter.named_parameters():
        torch.nn.init.normal_(p, std=0.4, mean=1.0 if name.endswith("norm.weight") else 0.0)
    return drafter


def scores(drafter: Any, hidden: torch.Tensor, logits: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Logits with the pair head below the tokens `above`."""
    if hasattr(drafter, "candidate_selector"):
        chosen, result = drafter.candidate_selector.select(logits, hidden, above)
        return torch.full_like(logits, -torch.inf).scatter(-1, chosen, result)
    if hasattr(drafter, "markov_head"):
        return logits + drafter.markov_head.markov_w2(drafter.markov_head.prev_embeddings(above))
    return logits


@torch.no_grad()
def write(place: Path, kind: str, causal: bool) -> None:
    torch.manual_seed(sorted(KINDS).index(kind))
    name, more = KINDS[kind]
    drafter = made(getattr(import_module(f"speculators.models.{kind}"), name), more, causal)
    drafter.save_pretrained(place)
    drafter = drafter.double()
    features, tokens = torch.randn(1, LENGTH, 2 * HIDDEN).double(), torch.randint(0, VOCAB - 1, (1, LENGTH))
    ones, zeros = torch.ones(1, LENGTH), torch.zeros(1, LENGTH, dtype=torch.long)
    last = torch.randn(1, LENGTH, HIDDEN).double()
    hidden, logits, _, _, indices = drafter._backbone_forward(features, tokens, ones, last, zeros, max_anchors=ANCHORS)
    blocks = indices.view(ANCHORS, BLOCK)
    shift = 0 if drafter.config.sample_from_anchor else 1
    above = tokens[0][(blocks - shift).clamp(min=0).minimum(torch.tensor(LENGTH - 1))]
    hidden, logits = hidden.view(ANCHORS, BLOCK, -1), logits.view(ANCHORS, BLOCK, -1)
    answers = {
        "features": features[0], "tokens": tokens[0], "table": drafter.embed_tokens.weight, "anchors": blocks[:, 0],
        "hidden": hidden, "logits": logits, "above": above, "scores": scores(drafter, hidden, logits, above),
        "head": drafter.lm_head.weight,
    }  # fmt: skip
    (place / "config.py").unlink()  # the library's own code
    save_file({name: t.contiguous().clone() for name, t in answers.items()}, place / "answers.safetensors")
    print(place, sorted(f.name for f in place.iterdir()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the folders go")
    folder = parser.parse_args().folder
    for kind in KINDS:
        for end, causal in (("", False), ("_causal", True)):
            write(folder / (kind + end), kind, causal)


if __name__ == "__main__":
    main()
