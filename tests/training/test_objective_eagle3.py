"""EAGLE-3's training-time test against loops, and against what the drafter does when it decodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_world import (
    VOCAB,
    continued,
    cross_entropy,
    decoded,
    overfit,
    packed,
    passes,
    sharp,
    states,
    target,
    texts,
    value,
)  # fmt: skip
from torch import Tensor

from outrider import drafters
from outrider.backends.torch import HFTarget
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.drafters import eagle3 as network
from outrider.engine import Batch as Rows
from outrider.engine import Engine, Request, Row
from outrider.params import InputError, Sampling
from outrider.training import objectives
from outrider.training.data import Document
from outrider.training.features import see

TAPS = (0, 2, 3)


def build(of: HFTarget, words: list[int] = (), **options: Any) -> Any:
    torch.manual_seed(1)
    documents = [Document(tuple(words), (True,) * len(words), "x")]
    objective = objectives.build("eagle3", of, documents, {"taps": TAPS, **options})
    return objective.to(of.dtype)


def slow(of: HFTarget, objective: Any, words: list[int], learn: list[bool]) -> tuple[float, int]:
    """The loss of one text, summed over its positions, and how many these are (all steps')."""
    net, layers = objective.net, states(of, words)
    kept = [i for i in range(VOCAB) if net.t2d[i]]
    embedding = net.embed_tokens.weight if net.config.own_embedding else of.model.get_input_embeddings().weight
    fused = torch.stack([net.fc(torch.cat([layers[tap][t] for tap in TAPS])) for t in range(len(words))])

    def norm(x: Tensor, by: Any) -> Tensor:
        return x / (x.pow(2).mean() + by.eps).sqrt() * by.weight

    def inputs(read: Tensor, t: int) -> tuple[Tensor, Tensor]:
        shifted = embedding[words[t + 1]] if t + 1 < len(words) else torch.ones(net.config.layer.hidden).to(read)
        mid = net.midlayer
        return torch.cat([norm(shifted, mid.input_layernorm), norm(read, mid.hidden_norm)]), read

    made = passes(net.midlayer, fused, inputs, objective.passes)
    total, count = 0.0, 0
    for j in range(1, objective.passes + 1):
        for t in range(j - 1, len(words) - 2):
            law = of.head(layers[-1][t + 1]).softmax(-1)
            if not learn[t + 2] or words[t + 2] not in kept:
                continue
            p = torch.stack([law[i] for i in kept])
            student = net.lm_head(norm(made[j - 1][t], net.norm))
            total += objective.decay ** (j - 1) * float(cross_entropy(student, p / p.sum()))
            count += 1
    return total, count


@pytest.mark.parametrize(
    "options", [{}, {"draft_vocab": 40, "passes": 4, "decay": 0.5}, {"hidden": 24, "draft_vocab": 50}]
)
def test_loss_equals_loops_over_positions(options: dict[str, Any]) -> None:
    of = target()
    rows = [texts(i, sizes) for i, sizes in enumerate([[9, 5], [11], [3, 6]])]
    objective = build(of, [w for row in rows for words, _ in row for w in words], **options)
    with torch.no_grad():
        for norm in (objective.net.norm, objective.net.midlayer.hidden_norm, objective.net.midlayer.input_layernorm):
            norm.weight.uniform_(0.5, 1.5)
        loss, weight, _ = value(objective, of, packed(rows, 16))
        found = [slow(of, objective, *text) for row in rows for text in row]
        alone = [value(objective, of, packed([[text]])) for row in rows for text in row]
    assert float(weight) * objective.passes == pytest.approx(sum(c for _, c in found))
    assert float(loss) == pytest.approx(sum(total for total, _ in found), rel=2e-5)
    assert float(loss) == pytest.approx(sum(float(a) for a, _, _ in alone), rel=1e-6)


def test_nothing_is_detached() -> None:
    """A numerical derivative in a weight that every step uses."""
    of, batch = target(), packed([texts(5, [10])])
    objective = build(of)
    seen, weight = see(of, batch, objective.taps), objective.net.midlayer.mlp.up_proj.weight
    objective(batch, seen)[0].backward()
    direction, step = torch.randn_like(weight), 1e-3
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step * direction)
            ends.append(float(objective(batch, seen)[0]))
            weight.sub_(sign * step * direction)
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float((weight.grad * direction).sum()), rel=5e-3)


