"""Tuning with real networks: measured accuracies against the stock model's features."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from heads import engine, stock, written
from small import PROMPTS, VOCAB, build, sequential

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.checkpoints import native
from outrider.core import tree
from outrider.core.types import Budget
from outrider.drafters import eagle, hydra, medusa
from outrider.engine import Request
from outrider.nets.layer import LayerShape
from outrider.params import Sampling
from outrider.training import tree_tuning as tuning

SHAPE = LayerShape(32, heads=4, kv_heads=2, head_dim=8, intermediate=40, inputs=32)


@torch.no_grad()
def test_accuracies_of_medusa_are_those_of_its_heads(tmp_path: Path) -> None:
    model = build("llama")
    target = load_target(model)
    net = medusa.fresh(target, heads=3)
    torch.manual_seed(1)
    for p in net.parameters():
        p.add_(torch.randn_like(p) * 0.05)
    native.save(tmp_path, "medusa", net)
    drafter = drafters.load(f"medusa:{tmp_path}", target)
    new = 25  # one token by the prompt, eight rounds of three
    measured = tuning.measure(engine(target, drafter), [Request(p, 1, new) for p in PROMPTS], ranks=5, depth=6)
    hits, tested = torch.zeros(3, 5, dtype=torch.long), [0, 0, 0]
    for prompt, output in zip(PROMPTS, written(target, drafters.load("none"), PROMPTS, new, 0.0), strict=True):
        text = prompt + output
        features = sequential(model, text, (-1,))[1][-1]
        for at in range(len(prompt), len(text) - 1, 3):
            for d, logits in enumerate(net(features[at - 1])):
                if at + 1 + d < len(text):
                    tested[d] += 1
                    hits[d] += logits.topk(5).indices == text[at + 1 + d]
    assert measured.tested == (*tested, 0, 0, 0)
    assert [list(h) for h in measured.hits[:3]] == hits.tolist()
    assert sum(map(sum, measured.hits)) > 0


@pytest.mark.parametrize("name", ["medusa", "hydra", "hydra++", "model"])
def test_candidates_of_the_target_itself_are_right(name: str, tmp_path: Path) -> None:
    """A draft model that is the target: rank 0 is always right. Heads that are the target's own: another count."""
    model = build("llama")
    target = load_target(model)
    if name == "model":
        model.save_pretrained(tmp_path)
    elif name == "medusa":
        native.save(tmp_path, "medusa", medusa.fresh(target))
    else:
        native.save(tmp_path, "hydra", hydra.fresh(target, layer=SHAPE if "+" in name else None))
    drafter = drafters.load(f"{name.rstrip('+')}:{tmp_path}", target)
    for temperature in (0.0, 1.0):
        made = [Request(p, 1 + i, 19, Sampling(temperature)) for i, p in enumerate(PROMPTS)]
        measured = tuning.measure(engine(target, drafter), made, ranks=4, depth=5, batch_size=2)
        assert measured.tested[0] == 18
        if name == "model":
            assert [h[0] for h in measured.hits] == list(measured.tested)


@pytest.mark.parametrize(
    ("name", "rule"), [("medusa", "coupled"), ("hydra", "rejection"), ("eagle", "coupled"), ("model", "rejection")]
)
def test_every_drafter_with_ranks_takes_a_tuned_tree(name: str, rule: str, tmp_path: Path) -> None:
    model = build("llama")
    target, where = load_target(model), tmp_path / "drafter"
    if name == "model":
        model.save_pretrained(where)
    elif name == "eagle":
        torch.manual_seed(3)
        native.save(where, "eagle", eagle.EagleNet(eagle.EagleConfig(SHAPE, VOCAB, 32)))
    else:
        made = (medusa if name == "medusa" else hydra).fresh(target)  # type: ignore[attr-defined]
        native.save(where, name, made)
    measured = tuning.measure(engine(target, drafters.load(f"{name}:{where}", target)), [Request(PROMPTS[0], 1, 60)])
    if not any(map(any, measured.hits)):  # an untrained net that is never right: any tree will do
        measured = tuning.Measured(((5, 3, 1), (4, 2, 0)), (10, 10))
    tuned, file = tuning.grow(measured, 8), tmp_path / "tree.json"
    file.write_text(json.dumps(tuning.document(tuned, measured, {})))
    drafter = drafters.load(f"{name}:{where}?tree={file}", target)
    for nodes in (64, 5):
        batch = stock(target, drafter, PROMPTS, rule)
        proposed = batch.drafting.propose(batch.view(), Budget(nodes, 9))
        tree.check(proposed)
        sizes = [1 + sum(len(p) <= proposed.deepest for p in tuned.paths), nodes]
        assert proposed.nodes == min(sizes)
        batch.round()
