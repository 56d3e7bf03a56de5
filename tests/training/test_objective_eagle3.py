"""EAGLE-3's training-time test against loops, and against what the drafter does when it decodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from objective_world import (
    ROWS,
    VOCAB,
    cross_entropy,
    equals_loops,
    normed,
    opened,
    packed,
    passes,
    states,
    target,
    texts,
    value,
)  # fmt: skip
from objective_world import build as fresh
from torch import Tensor

from outrider.backends.torch import HFTarget
from outrider.drafters import eagle3 as network
from outrider.params import InputError

TAPS = (0, 2, 3)


def build(of: HFTarget, words: list[int] = (), **options: Any) -> Any:
    return fresh("eagle3", of, words, **{"taps": TAPS, **options})


def slow(of: HFTarget, objective: Any, words: list[int], learn: list[bool]) -> tuple[float, int]:
    """The loss of one text, summed over its positions, and how many these are (all steps')."""
    net, layers = objective.net, states(of, words)
    kept = [i for i in range(VOCAB) if net.t2d[i]]
    embedding = net.embed_tokens.weight if net.config.own_embedding else of.model.get_input_embeddings().weight
    fused = torch.stack([net.fc(torch.cat([layers[tap][t] for tap in TAPS])) for t in range(len(words))])

    def inputs(read: Tensor, t: int) -> tuple[Tensor, Tensor]:
        shifted = embedding[words[t + 1]] if t + 1 < len(words) else torch.ones(net.config.layer.hidden).to(read)
        mid = net.midlayer
        return torch.cat([normed(shifted, mid.input_layernorm), normed(read, mid.hidden_norm)]), read

    made = passes(net.midlayer, fused, inputs, objective.passes)
    total, count = 0.0, 0
    for j in range(1, objective.passes + 1):
        for t in range(j - 1, len(words) - 2):
            teacher = of.head(layers[-1][t + 1]).softmax(-1)
            if not learn[t + 2] or words[t + 2] not in kept:
                continue
            p = torch.stack([teacher[i] for i in kept])
            student = net.lm_head(normed(made[j - 1][t], net.norm))
            total += objective.decay ** (j - 1) * float(cross_entropy(student, p / p.sum()))
            count += 1
    return total, count


@pytest.mark.parametrize(
    "options", [{}, {"draft_vocab": 40, "passes": 4, "decay": 0.5}, {"hidden": 24, "draft_vocab": 50}]
)
def test_loss_equals_loops_over_positions(options: dict[str, Any]) -> None:
    of, rows = target(), [texts(i, sizes) for i, sizes in enumerate(ROWS)]
    objective = build(of, [w for row in rows for words, _ in row for w in words], **options)
    with torch.no_grad():
        for norm in (objective.net.norm, objective.net.midlayer.hidden_norm, objective.net.midlayer.input_layernorm):
            norm.weight.uniform_(0.5, 1.5)
    equals_loops(of, objective, rows, slow, objective.passes)


@pytest.mark.parametrize("draft_vocab", [0, 40])
def test_training_time_test_is_what_decoding_does(draft_vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step j at position t equals the logits of the j-th node of a chain drafted after the prompt, by the drafter's own
    cache, its own vectors fed back."""
    of, prompt, depth = target(), [3, 1, 4, 1, 5, 9, 2], 6
    objective = build(of, list(range(VOCAB)), draft_vocab=draft_vocab, passes=7)
    drafter = network.drafter(objective.net, of)
    batch = opened(of, drafter, prompt, depth)
    truth = torch.randint(VOCAB, (1, depth), generator=torch.Generator().manual_seed(2))
    results: list[Tensor] = []
    logits = drafter.net.logits

    def recorded(hidden: Tensor) -> Tensor:
        results.append(logits(hidden)[0, -1])
        return logits(hidden)

    monkeypatch.setattr(drafter.net, "logits", recorded)
    with torch.no_grad():
        batch.drafting.candidates(batch.view(), truth, 1)

    made: list[Tensor] = []
    objective.net.register_forward_hook(lambda module, given, out: made.append(out[0]))
    words = [*prompt, int(batch.root[0]), *truth[0].tolist()]
    value(objective, of, packed([[(words, [True] * len(words))]]))
    assert len(results) == depth
    for j in range(depth):
        expected = objective.net.logits(made[j][len(prompt) - 1 + j])
        torch.testing.assert_close(results[j], expected, rtol=1e-8, atol=1e-8)


def test_draft_vocabulary_is_the_most_frequent() -> None:
    of = target()
    words = [5, 5, 5, 60, 60, 7, 7, 1, 2]
    net = build(of, words, draft_vocab=4).net
    best = sorted(range(VOCAB), key=lambda t: (-Counter(words)[t], t))[:4]
    assert net.ids().tolist() == sorted(best) == [1, 5, 7, 60]
    assert net.t2d.nonzero()[:, 0].tolist() == sorted(best)
    assert torch.equal(net.lm_head.weight, of.model.get_output_embeddings().weight[sorted(best)])


def test_bad_options() -> None:
    of = target()
    with pytest.raises(InputError, match="distinct"):
        build(of, taps=())  # four layers: 2, 4 // 2, 4 - 3
    with pytest.raises(InputError, match="passes"):
        build(of, passes=0)
    with pytest.raises(InputError, match="draft_vocab"):
        build(of, draft_vocab=VOCAB + 1)
