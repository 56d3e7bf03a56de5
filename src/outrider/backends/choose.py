"""Which backend serves a model: the native one where it can, else torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from ..core.protocols import Target
from ..names import Place, find


@dataclass(frozen=True)
class Loaded:
    """A model, ready to decode."""

    target: Target
    tokenizer: Any  # None for a model in memory that came from nowhere
    eos: frozenset[int]  # every token that ends a text
    name: str
    place: Place | None  # None: it was in memory


def load(
    model: Any,
    *,
    dtype: str = "auto",
    device: str = "auto",
    exact: str = "auto",
    weights: str = "full",
    trust_remote_code: bool = False,
    compile: bool | None = None,
    **options: Any,
) -> Loaded:
    """The target of a name, or of a transformers model in memory; arguments and errors are those of `outrider.load`."""
    place = None if in_memory(model) else find(model)
    from .torch.load import eos_of, load_target, load_tokenizer, name_of, record

    target = load_target(
        place or model, dtype=dtype, device=device, trust_remote_code=trust_remote_code, exact=exact, weights=weights,
        native=False if compile is False else None, **options,
    )  # fmt: skip
    record(target, compile, place is not None)
    tokenizer = load_tokenizer(place or name_of(target.model), trust_remote_code)
    name = str(place or name_of(target.model) or type(target.model).__name__)
    return Loaded(target, tokenizer, eos_of(target.model, tokenizer), name, place)


def in_memory(model: Any) -> bool:
    """Is this a transformers model? None is where transformers was never imported."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)
