"""How many threads are used, by the machine's processors and a container's limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider import machine


@pytest.mark.parametrize(("limit", "most"), [("max 100000", None), ("250000 100000", 3), ("50000 100000", 1)])
@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_bounds_the_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, limit: str, most: int | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_core", str)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if version == 2:
        (tmp_path / "cpu.max").write_text(limit, encoding="ascii")
    else:
        (tmp_path / "cpu").mkdir()
        for name, value in zip(("quota", "period"), limit.replace("max", "-1").split(), strict=True):
            (tmp_path / "cpu" / f"cpu.cfs_{name}_us").write_text(value, encoding="ascii")
    machine._quota.cache_clear()
    try:
        assert machine._usual.__wrapped__() == min(cores, most or cores)
    finally:
        machine._quota.cache_clear()
