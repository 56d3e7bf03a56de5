"""EAGLE and EAGLE-3: oracles, wrong checkpoints, real families, the distribution under rejection, refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import small
import torch
from oracle import HIDDEN, VOCAB, Oracle
from safetensors.torch import load_file, save_file
from small import tiny_llama

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.budgets.budgeter import FixedBudget
from outrider.checkpoints import native
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Round
from outrider.core.types import Budget, Rows
from outrider.drafters import _features, _mix, eagle, eagle3
from outrider.drafters._growth import Growth
from outrider.drafters.eagle import STATIC
from outrider.engine import Batch, Engine, Request, Row, generate
from outrider.nets import configs
from outrider.nets.configs import INPUTS
from outrider.nets.kv_cache import KVCache
from outrider.nets.layer import LayerShape
from outrider.params import InputError, Sampling
from outrider.proofs import samples as draws
from outrider.proofs.gtest import g_test

PROMPTS = [[3, 14, 15, 9, 26, 5], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4]]
LENGTH = 31  # the prompt's token, and six rounds of five
TREES = {
    "dynamic": Growth(width=3, top_k=3, scale=0.01),
    "best": Growth("best", width=3, top_k=3, scale=0.01),
    "static": Growth("static", parents=STATIC, scale=0.01),
    "chain": Growth("chain", scale=0.01),
}


def decode(
    target: Any, drafter: Any, temperature: float, rule: str = "coupled", length: int = LENGTH, batch: int = 8,
    nodes: int = 14, depth: int = 4, prompts: list[list[int]] = PROMPTS,
) -> list[Row]:  # fmt: skip
    budget = FixedBudget(nodes if drafter.growth.tree != "static" else 26, depth)
    engine = Engine(target, drafter, budget, GumbelNoise(target.vocab), rule)
    made = [Request(p, 50 + i, length, Sampling(temperature)) for i, p in enumerate(prompts)]
    rows = {}
    for piece in generate(engine, made, batch):
        rows[piece.row.index] = piece.row
    return [rows[i] for i in range(len(prompts))]


def tau(rows: list[Row]) -> float:
    return sum(r.usage.tau for r in rows) / len(rows)


# --- oracles

MAKE: dict[str, tuple[Callable[..., tuple[Oracle, Any]], Any]] = {
    "eagle": (oracle.of_eagle, eagle),
    "eagle3": (oracle.of_eagle3, eagle3),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", MAKE)
def test_the_known_good_drafter_is_accepted_to_full_depth(name: str, tree: str, temperature: float) -> None:
    make, module = MAKE[name]
    target, net = make()
    for row in decode(target, module.drafter(net, target, TREES[tree]), temperature):
        assert row.usage.accepted_at == row.usage.tested_at == [6, 6, 6, 6]
        assert row.usage.tau == 5.0


@pytest.mark.parametrize("tree", ["static", "chain"])
@pytest.mark.parametrize("name", MAKE)
def test_under_rejection_a_drafter_of_the_targets_distribution_is_accepted(name: str, tree: str) -> None:
    """A sampled chain from the target's own distribution is never rejected; in a tree, the first child never."""
    make, module = MAKE[name]
    target, net = make()
    for row in decode(target, module.drafter(net, target, TREES[tree]), 1.0, "rejection"):
        assert row.usage.accepted_at == row.usage.tested_at == [6, 6, 6, 6]


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
@pytest.mark.parametrize("value", [False, True])
def test_flags_of_published_checkpoints(flag: str, value: bool) -> None:
    target, net = oracle.of_eagle3(**{flag: value})
    other = eagle3.Eagle3Net(replace(net.config, **{flag: not value})).double()
    other.load_state_dict(net.state_dict())
    assert tau(decode(target, eagle3.drafter(net, target, TREES["chain"]), 0.0)) == 5.0
    assert tau(decode(target, eagle3.drafter(other, target, TREES["chain"]), 0.0)) < 4.8


def wrong_theta(net: Any) -> Any:
    shape = replace(net.config.layer, rope={"rope_theta": 10000.0})
    made = type(net)(replace(net.config, layer=shape)).double()
    made.load_state_dict(net.state_dict())
    return made


def unshifted(net: Any) -> Any:
    made = eagle.EagleNet(replace(net.config, inputs="feature+unshifted")).double()
    made.load_state_dict(net.state_dict())
    return made


def other_taps(net: Any) -> Any:
    made = eagle3.Eagle3Net(replace(net.config, taps=tuple(t + 1 for t in net.config.taps))).double()
    made.load_state_dict(net.state_dict())
    return made


