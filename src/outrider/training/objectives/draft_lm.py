"""A small Llama as draft model, trained in stages (`_language.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from ...backends.torch import HFTarget
from ...params import InputError
from ..data import Document, trimmed
from ._language import OPTIMISER as OPTIMISER
from ._language import LanguageObjective, objective, special_tokens, unusual

FIELDS = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}


def build(
    target: HFTarget,
    documents: Sequence[Document] = (),
    hidden: int = 192,
    layers: int = 2,
    heads: int = 3,
    stage: str = "pretrain",
    loss: str = "forward-kl",
    init: str = "",
    draft_vocab: int = 0,
) -> LanguageObjective:
    """A Llama with `layers` of size `hidden` and `heads` attention heads. `stage` pretrain, sft or distil; `loss` of
    distil: forward-kl, reverse-kl or tv; `init`: the folder to start from, which decides the shape; `draft_vocab`: size
    of the draft vocabulary (0: all).
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if heads < 1 or hidden % heads or hidden // heads % 2:
        raise InputError(f"{heads} heads do not divide the hidden size {hidden} into even sizes; give another number")
    config = LlamaConfig(
        **special_tokens(target), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=8 * hidden // 3 // 8 * 8, max_position_embeddings=target.context,
        tie_word_embeddings=True,
    )  # fmt: skip
    few = trimmed(documents, target.vocab, draft_vocab)
    shape = unusual(build, FIELDS, {"hidden": hidden, "layers": layers, "heads": heads})
    return objective(target, lambda: LlamaForCausalLM(config), stage, loss, init, ("llama",), few, shape)
