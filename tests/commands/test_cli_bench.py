"""`outrider bench` as a user types it, on the demo target: files, sentences, exit codes, and what is said besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.logging import disable_progress_bar

from outrider import files
from outrider.bench.runner import Group, Runner
from outrider.cli import main

disable_progress_bar()
SMALL = ["demo", "--task", "demo/tldr", "--limit", "2", "--max-new-tokens", "8"]
TYPICAL = "typical?epsilon=0.3&delta=0.5"
GRID = [
    *("--temperature", "0", "--temperature", "1", "--batch-size", "1", "--batch-size", "2"),
    *("--drafter", "lookup@8x4", "--drafter", f"lookup@8x4@{TYPICAL}"),
    *("--drafter", "EAGLE=eagle:demo@6x4", "--drafter", f"EAGLE=eagle:demo@6x4@{TYPICAL}"),
]


def bench(*args: str) -> int:
    return main(["bench", *args])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both temperatures, two rules one of which is lossy, two batch sizes."""
    folder = tmp_path_factory.mktemp("bench") / "run"
    assert bench(*SMALL, *GRID, "--out", str(folder)) == 0
    return folder


def read(folder: Path) -> dict[str, Any]:
    matches: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return matches


def test_all_files_and_all_cells(run: Path) -> None:
    assert {p.name for p in run.iterdir()} == {
        "run.json", "samples.jsonl", "results.json", "report.html"
    }  # fmt: skip
    cells = read(run)["cells"]
    cold = ["none", "transformers", "lookup, 8x4", "EAGLE, 6x4"]
    hot = ["none", "transformers", "lookup, 8x4", f"lookup, {TYPICAL}, 8x4", "EAGLE, 6x4", f"EAGLE, {TYPICAL}, 6x4"]
    for batch in (1, 2):
        for t, names in ((0.0, cold), (1.0, hot)):
            assert [c["method"] for c in cells if (c["temperature"], c["batch"]) == (t, batch)] == names
    assert {c["state"] for c in cells} == {"done"}, [c["reason"] for c in cells]
    for c in cells:
        equal = c["lossless"] and (c["peer"] == "outrider" or c["temperature"] == 0) and c["method"] != "none"
        assert c["same_text"] == c["compared"] == (2 if equal else 0)
        assert c["prefill_ms"][0] > 0
    assert {c["prompts"] for c in cells} == {2}


def test_the_same_command_measures_nothing_twice(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, old = (run / "samples.jsonl").read_bytes(), read(run)
    assert bench(*SMALL, *GRID, "--json", "--out", str(run)) == 0
    assert (run / "samples.jsonl").read_bytes() == before
    report = json.loads(capsys.readouterr().out)
    assert [c["method"] for c in report["cells"]] == [c["method"] for c in old["cells"]]
    assert report["run"]["sessions"] >= 2


@pytest.mark.skipif(files.fcntl is None, reason="this system has no such locks")
def test_a_folder_has_one_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    with files.alone_in(run):
        assert bench(*SMALL, *GRID, "--out", str(run)) == 2
    assert f"another run is writing {run}; wait until it ends" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


def test_compare(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("compare", str(run), str(run), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rows"]
    assert not result["only_a"]
    assert bench("compare", str(run), str(run)) == 0
    assert "lookup" in capsys.readouterr().out


def test_another_setting_in_the_same_folder_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*SMALL, *GRID, "--max-new-tokens", "9", "--out", str(run)) == 2
    assert "tokens 8, not 9" in capsys.readouterr().err


def test_a_narrower_run_reports_what_it_names_and_keeps_all_samples(run: Path) -> None:
    before = (run / "samples.jsonl").read_bytes()
    assert bench(*SMALL, "--drafter", "lookup@8x4", "--out", str(run)) == 0
    assert (run / "samples.jsonl").read_bytes() == before
    assert [c["method"] for c in read(run)["cells"]] == ["none", "transformers", "lookup, 8x4"]


def test_the_options_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--help") == 0
    options = {word for word in capsys.readouterr().out.split() if word.startswith("--") and len(word) > 2}
    assert len(options - {"--temp", "--max-tokens", "--help"}) <= 15, options


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("tasks") == 0
    assert "gsm8k" in capsys.readouterr().out
    assert bench("tasks", "--json") == 0
    assert json.loads(capsys.readouterr().out)["demo"]


def test_ctrl_c_reports_the_kept_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Runner, group: Group, advance: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "run", interrupt)
    assert bench(*SMALL, "--drafter", "lookup", "--out", str(tmp_path / "x")) == 130
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == f"outrider: interrupted; 0 answers are kept in {tmp_path / 'x'}; the same command resumes from there"
