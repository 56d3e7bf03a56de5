"""An environment that has none of the extras: what works there, and what says in one sentence which extra it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.params import EXTRAS

HIDDEN = f"""
import sys
for name in {sorted(EXTRAS)}:
    sys.modules[name] = None  # as if it were not installed
from outrider.cli import main
sys.exit(main(sys.argv[1:]))
"""


def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDDEN, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.trained
@pytest.mark.process
@pytest.mark.parametrize(
    "drafter",
    [
        "none", "lookup + suffix", "eagle:demo/hass", "demo/eagle3", "medusa:demo", "medusa:demo?tree=static",
        "hydra:demo", "hydra:demo?tree=static", "block:demo", "block:demo?tree=static&shape=3,2,1", "mamba:demo",
        "mamba:demo?tree=static", "mamba:demo?vocab=text", "model:demo", "model:demo?vocab=text",
        "model:demo?vocab=shared", "suffix + model:demo",
    ],
)  # fmt: skip
def test_the_demo_writes_with_what_ships(drafter: str) -> None:
    done = outrider("generate", "demo", "Once upon", "--max-new-tokens", "8", "--drafter", drafter)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.process
def test_integer_products() -> None:
    done = outrider("generate", "demo", "Once upon", "--max-new-tokens", "8", "--weights", "int8")
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("generate", "demo", "hi", "--drafter", "mamba:demo?dtype=float64"), "torch"),
        (("generate", "demo", "hi", "--no-compile"), "torch"),
        (("audit", "demo"), "torch"),
        (("validate", "demo"), "torch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_what_needs_an_extra_names_it(arguments: tuple[str, ...], extra: str) -> None:
    done = outrider(*arguments)
    last = done.stderr.strip().splitlines()[-1]
    assert (done.returncode, last.count("\n")) == (2, 0), done.stderr
    assert last.startswith("outrider: ")
    assert last.endswith(f"pip install 'outrider[{extra}]'")


@pytest.mark.process
def test_info_needs_none() -> None:
    done = outrider("info")
    assert done.returncode == 0, done.stderr
    assert "target here" in done.stdout


@pytest.mark.trained
@pytest.mark.process
def test_results_are_kept_without_plots(tmp_path: Path) -> None:
    done = outrider("bench", "demo", "--limit", "1", "--max-new-tokens", "4", "--repeats", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results.json").is_file()
    assert not (tmp_path / "report.html").exists()
    assert "outrider[bench]" in done.stderr
    assert "report.html" not in done.stdout + done.stderr.replace("no report.html", "")
