"""vLLM in another Python: its jobs, and running it.

Exported drafters are loaded by vLLM's code; those that read text alone run inside it, as its custom class
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
ROWS = 16  # batch size: a pass over a tiny model is mostly Python overhead
PLAIN: dict[str, Any] = {"speculative": None, "additional": {}, "rows": ROWS}

Decode = Callable[[dict[str, Any]], Generator[dict[str, Any]]]  # from a job to events of its runs


def exported(method: str, folder: str | Path, tokens: int, parallel: bool) -> dict[str, Any]:
    """A run with a drafter that vLLM's code loads. method: ours. parallel: whether it is a P-EAGLE.

    One text at a time: in a batch vLLM 0.32 drafts differently in some rounds after one of its texts has ended.
    """
    how = {"method": METHODS[method], "model": str(folder), "num_speculative_tokens": tokens}
    return {"speculative": {**how, "parallel_drafting": True} if parallel else how, "additional": {}, "rows": 1}


def inside(specs: Sequence[str], tokens: int) -> dict[str, Any]:
    """A run with one of our drafters inside vLLM."""
    how = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": tokens}
    return {"speculative": how, "additional": {"outrider": list(specs)}, "rows": ROWS}


def check(python: str | Path, module: str = "vllm") -> None:
    """Raise InputError unless a Python runs and has vLLM (and outrider); nothing is imported there."""
    probe = f"import sys, importlib.util; sys.exit(3 * (importlib.util.find_spec({module!r}) is None))"
    try:
        code = subprocess.run([str(python), "-I", "-c", probe], capture_output=True, timeout=60).returncode
    except (OSError, subprocess.TimeoutExpired):
        code = 1
    if code == 3 and module == "outrider":
        raise InputError(f"{python} has no outrider, which runs inside vLLM: {python} -m pip install outrider")
    if code:
        what = "has no vLLM" if code == 3 else "is not a working Python"
        raise InputError(f"{python} {what}; `make parity` makes an environment with vLLM")


def runner(python: str | Path) -> Decode:
    """Decode by the vLLM of another Python; yields the events of `vllm_decode.py`.

    Raises InputError for a Python that cannot run or lacks a required outrider, and RuntimeError with vLLM's message if
    it fails. vLLM is terminated when the generator is closed.
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
                with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                    json.dump(job, stdin)
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
    """The error line of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no message"])[-1][:300]
