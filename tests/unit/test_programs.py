"""Every program beside the package: `--help` prints its help and does nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    str(file.relative_to(ROOT))
    for folder in ("benchmarks", "papers", "tools", "recipes", "examples")
    for file in (ROOT / folder).rglob("*.py")
    if "__main__" in file.read_text(encoding="utf-8") and file.parent.name != "engines"  # which read jobs from stdin
)

# One process imports what takes long, and forks for each program: a tenth of a second each, not five.
ASK = """
import os, runpy, sys, matplotlib.pyplot, scipy.stats, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast
import outrider.llm, outrider.training
for file in sys.argv[1:]:
    sys.stdout.flush()
    if not os.fork():
        sys.path.insert(0, os.path.dirname(file))
        sys.argv = [file, "--help"]
        print("\\0" + file)
        try:
            if file.startswith("papers/"):  # a module of a package
                runpy.run_module(file[:-3].replace("/", "."), run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(file, run_name="__main__")
            print("it ran")
        except SystemExit as end:
            print("it stopped with", end.code)
        except BaseException as error:
            print("it failed:", repr(error))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def tracked() -> dict[Path, int]:
    """When each file of the repository was last written."""
    folders = "benchmarks", "docs", "examples", "papers", "recipes", "src", "tools"
    files = [ROOT / "README.md", *(f for name in folders for f in (ROOT / name).rglob("*"))]
    return {f: f.stat().st_mtime_ns for f in files if f.is_file() and f.suffix not in (".pyc", ".log")}


@pytest.mark.process
def test_help_prints_and_does_nothing_else() -> None:
    before = tracked()
    done = subprocess.run(
        [sys.executable, "-c", ASK, *PROGRAMS], cwd=ROOT, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = dict(part.split("\n", 1) for part in done.stdout.split("\0")[1:])
    assert said.keys() == set(PROGRAMS)
    for name, text in said.items():
        assert text.lower().lstrip().startswith("usage: "), f"{name} --help: {text[:500]}"
        assert text.endswith("it stopped with 0\n"), f"{name} --help: {text[-500:]}"
    assert tracked() == before
