"""What the tests of state-space drafters share: texts, a tiny target, and a node's path."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.backends.torch import load_target
from outrider.core.protocols import Target
from outrider.core.types import DraftTree

VOCAB = 47
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5]]


def small_target() -> Target:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return load_target(LlamaForCausalLM(config).double().eval())


def path(tree: DraftTree, row: int, node: int) -> list[int]:
    """The tokens from below the root down to a node."""
    out: list[int] = []
    while node:
        out.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return out
