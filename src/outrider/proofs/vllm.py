"""vLLM in another Python: what it is told to decode, and how it is run.

The drafters that we export are loaded by vLLM's own code; those that read text alone run inside it, as its custom class
(`integrations/vllm.py`).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from ..params import InputError

PROPOSER = "outrider.integrations.vllm.Proposer"
METHODS = {"eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa", "block": "dflash"}  # ours: vLLM's
ROWS = 16  # texts at a time: most of a pass over a tiny model is Python, and costs no more for many rows than for one
PLAIN: dict[str, Any] = {"speculative": None, "additional": {}, "rows": ROWS}

Decode = Callable[[dict[str, Any]], Generator[dict[str, Any]]]  # a job; what is said of its runs


def exported(method: str, folder: str | Path, tokens: int, parallel: bool) -> dict[str, Any]:
    """A run with a drafter that vLLM loads itself; `method` is ours, `parallel` says that it is a P-EAGLE.

    One text at a time: in a batch vLLM 0.32 drafts otherwise in some rounds just after a text of it has ended.
    """
    how = {"method": METHODS[method], "model": str(folder), "num_speculative_tokens": tokens}
    return {"speculative": {**how, "parallel_drafting": True} if parallel else how, "additional": {}, "rows": 1}


def inside(specs: Sequence[str], tokens: int) -> dict[str, Any]:
    """A run with one of our drafters inside vLLM."""
    how = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": tokens}
    return {"speculative": how, "additional": {"outrider": list(specs)}, "rows": ROWS}


def check(python: str | Path, module: str = "vllm") -> None:
    """Refuse a Python that is none, or that has no vLLM (or no outrider); nothing is imported there."""
    probe = f"import sys, importlib.util; sys.exit(3 * (importlib.util.find_spec({module!r}) is None))"
    try:
        code = subprocess.run([str(python), "-I", "-c", probe], capture_output=True, timeout=60).returncode
    except (OSError, subprocess.TimeoutExpired):
        code = 1
    if code == 3 and module == "outrider":
        raise InputError(f"{python} has no outrider, which runs inside vLLM: {python} -m pip install outrider")
    if code:
        what = "has no vLLM" if code == 3 else "is no Python that runs"
        raise InputError(f"{python} {what}; `make parity` makes an environment with vLLM")


def runner(python: str | Path) -> Decode:
    """Decoding by the vLLM of another Python: what it says (`vllm_decode.py`), line by line, as it goes on.

    Raises InputError for a Python that cannot be run or lacks outrider where a run needs it, and RuntimeError with
    vLLM's own words where it fails. vLLM is ended when nobody reads on.
    """

    def decode(job: dict[str, Any]) -> Generator[dict[str, Any]]:
        if any(run["additional"] for run in job["runs"]):
            check(python, "outrider")
        script = Path(__file__).with_name("vllm_decode.py")
        with tempfile.TemporaryFile("w+", errors="replace") as words:
            try:
                process = subprocess.Popen(
                    [str(python), "-I", str(script)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True,
                )  # fmt: skip
            except OSError:
                raise InputError(f"there is no Python {python}; `make parity` makes one with vLLM") from None
            assert process.stdin
            assert process.stdout
            left = len(job["runs"])
            try:
                with contextlib.suppress(BrokenPipeError), process.stdin as asked:
                    json.dump(job, asked)
                for line in process.stdout:
                    event = json.loads(line)
                    left -= "texts" in event
                    yield event
                if process.wait() or left:
                    words.seek(0)
                    raise RuntimeError(f"vLLM under {python} failed: {_reason(words.read())}")
            finally:
                process.kill()
                process.wait()
                process.stdout.close()

    return decode


def _reason(text: str) -> str:
    """The line of a traceback that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it says nothing"])[-1][:300]
