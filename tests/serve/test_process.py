"""The command itself: killed and started again, its model's folder gone, and terminated while it works."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install 'outrider[serve]'")
pytestmark = [pytest.mark.trained, pytest.mark.process]
BODY = {"prompt": "Once upon a time", "temperature": 0.8, "seed": 3, "max_tokens": 48, "ignore_eos": True}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Servers of a test, of which none outlives it."""
    results: list[subprocess.Popen[str]] = []
    yield results
    for process in results:
        process.kill()
        process.wait(30)
        if process.stderr is not None:
            process.stderr.close()


def begin(model: str, port: int, patience: int = 120) -> tuple[subprocess.Popen[str], int]:
    """A server of its own process, and the port that it says it has; `patience`: its --shutdown-timeout."""
    code = "import sys; from outrider.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", model, "--drafter", "eagle:demo/hass", "--port", str(port)]
    options = ["--rows", "2", "--quiet", "--shutdown-timeout", str(patience)]
    source = str(Path(__file__).resolve().parents[2] / "src")
    process = subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source}
    )
    assert process.stderr is not None
    for line in process.stderr:
        if result := re.search(r"at http://127\.0\.0\.1:(\d+) ", line):
            wait_for(int(result[1]))
            return process, int(result[1])
    raise AssertionError("the server did not start")


def wait_for(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if send(port, "GET", "/ready")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError("the server is not ready")


def send(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=200)
    headers = {"content-type": "application/json"} if body else {}
    connection.request(method, path, json.dumps(body) if body else None, headers)
    answer = connection.getresponse()
    status, raw = answer.status, answer.read()
    connection.close()
    return status, json.loads(raw)


def test_killed_started_again_and_drained(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(str(files("outrider") / "demo" / "target"), folder)
    first, port = begin(str(folder), 0)
    started.append(first)
    text = send(port, "POST", "/v1/completions", BODY)[1]["choices"][0]["text"]
    first.send_signal(signal.SIGKILL)
    assert first.wait(30) == -signal.SIGKILL

    second, port = begin(str(folder), port)
    started.append(second)
    shutil.rmtree(folder)  # the model is in memory: nobody notices
    answers: list[tuple[int, Any]] = []

    def ask() -> None:
        answers.append(send(port, "POST", "/v1/completions", BODY))

    threads = [threading.Thread(target=ask) for _ in range(5)]  # two run, three wait
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while sum(send(port, "GET", "/load")[1][k] for k in ("running", "waiting")) < 5 and time.monotonic() < end:
        time.sleep(0.01)
    second.send_signal(signal.SIGTERM)
    end = time.monotonic() + 10
    while send(port, "GET", "/ready")[0] == 200 and time.monotonic() < end:
        time.sleep(0.01)
    assert send(port, "POST", "/v1/completions", BODY)[0] == 503
    for thread in threads:
        thread.join(200)
    assert [status for status, _ in answers] == [200] * 5, "what was accepted is finished"
    assert {answer["choices"][0]["text"] for _, answer in answers} == {text}
    assert second.wait(60) == 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    code = "import sys; from outrider.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", str(tmp_path / "nothing"), "--port", "0"]
    source = str(Path(__file__).resolve().parents[2] / "src")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": source}, check=False
    )
    assert done.returncode == 2
    assert "nothing" in done.stderr.splitlines()[-1]
