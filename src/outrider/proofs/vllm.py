"""vLLM in another Python: what it is told to decode, and how it is run.

The drafters that we export are loaded by vLLM's own code; those that read text alone run inside it, as its custom class
(`integrations/vllm.py`).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..types import InputError

SECONDS = 3600
PROPOSER = "outrider.integrations.vllm.Proposer"
METHODS = {"eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa", "block": "dflash"}  # ours: vLLM's
PLAIN: dict[str, Any] = {"speculative": None, "additional": {}}

Decode = Callable[[dict[str, Any]], dict[str, Any]]


def exported(method: str, folder: str | Path, tokens: int, parallel: bool) -> dict[str, Any]:
    """A run with a drafter that vLLM loads itself; `method` is ours, `parallel` says that it is a P-EAGLE."""
    how = {"method": METHODS[method], "model": str(folder), "num_speculative_tokens": tokens}
    return {"speculative": {**how, "parallel_drafting": True} if parallel else how, "additional": {}}


def inside(specs: Sequence[str], tokens: int) -> dict[str, Any]:
    """A run with one of our drafters inside vLLM."""
    how = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": tokens}
    return {"speculative": how, "additional": {"outrider": list(specs)}}


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
    """Decoding by the vLLM of another Python."""

    def decode(job: dict[str, Any]) -> dict[str, Any]:
        if any(run["additional"] for run in job["runs"]):
            check(python, "outrider")
        script = Path(__file__).with_name("vllm_decode.py")
        with tempfile.TemporaryDirectory() as folder:
            asked, answer = Path(folder) / "job.json", Path(folder) / "result.json"
            asked.write_text(json.dumps(job), encoding="utf-8")
            try:
                run = subprocess.run(
                    [str(python), "-I", str(script), str(asked), str(answer)],
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                )
            except FileNotFoundError:
                raise InputError(f"there is no Python {python}; `make parity` makes one with vLLM") from None
            except subprocess.TimeoutExpired:
                raise RuntimeError(
                    f"vLLM did not finish within {SECONDS // 60} minutes; ask for fewer prompts"
                ) from None
            if run.returncode or not answer.is_file():
                raise RuntimeError(f"vLLM under {python} failed: {_reason(run.stderr)}")
            return json.loads(answer.read_text(encoding="utf-8"))

    return decode


def _reason(text: str) -> str:
    """The line of a traceback that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it says nothing"])[-1][:300]
