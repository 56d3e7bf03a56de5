"""Two processes on the CPU give what one gives: replicas and shards, killed or not, with a target on both of them.

Each training has a trap that several processes can fall into (`CASES` in tests/support/training_world.py):

    sampled anchors and noise that depend on the process      anchors, eagle
    a mean of the processes' means                            eagle: texts of very unequal shares to learn
    shared embeddings that are sharded or written twice       tied
    a process without rows, which others wait for             pieces, idle
    checkpoints that need as many processes as wrote them     from-one, and those that go on in one
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_world import target
from one_of_several import KINDS
from safetensors.torch import load_file
from torch import Tensor
from training_world import CASES, EAGLE3, KILLED, THREE, unequal, watched

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.training import checkpoint
from outrider.training.data import pack, split
from outrider.training.state import rows_of, shares

pytestmark = [pytest.mark.process, pytest.mark.trained]
NEAR = 1e-10


def together(out: Path, trainings: str, count: int = 2) -> list[dict[str, Any]]:
    """What each of the processes returned."""
    support = Path(__file__).resolve().parents[1] / "support"
    shared = {
        "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")]),
        "OUTRIDER_CACHE": str(out / "kept"),
    }  # fmt: skip
    command = [sys.executable, str(support / "one_of_several.py"), str(out), str(count), trainings]
    options: Any = {"env": {**os.environ, **shared}, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **options) as process:
        try:
            said = process.communicate(timeout=480)[1]
        finally:
            with suppress(ProcessLookupError):  # the group has ended
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-5000:]
    return [json.loads((out / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """The same trainings by one process: their folder, and the losses of every step."""
    out = tmp_path_factory.mktemp("one")
    target().model.save_pretrained(out / "target")
    of: Any = load_target(str(out / "target"), dtype="float64")
    losses = {name: watched(target(), unequal(), out / name, recipe) for name, recipe in CASES.items()}
    losses["eagle3"] = watched(of, unequal(), out / "eagle3", EAGLE3)
    cached = replace(THREE, cache=str(out / "features"), steps=8)
    losses["cache"] = watched(of, unequal(), out / "cache", cached)
    shutil.copytree(out / "eagle", out / "longer")
    losses["longer"] = watched(target(), unequal(), out / "longer", replace(THREE, steps=5))
    return out, losses


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, alone: tuple[Path, dict[str, list[float]]]
) -> tuple[Path, list[dict[str, Any]]]:
    """Trainings by two processes, one of which was killed before: their folder, and what both losses."""
    out = tmp_path_factory.mktemp("two")
    shutil.copytree(alone[0] / "target", out / "target")
    for kind in KINDS:
        shutil.copytree(alone[0] / "eagle", out / kind / "from-one")
    return out, together(out, "everything")


def state(folder: Path) -> dict[str, Any]:
    read = checkpoint.read(folder / "checkpoint.pt")
    assert read is not None
    return read


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Weights and moments of a checkpoint."""
    kept = state(folder)
    yield from kept["module"].items()
    for i, moments in kept["optimiser"]["state"].items():
        yield from ((f"{name} of {i}", x) for name, x in moments.items())


def same(a: Path, b: Path, near: float = NEAR) -> None:
    """Two checkpoints have the same plain tensors of the same names; near = 0: bit for bit."""
    one, other = dict(tensors(a)), dict(tensors(b))
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert type(other[name]) is Tensor, f"{name} is a plain tensor"
        assert x.shape == other[name].shape, name
        apart = float((x.double() - other[name].double()).abs().max())
        assert apart <= near, f"{name} differs by {apart:.1e}"
    for of in ("step", "of"):
        assert state(a)[of] == state(b)[of]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_losses_and_weights_of_one(alone: Any, two: Any, case: str, kind: str) -> None:
    for results in two[1]:
        assert results[f"{kind}/{case}"] == pytest.approx(alone[1][case], rel=NEAR, abs=NEAR)
    same(alone[0] / case, two[0] / kind / case)
    one, other = (
        load_file(folder / "best" / "model.safetensors") for folder in (alone[0] / case, two[0] / kind / case)
    )
    assert one.keys() == other.keys()
    assert all(torch.allclose(x, other[name], rtol=0, atol=NEAR) for name, x in one.items())


