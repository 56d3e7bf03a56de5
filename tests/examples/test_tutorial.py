"""The commands of docs/tutorial.md, in their order, in an empty folder, as the page gives them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.trained]


def commands(text: str) -> list[str]:
    """The blocks of the page that a reader is to run."""
    return re.findall(r"^```sh\n(.*?)^```", text, flags=re.S | re.M)


@pytest.mark.timeout(3000)
def test_the_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    blocks = commands(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= 9
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "outrider").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m outrider "$@"\n', encoding="utf-8")
    (bin_ / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    for file in bin_.iterdir():
        file.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    env = {**os.environ, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}
    script = "set -eu\n" + "\n".join(blocks)
    done = subprocess.run(["bash", "-c", script], cwd=work, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (work / "runs" / "eagle" / "best" / "model.safetensors").is_file()
    assert (work / "runs" / "report" / "report.html").is_file()
    assert (work / "runs" / "eagle-vllm" / "config.json").is_file()
