"""A trimmed draft vocabulary: the tokens that a drafter can draft, fewer than its target has.

A network that has one keeps `d2t`, a whole number for each draft token, as EAGLE-3's checkpoints do: draft token i is
the target's token i + d2t[i]. A token outside is written by the target all the same, it is only never drafted; so every
rule stays as exact as it was.

A draft model is a stock model with all tokens; its config names those that it was trained to draft (`DRAFT_VOCAB`), and
only their rows of its head are kept where it drafts.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..native import draft_vocab


def ids_of(d2t: Int[Tensor, " vd"]) -> Int[Tensor, " vd"]:
    """The target's token id of every draft token."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def keep(d2t: Int[Tensor, " vd"], tokens: Int[Tensor, " vd"]) -> None:
    """Write into a network's `d2t` that these are its draft tokens."""
    d2t.copy_(tokens.to(d2t.device) - torch.arange(len(tokens), device=d2t.device))


def check_ids(ids: Int[Tensor, " vd"], vocab: int) -> None:
    """Refuse ids that are not tokens of the target, each once."""
    draft_vocab.check_ids(ids.cpu().numpy(), vocab)


def places_of(ids: Int[Tensor, " vd"], vocab: int) -> Int[Tensor, " v"]:
    """The draft token of every token of the target; -1 where there is none."""
    places = torch.full((vocab,), -1, dtype=torch.long, device=ids.device)
    places[ids] = torch.arange(len(ids), device=ids.device)
    return places


def ids_named(net: Any) -> Int[Tensor, " vd"] | None:
    """The tokens that a draft model's config names, on the model's device; None where it drafts all.

    Raises:
        InputError: what it names are not token ids of the model, each once.
    """
    ids = draft_vocab.ids_in(net.config.to_dict())
    return None if ids is None else torch.from_numpy(ids).to(net.device)


def cut(net: Any) -> Int[Tensor, " vd"] | None:
    """Cut a draft model's head to the rows of the tokens that its config names, and return these; None: all stay."""
    ids = ids_named(net)
    if ids is not None:
        head = net.get_output_embeddings()
        with torch.no_grad():
            few = nn.Linear(head.in_features, len(ids), bias=False, device=head.weight.device, dtype=head.weight.dtype)
            few.weight.copy_(head.weight[ids])
        net.config.tie_word_embeddings = False
        net.set_output_embeddings(few.requires_grad_(False))
    return ids
