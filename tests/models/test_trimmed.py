"""A draft vocabulary smaller than the target's: the same guesses as the whole one among its tokens, the same texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import PROMPTS, VOCAB, build

from outrider import drafters
from outrider.backends.torch import HFTarget, load_target
from outrider.budgets.budgeter import FixedBudget
from outrider.checkpoints import Facts, native
from outrider.checkpoints.write import write
from outrider.core.noise import GumbelNoise
from outrider.core.types import Budget, Rows
from outrider.engine import Engine, generate
from outrider.engine.request import Request
from outrider.params import InputError, Sampling
from outrider.training import objectives
from outrider.training.data import Document, pack
from outrider.training.features import see

FEW = 40
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "hass": ("hass", {}),
    "medusa": ("medusa", {"heads": 3}),
    "medusa, shared head": ("medusa", {"heads": 3, "share_head": True}),
    "hydra": ("hydra", {"heads": 3}),
    "hydra++": ("hydra", {"heads": 3, "prefix": True}),
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    result = load_target(build("llama", torch.float64))
    assert isinstance(result, HFTarget)
    return result


def documents(tokens: int) -> list[Document]:
    """Texts of the first `tokens` tokens."""
    ids = torch.randint(0, tokens, (6, 24), generator=torch.Generator().manual_seed(1)).tolist()
    return [Document(tuple(row), (False,) * 4 + (True,) * 20, str(i)) for i, row in enumerate(ids)]


def objective(target: HFTarget, way: str, tokens: int = FEW, few: int = FEW) -> Any:
    torch.manual_seed(3)
    method, options = WAYS[way]
    made = objectives.build(method, target, documents(tokens), {**options, "draft_vocab": few})
    with torch.no_grad():
        for p in made.net.parameters():  # away from a start at which all heads are equal
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p))
    return made.double()


def loaded(target: HFTarget, made: Any, folder: Path, options: str = "") -> Any:
    made.save(folder)
    return drafters.load(f"{made.drafter}:{folder}{options}", target).uncalibrated


def texts(target: HFTarget, drafter: Any, temperature: float, rule: str = "coupled") -> list[list[int]]:
    engine = Engine(target, drafter, FixedBudget(10, 3), GumbelNoise(VOCAB), rule)  # type: ignore[arg-type]
    requests = [Request(p, i, 24, Sampling(temperature)) for i, p in enumerate(PROMPTS)]
    rows = {piece.row.index: piece.row for piece in generate(engine, requests)}
    return [rows[i].output for i in range(len(PROMPTS))]


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_the_targets_and_drafts_keep_to_their_vocabulary(target: HFTarget, way: str, tmp_path: Path) -> None:
    drafter = loaded(target, objective(target, way), tmp_path / "d")
    drafted: list[int] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(drafter, name)

        def open(self, *given: Any) -> Any:
            made = drafter.open(*given)
            propose = made.propose

            def watched(rows: Rows, budget: Budget) -> Any:
                tree = propose(rows, budget)
                for row, size in zip(tree.tokens.tolist(), tree.size.tolist(), strict=True):
                    drafted.extend(row[1:size])
                return tree

            made.propose = watched
            return made

    for temperature in (0.0, 1.0):
        assert texts(target, Watched(), temperature) == texts(target, drafters.load("none"), temperature)
    assert len(set(drafted)) > FEW // 2
    assert max(drafted) < FEW


@pytest.mark.parametrize("way", ["eagle", "medusa", "medusa, shared head", "hydra"])
def test_its_drafts_are_the_best_within_its_vocabulary(target: HFTarget, way: str, tmp_path: Path) -> None:
    """The same weights with all tokens: what remains of their ranking when the others are struck out."""
    trimmed = objective(target, way)
    full = objective(target, way, few=0)
    ids, state = trimmed.net.ids(), trimmed.net.state_dict()
    for name, tensor in full.net.state_dict().items():
        tensor.copy_(state[name]) if tensor.shape == state[name].shape else tensor[ids].copy_(state[name])
        if tensor.shape != state[name].shape:
            tensor[ids] = state[name]
    few = candidates(target, loaded(target, trimmed, tmp_path / "few"), 4)
    all_ = candidates(target, loaded(target, full, tmp_path / "all"), VOCAB)
    kept = [[t for t in depth if t < FEW][:4] for depth in all_]
    assert few == kept


def candidates(target: HFTarget, drafter: Any, k: int) -> list[list[int]]:
    """The k best guesses at each depth below a path of known tokens."""
    truth, prompt = np.array([[5, 9, 30]]), PROMPTS[0]
    seen: dict[str, Any] = {}

    class Open:
        def __getattr__(self, name: str) -> Any:
            return getattr(drafter, name)

        def open(self, *given: Any) -> Any:
            made = seen["state"] = drafter.open(*given)
            propose = made.propose

            def watched(rows: Rows, budget: Budget) -> Any:
                seen.setdefault("candidates", made.candidates(rows, truth, k)[0].tolist())
                return propose(rows, budget)

            made.propose = watched
            return made

    engine = Engine(target, Open(), FixedBudget(6, 3), GumbelNoise(VOCAB))  # type: ignore[arg-type]
    for _ in generate(engine, [Request(prompt, 0, 8)]):
        pass
    results: list[list[int]] = seen["candidates"]
    return results


@pytest.mark.parametrize("way", WAYS)
def test_it_learns_what_can_be_drafted(target: HFTarget, way: str, tmp_path: Path) -> None:
    """Half of the text's tokens lie outside: they are not learned, count as wrong guesses, and break nothing."""
    made = objective(target, way, tokens=80)
    ids = made.net.ids()
    assert len(ids) == FEW
    batch = pack(documents(80), 24)
    seen = see(target, batch, made.taps)
    loss, weight, hits = made.train()(batch, seen, 0)
    (loss / weight).backward()
    gradients = [p.grad for p in made.net.parameters() if p.grad is not None]
    assert gradients
    assert all(bool(torch.isfinite(g).all()) for g in gradients)
    inside = torch.isin(batch.ahead(2)[batch.wanted(2)], ids).double().mean()
    assert float(hits["hit1"]) <= float(inside)


