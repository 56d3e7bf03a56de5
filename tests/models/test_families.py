"""Every family: a tree pass equals stock decoding, one token at a time, along every path from the root to a leaf.

Three ragged rows, each with a tree of its own; two rounds with a different acceptance in each row, through different
branches. In float64 agreement is to 1e-10, except where the stock attention computes its softmax in float32 (1e-5).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import PROMPTS, ROUNDS, ROUNDS_TO_32, ZOO, build, sequential, tree_of
from tree_paths import paths_to_leaves, seeing_siblings

from outrider.backends.torch import load_target
from outrider.backends.torch.tensors import tensor

Decoded = list[tuple[int, list[int], torch.Tensor]]  # row, nodes of a path, their logits


def decoded(model: Any, texts: list[list[int]], turn: dict[str, Any]) -> Decoded:
    """Stock decoding of every path from the root to a leaf, one token at a time."""
    return [
        (b, path, sequential(model, text + [turn["tokens"][b][i] for i in path])[0][len(text) :])
        for b, text in enumerate(texts)
        for path in paths_to_leaves(turn["parents"][b])
    ]


def worst(expected: Decoded, logits: torch.Tensor) -> float:
    """The largest difference of any node's logits from those of stock decoding."""
    return max(float((logits[b, path] - right).abs().max()) for b, path, right in expected)


@pytest.mark.parametrize("name", ZOO)
@torch.no_grad()
def test_tree_equals_sequential(name: str) -> None:
    model = build(name)
    target = load_target(model)
    assert target.family.proved, "this very test is the proof"
    session, texts = target.open(24), [list(p) for p in PROMPTS]
    for chunk in session.prefill(PROMPTS):
        first = tensor(chunk.output.logits)[:, 0]
    tolerance = 1e-5 if name in ROUNDS_TO_32 else 1e-10
    for b, text in enumerate(texts):
        assert (first[b] - sequential(model, text)[0][-1]).abs().max() < tolerance
    for turn in ROUNDS:
        tree, expected = tree_of(turn["tokens"], turn["parents"]), decoded(model, texts, turn)
        wrong = tensor(session.forward(seeing_siblings(tree)).logits)
        assert worst(expected, wrong) > 0.02, "a wrong mask must show"
        looked = tensor(session.forward(tree).logits)
        assert worst(expected, looked) < tolerance
        session.keep(turn["paths"])
        for text, tokens, path in zip(texts, turn["tokens"], turn["paths"], strict=True):
            text += [tokens[i] for i in path]
    assert session.lengths == [len(t) for t in texts] == session.there.tolist()
