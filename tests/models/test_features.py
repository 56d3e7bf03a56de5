"""What drafters read from a target: hidden states, the head and the embedding, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import PROMPTS, ROUNDS, ROUNDS_TO_32, ZOO, build, sequential, tree_of

from outrider.backends.torch import load_target
from outrider.backends.torch.tensors import tensor

TAPS = (1, -1)


def first_layer_input(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What the model makes of tokens before any layer, positions apart: hidden_states[0] at position 0."""
    return model(
        tokens[:, None], position_ids=torch.zeros_like(tokens)[:, None], output_hidden_states=True
    ).hidden_states[0]


@pytest.mark.parametrize("name", ZOO)
@torch.no_grad()
def test_features_head_and_embeddings_as_inputs(name: str) -> None:
    """Of prompts and of a tree's nodes; embeddings given to `forward` (soft drafts) act as their tokens."""
    model = build(name)
    target = load_target(model)
    session, turn, read = target.open(40), ROUNDS[0], []
    tolerance = 1e-5 if name in ROUNDS_TO_32 else 1e-10
    tree = tree_of(turn["tokens"], turn["parents"])
    for chunk in session.prefill(PROMPTS, TAPS):
        read.append(chunk.output.features)
    output = session.forward(tree, TAPS)
    assert set(output.features) == set(TAPS)
    for b, prompt in enumerate(PROMPTS):
        path = turn["paths"][b]
        _, right = sequential(model, prompt + [turn["tokens"][b][i] for i in path], TAPS)
        for tap in TAPS:
            assert (tensor(output.features[tap])[b, path] - right[tap][len(prompt) :]).abs().max() < tolerance
            for features in read:
                assert (tensor(features[tap])[b, : len(prompt)] - right[tap][: len(prompt)]).abs().max() < tolerance
    assert (target.head(tensor(output.features[-1])) - tensor(output.logits)).abs().max() < 1e-12, (
        "head(features[-1]) is the logits"
    )
    embeds = target.embed(tensor(tree.tokens))
    assert abs(session.forward(tree, embeds=embeds).logits - output.logits).max() < 1e-10


LEARNED = ("gpt2", "gpt_neo", "opt")  # they add a learned position to the embedding
NORMED = ("bloom",)  # it norms the embedding


@pytest.mark.parametrize("name", [n for n in ZOO if n not in LEARNED + NORMED])
@torch.no_grad()
def test_embed_is_what_enters_the_first_layer(name: str) -> None:
    model = build(name)
    target, tokens = load_target(model), torch.tensor([3, 50, 96])
    assert (target.embed(tokens)[:, None] - first_layer_input(model, tokens)).abs().max() < 1e-6


@pytest.mark.parametrize("name", LEARNED)
@torch.no_grad()
def test_embed_lacks_only_the_position(name: str) -> None:
    """Learned positions are added later: the difference is the same for every token."""
    model = build(name)
    target, tokens = load_target(model), torch.tensor([3, 50, 96])
    off = first_layer_input(model, tokens) - target.embed(tokens)[:, None]
    assert (off - off[:1]).abs().max() < 1e-12
