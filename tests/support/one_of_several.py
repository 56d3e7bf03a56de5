"""Processes that train together, as torchrun starts them (test_distributed.py): OUT, COUNT, and which trainings.

They are forked from one process that has imported everything, which takes longer than the trainings.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from objective_world import target
from torch.distributed.tensor import DTensor
from training_world import CASES, EAGLE3, KILLED, THREE, unequal, watched

from outrider.backends.torch import load_target
from outrider.params import Interrupted
from outrider.training.state import State

KINDS = ("replicas", "shard")


def everything(out: Path, results: dict[str, Any]) -> None:
    """All trainings that end well, one after the other."""
    spread(out, results)
    for kind in KINDS:
        more = {"shard": kind == "shard"}
        for name, recipe in CASES.items():
            results[f"{kind}/{name}"] = watched(target(), unequal(), out / kind / name, recipe, **more)
        of = out / kind / "from-one"  # three steps by one process are there
        results[f"{kind}/from-one"] = watched(target(), unequal(), of, replace(THREE, steps=5), **more)
    results["replicas/stopped"] = [
        *watched(target(torch.float32), unequal(), out / "replicas" / "stopped", KILLED, stop=6),
        *watched(target(torch.float32), unequal(), out / "replicas" / "stopped", KILLED),
    ]
    for kind in KINDS:
        calm = out / kind / "calm"
        results[f"{kind}/calm"] = watched(target(torch.float32), unequal(), calm, KILLED, shard=kind == "shard")
    killed = out / "shard" / "killed"  # what another pair of processes has left
    results["shard/killed"] = watched(target(torch.float32), unequal(), killed, KILLED, shard=True)
    results["signal"] = interrupted(out / "signal")


def spread(out: Path, results: dict[str, Any]) -> None:
    """Trainings for a target that the processes hold together."""
    of: Any = load_target(str(out / "target"), dtype="float64", processes=2)
    parts = {name: isinstance(p, DTensor) for name, p in of.model.named_parameters()}
    results["parts"] = sorted(name for name, part in parts.items() if part)
    results["spread/eagle"] = watched(of, unequal(), out / "spread" / "eagle", THREE)
    results["spread/eagle3"] = watched(of, unequal(), out / "spread" / "eagle3", EAGLE3, shard=True)
    results["spread/idle"] = watched(of, unequal(), out / "spread" / "idle", CASES["idle"])
    cached = replace(THREE, cache=str(out / "features"), steps=8)
    results["spread/cache"] = watched(of, unequal(), out / "spread" / "cache", cached)


def interrupted(out: Path) -> str:
    """The message of a process when one of the two gets SIGTERM in its second step."""

    def kill(step: int) -> None:
        if step == 1 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with each(kill):
        try:
            watched(target(), unequal(), out, replace(THREE, steps=6))
        except Interrupted as words:
            return str(words)
    return "nothing"


class each:
    """While it is open, a function is called before every step."""

    def __init__(self, function: Callable[[int], None]):
        self.function = function

    def __enter__(self) -> None:
        self.before = step = State.step

        def first(state: State, number: int, *given: Any) -> tuple[float, int, dict[str, float]]:
            self.function(number)
            return step(state, number, *given)

        State.step = first  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        State.step = self.before  # type: ignore[method-assign]


def killed(out: Path, results: dict[str, Any]) -> None:
    """A training whose processes are killed in its seventh step, while one of them waits for the other."""

    def wait(step: int) -> None:
        if step == 6 and torch.distributed.get_rank() == 0:
            (out / "here").touch()
            time.sleep(600)

    with each(wait):
        watched(target(torch.float32), unequal(), out / "shard" / "killed", KILLED, shard=True)


def process(rank: int, out: Path, trainings: Callable[[Path, dict[str, Any]], None]) -> int:
    """Fork the process of this rank, which writes its results to OUT/RANK.json; its id."""
    if child := os.fork():
        return child
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    results: dict[str, Any] = {}
    trainings(out, results)
    (out / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.destroy_process_group()
    os._exit(0)


def together(out: Path, count: int, trainings: Callable[[Path, dict[str, Any]], None], until: str = "") -> bool:
    """Whether all processes exited with 0; with `until`, they are killed when a file of that name is in OUT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), MASTER_PORT=str(port))
    running = [process(rank, out, trainings) for rank in range(count)]
    while until and not (out / until).exists():
        assert os.waitpid(-1, os.WNOHANG) == (0, 0), "a process ended before it could be killed"
        time.sleep(0.02)
    for child in running if until else ():
        os.kill(child, signal.SIGKILL)
    ends = (os.waitpid(-1, 0)[1] for _ in running)
    return all(end == 0 or until for end in ends)  # at the first failure: the others would wait for that process


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    if sys.argv[3] == "everything":
        together(folder, size, killed, until="here")
        shutil.copytree(folder / "shard" / "killed", folder / "remains")
    sys.exit(not together(folder, size, {"everything": everything, "spread": spread}[sys.argv[3]]))
