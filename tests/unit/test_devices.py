"""What is done differently where the device works on while the host goes ahead. No GPU is needed: none is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import build

from outrider import machine
from outrider.backends.torch.hf import HFTarget
from outrider.core.clock import Clock
from outrider.training.data import Batch
from outrider.training.objectives._objective import uniform


def test_a_part_ends_when_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    target = HFTarget(build("llama"))
    for device in ("cpu", "cuda:1"):
        target.device = device
        with Clock(target.settle)("draft"):
            pass
    assert waits == ["cuda:1"], "and nobody waits for a CPU"


def test_what_was_measured_on_a_gpu_is_kept_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device[-1]}")
    assert machine.device("cuda:1") == "cuda:1 card 1"
    assert machine.device("cpu") == "cpu"


def test_noise_of_training_is_drawn_where_the_batch_is() -> None:
    shape = (2, 3)
    rows = torch.zeros(shape, dtype=torch.long)
    batch = Batch(rows, rows, rows, rows.bool(), (4, 7))
    result = uniform(batch, 5, 11, 3)
    assert result.device == rows.device
    assert result.shape == shape
    assert not torch.equal(result[0], result[1])
    alone = uniform(Batch(rows[:1], rows[:1], rows[:1], rows[:1].bool(), (7,)), 5, 11, 3)
    assert torch.equal(alone[0], result[1]), "a function of step and row"
