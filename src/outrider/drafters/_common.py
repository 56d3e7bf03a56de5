"""What the drafters share: reading options and corpora, the depth that is of use, forking the state of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.protocols import Round
from ..core.types import Budget, Rows
from ..params import InputError


def refuse(drafter: str, unknown: Mapping[str, Any], path: str | None = None) -> None:
    """Refuse options that a drafter does not have, and a path where none is read."""
    if unknown:
        raise InputError(f"the drafter {drafter} has no option {', '.join(sorted(unknown))}")
    if path is not None:
        raise InputError(f"the drafter {drafter} reads no file; leave out {path!r}")


def whole(name: str, value: Any, least: int = 1, most: int = 1 << 30) -> int:
    """An integer option within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        bounds = f"of at least {least}" if most == 1 << 30 else f"from {least} to {most}"
        raise InputError(f"{name} must be a whole number {bounds}, not {value!r}")
    return value


def flag(name: str, value: Any) -> bool:
    """A yes-or-no option."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {value!r}")
    return value


def corpus(drafter: str, path: str, tokenizer: Any) -> list[int]:
    """The tokens of a UTF-8 text file."""
    if tokenizer is None:
        raise InputError(f"{drafter}:{path} needs the target's tokenizer to read the corpus")
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"the corpus {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the corpus {path} is not UTF-8 text (byte {error.start}); convert it first") from None
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if not tokens:
        raise InputError(f"the corpus {path} is empty; give a file with text, or no file")
    return list(tokens)


def useful(rows: Rows, budget: Budget) -> list[int]:
    """How deep a draft may go in each row: within the budget, and leaving room for the target's own token."""
    depth = budget.depth if budget.nodes > 1 else 0
    return [max(0, min(depth, remaining - 1)) for remaining in rows.remaining]


def fitted(logits: Float[Tensor, "*s d"], vocab: int) -> Float[Tensor, "*s v"]:
    """Logits over the target's vocabulary: a drafter's padding rows are cut, tokens that it lacks are impossible."""
    missing = vocab - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits[..., :vocab]


def accepted(fed: Int[Tensor, "b n"], round: Round) -> tuple[Int[Tensor, "b k"], Int[Tensor, " b"]]:
    """The accepted path as places among the nodes that the drafter fed (`fed`: of each node, -1 for one that it did
    not feed), and how much of it, from the root on, it fed itself."""
    places = fed.gather(1, round.path.clamp(min=0)).masked_fill(round.path < 0, -1)
    inside = torch.arange(places.shape[1], device=places.device) < round.count[:, None]
    return places, ((places >= 0) & inside).long().cumprod(1).sum(1)


@runtime_checkable
class Forks(Protocol):
    """A state that can be copied for a row that is split."""

    def fork(self: S) -> S: ...


S = TypeVar("S", bound=Forks)


def selected(states: list[S], index: Sequence[int]) -> list[S]:
    """State i := old state index[i]. The first use moves it; repeats are forks that share nothing mutable."""
    seen: set[int] = set()
    out = []
    for i in index:
        out.append(states[i].fork() if i in seen else states[i])
        seen.add(i)
    return out
