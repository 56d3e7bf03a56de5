"""Targets that are made of a drafter's network: the known-good drafter must be accepted to full depth.

`Oracle` writes texts by the recurrence that an EAGLE network predicts: the feature of token i + 1 is the network's
step over the pairs (feature, next token) up to i. For EAGLE-3 the vector of a token is seen through another random
rotation at every tap, and fc of the known-good network turns three of them back. The network is computed here token by
token with plain matrices, independently of `outrider.nets.layer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any

import torch
from layouts_reference import rms, rotated
from torch import Tensor

from outrider.backends.torch.tensors import array
from outrider.core.protocols import Prefill, Session, Target, TargetOutput
from outrider.core.tree import chain, check
from outrider.core.types import DraftTree
from outrider.drafters import eagle, eagle3
from outrider.nets.layer import LayerShape

HIDDEN, VOCAB, THETA = 16, 29, 50.0
TAPS = (1, 4, 6)
SHAPE = LayerShape(HIDDEN, 2, 1, 8, 24, HIDDEN, {"rope_type": "default", "rope_theta": THETA})
DRAFTED = [t for t in range(VOCAB) if t % 5 != 3]  # EAGLE-3's draft vocabulary

Text = tuple[int, ...]
State = tuple[Tensor, list[Tensor], list[Tensor]]  # vector of the last token; keys and values of all pairs


def random(*size: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen_at(tap: int) -> Tensor:
    """The rotation through which a tap sees the vector."""
    return torch.linalg.qr(random(HIDDEN, HIDDEN, seed=900 + tap))[0]


def layer_step(w: Mapping[str, Tensor], x: Tensor, residual: Tensor, position: int, before: State) -> State:
    """One more pair through the decoder layer."""
    _, keys, values = before
    q, k, v = (w[f"self_attn.{n}_proj.weight"] @ x for n in "qkv")
    keys, values = [*keys, rotated(k.view(1, 8), position, THETA)[0]], [*values, v]
    weights = (rotated(q.view(2, 8), position, THETA) @ torch.stack(keys).T / math.sqrt(8)).softmax(-1)
    h = residual + w["self_attn.o_proj.weight"] @ (weights @ torch.stack(values)).flatten()
    n = rms(h, w["post_attention_layernorm.weight"])
    gate = w["mlp.gate_proj.weight"] @ n
    return h + w["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * (w["mlp.up_proj.weight"] @ n)), keys, values


@dataclass
class Oracle(Target):
    """A target. `step(vector, token, position, state)` gives the next token's state, `logits_of(vector)` its logits."""

    step: Callable[[Tensor, int, int, State], State]
    logits_of: Callable[[Tensor], Tensor]
    output: Callable[[int, Tensor], Tensor]
    vocab: int = VOCAB
    context: int = 200
    precision: str = "float64"
    tensors: bool = True
    known: dict[Text, State] = field(default_factory=dict)
    hidden: int = HIDDEN
    layers: int = 8
    exact: str = "bits"  # type: ignore[assignment]
    lock: Any = field(default_factory=RLock)

    @property
    def config_dict(self) -> dict[str, Any]:
        return {}

    def turn(self) -> AbstractContextManager[Any]:
        return self.lock

    def embed(self, tokens: Tensor) -> Tensor:
        return random(VOCAB, HIDDEN, seed=1)[tokens]

    def head(self, features: Tensor) -> Tensor:
        return self.logits_of(features)

    def state(self, text: Text) -> State:
        result = self.known.get(text)
        if result is None:
            if len(text) == 1:
                result = random(VOCAB, HIDDEN, seed=2)[text[0]], [], []
            else:
                before = self.state(text[:-1])
                result = self.step(before[0], text[-1], len(text) - 2, before)
            self.known[text] = result
        return result

    def open(self, capacity: int) -> OracleSession:
        return OracleSession(self)


