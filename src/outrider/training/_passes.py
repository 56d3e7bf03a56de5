"""Alignment passes: a network trained on what it will be fed (HASS section 3.2; EAGLE-3's training-time test).

Pass 1 reads the target's features. Pass j reads at position t the vector that pass j - 1 made at t - 1, as the j-th
step of a draft does, and sees what that step sees: keys and values of true features up to t - j + 1, and then, one
diagonal each, those of passes 2 .. j at t - j + 2 .. t.

    pass 3 at t sees     true: .. t-3 t-2 |   pass 2: t-1   |   pass 3: t
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..nn import Store
from .features import additive


@dataclass
class Passes:
    """Keys, values and masks of the passes over one batch. `published`: HASS's own code multiplies the scores of hidden
    true keys by 0 instead of hiding them, so that they are still looked at."""

    seen: Bool[Tensor, "b m m"]
    dtype: torch.dtype = torch.float32
    published: bool = False
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def store(self, k: Float[Tensor, "b g m d"], v: Float[Tensor, "b g m d"]) -> tuple[Tensor, Tensor]:
        """Where a pass's keys and values go, and what it looks at."""
        self.keys.append(k)
        self.values.append(v)
        keys, values = list(self.keys), list(self.values)
        if self.published and len(keys) > 1:
            keys.append(torch.zeros_like(keys[0]))
            values.append(values[0])
        return torch.cat(keys, 2), torch.cat(values, 2)

    @property
    def next(self) -> tuple[Store, Float[Tensor, "b 1 m s"]]:
        """Store and mask of the next pass."""
        j, m = len(self.keys) + 1, self.seen.shape[1]
        place = torch.arange(m, device=self.seen.device)
        back = place[:, None] - place
        blocks = [self.seen & (back >= j - 1)]
        blocks += [self.seen & (back == j - i) for i in range(2, j + 1)]
        if self.published and j > 1:
            blocks.append(self.seen & (back < j - 1))
        return self.store, additive(torch.cat(blocks, 2), self.dtype)[:, None]


def moved(made: Float[Tensor, "b m h"], true: Float[Tensor, "b m h"], positions: Int[Tensor, "b m"]) -> Tensor:
    """What the next pass reads: at t the vector made at t - 1; a text's first feature stays the true one."""
    before = torch.cat([true[:, :1], made[:, :-1]], 1)
    return torch.where((positions == 0)[..., None], true, before)
