"""Which of the target's tokens a drafter can draft, where it cannot draft all: stated by a draft model's config, or as
EAGLE-3's checkpoints do, by `d2t`: draft token i is the target's token i + d2t[i]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.types import Array
from ...params import InputError

DRAFT_VOCAB = "outrider_draft_vocab"  # of a draft model's config: token ids, ascending


def check_ids(ids: Array, vocab: int, name: str = "d2t (id i + d2t[i])") -> Array:
    """The ids, if they are tokens of a vocabulary of this size, each once; raises InputError, which says whose they
    are."""
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < len(ids):
        raise InputError(f"the draft tokens of {name} must be distinct token ids below {vocab}, and they are not")
    return ids


def ids_of(d2t: Array, vocab: int) -> Array:
    """The token id of every draft token. Raises InputError as `check_ids`."""
    return check_ids(d2t.astype(np.int64) + np.arange(len(d2t)), vocab)


def ids_in(config: Mapping[str, Any]) -> Array | None:
    """The tokens that a draft model's config says it drafts; None: all.

    Raises:
        InputError: what it names are not token ids of the model, each once.
    """
    named = config.get(DRAFT_VOCAB)
    if named is None:
        return None
    if not isinstance(named, list) or not named or not all(type(i) is int for i in named):
        raise InputError(f"{DRAFT_VOCAB} in a draft model's config is a list of token ids, and this is none")
    return check_ids(np.array(named), int(config["vocab_size"]), f"{DRAFT_VOCAB} in the model's config")