@dataclass
class OracleSession(Session):
    target: Oracle
    texts: list[list[int]] = field(default_factory=list)
    paths: list[list[Text]] = field(default_factory=list)  # of the last tree's nodes

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [len(text) for text in self.texts]

    def prefill(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> Iterator[Prefill]:
        n, b, half = max(map(len, prompts)), len(prompts), 4  # in two chunks
        self.texts = [[] for _ in prompts]
        for first in range(0, n, half):
            parts = [list(p[first : first + half]) for p in prompts]
            m, tree = max(map(len, parts)), chain(parts, matrix=False)
            logits = torch.zeros(b, 1, VOCAB, dtype=torch.float64)
            features = {t: torch.zeros(b, m, HIDDEN, dtype=torch.float64) for t in taps}
            for row, part in enumerate(parts):
                for i, token in enumerate(part):
                    self.texts[row].append(token)
                    vector = self.target.state(tuple(self.texts[row]))[0]
                    logits[row, 0] = self.target.logits_of(vector)
                    for t in taps:
                        features[t][row, i] = self.target.output(t, vector)
            last = tuple(first < len(p) <= first + half for p in prompts)
            upcoming = [p[first + half] if first + half < len(p) else -1 for p in prompts]
            yield Prefill(tree, output_of(logits, features), last, upcoming)

    def forward(self, tree: DraftTree, taps: tuple[int, ...] = (), since: int = 0, embeds: Any = None) -> TargetOutput:
        check(tree)
        b, n = tree.tokens.shape
        logits = torch.zeros(b, n, VOCAB, dtype=torch.float64)
        features = {t: torch.zeros(b, n, HIDDEN, dtype=torch.float64) for t in taps}
        self.paths = []
        for row in range(b):
            paths: list[Text] = []
            for node in range(n):
                above = paths[int(tree.parents[row, node])] if node else ()
                paths.append((*above, int(tree.tokens[row, node])))
                vector = self.target.state((*self.texts[row], *paths[-1]))[0]
                logits[row, node] = self.target.logits_of(vector)
                for t in taps:
                    features[t][row, node] = self.target.output(t, vector)
            self.paths.append(paths)
        return output_of(logits, features)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        for text, known, path in zip(self.texts, self.paths, paths, strict=True):
            text += known[path[-1]]

    def rewind(self, lengths: Sequence[int]) -> None:
        self.texts = [t[:n] for t, n in zip(self.texts, lengths, strict=True)]

    def wipe(self, rows: Sequence[int]) -> None:
        pass  # nothing is computed from what a row held

    def select(self, index: Sequence[int]) -> None:
        self.texts = [list(self.texts[i]) for i in index]

    def join(self, other: Any) -> None:
        self.texts += other.texts


def output_of(logits: Tensor, features: Mapping[int, Tensor]) -> TargetOutput:
    return TargetOutput(array(logits), {tap: array(states) for tap, states in features.items()})


def shaken(net: Any, seed: int) -> Any:
    """Weights wide enough that attention and positions matter."""
    with torch.no_grad():
        for i, (name, p) in enumerate(net.named_parameters()):
            wide = 2.0 if "q_proj" in name or "k_proj" in name or "o_proj" in name else 1.0
            p.copy_(random(*p.shape, seed=seed + i, scale=wide / math.sqrt(p.shape[-1])))
            if p.dim() == 1:
                p.copy_(1 + 0.2 * p)
    return net


def of_eagle() -> tuple[Oracle, eagle.EagleNet]:
    """The target whose next feature is the network's, and the network."""
    net = shaken(eagle.EagleNet(eagle.EagleConfig(SHAPE, VOCAB, HIDDEN, scale=0.01)).double(), 40)
    w = {k.removeprefix("layers.0."): v for k, v in net.state_dict().items()}
    embedding, head = random(VOCAB, HIDDEN, seed=1), random(VOCAB, HIDDEN, seed=3, scale=0.7)

    def step(vector: Tensor, token: int, position: int, before: State) -> State:
        x = w["fc.weight"] @ torch.cat([embedding[token], vector])
        return layer_step(w, x, x, position, before)

    def output(tap: int, vector: Tensor) -> Tensor:
        return vector if tap == -1 else seen_at(tap) @ vector

    return Oracle(step, lambda f: f @ head.T, output), net


def of_eagle3(norm_before_residual: bool = True, norm_output: bool = False) -> tuple[Oracle, eagle3.Eagle3Net]:
    """The same for EAGLE-3. Its residual is normed unless asked otherwise: a vector that only grows forgets nothing, so
    that mistakes hardly show."""
    flags = {"norm_before_residual": norm_before_residual, "norm_output": norm_output}
    shape = replace(SHAPE, inputs=2 * HIDDEN)
    config = eagle3.Eagle3Config(shape, VOCAB, len(DRAFTED), HIDDEN, TAPS, scale=0.01, **flags)
    net = shaken(eagle3.Eagle3Net(config).double(), 70)
    net.d2t = torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))
    net.t2d = torch.tensor([t in DRAFTED for t in range(VOCAB)])
    with torch.no_grad():  # what the taps see, turned back; a half, a third and a sixth of it
        parts = [share * seen_at(t).T for t, share in zip(TAPS, (1 / 2, 1 / 3, 1 / 6), strict=True)]
        net.fc.weight.copy_(torch.cat(parts, 1))
        net.lm_head.weight.mul_(3)
    w = {k.removeprefix("midlayer."): v for k, v in net.state_dict().items()}
    embedding = random(VOCAB, HIDDEN, seed=1)

    def step(vector: Tensor, token: int, position: int, before: State) -> State:
        normed = rms(vector, w["hidden_norm.weight"])
        x = torch.cat([rms(embedding[token], w["input_layernorm.weight"]), normed])
        residual = normed if norm_before_residual else vector
        made, keys, values = layer_step(w, x, residual, position, before)
        return (rms(made, w["norm.weight"]) if norm_output else made), keys, values

    def logits_of(vector: Tensor) -> Tensor:
        logits = torch.full((*vector.shape[:-1], VOCAB), -50.0, dtype=torch.float64)
        normed = vector if norm_output else rms(vector, w["norm.weight"])
        logits[..., DRAFTED] = normed @ w["lm_head.weight"].T
        return logits

    return Oracle(step, logits_of, lambda tap, vector: seen_at(tap) @ vector), net
