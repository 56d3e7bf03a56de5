"""A server under abuse, in short: what benchmarks/abuse.py measures at length, without the times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install 'outrider[serve]'")
from benchmarks import abuse

pytestmark = [pytest.mark.trained, pytest.mark.process, pytest.mark.slow]
UNTIMED = ("above_idle_mb", "left_mb", "descriptors_left", "log_lines_per_second")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="memory is read from /proc, which is not here")
@pytest.mark.parametrize("name", list(abuse.SITUATIONS))
def test_the_neighbour_is_answered_and_nothing_is_left(name: str) -> None:
    row = abuse.under(name, 3.0)
    print(abuse.table([row]), file=sys.stderr)
    assert row["failed"] == 0
    assert row["answers"] > 1
    assert {bar: row[bar] for bar in UNTIMED if row[bar] > abuse.BARS[bar]} == {}


@pytest.mark.parametrize("end", [abuse.second_signal, abuse.bodies_at_sigterm])
def test_it_ends_without_a_traceback(end: abuse.End) -> None:
    result = end()
    assert not result["traceback"]
    assert result["rc"] == (143 if end is abuse.second_signal else 0)
