"""Alignment passes: a network trained on what it will be fed (HASS section 3.2; EAGLE-3's training-time test).

Pass 1 reads the target's features. Pass j reads at position t the vector that pass j - 1 made at t - 1, as the j-th
step of a draft does, and sees what that step sees: keys and values of true features up to t - j + 1, and then, one
diagonal each, those of passes 2 .. j at t - j + 2 .. t.

    pass 3 at t sees     true: .. t-3 t-2 |   pass 2: t-1   |   pass 3: t

So a pass scores its queries against the true keys, and against one key of each later pass: j * m * m scores would be
mostly hidden (on the demo target seven passes take a fifth of the time this way).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ..data import STEP, Batch
from ..features import visible


@dataclass
class Passes:
    """Keys and values of the passes over one batch. On a CPU each document is computed by itself, so that nothing of
    what the others in its row would have seen is.

    Args:
        batch: packed rows.
        published: HASS's own code multiplies the scores of hidden true keys by 0 instead of hiding them, so that they
            still count.
    """

    batch: Batch
    published: bool = False
    keys: list[list[Tensor]] = field(default_factory=list)  # of every pass, those of each piece
    values: list[list[Tensor]] = field(default_factory=list)

    def attention(
        self, q: Float[Tensor, "b h m d"], k: Float[Tensor, "b g m d"], v: Float[Tensor, "b g m d"]
    ) -> Float[Tensor, "b m hd"]:
        """Attention of the next pass, whose own keys and values these are."""
        self.keys.append(self._pieces(k))
        self.values.append(self._pieces(v))
        made = [
            self._attend(part, [keys[i] for keys in self.keys], [values[i] for values in self.values])
            for i, part in enumerate(self._pieces(q))
        ]
        if self.lengths is None:
            return made[0]
        flat = torch.cat([one[0, :length] for one, length in zip(made, self.lengths, strict=True)])
        return flat.view(*self.batch.tokens.shape, -1)

    @cached_property
    def lengths(self) -> list[int] | None:
        """Of documents and of stretches of padding, in order; None: all rows are computed together."""
        if self.batch.tokens.device.type != "cpu":
            return None
        lengths: list[int] = []
        for row in self.batch.documents:
            lengths += row.unique_consecutive(return_counts=True)[1].tolist()
        return lengths

    def _pieces(self, x: Float[Tensor, "b heads m d"]) -> list[Float[Tensor, "p heads n d"]]:
        """Documents, filled up to multiples of STEP, so that products have few sizes (`sizes.py`)."""
        if self.lengths is None:
            return [x]
        parts = x.transpose(1, 2).flatten(0, 1).split(self.lengths)
        return [functional.pad(part.transpose(0, 1), (0, 0, 0, -len(part) % STEP))[None] for part in parts]

    def _attend(self, q: Float[Tensor, "b h m d"], keys: list[Tensor], values: list[Tensor]) -> Float[Tensor, "b m hd"]:
        """Of one piece, which the keys and values of all passes so far are of."""
        j, (b, h, m, d), g = len(keys), q.shape, keys[0].shape[1]
        q = q.reshape(b, g, h // g * m, d) / math.sqrt(d)  # heads of a group side by side: keys are not repeated
        place = torch.arange(m, device=q.device)
        known = (place[:, None] - place >= j - 1)[None, None, None]
        shown = (place[:, None] >= place)[None, None, None] if self.lengths else visible(self.batch)[:, None, None]
        scores = (q @ keys[0].transpose(2, 3)).view(b, g, h // g, m, m)
        if self.published:
            scores = scores * known
        scores = scores.masked_fill(~(shown if self.published else shown & known), -math.inf)
        own = [(q.view(b, g, h // g, m, d) * _behind(keys[i - 1], j - i)).sum(-1) for i in range(2, j + 1)]
        p = torch.cat([scores, torch.stack(own, -1)], -1) if own else scores
        p = p.softmax(-1, dtype=torch.promote_types(p.dtype, torch.float32)).to(q.dtype)
        out = (p[..., :m].reshape(b, g, h // g * m, m) @ values[0]).view(b, g, h // g, m, d)
        for i in range(2, j + 1):
            out = out + p[..., m + i - 2, None] * _behind(values[i - 1], j - i)
        return out.reshape(b, h, m, d).transpose(1, 2).flatten(2)


def _behind(x: Float[Tensor, "b g m d"], places: int) -> Float[Tensor, "b g 1 m d"]:
    """At t what was at t - places. What wraps around belongs to positions that no draft has (they are not learned)."""
    return x.roll(places, 2)[:, :, None]


def moved(made: Float[Tensor, "b m h"], true: Float[Tensor, "b m h"], positions: Int[Tensor, "b m"]) -> Tensor:
    """What the next pass reads: at t the vector made at t - 1; a text's first feature stays the true one."""
    before = torch.cat([true[:, :1], made[:, :-1]], 1)
    return torch.where((positions == 0)[..., None], true, before)
