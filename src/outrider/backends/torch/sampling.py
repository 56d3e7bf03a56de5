"""Logits to a distribution, in tensors of a device: temperature, filters, penalties and biases; drawing and ranking.

Everything is a pure batched function. The order is that of transformers: bias and penalties on the raw logits, then
temperature, top-k, top-p, min-p. The Gumbel-max form of sampling, `argmax(logits + T * G)`, needs no softmax and no
division by T, so that greedy decoding (T = 0) is the same formula without its second term.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.sampling import POOL, POOLED
from ...params import Sampling
from .tensors import TensorRows

History = Sequence[tuple[Sequence[int], Sequence[int]]]  # per row: the prompt's tokens, the output's tokens


def wide(logits: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Logits in float32 or wider."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def narrow(logits: Float[Tensor, "*s"], sampling: Sampling) -> Float[Tensor, "*s"]:
    """Logits [.., v] in float32 or wider, -inf where top-k, top-p or min-p exclude; not divided by T.

    The filters see logits / T, one after the other as in transformers (all equals of the k-th best stay).
    """
    x = wide(logits)
    if sampling.temperature == 0 or not sampling.warped:
        return x
    v = x.shape[-1]
    scores = (x / sampling.temperature).reshape(-1, v)
    gone = torch.zeros_like(scores, dtype=torch.bool)
    if sampling.top_k > 0:
        gone = scores < scores.topk(min(sampling.top_k, v)).values[:, -1:]
        scores = scores.masked_fill(gone, float("-inf"))
    if sampling.top_p < 1:
        drop = _outside_top_p(scores, sampling.top_p)
        scores, gone = scores.masked_fill(drop, float("-inf")), gone | drop
    if sampling.min_p > 0:
        p = scores.softmax(-1)
        gone = gone | (p < sampling.min_p * p.amax(-1, keepdim=True))
    return x.masked_fill(gone.view_as(x), float("-inf"))


def _outside_top_p(scores: Float[Tensor, "b v"], top_p: float) -> Bool[Tensor, "b v"]:
    """All but the smallest set of likeliest tokens that holds `top_p`, summed from below as transformers does."""
    ordered, index = scores.sort(descending=False)
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[:, -1] = False
    return drop.scatter(1, index, drop)


def distribution(logits: Float[Tensor, "*s"], sampling: Sampling) -> Float[Tensor, "*s"]:
    """Probabilities [.., v], float32 or wider: softmax(narrow(logits) / T), at T = 0 the one-hot of the argmax."""
    if sampling.temperature == 0:
        x = wide(logits)
        return torch.zeros_like(x).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return (narrow(logits, sampling) / sampling.temperature).softmax(-1)


def distributions(logits: Float[Tensor, "b v"], samplings: Sequence[Sampling]) -> Float[Tensor, "b v"]:
    """`distribution` of each row by its own sampling; rows of equal sampling at once."""
    made = torch.empty_like(wide(logits))
    for sampling, rows in _groups(samplings):
        made[rows] = distribution(logits[rows], sampling)
    return made


def _groups(samplings: Sequence[Sampling]) -> list[tuple[Sampling, list[int]]]:
    """The rows of each sampling there is."""
    groups: list[tuple[Sampling, list[int]]] = []
    for i, sampling in enumerate(samplings):
        for other, rows in groups:
            if other is sampling or other == sampling:
                rows.append(i)
                break
        else:
            groups.append((sampling, [i]))
    return groups


def penalise(
    logits: Float[Tensor, "b v"],
    samplings: Sequence[Sampling],
    history: History,
    path: Int[Tensor, "b d"] | None = None,
) -> Float[Tensor, "b v"]:
    """Logit bias, then repetition, presence and frequency penalties, for a node below `path`.

    `path` holds the tokens accepted below the root in this round; the root is the last token of `history` already.
    Repetition looks at prompt, output and path; presence and frequency at output and path alone.
    """
    x = wide(logits)
    if not any(s.penalised or s.logit_bias for s in samplings):
        return x
    tails = [[]] * len(x) if path is None else path.tolist()
    rows: list[int] = []  # the entries that change, of all rows, one row after another
    ids: list[int] = []
    counts: list[int] = []  # in output and path
    factors: list[float] = []
    for i, (sampling, (prompt, output), tail) in enumerate(zip(samplings, history, tails, strict=True)):
        said = Counter([*output, *tail]) if sampling.penalised else {}
        seen = {*prompt, *said} if sampling.penalised else set()
        touched = [*seen, *(token for token in sampling.logit_bias if token not in seen)]
        rows += [i] * len(touched)
        ids += touched
        counts += [said.get(token, 0) for token in touched]
        factors += [sampling.repetition_penalty] * len(seen) + [1.0] * (len(touched) - len(seen))
    row, where = (torch.tensor(t, dtype=torch.long, device=x.device) for t in (rows, ids))

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=x.dtype, device=x.device)

    z, count, factor = x[row, where], column(counts), column(factors)
    if any(s.logit_bias for s in samplings):
        z = z + column(samplings[i].logit_bias.get(token, 0.0) for i, token in zip(rows, ids, strict=True))
    z = torch.where(z < 0, z * factor, z / factor)
    presence, frequency = (
        column(getattr(s, f"{n}_penalty") for s in samplings)[row] for n in ("presence", "frequency")
    )
    return x.index_put((row, where), z - presence * (count > 0) - frequency * count)


def draw(
    logits: Float[Tensor, "b v"], samplings: Sequence[Sampling], noise: Float[Tensor, "b v"] | None
) -> Int[Tensor, " b"]:
    """One token per row: argmax(narrow(logits) + T * G), the lowest id among equals. `noise` may be None at T = 0."""
    groups = _groups(samplings)
    if len(groups) == 1:
        return _draw(logits, groups[0][0], noise)
    chosen = torch.empty(logits.shape[0], dtype=torch.long, device=logits.device)
    for sampling, rows in groups:
        chosen[rows] = _draw(logits[rows], sampling, None if noise is None else noise[rows])
    return chosen


def _draw(logits: Tensor, sampling: Sampling, noise: Tensor | None) -> Tensor:
    if sampling.temperature == 0:
        return logits.argmax(-1)
    assert noise is not None, "sampling needs noise"
    # Two operations on purpose: a fused multiply-add rounds differently in the vectorised body and in its tail, which
    # would make the result depend on where in the batch a row lies.
    scaled = noise * sampling.temperature
    return (narrow(logits, sampling) + scaled).argmax(-1)


def rank(
    logits: Float[Tensor, "b w v"],
    rows: TensorRows,
    depth: int | Int[Tensor, "b w"],
    k: int,
    scale: float = 1.0,
    pool: int = POOL,
    warp: bool = False,
    names: Int[Tensor, " v"] | None = None,
) -> tuple[Int[Tensor, "b w k"], Float[Tensor, "b w k"]]:
    """The k candidates [b, w, k] below each of w nodes, best first, and the logs of their confidences.

    Under `coupled` candidates are ranked by r = log q + T * G, with the noise G of absolute position
    `rows.position + depth` that the target's own choice there will use; elsewhere, and at T = 0, by log q (EAGLE-2).
    The confidence is softmax(r / scale). q is taken at temperature 1 and unfiltered, which is best for trees; `warp`
    applies the row's filters to q, which is best for chains. `depth` is that of the candidates, one for all nodes or
    one for each. Above 4,096 tokens only the `pool` best of q are raced. `names`: the token ids of the columns, where
    they are not 0 .. v - 1.
    """
    x = wide(logits)
    k = min(k, x.shape[-1])
    raced = rows.rule == "coupled" and rows.sampled
    if warp and any(s.warped for s in rows.sampling):
        x = torch.stack([narrow(z, s) for z, s in zip(x, rows.sampling, strict=True)])
    ids: Tensor | None = None
    if raced and x.shape[-1] > POOLED:
        x, ids = x.topk(min(max(pool, k), x.shape[-1]))
    if raced:
        if names is None or ids is not None:
            noise = _noise(rows, depth, ids if names is None or ids is None else names[ids])
        else:
            noise = _noise(rows, depth, None)[..., names]
        x = x + noise * rows.temperature.view(-1, 1, 1)
    top = x.topk(k)
    confidence = (x if scale == 1 else x / scale).log_softmax(-1).gather(-1, top.indices)
    chosen = top.indices if ids is None else ids.gather(-1, top.indices)
    return chosen if names is None else names[chosen], confidence


def _noise(rows: TensorRows, depth: int | Tensor, ids: Tensor | None) -> Tensor:
    """G of candidates at their depths: [b, 1, v] or [b, w, v], for `ids` [b, w, k] the same shape."""
    if isinstance(depth, int):
        return rows.noise(depth)[:, None] if ids is None else rows.noise(depth, ids)
    levels = depth.unique().tolist()
    which = torch.bucketize(depth, depth.new_tensor(levels))
    noise = torch.stack([rows.noise(d, ids) for d in levels])
    row = torch.arange(depth.shape[0], device=depth.device)[:, None]
    return noise[which, row] if ids is None else noise[which, row, torch.arange(depth.shape[1], device=depth.device)]
