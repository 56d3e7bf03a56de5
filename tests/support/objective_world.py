"""A tiny target, packed rows made by hand, and the slow, obvious references that objectives are held against.

They are loops over positions and lists of keys, one text at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from small import tiny_llama
from torch import Tensor
from torch.nn import functional

from outrider.backends.torch import HFTarget
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.core.types import Usage
from outrider.engine import Batch as Rows
from outrider.engine import Engine, Request, Row, generate
from outrider.nets.layer import Layer
from outrider.params import Sampling
from outrider.training import objectives
from outrider.training.data import Batch, Document
from outrider.training.features import see

VOCAB = 61
ROWS = [[9, 5], [11], [3, 6, 2]]  # lengths of texts, row by row


def target(dtype: torch.dtype = torch.float64, seed: int = 0, **other: Any) -> HFTarget:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {**sizes, "initializer_range": 0.2, "pad_token_id": None, **other}
    return HFTarget(tiny_llama(VOCAB, 4, dtype, seed, **more))


def sharp() -> HFTarget:
    """A target in float32 whose distributions are far from uniform, and whose texts do not loop at once."""
    of = target(torch.float32, 4)
    with torch.no_grad():
        of.model.get_output_embeddings().weight.mul_(5)
    return of


Text = tuple[list[int], list[bool]]  # tokens, and which are learned


def texts(seed: int, sizes: Sequence[int]) -> list[Text]:
    """Random texts; about two thirds of their tokens are learned, in turns."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        tokens = torch.randint(VOCAB, (size,), generator=g).tolist()
        made.append((tokens, [(i // 2) % 3 != 1 for i in range(size)]))
    return made


def packed(rows: Sequence[Sequence[Text]], width: int = 0) -> Batch:
    """Rows of texts, one after the other, padded."""
    width = max([width, *(sum(len(t) for t, _ in row) for row in rows)])
    tokens, positions = torch.zeros(len(rows), width).long(), torch.zeros(len(rows), width).long()
    documents, learn = torch.full((len(rows), width), -1), torch.zeros(len(rows), width, dtype=torch.bool)
    for r, row in enumerate(rows):
        at = 0
        for number, (words, marks) in enumerate(row):
            for i, (word, mark) in enumerate(zip(words, marks, strict=True)):
                tokens[r, at], positions[r, at], documents[r, at], learn[r, at] = word, i, number, mark
                at += 1
    return Batch(tokens, positions, documents, learn, tuple(range(len(rows))))


def build(name: str, of: HFTarget, words: Sequence[int] = (), **options: Any) -> Any:
    """A fresh objective; `words`: the text from which a draft vocabulary is chosen."""
    torch.manual_seed(1)
    document = Document(tuple(words), (True,) * len(words), "x")
    return objectives.build(name, of, [document], options).to(of.dtype)


def equals_loops(
    of: HFTarget, objective: Any, rows: Sequence[Sequence[Text]], slow: Callable[..., tuple[float, float]],
    passes: int = 1,
) -> None:  # fmt: skip
    """The loss of packed rows is the sum of `slow(of, objective, tokens, learned)` over their texts, and of the
    objective's own losses of each text alone; so are the weights, which `slow` counts in every pass."""
    with torch.no_grad():
        loss, weight, _ = value(objective, of, packed(rows, 16))
        texts = [text for row in rows for text in row]
        expected = [slow(of, objective, *text) for text in texts]
        alone = [value(objective, of, packed([[text]])) for text, (_, w) in zip(texts, expected, strict=True) if w]
    assert float(weight) == pytest.approx(sum(float(w) for _, w, _ in alone))
    assert float(weight) * passes == pytest.approx(sum(w for _, w in expected))
    assert float(loss) == pytest.approx(sum(total for total, _ in expected), rel=2e-5)
    assert float(loss) == pytest.approx(sum(float(total) for total, _, _ in alone), rel=1e-6)


def normed(x: Tensor, by: Any) -> Tensor:
    """RMSNorm of one vector."""
    return x / (x.pow(2).mean() + by.eps).sqrt() * by.weight


def opened(of: HFTarget, drafter: Any, prompt: list[int], depth: int) -> Any:
    """A batch of one row that has read its prompt."""
    engine = Engine(of, drafter, FixedBudget(8, depth), GumbelNoise(of.vocab))
    with torch.no_grad():
        batch, _ = Rows.start(engine, [Row(Request(prompt, 0, 30, Sampling()), 0)])
    return batch


def states(of: HFTarget, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """The stock model's hidden states of one text."""
    with torch.no_grad():
        out = of.model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return tuple(s[0] for s in out.hidden_states)


def value(objective: Any, of: HFTarget, batch: Batch, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    with torch.no_grad():
        return objective(batch, see(of, batch, objective.taps), step)


def cross_entropy(student: Tensor, p: Tensor) -> Tensor:
    """-sum p log q of two vectors, one term after the other."""
    log_q, total = student.log_softmax(-1), torch.zeros((), dtype=student.dtype)
    for i in range(len(p)):
        total = total - p[i] * log_q[i]
    return total


def smooth_l1(a: Tensor, b: Tensor, beta: float = 1.0) -> Tensor:
    terms = []
    for d in (a - b).tolist():
        terms.append(d * d / (2 * beta) if abs(d) < beta else abs(d) - beta / 2)
    return torch.tensor(sum(terms) / len(terms), dtype=a.dtype)


def rotated(x: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    """Rotary position of one head's vector: pairs (i, i + d/2) turned by position * theta^(-2i/d)."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / len(x)), dtype=torch.float32)  # as the tables are made
        c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return out


class SlowLayer:
    """The decoder layer for one token at a time: whom it sees is a list."""

    def __init__(self, layer: Layer):
        self.layer, self.shape = layer, layer.shape

    def _heads(self, projection: Any, x: Tensor) -> list[Tensor]:
        return list(projection(x).view(-1, self.shape.head_dim))

    def key(self, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of one token, by key head."""
        a = self.layer.self_attn
        return [rotated(k, position) for k in self._heads(a.k_proj, x)], self._heads(a.v_proj, x)

    def out(self, x: Tensor, residual: Tensor, position: int, seen: list[Any], blank: list[Any]) -> Tensor:
        """`seen`: keys and values it looks at. `blank`: those whose score is 0, whatever their key."""
        shape, heads = self.shape, []
        for number, q in enumerate(self._heads(self.layer.self_attn.q_proj, x)):
            q, group = rotated(q, position), number // (shape.heads // shape.kv_heads)
            scores = [q @ k[group] / math.sqrt(shape.head_dim) for k, _ in seen] + [
                torch.zeros((), dtype=q.dtype)
            ] * len(blank)
            p = torch.stack(scores).softmax(0)
            values = [v[group] for _, v in [*seen, *blank]]
            heads.append(sum(w * v for w, v in zip(p, values, strict=True)))
        h = residual + self.layer.self_attn.o_proj(torch.cat(heads))
        norm, mlp = self.layer.post_attention_layernorm, self.layer.mlp
        n = normed(h, norm)
        return h + mlp.down_proj(functional.silu(mlp.gate_proj(n)) * mlp.up_proj(n))


def passes(
    layer: Layer,
    true: Tensor,
    inputs: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    count: int,
    published: bool = False,
) -> list[dict[int, Tensor]]:
    """[j - 1][t]: what pass j makes at position t of one text.

    `inputs(read, t)`: what the layer's attention reads, and its residual. Pass 1 reads the true vector at t, pass j
    what pass j - 1 made at t - 1. It sees true keys at 1 .. t - j + 1, then one key of pass i at t - j + i, i = 2 .. j.
    """
    slow, n = SlowLayer(layer), len(true)
    keys: list[dict[int, Any]] = []
    made: list[dict[int, Tensor]] = []
    for j in range(1, count + 1):
        keys.append({})
        made.append({})
        for t in range(j - 1, n):
            x, residual = inputs(true[t] if j == 1 else made[j - 2][t - 1], t)
            keys[j - 1][t] = slow.key(x, t)
            seen = [keys[0][s] for s in range(t - j + 2)] + [keys[i - 1][t - j + i] for i in range(2, j + 1)]
            hidden = [([], keys[0][s][1]) for s in range(t - j + 2, t + 1)] if published else []
            made[j - 1][t] = slow.out(x, residual, t, seen, hidden)
    return made


def overfit(objective: Any, of: HFTarget, batch: Batch, steps: int = 400, rate: float = 5e-3) -> dict[str, float]:
    """Train on one batch until every first guess is right; the shares of right guesses."""
    seen = see(of, batch, objective.taps)
    groups = [{"params": g["params"], "lr": rate * g["scale"]} for g in objective.groups()]
    optimiser = torch.optim.Adam(groups, lr=rate)
    hits: dict[str, float] = {}
    for step in range(steps):
        loss, weight, parts = objective(batch, seen, step)
        hits = {name: float(v) for name, v in parts.items() if name.startswith("hit")}
        if min(hits.values()) == 1.0 and step > 20:
            return hits
        (loss / weight).backward()
        optimiser.step()
        optimiser.zero_grad()
    return hits


def continued(of: HFTarget, prompt: list[int], new: int) -> list[int]:
    """What the target itself writes after a prompt at temperature 0."""
    tokens = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            tokens.append(int(of.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens


def decoded(of: HFTarget, drafter: Any, prompt: list[int], new: int, depth: int) -> tuple[list[int], Usage]:
    """Chains of `depth` drafted tokens at temperature 0."""
    engine = Engine(of, drafter, FixedBudget(depth + 1, depth, (1,) * depth), GumbelNoise(of.vocab))
    row = None
    for piece in generate(engine, [Request(prompt, 0, new, Sampling())]):
        row = piece.row
    assert row is not None
    return row.output, row.usage
