"""llama.cpp by its own server, on the file's own weights. Methods: plain; lookup (its n-gram drafts, `ngram-mod`); and
draft (by the model in the .gguf file `drafter`).

`programs` of the job is the folder of its native build with llama-server (docs/benchmarks.md says how it is made).
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from job import Texts, Write, serve

CONTEXT = 8192  # tokens of a text
DRAFTS = {
    "plain": (),
    "lookup": ("--spec-type", "ngram-mod"),
    "draft": ("--spec-type", "draft-simple", "--spec-draft-model"),
}
EXACT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "return_tokens": True}


def started(job: dict[str, Any], rows: int) -> str:
    """The address of a server that writes `rows` texts at a time. It ends with this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(os.cpu_count())
    command = [str(Path(job["programs"]) / "llama-server"), "--model", job["gguf"], "--port", str(port)]
    command += ["--threads", threads, "--threads-batch", threads, "--parallel", str(rows)]
    command += ["--ctx-size", str(CONTEXT * rows), *DRAFTS[job["method"]]]
    command += [job["drafter"]] if job["method"] == "draft" else []
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    atexit.register(server.kill)
    url = f"http://127.0.0.1:{port}"
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return url
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"llama-server ended with {server.returncode}")


def version(job: dict[str, Any]) -> str:
    """As llama-server says it: version: 1234 (abcdef0)."""
    program = str(Path(job["programs"]) / "llama-server")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    line = next(line for line in (said.stdout + said.stderr).splitlines() if line.startswith("version:"))
    return line.removeprefix("version:").strip()


def start(job: dict[str, Any]) -> tuple[str, Write, None]:
    url = started(job, max(job["batches"]))

    def one(prompt: list[int], temperature: float, goes_on: bool) -> list[int]:
        asked = {
            **EXACT,
            "cache_prompt": goes_on,
            "prompt": prompt,
            "n_predict": job["tokens"],
            "temperature": temperature,
            "seed": 1,
        }
        request = urllib.request.Request(f"{url}/completion", json.dumps(asked).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            made = json.load(answer)
        text: list[int] = made["tokens"]
        return [*text, job["ends"][0]] if made.get("stop_type") == "eos" else text

    def write(prompts: Texts, temperature: float, batch: int, goes_on: bool) -> Texts:
        with ThreadPoolExecutor(batch) as clients:
            return list(clients.map(lambda prompt: one(prompt, temperature, goes_on), prompts))

    return f"{version(job)}, the file's own weights", write, None


serve(start)
