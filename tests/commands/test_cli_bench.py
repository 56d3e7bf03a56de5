"""`outrider bench` as a user types it, on the demo target: files, sentences, exit codes, and what is said besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.logging import disable_progress_bar

from outrider.bench.runner import Group, Runner
from outrider.cli import main

disable_progress_bar()
SMALL = ["demo", "--task", "demo/tldr", "--limit", "2", "--max-new-tokens", "8", "--threads", "1"]
TYPICAL = "typical?epsilon=0.3&delta=0.5"
GRID = [
    *("--temperature", "0", "--temperature", "1", "--rule", "coupled", "--rule", TYPICAL, "--lossy", "--observe"),
    *("--batch-size", "1", "--batch-size", "2", "--drafter", "lookup", "--drafter", "EAGLE=eagle:demo@6x4"),
    *("--memory", "1", "--budget", "8x4"),
]


def bench(*args: str) -> int:
    return main(["bench", *args])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both temperatures, two rules one of which is lossy, two batch sizes, observed."""
    folder = tmp_path_factory.mktemp("bench") / "run"
    assert bench(*SMALL, *GRID, "--out", str(folder)) == 0
    return folder


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def test_all_files_and_all_cells(run: Path) -> None:
    assert {p.name for p in run.iterdir()} == {
        "run.json", "samples.jsonl", "results.json", "results.csv", "results.md", "report.html"
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
        assert (c["quality"] is None) == c["lossless"]
        assert c["prefill_ms"][0] > 0
    assert {c["prompts"] for c in cells} == {2}


def test_what_is_looked_at_besides(run: Path) -> None:
    document = read(run)
    eagle = next(c for c in document["cells"] if c["method"] == "EAGLE, 6x4" and c["batch"] == 1)
    pairs = eagle["reliability"]["pairs"]
    assert pairs == sum(b["count"] for b in eagle["reliability"]["bins"]) > 5
    assert [p["position"] for p in eagle["positions"]] == [1, 2, 3, 4, 5]
    accepted = sum(p["rate"] for p in eagle["positions"])
    assert accepted == pytest.approx(eagle["tau"][0] - 1, abs=0.3), "at T = 0 the same texts, without a clock"
    best = document["explain"]
    assert {(e["temperature"], e["batch"]) for e in best} == {(0.0, 1), (1.0, 1)}
    for e in best:
        product = e["ideal"]
        for part in e["parts"]:
            product *= part["factor"]
        assert product == pytest.approx(e["measured"], rel=1e-2), (
            "the factors lead from the ideal to the measured speed"
        )
    room = {c["method"]: c for c in document["capacity"] if (c["temperature"], c["batch"]) == (0.0, 1)}
    assert room["none"]["rows"] > room["EAGLE, 6x4"]["rows"] > 10
    two = next(c for c in document["capacity"] if (c["batch"], c["method"], c["temperature"]) == (2, "none", 0.0))
    assert two["bytes_per_row"] == pytest.approx(room["none"]["bytes_per_row"], rel=0.2), "a row is a row in any batch"
    page = (run / "report.html").read_text(encoding="utf-8")
    for title in ("Room in memory", "Acceptance by position", "Reliability of confidence", "Lossy methods"):
        assert f">{title}</h2>" in page


def test_the_same_command_measures_nothing_twice(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, old = (run / "samples.jsonl").read_bytes(), read(run)
    assert bench(*SMALL, *GRID, "--no-explain", "--json", "--out", str(run)) == 0
    assert (run / "samples.jsonl").read_bytes() == before
    told = json.loads(capsys.readouterr().out)
    assert [c["method"] for c in told["cells"]] == [c["method"] for c in old["cells"]]
    assert told["run"]["sessions"] >= 2


def test_compare(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("compare", str(run), str(run), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"]
    assert not found["only_a"]
    assert bench("compare", str(run), str(run)) == 0
    assert "lookup" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--task", "gsm9k"], "gsm8k"),
        (["--drafter", "looup"], "there is no drafter 'looup'"),
        (["--peer", "vllm"], "there is no peer 'vllm'"),
        (["--rule", "typical"], "say --lossy"),
        (["--rule", "greedy"], "there is no rule 'greedy'"),
        (["--budget", "16y2"], "a budget is auto"),
        (["--variant", "int4"], "there is no variant 'int4'"),
        (["--variant", "compile"], "recorded by default"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--temperature", "0", "1"], "'1' belongs to none"),
        (["suffix"], "'suffix' belongs to none"),
        (["--max-new-tokens", "4000"], "fits into the model's context"),
        (["--replay", "nowhere.jsonl"], "nowhere.jsonl"),
        (["compare", "nowhere", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    given = (
        args
        if args[0] in ("compare", "--replay")
        else ["demo", "--task", "demo/tldr", "--no-compile", "--limit", "1", *args, "--out", str(tmp_path / "x")]
    )
    code = bench(*given)
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2, told
    assert words in told
    assert not (tmp_path / "x").exists(), "a refusal leaves nothing behind"


def test_another_setting_in_the_same_folder_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*SMALL, *GRID, "--max-new-tokens", "9", "--out", str(run)) == 2
    assert "tokens 8, not 9" in capsys.readouterr().err


def test_a_replay_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answers.jsonl"
    rows = [{"prompt_tokens": [1, 2, 3, 4, 1, 2], "answer_tokens": [3, 4, 1, 2, 3, 4, 7, 5, 1, 2, 3, 4]}]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    assert (
        bench("--replay", str(file), "--drafter", "lookup", "--cost", "7b@a100", "--out", str(tmp_path / "r"), "--json")
        == 0
    )
    cell = json.loads(capsys.readouterr().out)["cells"][0]
    assert cell["tau"][0] > 1.5
    assert cell["predicted"]["speedup"][0] > 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--drafter", "suffix"], "EAGLE, 6x4"),
        (["--limit", "1"], "2 prompts of demo/tldr"),
        (["--keep-loops"], "leaving loops out"),
        (["--temperature", "1"], "temperature 0.0"),
    ],
)
def test_a_narrower_run_does_not_replace_the_report(
    run: Path, capsys: pytest.CaptureFixture[str], change: list[str], words: str
) -> None:
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    args = GRID if change[0] not in ("--drafter", "--temperature") else without(GRID, change[0])
    assert bench(*SMALL, *args, *change, "--out", str(run)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in said
    assert "or give another --out" in said
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before


def without(args: list[str], option: str) -> list[str]:
    pairs = list(zip(args, [*args[1:], ""], strict=True))
    return [a for i, (a, _) in enumerate(pairs) if a != option and (i == 0 or pairs[i - 1][0] != option)]


def test_ctrl_c_says_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Runner, group: Group, advance: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "run", interrupt)
    assert bench(*SMALL, "--drafter", "lookup", "--no-compile", "--out", str(tmp_path / "x")) == 130
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == f"outrider: interrupted; 0 answers are kept in {tmp_path / 'x'}; the same command goes on from there"