def absolute_ids(net: Any) -> Any:
    made = copy.deepcopy(net)
    ids = net.ids()
    made.d2t = torch.cat([ids[1:], ids[:1]]) - torch.arange(len(ids))
    return made


def swapped(net: Any) -> Any:
    """cat(feature, embedding) where cat(embedding, feature) is meant."""
    made = copy.deepcopy(net)
    with torch.no_grad():
        made.fc.weight.copy_(net.fc.weight.roll(net.fc.weight.shape[1] // 2, 1))
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("eagle", wrong_theta), ("eagle", unshifted), ("eagle", swapped), ("eagle3", wrong_theta),
        ("eagle3", other_taps), ("eagle3", absolute_ids), ("eagle3", swapped),
    ],
)  # fmt: skip
def test_a_wrong_checkpoint_shows_at_once(name: str, spoil: Callable[[Any], Any], temperature: float) -> None:
    make, module = MAKE[name]
    target, net = make()
    assert tau(decode(target, module.drafter(spoil(net), target, TREES["chain"]), temperature)) < 3.5


@pytest.mark.parametrize("what", ["position", "mask", "tap", "true features"])
@pytest.mark.parametrize("name", MAKE)
def test_a_wrong_step_shows_at_once(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants of the drafting code, each of which leaves the text right."""
    make, module = MAKE[name]
    target, net = make()
    good = module.drafter(net, target, TREES["dynamic"])
    assert tau(decode(target, good, 1.0)) == 5.0
    life = _features.FeatureDrafting
    if what == "position":
        turn = life._rotary
        monkeypatch.setattr(
            life, "_rotary", lambda self, reach, dtype, places, place=0: turn(self, reach + 3, dtype, places, place + 3)
        )
    elif what == "mask":
        mask = KVCache.mask
        monkeypatch.setattr(KVCache, "mask", lambda self, own, *more: mask(self, torch.ones_like(own), *more))
    elif what == "tap":
        target.output = lambda tap, vector: oracle.seen_at(tap + 1) @ vector
    else:
        observe = life.observe

        def stale(self: Any, round: Any) -> None:
            features = {t: np.roll(f, 1, 1) for t, f in round.output.features.items()}
            observe(self, replace(round, output=replace(round.output, features=features)))

        monkeypatch.setattr(life, "observe", stale)
    assert tau(decode(target, good, 1.0)) < 4.75


def test_in_a_mix_it_observes_every_drafters_accepted_nodes() -> None:
    """It drafts one token, lookup several: its true features come from nodes that it did not propose, too."""
    target, net = oracle.of_eagle()
    mixed = _mix.of([drafters.load_one("lookup", target), eagle.drafter(net, target, Growth("chain", depth=1))])
    engine = Engine(target, mixed, FixedBudget(60, 6), GumbelNoise(VOCAB), "coupled")
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    *_, last = generate(engine, [Request(prompt, 3, 60, Sampling())])
    usage = last.row.usage
    assert usage.accepted_at[0] == usage.rounds
    assert sum(usage.accepted_at[1:]) > 5


# --- real families


@pytest.mark.parametrize("inputs", INPUTS)
def test_the_four_inputs(inputs: str) -> None:
    """Each reads what it says, and its first step is the network's forward over the whole text."""
    target, _ = oracle.of_eagle()
    net = oracle.shaken(eagle.EagleNet(eagle.EagleConfig(oracle.SHAPE, VOCAB, HIDDEN, inputs=inputs)).double(), 40)
    drafter = eagle.drafter(net, target, TREES["chain"])
    text = [3, 9, 4, 4, 20, 7, 11]
    session, drafting = target.open(99), drafter.open([text], 99)
    rows = _rows([text], target)
    for chunk in session.prefill([text[:-1]], drafter.taps):
        upcoming = chunk.next if chunk.next[0] >= 0 else [text[-1]]
        drafting.observe(_round(rows, chunk, [list(range(chunk.tree.nodes))], upcoming))
    tree = drafting.propose(rows, Budget(5, 3))
    tokens = text[1:] if ("shifted" in inputs and "un" not in inputs) or inputs == "token" else text[:-1]
    features = torch.stack([target.state(tuple(text[: i + 1]))[0] for i in range(6)])[None]
    drafted: list[int] = []
    for _ in range(3):
        n = features.shape[1]
        with torch.no_grad():
            out = net(features, target.embed(torch.tensor(tokens[:n]))[None], torch.arange(n)[None])
        drafted.append(int(target.head(out[0, -1]).argmax()))
        features = torch.cat([features, out[:, -1:]], 1)
        tokens = (
            [*tokens, drafted[-1]]
            if inputs != "feature+unshifted"
            else [*tokens, [text[-1], *drafted][len(drafted) - 1]]
        )
    assert tree.tokens[0].tolist() == [text[-1], *drafted]


def _rows(texts: list[list[int]], target: Any) -> Rows:
    start = tuple(len(t) - 1 for t in texts)
    b = len(texts)
    return Rows(
        tuple(t[-1] for t in texts), start, (0,) * b, (0,) * b, (Sampling(),) * b,
        "coupled", (50,) * b, GumbelNoise(target.vocab),
    )  # fmt: skip


def _round(rows: Any, chunk: Any, path: Any, upcoming: Any) -> Round:
    return Round(rows, chunk.tree, chunk.output, path, upcoming, [[] for _ in range(len(rows))])


# --- the distribution under rejection


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_target(tiny_llama(11, initializer_range=0.35))


@pytest.mark.parametrize("shape", [None, (3, 2), "static", (1, 1)])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_pairs_of_tokens_follow_the_targets_distribution(tiny: Any, name: str, shape: Any) -> None:
    """Under rejection: dynamic trees with point masses, sampled trees with q, by the real code path."""
    torch.manual_seed(8)
    if name == "eagle":
        net: Any = eagle.EagleNet(eagle.EagleConfig(LayerShape(16, 2, 1, 8, 24, 16), 11, 16))
        module: Any = eagle
    else:
        net = eagle3.Eagle3Net(eagle3.Eagle3Config(LayerShape(16, 2, 1, 8, 24, 32), 11, 8, 16, (0, 1, 2)))
        net.d2t.add_(2)
        module = eagle3
    growth = Growth("static", parents=(0, 0, 0, 0, 1, 1, 2)) if shape == "static" else Growth(width=2, top_k=3)
    drafter = module.drafter(net, tiny, growth)
    budget = FixedBudget(12, 3, None if shape == "static" else shape)
    engine = Engine(tiny, drafter, budget, GumbelNoise(11), "rejection")
    sampling, samples = Sampling(0.9, top_p=0.9), 1500
    with torch.no_grad():
        cells = draws.exact_cells(tiny.model, PROMPTS[1], sampling, samples)
        counts = torch.zeros(len(cells.expected), dtype=torch.float64)
        for first in range(0, samples, 500):
            for pair in draws.pairs(engine, PROMPTS[1], sampling, range(first, first + 500)):
                counts[cells.of(*pair)] += 1
    assert g_test(counts, cells.expected)[1] > 1e-3


def test_sampled_trees_keep_q_over_the_targets_vocabulary(tiny: Any) -> None:
    net = eagle3.Eagle3Net(eagle3.Eagle3Config(LayerShape(16, 2, 1, 8, 24, 32), 11, 8, 16, (0, 1, 2)))
    net.d2t.add_(2)
    drafter = eagle3.drafter(net, tiny, TREES["static"])
    engine = Engine(tiny, drafter, FixedBudget(30, 3, (2, 1)), GumbelNoise(11), "rejection")
    with torch.no_grad():
        batch, _ = Batch.start(engine, [Row(Request([1, 2, 3], 5, 30, Sampling(0.7)), 0)])
        assert batch is not None
        tree = batch.propose(batch.view(), Budget(30, 2, shape=(2, 1)))
    assert tree.q is not None
    assert tree.q.shape == (1, 3, 11)
    assert np.allclose(tree.q.sum(-1), 1)
    assert (tree.q[..., :2] == 0).all(), "tokens that the draft vocabulary has not"
    assert (tree.q[..., 2:10] > 0).all()


# --- folders, and what is refused


def test_folders_come_back(tmp_path: Path) -> None:
    for name, (make, _) in MAKE.items():
        target, net = make()
        native.save(tmp_path / name, name, net)
        loaded = drafters.load(f"{tmp_path / name}?tree=chain", target).uncalibrated  # its config names the method
        assert loaded.config == net.config
        assert loaded.growth.scale == 0.01
        assert tau(decode(target, loaded, 1.0)) == 5.0
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["outrider_method"] == name


def change(folder: Path, **tensors: Any) -> None:
    kept = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del kept[name]
        else:
            kept[name] = tensor
    save_file(kept, folder / "model.safetensors")


def config_change(folder: Path, **fields: Any) -> None:
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, **fields}))


