"""Two processes on the CPU: replicas and shards both give the losses of one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from objective_world import target
from training_world import RECIPE, documents

from outrider import drafters
from outrider.training import loop

pytestmark = [pytest.mark.process, pytest.mark.trained]


def together(out: Path, kind: str) -> list[dict]:
    """What two processes say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    support = Path(__file__).resolve().parents[1] / "support"
    shared |= {"PYTHONPATH": os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])}
    shared |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    script = str(support / "one_of_several.py")
    running = [
        subprocess.Popen(
            [sys.executable, script, str(out), kind],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ends = [process.communicate(timeout=240) for process in running]
    assert all(process.returncode == 0 for process in running), ends[0][1][-3000:] + ends[1][1][-3000:]
    return [json.loads(Path(f"{out}.{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float]:
    """The losses of one process."""
    losses = []
    step = loop._State.step

    def watched(self: loop._State, *given: object) -> tuple[float, int, dict[str, float]]:
        made = step(self, *given)  # type: ignore[arg-type]
        losses.append(made[0])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._State, "step", watched)
        found = loop.train(target(torch.float32), documents(), tmp_path_factory.mktemp("one"), RECIPE, quiet=True)
    return losses, found.best


@pytest.mark.parametrize("kind", ["replicas", "shard"])
def test_two_processes_give_the_losses_of_one(tmp_path: Path, alone: tuple[list[float], float], kind: str) -> None:
    found = together(tmp_path / "run", kind)
    for one in found:
        assert one["losses"] == pytest.approx(alone[0], rel=1e-5)
        assert one["sharded"] == [kind == "shard"], "shards are DTensors, replicas are not"
    assert found[0]["best"] == pytest.approx(alone[1], rel=1e-5)
    assert drafters.load(str(tmp_path / "run" / "best"), target(torch.float32)).taps == (-1,)
