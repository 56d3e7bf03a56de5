"""`python -m papers.theory`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_world import Result, Run

from papers import command
from papers.theory import theory


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> Result:
        return Result(command.run(theory, args), *capsys.readouterr())

    return call


def test_a_promise(run: Run) -> None:
    shown = run("--alpha", "0.8", "--c", "0.05")
    assert shown.code == 0
    assert "best gamma: 8 (3.09 times as fast)" in shown.out
    result = json.loads(run("--alpha", "0.8", "--c", "0.05", "--gamma", "5", "--json").out)["promise"]
    assert result["gamma"] == 5
    assert result["best_gamma"] == 8
    assert result["c_hat"] == 0.05
    assert result["tau"] == pytest.approx(3.68928)
    assert "do not speculate" in run("--alpha", "0.5", "--c", "0.6").out
    assert "the more the better" in run("--alpha", "0.5").out


def test_table_and_inverse(run: Run) -> None:
    shown = run("--table", "--speedup", "3", "--c", "0.05")
    assert "6.86x (6.86)" in shown.out
    assert "needs alpha 0.791" in shown.out
    assert "cannot be reached" in run("--speedup", "9", "--c", "0.2", "--gamma", "5").out
    assert len(json.loads(run("--table", "--json").out)["table"]) == 6
    curve = json.loads(run("--alpha", "0.8", "--verify", "1,1.05,1.1", "--json").out)["promise"]
    assert curve["best_gamma"] == 2


def test_measured_and_plot(run: Run, tmp_path: Path) -> None:
    file, picture = tmp_path / "run.json", tmp_path / "theory.svg"
    file.write_text('{"alpha": 0.8, "gamma": 5, "c": 0.05, "speedup": 2.5}')
    shown = run("--measured", str(file), "--plot", str(picture), "--json")
    result = json.loads(shown.out)
    assert result["measured"]["promised_speedup"] == pytest.approx(2.951424)
    assert picture.is_file()
    assert not shown.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--alpha", "2"], "alpha is a probability"),
        (["--alpha", "x"], "Invalid value"),
        (["--alfa", "1"], "No such option"),
        (["--alpha", ".5", "--gamma", "-1"], "whole number"),
        (["--measured", "nowhere.json"], "cannot be read"),
        (["--measured", __file__], "not JSON"),
        (["--alpha", ".5", "--measured", "x"], "leave out --alpha"),
        (["--alpha", ".5", "--plot", "x.txt"], ".svg"),
        (["--alpha", ".5", "--plot", "nowhere/x.svg"], "cannot be written"),
        (["--alpha", ".5", "--verify", "1,x"], "numbers with commas"),
    ],
)
def test_bad_input_is_one_sentence(run: Run, args: list[str], words: str) -> None:
    shown = run(*args, "--json")
    assert shown.code == 2
    assert not shown.out
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1