def test_the_processes_have_very_unequal_shares() -> None:
    """Else the mean of their means would be the mean of all, and nothing would be proved."""
    rows = pack(split(unequal())[0], THREE.length, THREE.seed)
    counts = []
    for step in range(3):
        piece = shares(rows_of(THREE, len(rows.keys), step), 2, 1)[0]
        counts.append(sorted(int(rows.rows(mine).wanted(2).sum()) for mine in piece))
    assert max(b / a for a, b in counts) > 3, counts


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_hold_only_the_drafters_weights(two: Any, kind: str) -> None:
    """Neither the target's embedding nor its head; and a drafter's own shared embedding stays shared."""
    vocab = target().vocab
    of_eagle = state(two[0] / kind / "eagle")["module"]
    assert not [name for name, x in of_eagle.items() if vocab in x.shape]
    of_lm = state(two[0] / kind / "tied")["module"]
    assert torch.equal(of_lm["net.lm_head.weight"], of_lm["net.model.embed_tokens.weight"])
    kept = load_file(two[0] / kind / "tied" / "best" / "model.safetensors")
    assert [name for name, x in kept.items() if vocab in x.shape] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("kind", [*KINDS, "spread"])
def test_a_checkpoint_of_two_processes_goes_on_in_one(tmp_path: Path, alone: Any, two: Any, kind: str) -> None:
    shutil.copytree(two[0] / kind / "eagle", tmp_path / "run")
    losses = watched(target(), unequal(), tmp_path / "run", replace(THREE, steps=5))
    assert losses == pytest.approx(alone[1]["longer"], rel=NEAR)
    same(alone[0] / "longer", tmp_path / "run")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_one_process_goes_on_in_two(alone: Any, two: Any, kind: str) -> None:
    assert two[1][0][f"{kind}/from-one"] == pytest.approx(alone[1]["longer"], rel=NEAR)
    same(alone[0] / "longer", two[0] / kind / "from-one")


def test_killed_and_started_again_is_never_killed(two: Any) -> None:
    """SIGKILL to both processes in the middle of a sharded run; bit for bit."""
    assert state(two[0] / "remains")["step"] == 4, "what the killed processes have left"
    for results in two[1]:
        assert results["shard/killed"] == results["shard/calm"][4:]
        assert len(results["shard/killed"]) == KILLED.steps - 4
    same(two[0] / "shard" / "calm", two[0] / "shard" / "killed", near=0)


def test_stopped_and_started_again_is_never_stopped(two: Any) -> None:
    """Replicas, bit for bit."""
    for results in two[1]:
        assert results["replicas/calm"] == results["replicas/stopped"]
    same(two[0] / "replicas" / "calm", two[0] / "replicas" / "stopped", near=0)


def test_a_signal_to_one_process_ends_all_after_the_same_step(two: Any) -> None:
    words = f"{two[0] / 'signal'} keeps step 2 of 6; the same command resumes from there"
    assert [results["signal"] for results in two[1]] == [words, words]
    assert state(two[0] / "signal")["step"] == 2


@pytest.mark.parametrize("case", ["eagle", "eagle3", "idle"])
def test_a_target_on_two_processes_trains_like_one_on_one(alone: Any, two: Any, case: str) -> None:
    for results in two[1]:
        assert results[f"spread/{case}"] == pytest.approx(alone[1][case], rel=NEAR, abs=NEAR)
    same(alone[0] / case, two[0] / "spread" / case)
    best = two[0] / "spread" / case / "best"
    one, other = load_file(alone[0] / case / "best" / "model.safetensors"), load_file(best / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.allclose(x, other[name], rtol=0, atol=NEAR) for name, x in one.items())
    assert drafters.load(str(best), target()).taps


def test_its_layers_are_sharded_and_its_embedding_and_head_are_not(two: Any) -> None:
    parts = two[1][0]["parts"]
    assert "model.layers.0.self_attn.q_proj.weight" in parts
    assert "model.layers.3.mlp.down_proj.weight" in parts
    assert not [name for name in parts if "embed" in name or "head" in name]


def test_its_features_can_be_cached(alone: Any, two: Any) -> None:
    """Over several epochs; the cache is of float32."""
    for results in two[1]:
        assert results["spread/cache"] == pytest.approx(alone[1]["cache"], rel=1e-6)


@pytest.mark.slow
def test_two_groups_of_two_processes(tmp_path: Path, alone: Any) -> None:
    shutil.copytree(alone[0] / "target", tmp_path / "target")
    for results in together(tmp_path, "spread", count=4):
        for case in ("eagle", "eagle3", "idle"):
            assert results[f"spread/{case}"] == pytest.approx(alone[1][case], rel=NEAR, abs=NEAR)
    for case in ("eagle", "eagle3", "idle"):
        same(alone[0] / case, tmp_path / "spread" / case)
