"""Draft models of transformers: loading them beside a target, and their vocabularies."""

from __future__ import annotations

from typing import Any

from ..backends.torch import vocabulary
from ..backends.torch.hf import HFTarget
from ..backends.torch.seq2seq import SeqTarget
from ..core.protocols import Target
from ..params import InputError
from ._words import Same, check_names


def draft_model(where: str, target: Target, dtype: str, translated: bool) -> tuple[HFTarget | SeqTarget, Same]:
    """The model of this name as a draft model of torch, and its words if its
    tokenizer is the target's.

    Args:
        dtype: its precision; auto: the target's.
        translated: has it another tokenizer?

    Raises:
        InputError: it cannot draft for this target.
    """
    from ..backends.torch.load import load_target

    kind = target.precision if dtype == "auto" else dtype
    draft = load_target(where, dtype=kind, device=target.device, drafting=not translated)
    if isinstance(draft, SeqTarget) != isinstance(target, SeqTarget):
        raise InputError(f"{where} and the target are not of one kind: both must be encoder-decoder models, or neither")
    if translated:
        if not isinstance(draft, HFTarget):
            raise InputError("another tokenizer is for decoder-only models; leave vocab out")
        check_whole(draft.model, where)
        return draft, Same(draft.vocab, draft.vocab)
    return draft, same(draft.model, where, target)


def same(net: Any, where: str, target: Target) -> Same:
    """The words of a draft model that has the target's tokenizer, and perhaps a draft vocabulary."""
    ids = vocabulary.ids_named(net)
    if ids is None:
        return Same(int(net.get_output_embeddings().weight.shape[0]), target.vocab)
    names = ids.cpu().numpy()
    check_names(names, where, target.vocab, same=True)
    return Same(int(net.get_input_embeddings().weight.shape[0]), target.vocab, names)


def check_whole(net: Any, where: str) -> None:
    """Refuse a draft vocabulary where tokens are translated."""
    ids = vocabulary.ids_named(net)
    check_names(None if ids is None else ids.cpu().numpy(), where, 0, same=False)
