"""A Mamba as drafter (Choi et al. 2025), trained in stages (`_language.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...backends.torch import HFTarget
from ...nets import mamba as ssm
from ...params import InputError
from ..data import Document, trimmed
from ._language import OPTIMISER as OPTIMISER
from ._language import LanguageObjective, objective, special_tokens, unusual

FIELDS = {
    "kind": "model_type", "hidden": "hidden_size", "layers": "num_hidden_layers", "state": "state_size",
    "head": "head_dim",
}  # fmt: skip


def build(
    target: HFTarget,
    documents: Sequence[Document] = (),
    kind: str = "mamba2",
    hidden: int = 192,
    layers: int = 4,
    state: int = 0,
    head: int = 32,
    stage: str = "pretrain",
    loss: str = "forward-kl",
    init: str = "",
    draft_vocab: int = 0,
) -> LanguageObjective:
    """A Mamba or Mamba-2 (`kind` mamba, mamba2) with `layers` of size `hidden`. `state`: state size per channel (0: 16
    and 64); `head`: channels per head (mamba2). `stage` pretrain, sft or distil; `loss` of distil: forward-kl,
    reverse-kl or tv; `init`: the folder to start from, which decides the shape; `draft_vocab`: size of the draft
    vocabulary (0: all).
    """
    from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

    if kind not in ssm.KINDS:
        raise InputError(f"the kind of a state-space drafter is {' or '.join(ssm.KINDS)}, not {kind!r}")
    shared = {**special_tokens(target), "hidden_size": hidden, "num_hidden_layers": layers, "residual_in_fp32": True}

    def fresh() -> Any:
        if kind == "mamba":
            return MambaForCausalLM(MambaConfig(**shared, state_size=state or 16, initializer_range=0.02))
        if head < 1 or 2 * hidden % head:
            raise InputError(f"heads of {head} channels do not divide {2 * hidden} channels; give another head")
        config = Mamba2Config(
            **shared, state_size=state or 64, head_dim=head, num_heads=2 * hidden // head, n_groups=1,
            initializer_range=0.02, tie_word_embeddings=True,
        )  # fmt: skip
        return Mamba2ForCausalLM(config)

    given = {"kind": kind, "hidden": hidden, "layers": layers, "state": state, "head": head}
    shape = unusual(build, FIELDS, given)
    few = trimmed(documents, target.vocab, draft_vocab)
    return objective(target, fresh, stage, loss, init, ssm.KINDS, few, shape)
