"""How many threads are used, by the machine's processors and a container's limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider import machine


@pytest.mark.parametrize(("limit", "most"), [("max 100000", None), ("250000 100000", 3), ("50000 100000", 1)])
def test_a_containers_limit_bounds_the_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, most: int | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_core", str)
    cores = len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text(limit, encoding="ascii")
    assert machine._usual.__wrapped__() == min(cores, most or cores)
