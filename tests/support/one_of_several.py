"""One of several processes that train together (test_distributed.py): OUT, and which trainings."""

from __future__ import annotations

import json
import os
import signal
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


def everything(out: Path, found: dict[str, Any]) -> None:
    """All trainings that end well, one after the other."""
    spread(out, found)
    for kind in KINDS:
        more = {"shard": kind == "shard"}
        for name, recipe in CASES.items():
            found[f"{kind}/{name}"] = watched(target(), unequal(), out / kind / name, recipe, **more)
        of = out / kind / "from-one"  # three steps by one process are there
        found[f"{kind}/from-one"] = watched(target(), unequal(), of, replace(THREE, steps=5), **more)
    found["replicas/stopped"] = [
        *watched(target(torch.float32), unequal(), out / "replicas" / "stopped", KILLED, stop=6),
        *watched(target(torch.float32), unequal(), out / "replicas" / "stopped", KILLED),
    ]
    for kind in KINDS:
        calm = out / kind / "calm"
        found[f"{kind}/calm"] = watched(target(torch.float32), unequal(), calm, KILLED, shard=kind == "shard")
    killed = out / "shard" / "killed"  # what another pair of processes has left
    found["shard/killed"] = watched(target(torch.float32), unequal(), killed, KILLED, shard=True)
    found["signal"] = told(out / "signal")


def spread(out: Path, found: dict[str, Any]) -> None:
    """Trainings for a target that the processes hold together."""
    of: Any = load_target(str(out / "target"), dtype="float64", processes=2)
    parts = {name: isinstance(p, DTensor) for name, p in of.model.named_parameters()}
    found["parts"] = sorted(name for name, part in parts.items() if part)
    found["spread/eagle"] = watched(of, unequal(), out / "spread" / "eagle", THREE)
    found["spread/eagle3"] = watched(of, unequal(), out / "spread" / "eagle3", EAGLE3, shard=True)
    found["spread/idle"] = watched(of, unequal(), out / "spread" / "idle", CASES["idle"])
    cached = replace(THREE, cache=str(out / "features"), steps=8)
    found["spread/cache"] = watched(of, unequal(), out / "spread" / "cache", cached)


def told(out: Path) -> str:
    """What a process says when one of the two, in its second step, is asked to end."""

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


def killed(out: Path, found: dict[str, Any]) -> None:
    """A training that says when it is in its seventh step, and is killed there: one process waits for the other."""

    def wait(step: int) -> None:
        if step == 6 and torch.distributed.get_rank() == 0:
            print("here", flush=True)
            time.sleep(600)

    with each(wait):
        watched(target(torch.float32), unequal(), out / "shard" / "killed", KILLED, shard=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, found = Path(sys.argv[1]), {}
    {"everything": everything, "killed": killed, "spread": spread}[sys.argv[2]](out, found)
    rank = torch.distributed.get_rank()
    (out / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()
