"""P-EAGLE: an oracle's drafts are accepted to full depth, one pass a round, and its state does not depend on when it
reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import heads
import oracle
import pytest
import torch
from oracle import DRAFTED, HIDDEN, SHAPE, TAPS, VOCAB, Oracle, seen_at
from torch import Tensor

from outrider import drafters
from outrider.budgets.budgeter import FixedBudget
from outrider.checkpoints import native
from outrider.drafters import _compiled, eagle3
from outrider.drafters._growth import STATIC, Growth
from outrider.params import InputError

PROMPTS = [[3, 14, 15, 9, 26, 5], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4]]
TREES = {
    "dynamic": Growth(top_k=3, scale=0.01),
    "static": Growth("static", parents=STATIC, scale=0.01),
    "chain": Growth("chain", scale=0.01),
}


def network(seed: int = 70, **changes: Any) -> Any:
    shape = replace(SHAPE, inputs=2 * HIDDEN)
    more = {"layers": 2, "parallel": 4, "mask_token": 3, "scale": 0.01, **changes}
    net = oracle.shaken(eagle3.Eagle3Net(eagle3.Eagle3Config(shape, VOCAB, len(DRAFTED), HIDDEN, TAPS, **more)), seed)
    net.d2t = torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))
    net.t2d = torch.tensor([t in DRAFTED for t in range(VOCAB)])
    return net.double()


def memoryless() -> tuple[Oracle, Any]:
    """A target of one distribution and one feature, and the network whose masks equal its pairs: what is drafted can
    only be refused if noise, positions or q are wrong."""
    net, vector = network(), oracle.random(HIDDEN, seed=5)

    def output(tap: int, vector: Tensor) -> Tensor:
        return seen_at(tap) @ vector

    with torch.no_grad():
        features = torch.cat([output(tap, vector) for tap in TAPS])
        net.mask_hidden.copy_(features.expand(1, 1, -1))
        for layer in (net.midlayer, *net.upper):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        logits = torch.full((VOCAB,), -50.0, dtype=torch.float64)
        logits[DRAFTED] = net.logits(net.fuse(features))
    return Oracle(lambda *given: (vector, [], []), lambda v: logits.expand(*v.shape[:-1], -1), output), net


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("tree", "rule"), [("dynamic", "coupled"), ("static", "coupled"), ("chain", "coupled"), ("chain", "rejection")]
)
def test_the_known_good_drafter_is_accepted_to_full_depth(tree: str, rule: str, temperature: float) -> None:
    target, net = memoryless()
    drafter = eagle3.drafter(net, target, TREES[tree])
    budget = FixedBudget(26 if tree == "static" else 14, 9)
    for row in heads.run(target, drafter, PROMPTS, 31, temperature, budget, rule):
        assert row.usage.accepted_at == row.usage.tested_at == [6, 6, 6, 6], "four tokens, whatever the budget"
        assert row.usage.tau == 5.0


def test_one_pass_a_round() -> None:
    target, _ = oracle.of_eagle3()
    drafter, calls = eagle3.drafter(network(), target, TREES["dynamic"]), []
    drafter.net.register_forward_hook(lambda module, given, out: calls.append(out.shape[1]))
    rows = heads.run(target, drafter, PROMPTS[:1], 31, 1.0, FixedBudget(14, 4))
    assert len(calls) == rows[0].usage.rounds - 1 > 6, "only the target's token fits into the last round"
    assert calls[0] == len(PROMPTS[0]) + 3, "the prompt's pairs, and three masks after the last"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_when_pairs_are_read_does_not_matter(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once or with the draft: the same trees, in ragged rows too."""
    target, _ = oracle.of_eagle3()
    drafter, results = eagle3.drafter(network(), target, Growth(top_k=3)), []
    for flush in (128, 1, 5):
        monkeypatch.setattr(_compiled, "MOST", flush)
        batch, trees = heads.stock(target, drafter, PROMPTS, temperature=temperature), []
        propose = batch.drafting.propose

        def recorded(*given: Any, propose: Any = propose, trees: list[Any] = trees) -> Any:
            made = propose(*given)
            trees.append((made.tokens.tolist(), made.parents.tolist()))
            return made

        batch.drafting.propose = recorded  # type: ignore[method-assign]
        with torch.no_grad():
            for _ in range(5):
                batch.round()
        results.append(trees)
    assert results[0] == results[1] == results[2]


def test_folders_and_refusals(tmp_path: Any) -> None:
    target, net = memoryless()
    native.save(tmp_path / "d", "eagle3", net)
    loaded = drafters.load(f"{tmp_path / 'd'}?tree=chain&scale=0.01", target)
    assert heads.run(target, loaded, PROMPTS, 31, 1.0, FixedBudget(14, 4))[0].usage.tau == 5.0
    with pytest.raises(InputError, match="tree=dynamic"):
        drafters.load(f"{tmp_path / 'd'}?tree=best", target)
    for wrong in ({"layers": 3, "parallel": 0}, {"parallel": -1}, {"mask_token": VOCAB}):
        with pytest.raises(InputError, match=r"one layer|outside the vocabulary"):
            replace(net.config, **wrong)
