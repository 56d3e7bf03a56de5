"""A trimmed draft vocabulary: the tokens that a drafter can draft, fewer than its target has.

A network that has one keeps `d2t`, a whole number for each draft token, as EAGLE-3's checkpoints do: draft token i is
the target's token i + d2t[i]. A token outside is written by the target all the same, it is only never drafted; so every
rule stays as exact as it was.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from ..params import InputError


def check_size(draft_vocab: int, vocab: int, least: int = 1) -> None:
    """Refuse a size that is none."""
    if not least <= draft_vocab <= vocab:
        raise InputError(f"the draft vocabulary holds {least} to {vocab} tokens, not {draft_vocab}")


def ids_of(d2t: Int[Tensor, " vd"]) -> Int[Tensor, " vd"]:
    """The target's token id of every draft token."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def keep(d2t: Int[Tensor, " vd"], tokens: Int[Tensor, " vd"]) -> None:
    """Write into a network's `d2t` that these are its draft tokens."""
    d2t.copy_(tokens.to(d2t.device) - torch.arange(len(tokens), device=d2t.device))


def check_ids(ids: Int[Tensor, " vd"], vocab: int) -> None:
    """Refuse ids that are not tokens of the target, each once."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < len(ids):
        raise InputError("d2t must give every draft token a token id of its own (id = i + d2t[i]); this one does not")


def places_of(ids: Int[Tensor, " vd"], vocab: int) -> Int[Tensor, " v"]:
    """The draft token of every token of the target; -1 where there is none."""
    places = torch.full((vocab,), -1, dtype=torch.long, device=ids.device)
    places[ids] = torch.arange(len(ids), device=ids.device)
    return places
