"""Exact laws of the rejection rules: every branch of their own functions on tiny vocabularies, in float64.

Every draft that can be drawn, times every script of answers to the rule's questions, is one row of one batch. A row's
weight is the probability of its draft and of its answers, and the rule's last draw is kept as a law.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ..backends.torch import sampling, verify
from ..backends.torch.tensors import TensorTree
from ..backends.torch.verify import TensorVerdict
from ..core.tree import from_template, template
from ..params import Sampling

Text = tuple[int, ...]


@dataclass(frozen=True)
class Exact:
    """The total variation between what a rule writes and plain decoding."""

    rule: str
    draft: str
    tv: float

    def counts(self, rule: str) -> bool:
        """Is this part of what a user of `rule` runs? (`block` judges by `rejection` what is no chain.)"""
        return self.rule == rule or (self.rule == "rejection" and rule == "block")


class Every:
    """A Chance that answers by script. All scripts in one batch, with the weight each gathers, are the exact law."""

    def __init__(self, script: Bool[Tensor, "b n"]):
        self.script, self.asked = script, torch.zeros_like(script)
        # A decision that is never asked splits its row in two halves.
        self.weight = torch.full((len(script),), 0.5 ** (script.shape[1] - 1), dtype=torch.float64)
        self.next: Tensor | None = None

    def accept(self, prob: Float64[Tensor, " b"], index: Int[Tensor, " b"], of: int) -> Bool[Tensor, " b"]:
        row, real = torch.arange(len(prob)), index > 0  # number 0 is the root: nothing is asked
        assert of == self.script.shape[1]
        assert not bool((self.asked[row, index] & real).any()), "each is asked once"
        self.asked[row, index] = True
        yes = self.script[row, index] & real
        self.weight = self.weight * torch.where(real, 2 * torch.where(yes, prob, 1 - prob), 1.0)
        return yes

    def draw(self, weights: Float64[Tensor, "b v"]) -> Int[Tensor, " b"]:
        self.next = weights / weights.sum(-1, keepdim=True)
        return weights.argmax(-1)


def exact(seed: int = 0, v: int = 3) -> tuple[Exact, ...]:
    """The total variation between each rule's text and plain decoding, the worst of several tiny models and laws."""
    cases = [("rejection", "sampled chain", (1, 1, 1)), ("rejection", "sampled tree", (2, 2)),
             ("rejection", "sampled tree, with replacement", (2, 2)), ("rejection", "deterministic tree", (2, 2)),
             ("block", "sampled chain", (1, 1, 1)), ("block", "deterministic chain", (1, 1, 1)),
             ("typical", "deterministic tree", (2, 2))]  # fmt: skip
    laws = (Sampling(1.0), Sampling(0.7, top_p=0.9))  # the second with zeros in p and q too
    out = []
    for rule, draft, shape in cases:
        found = [_bias(rule, draft, shape, v, seed + i, law, i > 0) for i, law in enumerate(laws)]
        out.append(Exact(rule, draft, max(found)))
    return tuple(out)