NAN = torch.full((HIDDEN, 2 * HIDDEN), float("nan"), dtype=torch.float64)
BAD: list[tuple[str, Callable[[Path], None], str]] = [
    ("eagle", lambda f: change(f, fc__weight=None), "lack fc.weight"),
    ("eagle", lambda f: change(f, fc__bias=torch.zeros(HIDDEN)), "hold fc.bias, which this .* has not"),
    ("eagle", lambda f: change(f, fc__weight=NAN), "fc.weight of .* NaN"),
    ("eagle", lambda f: change(f, fc__weight=NAN[:3]), r"fc.weight of .* is \[3, 32\], where its config says"),
    ("eagle", lambda f: config_change(f, vocab=30), "width 16 and 30 tokens, and this one has width 16 and 29"),
    ("eagle", lambda f: config_change(f, inputs="pixels+noise"), "inputs of EAGLE are"),
    ("eagle", lambda f: config_change(f, target_hidden=24), "must be 24 wide, not 16"),
    ("eagle", lambda f: config_change(f, surplus=1), "config of .* is not this drafter's"),
    ("eagle", lambda f: config_change(f, layer={"hidden": 3}), "config of .* is not (this drafter's|that of eagle)"),
    ("eagle", lambda f: (f / "config.json").write_text("{") and None, "not valid JSON"),
    ("eagle", lambda f: (f / "model.safetensors").write_bytes(b"12345678") and None, "damaged"),
    ("eagle", lambda f: (f / "model.safetensors").unlink(), "lacks config.json or model.safetensors|has no weights"),
    ("eagle3", lambda f: config_change(f, taps=[1, 4, 4]), "three distinct layers"),
    ("eagle3", lambda f: config_change(f, taps=[-1, 4, 6]), "negative"),
    ("eagle3", lambda f: config_change(f, taps=[1, 4]), "three distinct layers"),
    ("eagle3", lambda f: config_change(f, draft_vocab=99), "where its config says|holds 1 to 29"),
    ("eagle3", lambda f: change(f, d2t=torch.zeros(len(oracle.DRAFTED), dtype=torch.long) + 8), "distinct token ids"),
    ("eagle3", lambda f: change(f, d2t=-torch.arange(len(oracle.DRAFTED))), "distinct token ids"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "sentence"), BAD, ids=[b[2][:30] for b in BAD])
