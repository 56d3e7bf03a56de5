"""What a process reads of a step, and that one without anything to learn still takes part."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_world import packed, target, texts
from training_world import RECIPE, documents

from outrider.training import loop, objectives
from outrider.training.data import Batch
from outrider.training.features import TargetFeatures, see
from outrider.training.state import FeaturesOf, Piece, State, shares


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_every_process_has_as_many_pieces_and_every_row_one_place(count: int, accumulate: int, processes: int) -> None:
    index = list(range(100, 100 + count))
    pieces = shares(index, processes, accumulate)
    assert {len(piece) for piece in pieces} == {processes}
    assert sorted(row for piece in pieces for mine in piece for row in mine) == index
    assert pieces[0][0], "the first process has a row"
    assert len(pieces) <= accumulate
    assert max(len(mine) for piece in pieces for mine in piece) <= math.ceil(math.ceil(count / processes) / accumulate)


@pytest.mark.parametrize("method", [*objectives.names(), "p-eagle"])
def test_with_nothing_to_learn_every_gradient_is_there_and_zero(method: str) -> None:
    """Else the other processes would wait for it."""
    of, batch = target(), packed([texts(3, (9, 7)), texts(4, (12,))])
    options: dict[str, Any] = {"taps": (0, 2, 3)} if method in ("eagle3", "p-eagle") else {}
    options |= {"parallel": True} if method == "p-eagle" else {}
    options |= {"taps": (1, 2)} if method == "block" else {}
    made: Any = objectives.build(method.replace("p-eagle", "eagle3"), of, documents(), options)
    made.double().train()
    seen = see(of, batch, made.taps)
    loss, weight, _ = made(batch.silent(), seen, 5)
    assert (float(loss.detach()), float(weight)) == (0.0, 0.0)
    loss.backward()
    learned = [p for group in made.groups() for p in group["params"]]
    assert learned
    assert all(p.grad is not None and not p.grad.any() for p in learned)


@pytest.mark.parametrize(("half", "bf16"), [(False, False), (False, True), (True, False)])
def test_features_keep_the_precision_in_which_the_target_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bool, bf16: bool
) -> None:
    """A target in bfloat16 is read in that, one in float32 in the training's; networks learn in float32."""
    of = target(torch.bfloat16 if half else torch.float32)
    results: list[tuple[Batch, TargetFeatures]] = []
    read = State._read

    def watch(self: State, rows: Batch, piece: Piece, features_of: FeaturesOf) -> tuple[Batch, TargetFeatures]:
        results.append(read(self, rows, piece, features_of))
        return results[-1]

    monkeypatch.setattr(State, "_read", watch)
    loop.train(of, documents(), tmp_path, replace(RECIPE, bf16=bf16, prompts=1), stop=1, quiet=True)
    batch, seen = results[0]
    there, served = batch.documents >= 0, see(of, batch, (-1,), bf16).features[-1]
    kept = served.bfloat16().float() if half or bf16 else served
    assert seen.features[-1].dtype == torch.float32
    assert torch.equal(seen.features[-1][there], kept[there])
