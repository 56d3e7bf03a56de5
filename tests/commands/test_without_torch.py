"""An environment that has none of the extras: what works there, and what says in one sentence which extra it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_world import Result

from outrider.params import EXTRAS

# One process for all command lines, which forks for each of them.
RUN = f"""
import contextlib, io, json, os, sys, traceback
for name in {sorted(EXTRAS)}:
    sys.modules[name] = None  # as if it were not installed
from outrider import cli, llm
for line in json.load(sys.stdin):
    sys.stdout.flush()
    if not os.fork():
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                code = cli.main(line)
            except BaseException:
                code = traceback.format_exc()
        print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
        os._exit(0)
    os.wait()
"""
DRAFTERS = [
    "none", "lookup + suffix", "eagle:demo/hass", "demo/eagle3", "medusa:demo", "medusa:demo?tree=static", "hydra:demo",
    "hydra:demo?tree=static", "block:demo", "block:demo?tree=static&shape=3,2,1", "mamba:demo",
    "mamba:demo?tree=static", "mamba:demo?vocab=text", "model:demo", "model:demo?vocab=text",
    "model:demo?vocab=shared", "suffix + model:demo",
]  # fmt: skip
GENERATE = ["generate", "demo", "Once upon", "--max-new-tokens", "8"]
LINES = {
    **{drafter: [*GENERATE, "--drafter", drafter] for drafter in DRAFTERS},
    "integer products": [*GENERATE, "--weights", "int8"],
    "info": ["info"],
    "another precision": ["generate", "demo", "hi", "--drafter", "mamba:demo?dtype=float64"],
    "stock": ["generate", "demo", "hi", "--no-compile"],
    "audit": ["audit", "demo"],
    "validate": ["validate", "demo"],
}


def outrider(lines: list[list[str]]) -> list[Result]:
    done = subprocess.run([sys.executable, "-c", RUN], input=json.dumps(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Result(*json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def ran() -> dict[str, Result]:
    return dict(zip(LINES, outrider([*LINES.values()]), strict=True))


@pytest.mark.trained
@pytest.mark.process
@pytest.mark.parametrize("case", [*DRAFTERS, "integer products"])
def test_the_demo_writes_with_what_ships(case: str, ran: dict[str, Result]) -> None:
    code, out, err = ran[case]
    assert code == 0, err
    assert out.strip()


@pytest.mark.process
@pytest.mark.parametrize("case", ["another precision", "stock", "audit", "validate"])
def test_what_needs_an_extra_names_it(case: str, ran: dict[str, Result]) -> None:
    code, _, err = ran[case]
    assert code == 2, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("outrider: ")
    assert last.endswith("pip install 'outrider[torch]'")


@pytest.mark.process
def test_info_needs_none(ran: dict[str, Result]) -> None:
    code, out, err = ran["info"]
    assert code == 0, err
    assert "target here" in out


@pytest.mark.trained
@pytest.mark.process
def test_results_are_kept_without_plots(tmp_path: Path) -> None:
    line = ["bench", "demo", "--limit", "1", "--max-new-tokens", "4", "--repeats", "1", "--out", str(tmp_path)]
    ((code, out, err),) = outrider([line])
    assert code == 0, err
    assert (tmp_path / "results.json").is_file()
    assert not (tmp_path / "report.html").exists()
    assert "outrider[bench]" in err
    assert "report.html" not in out + err.replace("no report.html", "")
