"""Alignment passes: training on the network's own outputs (HASS section 3.2; EAGLE-3's training-time test).

Pass 1 reads the target's features. Pass j reads at position t the output of pass j - 1 at t - 1, like the j-th step of
a draft, and attends to the same keys and values: of true features up to t - j + 1, and then, one diagonal each, of
passes 2 .. j at t - j + 2 .. t.

    pass 3 at t: keys of true features .. t-3 t-2 |   pass 2: t-1   |   pass 3: t

So queries are multiplied with the true keys and with one key of each later pass; j * m * m scores would be mostly
masked (on the demo target seven passes take a fifth of the time this way).
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
    """Keys and values of the passes over one batch. On a CPU documents are computed separately, which skips masked
    scores between documents of a row.

    Args:
        batch: packed rows.
        published: as in HASS's code, which multiplies the scores of masked true keys by 0 instead of masking them, so
            that they still count.
    """

    batch: Batch
    published: bool = False
    keys: list[list[Tensor]] = field(default_factory=list)  # by pass and piece
    values: list[list[Tensor]] = field(default_factory=list)

    def attention(
        self, q: Float[Tensor, "b h m d"], k: Float[Tensor, "b g m d"], v: Float[Tensor, "b g m d"]
    ) -> Float[Tensor, "b m hd"]:
        """Attention of the next pass with these keys and values."""
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
        """Lengths of documents and runs of padding, in order; None: all rows are computed together."""
        if self.batch.tokens.device.type != "cpu":
            return None
        lengths: list[int] = []
        for row in self.batch.documents:
            lengths += row.unique_consecutive(return_counts=True)[1].tolist()
        return lengths

    def _pieces(self, x: Float[Tensor, "b heads m d"]) -> list[Float[Tensor, "p heads n d"]]:
        """Documents padded to multiples of STEP, so that GEMMs have few sizes (`sizes.py`)."""
        if self.lengths is None:
            return [x]
        parts = x.transpose(1, 2).flatten(0, 1).split(self.lengths)
        return [functional.pad(part.transpose(0, 1), (0, 0, 0, -len(part) % STEP))[None] for part in parts]

    def _attend(self, q: Float[Tensor, "b h m d"], keys: list[Tensor], values: list[Tensor]) -> Float[Tensor, "b m hd"]:
        """Attention of one piece, with its keys and values of all passes so far."""
        j, (b, h, m, d), g = len(keys), q.shape, keys[0].shape[1]
        q = q.reshape(b, g, h // g * m, d) / math.sqrt(d)  # heads of a group as rows: keys are not repeated
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
    """Shift by `places`. What wraps around is at positions without a draft, which have no loss."""
    return x.roll(places, 2)[:, :, None]


def moved(made: Float[Tensor, "b m h"], true: Float[Tensor, "b m h"], positions: Int[Tensor, "b m"]) -> Tensor:
    """The inputs of the next pass: at t the output at t - 1; a text's first feature stays the true one."""
    before = torch.cat([true[:, :1], made[:, :-1]], 1)
    return torch.where((positions == 0)[..., None], true, before)
