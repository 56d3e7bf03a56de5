"""`outrider train` and `outrider data generate` as a user calls them, on the demo target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli import main

QUESTIONS = Path(__file__).resolve().parents[2] / "recipes" / "demo" / "questions.jsonl"


def test_train_says_where_the_drafter_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(__file__).resolve().parents[2] / "docs" / "structure.md"
    small = ["--steps", "2", "--rows", "1", "--length", "64", "--prompts", "1", "--option", "noise=0"]
    call = ["train", "eagle", "--data", str(data), "--out", str(tmp_path / "run"), *small, "--json"]
    assert main(call) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["method"] == "eagle"
    assert Path(told["folder"], "model.safetensors").is_file()
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["options"] == {"noise": 0.0}
    assert main(["generate", "demo", "Hello", "--drafter", told["folder"], "--max-new-tokens", "4", "--json"]) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "eagle", "--data", "none.jsonl", "--out", "x"], "there is no file none.jsonl"),
        (["train", "oracle", "--data", "x", "--out", "x"], "no method 'oracle'"),
        (["train", "eagle", "--data", "x", "--out", "x", "--option", "colour=1"], "no option 'colour=1'"),
        (["train", "eagle", "--data", "x", "--out", "x", "--option", "passes"], "no option 'passes'"),
        (["train", "hass", "--data", "x", "--out", "x", "--option", "passes=two"], "passes must be int"),
        (["data", "generate", "--data", "none.jsonl", "--out", "x"], "there is no file none.jsonl"),
        (["data", "generate", "--data", "x", "--out", "x", "--max-new-tokens", "0"], "must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_answers_are_the_targets_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut off in the middle of a line, the same command writes what is missing, and the same answers."""
    out = tmp_path / "answers.jsonl"
    call = ["data", "generate", "--data", str(QUESTIONS), "--out", str(out), "--max-new-tokens", "12", "--limit", "4"]
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["questions"] == 4
    whole = {json.loads(line)["id"]: line for line in out.read_text(encoding="utf-8").splitlines()}
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    out.write_text(lines[0] + lines[1][:20], encoding="utf-8")
    assert main([*call, "--json"]) == 0
    again = {json.loads(line)["id"]: line for line in out.read_text(encoding="utf-8").splitlines()}
    assert again == whole
    assert all("messages" in json.loads(line) for line in whole.values())
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["written"] == 0


def test_a_strange_file_is_not_appended_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.jsonl"
    out.write_text('{"text": "mine"}\n', encoding="utf-8")
    assert main(["data", "generate", "--data", str(QUESTIONS), "--out", str(out)]) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == '{"text": "mine"}\n'
