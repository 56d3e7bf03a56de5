"""A minute of everything at once: no row stays behind, and memory does not grow."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install 'outrider[serve]'")
from test_process import begin, send, started

pytestmark = [pytest.mark.trained, pytest.mark.process, pytest.mark.slow]
SECONDS = int(os.environ.get("OUTRIDER_SOAK", "60"))
__all__ = ["started"]


def resident(pid: int) -> float:
    """MiB of memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, which is not here")
def test_a_minute_of_everything(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    pytest.importorskip("gevent", reason="locust is not installed: pip install 'outrider[load]'")
    server, port = begin("demo", 0)
    started.append(server)
    users = Path(__file__).resolve().parents[1] / "support" / "locust_users.py"
    command = [sys.executable, "-m", "locust", "-f", str(users), "--headless", "-u", "8", "-r", "4", "--only-summary"]
    where = ["-H", f"http://127.0.0.1:{port}", "-t", f"{SECONDS}s", "--stop-timeout", "30"]
    with (tmp_path / "locust.log").open("w") as log:
        locust = subprocess.Popen([*command, *where], cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        began, memory = time.monotonic(), []
        while locust.poll() is None and time.monotonic() - began < SECONDS + 120:
            memory.append(resident(server.pid))
            time.sleep(1)
    said = (tmp_path / "locust.log").read_text(encoding="utf-8")
    assert locust.poll() == 0, said[-4000:]  # 1: some requests were answered otherwise than they must be
    end = time.monotonic() + 30
    while (load := send(port, "GET", "/load")[1])["running"] + load["waiting"] and time.monotonic() < end:
        time.sleep(0.1)
    assert (load["running"], load["waiting"]) == (0, 0)
    third = len(memory) // 3
    middle, last = (max(memory[a:b]) for a, b in ((third, 2 * third), (2 * third, len(memory))))
    print(f"\nMiB after each tenth: {[round(m) for m in memory[:: max(1, len(memory) // 10)]]}\n{said[-3000:]}")
    assert last < 1.05 * middle + 16, memory