@pytest.mark.parametrize("draft_vocab", [0, 40])
def test_training_time_test_is_what_decoding_does(draft_vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step j at position t equals the logits of the j-th node of a chain drafted after the prompt, by the drafter's own
    cache, its own vectors fed back."""
    of, prompt, depth = target(), [3, 1, 4, 1, 5, 9, 2], 6
    objective = build(of, list(range(VOCAB)), draft_vocab=draft_vocab, passes=7)
    drafter = network.drafter(objective.net, of)
    engine = Engine(of, drafter, FixedBudget(8, depth), GumbelNoise(of.vocab))
    with torch.no_grad():
        batch, _ = Rows.start(engine, [Row(Request(prompt, 0, 30, Sampling()), 0)])
    assert batch is not None
    truth = torch.randint(VOCAB, (1, depth), generator=torch.Generator().manual_seed(2))
    found: list[Tensor] = []
    logits = drafter.net.logits

    def told(hidden: Tensor) -> Tensor:
        found.append(logits(hidden)[0, -1])
        return logits(hidden)

    monkeypatch.setattr(drafter.net, "logits", told)
    with torch.no_grad():
        batch.drafting.candidates(batch.view(), truth, 1)  # type: ignore[attr-defined]

    made: list[Tensor] = []
    objective.net.register_forward_hook(lambda module, given, out: made.append(out[0]))
    words = [*prompt, int(batch.root[0]), *truth[0].tolist()]
    value(objective, of, packed([[(words, [True] * len(words))]]))
    assert len(found) == depth
    for j in range(depth):
        expected = objective.net.logits(made[j][len(prompt) - 1 + j])
        torch.testing.assert_close(found[j], expected, rtol=1e-8, atol=1e-8)


def test_draft_vocabulary_is_the_most_frequent() -> None:
    of = target()
    words = [5, 5, 5, 60, 60, 7, 7, 1, 2]
    net = build(of, words, draft_vocab=4).net
    best = sorted(range(VOCAB), key=lambda t: (-Counter(words)[t], t))[:4]
    assert net.ids().tolist() == sorted(best) == [1, 5, 7, 60]
    assert net.t2d.nonzero()[:, 0].tolist() == sorted(best)
    assert torch.equal(net.lm_head.weight, of.model.get_output_embeddings().weight[sorted(best)])


def test_half_precision() -> None:
    of, batch = target(torch.float32), packed([texts(2, [12, 9])])
    objective = build(of)
    plain = value(objective, of, batch)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, _ = objective(batch, see(of, batch, objective.taps))
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(plain), rel=0.03)
    assert all(bool(p.grad.isfinite().all()) for p in objective.parameters() if p.grad is not None)


def test_one_sample_is_learned_by_heart(tmp_path: Path) -> None:
    of = sharp()
    words = continued(of, [3, 1, 4, 1, 5], 14)
    objective = build(of, words, draft_vocab=30, passes=5)
    hits = overfit(objective, of, packed([[(words, [False] * 5 + [True] * 14)]]))
    assert min(hits.values()) == 1.0, hits
    objective.save(tmp_path / "d")
    output, usage = decoded(of, drafters.load(f"eagle3:{tmp_path / 'd'}", of), words[:5], 12, 5)
    assert output == words[5:17]
    assert usage.accepted == usage.drafted > 0


def test_bad_options() -> None:
    of = target()
    with pytest.raises(InputError, match="distinct"):
        build(of, taps=())  # four layers: 2, 4 // 2, 4 - 3
    with pytest.raises(InputError, match="passes"):
        build(of, passes=0)
    with pytest.raises(InputError, match="draft_vocab"):
        build(of, draft_vocab=VOCAB + 1)
