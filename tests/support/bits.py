"""Logits of trees, bit for bit against those of one token at a time."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
from small import build
from torch import Tensor

from outrider.backends.native import target as native_target
from outrider.backends.native.library import sanitizer
from outrider.backends.native.target import NativeTarget
from outrider.backends.torch.module import ModuleTarget, checkpoint_of
from outrider.backends.torch.tensors import tensor
from outrider.core.protocols import Target
from outrider.core.tree import chain, from_lists


def opened(target: Target, prompts: list[list[int]], taps: tuple[int, ...] = ()) -> tuple[Any, Tensor]:
    """A session that has read the prompts, and the logits [b, v] after them."""
    session, after = target.open(1024), {}
    for chunk in session.prefill(prompts, taps):
        after |= {b: tensor(chunk.output.logits[b, 0]) for b, last in enumerate(chunk.last) if last}
    return session, torch.stack([after[b] for b in range(len(prompts))])


def plain(target: Target, text: list[int], length: int, taps: tuple[int, ...] = ()) -> list[tuple[Tensor, ...]]:
    """Logits and features after `length` tokens and after each one more: read one at a time, alone."""
    session, after = opened(target, [text[:length]], taps)
    results: list[tuple[Tensor, ...]] = [(after[0],)]
    for token in text[length:]:
        output = session.forward(chain([[token]]), taps)
        results.append(tuple(tensor(part[0, 0]) for part in (output.logits, *(output.features[t] for t in taps))))
        session.keep([[0]])
    return results


def scattered(
    dice: random.Random, text: list[int], at: int, deep: int, vocab: int = 97
) -> tuple[list[int], list[int], list[int]]:
    """A random tree that holds text[at : at + deep + 1] somewhere: its tokens, parents, and the nodes of that path."""
    tokens, parents, path = [text[at]], [0], [0]
    for token in text[at + 1 : at + deep + 1]:
        here = path[-1]
        for parent in [here] * dice.randint(0, 2) + [dice.choice(path)] * dice.randint(0, 1):
            tokens.append((token + len(tokens)) % vocab)  # another one
            parents.append(parent)
        path.append(len(tokens))
        tokens.append(token)
        parents.append(here)
    return tokens, parents, path


def trees_differ(
    target: Target, texts: list[list[int]], lengths: list[int], deep: int, taps: tuple[int, ...] = ()
) -> int:
    """Nodes on the texts' paths whose logits or features are not, bit for bit, those of plain decoding."""
    if sanitizer():  # a pass takes twenty times as long: two or three trees
        texts = [text[: length + 2 * deep + 2] for text, length in zip(texts, lengths, strict=True)]
    right = [plain(target, text, length, taps) for text, length in zip(texts, lengths, strict=True)]
    session, after = opened(target, [text[:length] for text, length in zip(texts, lengths, strict=True)], taps)
    wrong, at, dice = (
        sum(not torch.equal(a, r[0][0]) for a, r in zip(after, right, strict=True)),
        list(lengths),
        random.Random(0),
    )
    while all(len(text) - a > deep for text, a in zip(texts, at, strict=True)):
        drawn = [scattered(dice, text, a, dice.randint(1, deep)) for text, a in zip(texts, at, strict=True)]
        output = session.forward(from_lists([(ids, ups, [0.0] * len(ids)) for ids, ups, _ in drawn]), taps)
        for b, (_, _, path) in enumerate(drawn):
            for i, node in enumerate(path):
                parts = output.logits, *(output.features[t] for t in taps)
                results = [tensor(part[b, node]) for part in parts]
                expected = right[b][at[b] - lengths[b] + 1 + i]
                wrong += not all(torch.equal(f, e) for f, e in zip(results, expected, strict=True))
        session.keep([path for _, _, path in drawn])
        at = [a + len(d[2]) for a, d in zip(at, drawn, strict=True)]
    return wrong


def text_of(seed: int, n: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(97) for _ in range(n)]


def compiled(vocab: int, dtype: torch.dtype, halves: bool = False) -> NativeTarget:
    """A tiny random Llama in native passes; token 3 ends its texts. `halves`: weights are bfloat16 and all else is
    float32, as on processors without products of bfloat16."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 256}
    model = build("llama", torch.bfloat16 if halves else dtype, vocab_size=vocab, eos_token_id=3, **sizes)
    return mixed(model) if halves else ModuleTarget(model)


def mixed(model: Any) -> NativeTarget:
    """A model's bfloat16 weights beside float32."""
    with mock.patch.object(native_target, "abilities", frozenset):
        made = NativeTarget(checkpoint_of(model))
    made.stock = lambda: model
    return made
