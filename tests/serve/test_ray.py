"""Answers as a Ray Data pipeline on a local Ray of two cores: the driver is killed, and each question answered once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gateway import gateway
from serve_world import Served

from outrider.llm import LLM
from outrider.training import answering, data
from outrider.training.endpoints import Wish
from outrider.training.questions import keys

pytestmark = [
    pytest.mark.trained,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(1500),  # three minutes on two shared cores, ten on crowded ones
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'outrider[ray]'"),
]
ROOT = Path(__file__).resolve().parents[2]
ASKED = [(f"line {i}", f"Story {i} of the dog:") for i in range(8)]
DRIVER = """
import json, sys
import ray
from outrider.integrations.ray import write
from outrider.training.endpoints import Wish

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, logging_level="ERROR")
url, out, asked = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
write([url], asked, out, Wish("demo", 12), concurrency=2, block=2)
"""


def begin(url: str, out: Path) -> subprocess.Popen[bytes]:
    """A driver with a Ray of its own, which dies with it."""
    more = {"PYTHONPATH": str(ROOT / "src"), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", DRIVER, url, str(out), json.dumps(ASKED)]
    return subprocess.Popen(command, env={**os.environ, **more})


def answered(out: Path) -> list[dict[str, Any]]:
    files = sorted((out / "answers").glob("*.json")) if (out / "answers").is_dir() else []
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_driver_is_killed(served: Served, llm: LLM, tmp_path: Path) -> None:
    out, full = tmp_path / "ray", tmp_path / "whole.jsonl"
    with gateway(served.url, "busy", "cut") as between:
        process, end = begin(between.url, out), time.monotonic() + 600
        while process.poll() is None and time.monotonic() < end and len(answered(out)) < 2:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL, "it was killed while it worked"
        before = len(answered(out))
        assert 2 <= before < len(ASKED)
        first = len(between.asked)
        assert begin(between.url, out).wait(600) == 0
        assert len(between.asked) - first < len(ASKED), "what was written is not asked again"
    rows = answered(out)
    assert sorted(row["id"] for row in rows) == sorted(keys([what for _, what in ASKED]))
    answering.write([served.url], ASKED, full, Wish("demo", 12), 2)
    expected = {row["id"]: row for row in map(json.loads, full.read_text(encoding="utf-8").splitlines())}
    assert {row["id"]: {k: v for k, v in row.items() if v is not None} for row in rows} == expected
    documents = list(data.read(sorted((out / "answers").glob("*.json")), llm.tokenizer))
    assert sorted(d.tokens for d in documents) == sorted(d.tokens for d in data.read([full], llm.tokenizer))
