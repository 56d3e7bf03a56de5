"""P-EAGLE's objective: against loops, against decoding, which chains are drawn, overfitting one sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from objective_world import (
    ROWS,
    VOCAB,
    SlowLayer,
    continued,
    cross_entropy,
    decoded,
    equals_loops,
    normed,
    opened,
    overfit,
    packed,
    sharp,
    states,
    target,
    texts,
    value,
)  # fmt: skip
from objective_world import build as fresh
from torch import Tensor

from outrider import drafters
from outrider.backends.torch import HFTarget
from outrider.drafters import eagle3 as network
from outrider.params import InputError
from outrider.training.objectives import _parallel

TAPS, MASK = (0, 2, 3), 7


def build(of: HFTarget, words: list[int] = (), **options: Any) -> Any:
    given = {"taps": TAPS, "parallel": True, "passes": 4, "layers": 2, "mask_token": MASK, **options}
    objective = fresh("eagle3", of, words, **given)
    with torch.no_grad():
        for name, weight in objective.net.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    return objective


def outputs(of: HFTarget, objective: Any, words: list[int], pair: int, depths: int) -> list[Tensor]:
    """What the network makes of the last true pair and of the masks after it: one sequence, token by token."""
    net, layers = objective.net, states(of, words)
    embedding = net.embed_tokens.weight if net.config.own_embedding else of.model.get_input_embeddings().weight
    vectors = [net.fc(torch.cat([layers[tap][t] for tap in TAPS])) for t in range(pair + 1)]
    vectors += [net.fc(net.mask_hidden[0, 0])] * (depths - 1)
    spelled = [*words[1 : pair + 2], *[MASK] * (depths - 1)]
    made, mid = vectors, net.midlayer
    for number, layer in enumerate([mid, *net.upper]):
        slow, keys, results = SlowLayer(layer), [], []
        for t, vector in enumerate(made):
            x = normed(vector, mid.hidden_norm if number == 0 else layer.input_layernorm)
            if number == 0:
                x = torch.cat([normed(embedding[spelled[t]], mid.input_layernorm), x])
            keys.append(slow.key(x, t))
            results.append(slow.out(x, vector, t, keys, []))
        made = results
    return made[pair:]


def slow(of: HFTarget, objective: Any, words: list[int], learn: list[bool]) -> tuple[float, int]:
    """The loss of one text if every chain is drawn, and its pairs."""
    net, last = objective.net, states(of, words)[-1]
    kept, total, count = [i for i in range(VOCAB) if net.t2d[i]], 0.0, 0
    for pair in range(len(words) - 2):
        if not learn[pair + 2]:
            continue
        count += 1
        for d, made in enumerate(outputs(of, objective, words, pair, net.config.parallel)):
            if pair + d + 2 >= len(words) or not learn[pair + d + 2] or words[pair + d + 2] not in kept:
                continue
            teacher = of.head(last[pair + d + 1]).softmax(-1)
            p = torch.stack([teacher[i] for i in kept])
            student = net.lm_head(normed(made, net.norm))
            total += objective.decay**d * float(cross_entropy(student, p / p.sum()))
    return total, count


@pytest.mark.parametrize(
    "options", [{}, {"draft_vocab": 40, "passes": 3, "decay": 0.5}, {"hidden": 24, "draft_vocab": 50, "layers": 1}]
)
def test_loss_equals_loops_over_pairs_and_depths(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several texts in a row, chains that run over a text's end, turns that are not learned. Every chain is drawn."""
    monkeypatch.setattr(_parallel, "LEAST", 2.0)
    of, rows = target(), [texts(i, sizes) for i, sizes in enumerate(ROWS)]
    equals_loops(of, build(of, [w for row in rows for words, _ in row for w in words], **options), rows, slow)


def test_training_sees_what_decoding_sees() -> None:
    """Logits of a chain equal those that the drafter gives where its pair is the last one."""
    of, prompt = target(), [3, 1, 4, 1, 5, 9, 2]
    objective = build(of)
    batch = opened(of, network.drafter(objective.net, of), prompt, 4)
    with torch.no_grad():
        result = batch.drafting._logits(batch.view(), 4)[0]
        made = outputs(of, objective, [*prompt, int(batch.root[0])], len(prompt) - 1, 4)
        expected = torch.stack([objective.net.lm_head(normed(m, objective.net.norm)) for m in made])
    torch.testing.assert_close(result, expected, rtol=1e-8, atol=1e-8)


def test_chains_are_a_function_of_step_and_row_and_thin_out() -> None:
    of, batch = target(), packed([texts(3, [900]), texts(4, [700])])
    objective = build(of, passes=7)
    pair, depth, real = objective._chains(batch, 5)
    assert torch.equal(objective._chains(batch, 5)[0], pair)
    assert not torch.equal(objective._chains(batch, 6)[0][:, :9], pair[:, :9])
    swapped = objective._chains(batch.rows([1, 0]), 5)
    for row, there in ((0, 1), (1, 0)):
        mine = set(zip(pair[row][real[row]].tolist(), depth[row][real[row]].tolist(), strict=True))
        again = swapped[2][there]
        assert mine == set(zip(swapped[0][there][again].tolist(), swapped[1][there][again].tolist(), strict=True))
        assert all(d == 1 or (p, d - 1) in mine for p, d in mine), "a chain has its beginning"
    starts = float(batch.wanted(2).sum())
    for d, share in enumerate((0.7, 0.49, 0.343, 0.24, 0.2, 0.2), 1):
        assert float((real & (depth == d)).sum()) / starts == pytest.approx(share, abs=0.05)


def test_a_drafter_overfitted_to_a_sample_drafts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All depths: a label or a position that is off by one cannot be drafted to full depth."""
    monkeypatch.setattr(_parallel, "LEAST", 2.0)
    of = sharp()
    words = continued(of, [3, 1, 4, 1, 5], 14)
    objective = build(of, words, draft_vocab=30)
    hits = overfit(objective, of, packed([[(words, [False] * 5 + [True] * 14)]]))
    assert set(hits) == {"hit1", "hit2", "hit3", "hit4"}
    assert min(hits.values()) == 1.0, hits
    objective.save(tmp_path / "d")
    output, usage = decoded(of, drafters.load(f"{tmp_path / 'd'}", of), words[:5], 11, 4)
    assert output == words[5:16]
    assert usage.accepted_at == [2, 2, 2, 2]
    output, usage = decoded(of, drafters.load(f"{tmp_path / 'd'}", of), words[:5], 11, 9)
    assert usage.accepted == usage.drafted == 8, "four tokens are drafted at most, however deep the budget is"


def test_a_text_without_chains() -> None:
    """One token to learn: no mask has a label, and one depth has no masks at all."""
    of = target()
    for words, passes in (([5, 6, 7], 4), ([5, 6, 7, 8, 9], 1)):
        loss, weight, hits = value(build(of, passes=passes), of, packed([[(words, [True] * len(words))]]))
        assert float(weight) == len(words) - 2
        assert bool(loss.isfinite())
        assert len(hits) == passes


def test_bad_options() -> None:
    of = target()
    for options, says in (
        ({"passes": 0}, "passes"),
        ({"mask_token": VOCAB}, "outside the vocabulary"),
        ({"parallel": False}, "one layer"),
        ({"layers": 0}, "one layer"),
    ):
        with pytest.raises(InputError, match=says):
            build(of, **options)
