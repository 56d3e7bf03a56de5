"""How many threads a pass uses."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

CORES = Path("/sys/devices/system/cpu")


@cache
def threads() -> int:
    """OMP_NUM_THREADS, or else one for each physical core that this process may run on."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if given.isdecimal() and int(given):
        return int(given)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return max(1, len({_core(number) for number in allowed}))


def _core(number: int) -> str:
    """What the logical processors of one physical core have in common."""
    try:
        return (CORES / f"cpu{number}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(number)
