"""A trained drafter that another package brings: two modules and two entry points, and nothing else is edited.

The package is written to a folder with the metadata of an installed distribution. It is then trained, saved, imported,
loaded and decoded with by its name.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from objective_world import continued, decoded, sharp, target
from safetensors.torch import load_file

from outrider import drafters, plugins
from outrider.checkpoints import native, read
from outrider.commands import info
from outrider.params import InputError
from outrider.training import loop, objectives
from outrider.training.data import Document
from outrider.training.recipe import Recipe

DRAFTER = '''"""Toy: one linear map from a feature and the next token to the feature after it. More is said here."""

from dataclasses import dataclass

import torch
from torch import nn

from outrider.backends.torch.tensors import TensorRound, embed, head
from outrider.core import protocols
from outrider.core.tree import chain, root_only
from outrider.drafters import _heads, _weights
from outrider.nets.network import Network


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int


class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.map = config, nn.Linear(2 * config.hidden, config.hidden)

    def forward(self, features, embeds):
        return self.map(torch.cat([features, embeds], -1))


@dataclass
class Drafting(protocols.Drafting):
    drafter: object
    feature: object = None

    def observe(self, round):
        self.feature = _heads.last(TensorRound(round), self.feature)

    def propose(self, rows, budget):
        depth = min(budget.depth, budget.nodes - 1, max(rows.remaining) - 1)
        target, tokens, feature = self.drafter.target, [torch.tensor(rows.root)], self.feature
        for _ in range(depth):
            feature = self.drafter.net(feature, embed(target, tokens[-1]))
            tokens.append(head(target, feature).argmax(-1))
        return chain(torch.stack(tokens, 1).tolist()) if depth > 0 else root_only(rows.root)

    def select(self, index):
        self.feature = self.feature[list(index)]

    def join(self, other):
        self.feature = torch.cat([self.feature, other.feature])


@dataclass(frozen=True)
class Toy(protocols.Drafter):
    net: object
    target: object
    taps: tuple = (-1,)

    def open(self, prompts, capacity):
        return Drafting(self)


def load(target, tokenizer=None, path=None):
    net = _weights.network(path, "toy", target)
    _weights.fits(path, target, net.config.vocab, net.config.hidden)
    return Toy(net, target)


NETWORK = Network(Net, Config)
'''
OBJECTIVE = '''"""Toy's objective: the next feature, by least squares."""

from outrider.training.objectives import NetworkObjective, Optimiser
from toy_drafter import Config, Net

OPTIMISER = Optimiser(lr=1e-2)


class ToyObjective(NetworkObjective):
    drafter = "toy"

    def __init__(self, target, net, power):
        super().__init__(target, net)
        self.power = power

    def forward(self, batch, seen, step=0):
        true, places = seen.features[-1], batch.wanted(2)
        made = self.net(true, self.target.embed(batch.ahead(1)).to(true.dtype))
        error = (made - true.roll(-1, 1)).abs().pow(self.power).mean(-1)[places]
        return error.sum(), places.sum(), {"error": error.mean().detach()}


def build(target, power=2.0):
    return ToyObjective(target, Net(Config(target.vocab, int(target.config.hidden_size))), power)
'''
POINTS = """[outrider.drafters]
toy = toy_drafter

[outrider.objectives]
toy = toy_objective
broken = toy_absent
half = toy_drafter
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    about = site / "outrider_toy-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outrider-toy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    (site / "toy_drafter.py").write_text(DRAFTER)
    (site / "toy_objective.py").write_text(OBJECTIVE)
    monkeypatch.syspath_prepend(site)


def documents() -> list[Document]:
    g = torch.Generator().manual_seed(3)
    texts = [tuple(torch.randint(1, 61, (30,), generator=g).tolist()) for _ in range(16)]
    return [Document(tokens, (True,) * 30, str(i)) for i, tokens in enumerate(texts)]


@pytest.mark.usefixtures("package")
def test_it_is_trained_saved_loaded_and_decoded_with(tmp_path: Path) -> None:
    of = sharp()
    of.mark = "0123456789abcdef"
    recipe = Recipe("toy", steps=30, rows=4, length=32, prompts=1, tokens=8, evaluate=30, options={"power": 2.0})
    result = loop.train(of, documents(), tmp_path / "run", recipe, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    learned = [line["loss"] for line in lines if "loss" in line]
    assert learned[-1] < learned[0]
    config = json.loads((result.folder / "config.json").read_text())
    header = {"outrider_method": "toy", "format": 1, "target_weights": "0123456789abcdef"}
    assert config == {**header, "vocab": 61, "hidden": 32}
    assert load_file(result.folder / "model.safetensors").keys() == {"map.weight", "map.bias"}
    drafter = drafters.load(str(result.folder), of)
    tokens, usage = decoded(of, drafter, [3, 7, 11], 16, 4)
    assert tokens == continued(of, [3, 7, 11], 16)[3:]
    assert sum(usage.tested_at) > 0


@pytest.mark.usefixtures("package")
def test_its_folder_is_read_as_strictly_as_ours(tmp_path: Path) -> None:
    of = target(torch.float32)
    module = plugins.module("drafters", "toy")
    native.save(tmp_path / "d", "toy", module.Net(module.Config(61, 16)))
    checkpoint = read(tmp_path / "d")
    native.check(checkpoint, "here")
    assert native.table("toy", checkpoint.config) == {"map.weight": (16, 32), "map.bias": (16,)}
    with pytest.raises(InputError, match="was trained for a target of width 16"):
        drafters.load(f"toy:{tmp_path / 'd'}", of)
    (tmp_path / "d" / "config.json").write_text('{"outrider_method": "toy", "vocab": 61, "hidden": 8}')
    with pytest.raises(InputError, match=r"map.weight of .* is \[16, 32\], where its config says \[8, 16\]"):
        drafters.load(f"toy:{tmp_path / 'd'}", of)


@pytest.mark.usefixtures("package")
def test_it_is_listed_beside_ours() -> None:
    assert {"toy", "eagle", "none"} <= set(drafters.names())
    assert {"toy", "eagle", "hass", "draft-lm"} <= set(objectives.names())
    assert objectives.options_of("toy") == {"power": 2.0}
    said = "Toy: one linear map from a feature and the next token to the feature after it"
    assert info.drafters()["toy"] == said


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broken", "broken of the entry points outrider.objectives cannot be imported"),
        ("half", "toy_drafter, an entry point of outrider.objectives, lacks OPTIMISER, build"),
        ("absent", "there is no method 'absent'; choose one of block, broken, draft-lm"),
    ],
)
def test_a_module_without_an_objective_is_refused_in_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        objectives.options_of(name)
