"""Drawing from a filtered distribution over a large vocabulary without sorting it: `sampling.draw`'s token, faster.

`draw` sorts all scores and hashes noise for all tokens. Where a top-k, top-p or min-p filter applies, the token
drawn is one of a few likely ones. So the K largest scores are selected by blocks (the K largest lie in the K blocks
with the largest maxima), noise is hashed for them alone, and it is checked that this decides:

 * a token is surely kept, surely out, or in doubt, where a sum of probabilities lies within MARGIN of the filter's
   bound or equal scores straddle it (the float32 sums of `draw` and the order of its sort then decide);
 * all tokens beyond the K are surely out;
 * no token in doubt has a larger key than the winner.

Rows for which this fails are drawn by `draw`, so the results are always those of `draw`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...params import Sampling
from .sampling import draw, wide

Noise = Callable[[Sequence[int], Tensor | None], Tensor]  # (rows, ids [r, k] or None) -> G [r, k] or [r, v]

BLOCK = 64  # scores of a block
FEW, MANY = 64, 1024  # candidates tried first, and then
LARGE = 8192  # smaller vocabularies are sorted as they are
MARGIN = 1e-4  # of probabilities: rounding moves a float32 sum by some 1e-6


def choose(logits: Float[Tensor, "b v"], samplings: Sequence[Sampling], noise: Noise) -> Int[Tensor, " b"]:
    """One token per row, `sampling.draw`'s own: argmax(narrow(logits) + T * G), the lowest id among equals.

    Args:
        logits: after penalties; any float dtype.
        samplings: the distribution of each row.
        noise: G for some of the rows, for ids or for the whole vocabulary. It is not called for rows at T = 0.
    """
    hot = [i for i, s in enumerate(samplings) if s.temperature > 0]
    if not hot:
        return logits.argmax(-1)
    rest, v = hot, logits.shape[1]
    chosen = logits.argmax(-1) if len(hot) < len(samplings) else logits.new_zeros(len(samplings), dtype=torch.long)
    for k in (FEW, MANY) if v >= LARGE else ():
        fast = [i for i in rest if samplings[i].warped and samplings[i].top_k < k]
        if fast:
            index = torch.tensor(fast, device=logits.device)
            tokens, sure = among(logits[index], [samplings[i] for i in fast], lambda ids: noise(fast, ids), k)  # noqa: B023
            chosen[index] = torch.where(sure, tokens, chosen[index])
            done = {i for i, good in zip(fast, sure.tolist(), strict=True) if good}
            rest = [i for i in rest if i not in done]
    if rest:
        index = torch.tensor(rest, device=logits.device)
        chosen[index] = draw(logits[index], [samplings[i] for i in rest], noise(rest, None))
    return chosen


def among(
    logits: Float[Tensor, "b v"], samplings: Sequence[Sampling], noise: Callable[[Tensor], Tensor], k: int
) -> tuple[Int[Tensor, " b"], Tensor]:
    """Of the k largest scores of each row, the largest once Gumbel noise is added (all T > 0, top_k < k).

    Returns the tokens [b], and whether each is surely the one of `draw` [b].
    """
    x = wide(logits)
    scores = _scaled(x, samplings)
    top, ids = largest(scores, k)
    if top.shape[1] < k:  # all there are
        top, ids = (torch.nn.functional.pad(t, (0, k - t.shape[1]), value=f) for t, f in ((top, -math.inf), (ids, 0)))

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=x.device)[:, None]

    least = column([s.top_k - 1 for s in samplings]).long()
    bound = torch.where(least >= 0, top.gather(1, least.clamp(min=0)), -math.inf)  # all equals of the k-th best stay
    best = top[:, :1]
    weight = torch.where(top >= bound, (top - best).double().exp(), 0.0)
    everything = (scores - best).exp().sum(1, keepdim=True, dtype=torch.float64)
    share = weight / torch.where(least >= 0, weight.sum(1, keepdim=True), everything)
    # Of equal scores the sort's order decides: probability of what is larger, and of all before the last equal.
    sums = share.cumsum(1)
    down = -top
    first, last = torch.searchsorted(down, down), torch.searchsorted(down, down, right=True) - 1
    above, before = ((sums - share).gather(1, at) for at in (first, last))
    p, m = column([s.top_p if s.top_p < 1 else 2.0 for s in samplings]), column([s.min_p for s in samplings])
    ratio = (top - best).double().exp()
    out = (top < bound) | (above >= p + MARGIN) | (ratio < m * (1 - MARGIN))
    kept = (top >= bound) & (before < p - MARGIN) & (ratio >= m * (1 + MARGIN))
    kept[:, 0] |= (first[:, 0] == last[:, 0]) & (m[:, 0] < 1 - MARGIN)  # the likeliest token is never dropped
    keys = x.gather(1, ids) + noise(ids) * torch.tensor(
        [s.temperature for s in samplings], dtype=torch.float32, device=x.device
    ).to(x.dtype).view(-1, 1)
    won = keys.masked_fill(~kept, -math.inf).amax(1, keepdim=True)
    winner = ids.masked_fill(~(kept & (keys == won)), x.shape[1]).amin(1).clamp(max=x.shape[1] - 1)
    doubt = (~kept & ~out & (keys >= won)).any(1)
    return winner, out[:, -1] & ~doubt & won[:, 0].isfinite() & best[:, 0].isfinite()


def largest(scores: Float[Tensor, "b v"], k: int) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"]]:
    """The k largest scores of each row (all, where there are fewer), largest first, and their places."""
    b, v = scores.shape
    blocks = -(-v // BLOCK)
    if blocks <= 2 * k:
        top = scores.topk(min(k, v))
        return top.values, top.indices
    if v % BLOCK:
        scores = torch.nn.functional.pad(scores, (0, blocks * BLOCK - v), value=-math.inf)
    table = scores.view(b, blocks, BLOCK)
    chosen = table.amax(-1).topk(k).indices
    inside = table.gather(1, chosen[..., None].expand(-1, -1, BLOCK)).flatten(1)
    top = inside.topk(k)
    return top.values, (chosen.gather(1, top.indices // BLOCK) * BLOCK + top.indices % BLOCK).clamp(max=v - 1)


def _scaled(x: Float[Tensor, "b v"], samplings: Sequence[Sampling]) -> Float[Tensor, "b v"]:
    """x / T, divided by numbers as `narrow` does."""
    if len({s.temperature for s in samplings}) == 1:
        return x / samplings[0].temperature
    return torch.stack([row / s.temperature for row, s in zip(x, samplings, strict=True)])
