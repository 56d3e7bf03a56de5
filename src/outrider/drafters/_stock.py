"""Draft models of transformers: how they are loaded beside a target, and what words they have."""

from __future__ import annotations

from typing import Any

import torch

from ..backends.torch import products, vocabulary
from ..backends.torch.hf import HFTarget
from ..backends.torch.seq2seq import SeqTarget
from ..core.protocols import Target
from ..params import InputError
from ._words import Same


def draft_model(where: str, target: Target, dtype: str, translated: bool) -> tuple[HFTarget | SeqTarget, Same]:
    """The model of this name as a draft model of torch, in the passes that the target has, and its words if its
    tokenizer is the target's.

    Args:
        dtype: its precision; auto: the target's.
        translated: has it another tokenizer?

    Raises:
        InputError: it cannot draft for this target.
    """
    from ..backends.torch.load import load_target

    kind = _precision(target) if dtype == "auto" else dtype
    native = None if target.code is not None else False
    draft = load_target(where, dtype=kind, device=target.device, native=native, drafting=not translated)
    if draft.dtype == torch.float32 and draft.code is None:
        products.halve(draft.model)
    if isinstance(draft, SeqTarget) != isinstance(target, SeqTarget):
        raise InputError(f"{where} and the target are not of one kind: both must be encoder-decoder models, or neither")
    if isinstance(draft, HFTarget) and isinstance(target, HFTarget) and target.graphs is not None:
        draft.compile(target.graphs.patience)
        if target.graphs.patience == 0:
            draft.warm()
    if translated:
        if not isinstance(draft, HFTarget):
            raise InputError("another tokenizer is for decoder-only models; leave vocab out")
        check_whole(draft.model, where)
        return draft, Same(draft.vocab, draft.vocab)
    return draft, same(draft.model, where, target)


def _precision(target: Target) -> str:
    """What a draft model is loaded in: the target's precision; or its own, where the target's passes compute in float32
    but read weights of 16 bits. (This processor has no 16-bit products then, so the draft model is loaded alike.)"""
    forward = target.native if isinstance(target, HFTarget) else None
    return target.precision if forward is None or forward.weights.dtype == forward.kept else "auto"


def same(net: Any, where: str, target: Target) -> Same:
    """The words of a draft model that has the target's tokenizer, and perhaps a draft vocabulary."""
    ids = vocabulary.ids_named(net)
    if ids is None:
        return Same(int(net.get_output_embeddings().weight.shape[0]), target.vocab)
    if int(ids.max()) >= target.vocab:
        raise InputError(f"{where} drafts token {int(ids.max())} and the target has {target.vocab}; use its own target")
    return Same(int(net.get_input_embeddings().weight.shape[0]), target.vocab, ids.cpu().numpy())


def check_whole(net: Any, where: str) -> None:
    """Refuse a draft vocabulary where tokens are translated: what it leaves out was never learned."""
    ids = vocabulary.ids_named(net)
    if ids is not None:
        raise InputError(f"{where} learned to draft {len(ids)} of its tokens, with its own tokenizer; leave vocab out")