def _bias(rule: str, draft: str, shape: tuple[int, ...], v: int, seed: int, law: Sampling, zeros: bool) -> float:
    g = torch.Generator().manual_seed(seed)
    texts = [t for n in range(len(shape) + 1) for t in product(range(v), repeat=n)]
    raw = 1.2 * torch.randn(2, len(texts), v, generator=g, dtype=torch.float64)
    if zeros:
        gone = torch.rand(raw.shape, generator=g) < 0.3
        raw = raw.masked_fill(
            gone & (torch.arange(v) != torch.randint(v, (*raw.shape[:2], 1), generator=g)), -torch.inf
        )
    target, p, q = (dict(zip(texts, rows, strict=True)) for rows in (raw[0], *sampling.law(raw, law).tolist()))
    parents, replacement = template(shape), "with" in draft
    drafts = []
    for spelled in product(range(v), repeat=len(parents) - 1):
        told: list[Text] = [()]
        weight = 1.0
        for i, (token, parent) in enumerate(zip(spelled, parents[1:], strict=True), 1):
            before = [spelled[j - 1] for j in range(1, i) if parents[j] == parent]
            weight *= _chance(q[told[parent]], token, before, replacement, "deterministic" in draft)
            told.append((*told[parent], token))
        if weight > 0:
            drafts.append((spelled, weight, told))
    scripts = torch.tensor([(False, *s) for s in product((False, True), repeat=len(parents) - 1)])
    n, k = len(drafts), len(scripts)
    laws = torch.tensor([[q[t] for t in told[: max(parents) + 1]] for _, _, told in drafts], dtype=torch.float64)
    tokens = np.repeat(np.array([draft[0] for draft in drafts], np.int64), k, 0)
    tree = TensorTree.of(from_template([0] * (n * k), tokens, parents))
    tree = replace(tree, q=None if "deterministic" in draft else laws.repeat_interleave(k, 0), replacement=replacement)
    logits = torch.stack([torch.stack([target[t] for t in told]) for _, _, told in drafts]).repeat_interleave(k, 0)
    every = Every(scripts.repeat(n, 1))
    verdict = _verdict(rule, tree, logits, lambda x, depth, path: sampling.law(x, law), every, len(shape))
    last = torch.nn.functional.one_hot(verdict.next, v).double() if every.next is None else every.next
    mass = every.weight * torch.tensor([w for _, w, _ in drafts], dtype=torch.float64).repeat_interleave(k)
    found: dict[Text, float] = defaultdict(float)
    for text, weights in _by_text(tree, verdict, mass[:, None] * last):
        _spread(found, text, weights, p, len(shape) + 1)
    right: dict[Text, float] = defaultdict(float)
    _spread(right, (), p[()], p, len(shape) + 1)
    return 0.5 * sum(abs(found[t] - right[t]) for t in product(range(v), repeat=len(shape) + 1))


def _by_text(
    tree: TensorTree, verdict: TensorVerdict, weights: Float64[Tensor, "b v"]
) -> Iterator[tuple[Text, list[float]]]:
    """The accepted texts, and the summed weights of the token after each."""
    base, code = weights.shape[1] + 1, torch.zeros_like(verdict.count)
    for d, token in enumerate(tree.tokens.gather(1, verdict.path)[:, 1:].unbind(1), 1):
        code = torch.where(d < verdict.count, code * base + token + 1, code)
    codes, which = code.unique(return_inverse=True)
    sums = weights.new_zeros(len(codes), weights.shape[1]).index_add(0, which, weights)
    for number, row in zip(codes.tolist(), sums.tolist(), strict=True):
        text: Text = ()
        while number:
            number, digit = divmod(number, base)
            text = (digit - 1, *text)
        yield text, row


def _chance(q: list[float], token: int, before: list[int], replacement: bool, best: bool) -> float:
    """With what probability a child is `token`, after its elder siblings."""
    if best:
        return float(token == sorted(range(len(q)), key=lambda x: -q[x])[len(before)])
    free = [1.0 if replacement or x not in before else 0.0 for x in range(len(q))]
    left = [a * b for a, b in zip(q, free, strict=True)]
    left = left if sum(left) > 0 else free  # where q has run out any token will do that is no sibling's
    return left[token] / sum(left)


def _spread(
    found: dict[Text, float], text: Text, next: Sequence[float], p: dict[Text, list[float]], length: int
) -> None:
    """Add a text's law, continued by plain decoding, to what was found."""
    for token, weight in enumerate(next):
        longer = (*text, token)
        if weight and len(longer) == length:
            found[longer] += weight
        elif weight:
            _spread(found, longer, [weight * x for x in p[longer]], p, length)


def _verdict(
    rule: str, tree: TensorTree, logits: Float[Tensor, "b n v"], law: verify.Law, chance: Every, depth: int
) -> TensorVerdict:
    if rule == "typical":
        return verify.typical(tree, logits, law, depth=depth)
    return (verify.block if rule == "block" else verify.rejection)(tree, logits, law, chance, depth)