def test_bad_folders_are_refused_in_a_sentence(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], sentence: str
) -> None:
    target, net = MAKE[name][0]()
    native.save(tmp_path / "d", name, net)
    spoil(tmp_path / "d")
    with pytest.raises(InputError, match=sentence) as error:
        drafters.load(f"{name}:{tmp_path / 'd'}", target)
    assert "\n" not in str(error.value)


def test_other_refusals(tmp_path: Path) -> None:
    target, net = oracle.of_eagle()
    native.save(tmp_path, "eagle", net)
    for spec, sentence in (
        ("eagle", "needs trained weights"),
        (f"eagle3:{tmp_path}", "holds eagle, not eagle3"),
        (f"eagle:{tmp_path}?tree=oak", "tree must be"),
        (f"eagle:{tmp_path / 'none'}", "no folder"),
    ):
        with pytest.raises(InputError, match=sentence):
            drafters.load(spec, target)
    with pytest.raises(InputError, match="needs the target"):
        drafters.load(f"eagle:{tmp_path}")
    wider = copy.copy(target)
    wider.embed = lambda tokens: torch.zeros(*tokens.shape, 20)  # type: ignore[method-assign]
    with pytest.raises(InputError, match="embeddings have width 20 and its features 16"):
        drafters.load(f"eagle:{tmp_path}", wider)
    with pytest.raises(InputError, match="the draft vocabulary holds 1 to 29"):
        replace(oracle.of_eagle3()[1].config, draft_vocab=99)
    with pytest.raises(InputError, match="needs an embedding of its own"):
        replace(oracle.of_eagle3()[1].config, target_hidden=48)
    for layers in (2, 3, 4, 5, 6):
        with pytest.raises(InputError, match="not distinct"):
            configs.default_taps(layers)
    assert configs.default_taps(32) == (2, 16, 29)


def test_taps_beyond_the_target() -> None:
    target = load_target(small.build("llama"))
    net = eagle3.Eagle3Net(
        eagle3.Eagle3Config(LayerShape(32, 4, 2, 8, 40, 64), target.vocab, target.vocab, 32, (1, 2, 4))
    )
    with pytest.raises(InputError, match="0 to 3"):
        eagle3.drafter(net, target)