def test_the_vocabulary_is_what_is_learned_most(target: HFTarget) -> None:
    texts_ = [Document((7,) * 9 + (3, 3, 5), (False,) * 9 + (True,) * 3, "a"), Document((8, 8, 1), (False,) * 3, "b")]
    made = objectives.build("eagle", target, texts_, {"draft_vocab": 3})
    assert made.net.ids().tolist() == [3, 5, 7], "3 and 5 are learned; 7 is read most often of the rest"  # type: ignore[attr-defined]


def test_a_wrong_draft_vocabulary_is_refused(target: HFTarget, tmp_path: Path) -> None:
    for size in (-2, VOCAB + 1):
        with pytest.raises(InputError, match="draft_vocab is 0"):
            objectives.build("eagle", target, documents(FEW), {"draft_vocab": size})
    assert objectives.build("eagle", target, documents(FEW), {"draft_vocab": VOCAB}).net.ids() is None  # type: ignore[attr-defined]
    made = objective(target, "eagle")
    made.net.d2t[3] = made.net.d2t[2] - 1  # two draft tokens for one token
    with pytest.raises(InputError, match="must be distinct token ids"):
        loaded(target, made, tmp_path / "d")


def test_layouts_without_a_draft_vocabulary_refuse_it(target: HFTarget, tmp_path: Path) -> None:
    objective(target, "medusa").save(tmp_path / "d")
    result = native.read(tmp_path / "d")
    with pytest.raises(InputError, match="draft vocabulary"):
        write(result, "vllm", Facts.of(target), tmp_path / "out")
