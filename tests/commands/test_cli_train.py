"""`outrider train` and `outrider data generate` as a user calls them, on the demo target."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import files
from outrider.cli import main
from outrider.commands.info import PACKAGE
from outrider.engine import Batch
from outrider.training.log import Log
from outrider.training.loop import multiplies_bf16

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ROOT / "recipes" / "demo" / "questions.jsonl"
TEXTS = ["--data", str(ROOT / "docs" / "howto" / "prove.md"), "--data", str(ROOT / "docs" / "howto" / "choose.md")]


def test_train_prints_the_drafters_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--steps", "2", "--rows", "1", "--length", "64", "--limit", "1", "--option", "noise=0"]
    call = ["train", "eagle", "demo", *TEXTS, "--out", str(tmp_path / "run"), *small, "--json"]
    assert main(call) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["method"] == "eagle"
    assert Path(report["folder"], "model.safetensors").is_file()
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["options"] == {"noise": 0.0, "draft_vocab": 4096}
    assert main(["generate", "demo", "Hello", "--drafter", report["folder"], "--max-new-tokens", "4", "--json"]) == 0


@pytest.mark.parametrize(
    ("options", "fast"),
    [
        ([], multiplies_bf16(torch.device("cpu"))), (["--bf16"], True),
        (["--no-bf16"], False), (["--dtype", "float32"], False),
    ],
)  # fmt: skip
def test_train_is_in_bfloat16_where_that_is_fast(
    options: list[str], fast: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--steps", "1", "--rows", "1", "--length", "64", "--limit", "1", "--option", "noise=0"]
    assert main(["train", "eagle", "demo", *TEXTS, "--out", str(tmp_path / "run"), *small, *options]) == 0
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["bf16"] == fast
    kind = "bfloat16 GEMMs, float32 weights" if fast else "full precision"
    assert f"{kind}, the target's " in capsys.readouterr().err.replace("\n", " ")


def test_answers_are_the_targets_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut off in the middle of a line, the same command writes what is missing, and the same answers."""
    out = tmp_path / "answers.jsonl"
    call = ["data", "generate", "demo", "--data", str(QUESTIONS), "--out", str(out), "--limit", "4"]
    call += ["--max-new-tokens", "12"]
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["questions"] == 4
    full = {json.loads(line)["id"]: line for line in out.read_text(encoding="utf-8").splitlines()}
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    out.write_text(lines[0] + lines[1][:20], encoding="utf-8")
    assert main([*call, "--json"]) == 0
    again = {json.loads(line)["id"]: line for line in out.read_text(encoding="utf-8").splitlines()}
    assert again == full
    assert all("messages" in json.loads(line) for line in full.values())
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["written"] == 0


def test_answers_of_another_model_or_temperature_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where no question is left; a file that an earlier version wrote is continued."""
    out = tmp_path / "answers.jsonl"
    call = ["data", "generate", "demo", "--data", str(QUESTIONS), "--out", str(out), "--max-new-tokens", "4"]
    assert main([*call, "--temperature", "0", "--limit", "1"]) == 0
    (line,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert line["by"] == {"model": "demo", "weights": "full", "temperature": 0.0}
    others = ["--temperature", "0.7"], ["--temperature", "0", "--weights", "int8"]
    said = "has answers of model demo weights full temperature 0.0; give another --out"
    for more in ([*other, "--limit", count] for other in others for count in ("1", "2")):
        assert main([*call, *more]) == 2
        assert said in capsys.readouterr().err
    del line["by"]
    out.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert main([*call, "--temperature", "0.7", "--limit", "2"]) == 0
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2


def test_answers_of_rounded_weights_are_that_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --weights the answers are those of `generate` with the same weights, and not those of the full ones."""
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "In the winter"}\n', encoding="utf-8")
    sampled = ["--max-new-tokens", "128", "--temperature", "1", "--seed", "1"]
    texts = {}
    for weights in ("full", "int8"):
        out = tmp_path / f"{weights}.jsonl"
        call = ["data", "generate", "demo", "--data", str(asked), "--out", str(out), *sampled, "--weights", weights]
        assert main(call) == 0
        texts[weights] = json.loads(out.read_text(encoding="utf-8"))["completion"]
    capsys.readouterr()
    assert main(["generate", "demo", "In the winter", "--weights", "int8", *sampled, "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["outputs"]
    assert texts["int8"] == said["text"] != texts["full"]


def test_a_strange_file_is_not_appended_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.jsonl"
    out.write_text('{"text": "mine"}\n', encoding="utf-8")
    assert main(["data", "generate", "demo", "--data", str(QUESTIONS), "--out", str(out)]) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == '{"text": "mine"}\n'


@pytest.mark.parametrize(
    "foreign",
    ["a note", '{"text": "mine"}', '{"id": 0, "question": "x"}\na note', "one\ntwo", '{"id": "q1", "text": "mine"}',
     '{"id": 0}\n{"id": "abc"}', '{"id": 0, "messages": null}'],
)  # fmt: skip
def test_a_strange_file_keeps_its_last_line(foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also without an end of line; a complete answer of ours that an editor took it from is an answer."""
    out = tmp_path / "mine.jsonl"
    out.write_text(foreign, encoding="utf-8")
    assert main(["data", "generate", "demo", "--data", str(QUESTIONS), "--out", str(out)]) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == foreign
    out.write_text('{"id": 0}\n{"id": 1}', encoding="utf-8")
    assert main(["data", "generate", "demo", "--data", str(QUESTIONS), "--out", str(out), "--limit", "2"]) == 0
    assert out.read_text(encoding="utf-8") == '{"id": 0}\n{"id": 1}\n'


def test_answers_to_other_questions_are_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files_of = {}
    for name, lines in {
        "chats": [{"messages": [{"role": "user", "content": word}]} for word in ("one", "two")],
        "others": [{"messages": [{"role": "user", "content": word}]} for word in ("one", "three", "four")],
        "texts": [{"text": "In the winter"}], "other": [{"text": "In the summer"}],
        "prompts": [{"prompt": "In the winter"}],
    }.items():  # fmt: skip
        files_of[name] = tmp_path / f"{name}.jsonl"
        files_of[name].write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for first, second in (("chats", "others"), ("texts", "other"), ("prompts", "texts")):
        out = tmp_path / f"{first}-answers.jsonl"
        call = ["data", "generate", "demo", "--out", str(out), "--max-new-tokens", "4"]
        assert main([*call, "--data", str(files_of[first])]) == 0
        before = out.read_text(encoding="utf-8")
        assert main([*call, "--data", str(files_of[second])]) == 2
        assert "answers another question" in capsys.readouterr().err
        assert out.read_text(encoding="utf-8") == before


def test_a_prompt_is_asked_whole_and_a_text_is_opened(tmp_path: Path) -> None:
    asked, out = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    long = "In the winter the old bridge over the river was closed, and nobody crossed it."
    asked.write_text("".join(json.dumps({kind: long}) + "\n" for kind in ("prompt", "text")), encoding="utf-8")
    call = ["data", "generate", "demo", "--data", str(asked), "--out", str(out), "--opening", "4"]
    assert main([*call, "--max-new-tokens", "4"]) == 0
    prompts = {row["id"]: row["prompt"] for row in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    assert prompts[0] == long
    assert long.startswith(prompts[1])
    assert len(prompts[1]) < 30


def test_answered_questions_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_text('{"id": 0}\n{"id": 1}\n', encoding="utf-8")
    assert main(["data", "generate", "--data", str(QUESTIONS), "--out", str(out), "--limit", "2"]) == 0
    assert capsys.readouterr().out == f"all 2 questions already have answers in {out}\n"


def test_a_file_has_one_writer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "answers.jsonl"
    call = ["data", "generate", "demo", "--data", str(QUESTIONS), "--out", str(out), "--limit", "1"]
    with files.alone(out):
        assert main(call) == 2
    assert f"another run is writing {out}; wait until it ends" in capsys.readouterr().err
    assert not out.exists(), "a file without a line is not left behind"


@pytest.mark.parametrize("out", ["/dev/full", "/dev/null", "."])
def test_answers_go_to_regular_files(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "generate", "--data", str(QUESTIONS), "--out", out, "--limit", "2"]) == 2
    assert "is not a regular file, which the output must be" in capsys.readouterr().err


def interrupts(monkeypatch: pytest.MonkeyPatch, where: object, name: str, at: int) -> None:
    """Ctrl-C during the call number `at` of a function."""
    calls, real = [0], getattr(where, name)

    def called(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **options)

    monkeypatch.setattr(where, name, called)


def test_ctrl_c_keeps_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 130, one line with what is kept, and the same command goes on."""
    out = tmp_path / "run"
    small = ["--steps", "4", "--rows", "1", "--length", "32", "--limit", "1", "--evaluate", "4", "--json"]
    call = ["train", "medusa", "demo", *TEXTS, "--out", str(out), *small]
    with monkeypatch.context() as patch:
        interrupts(patch, Log, "step", 2)
        assert main(call) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"outrider: interrupted; {out} keeps step 2 of 4; the same command resumes from there"
    assert main(call) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4


def test_ctrl_c_keeps_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "answers.jsonl"
    call = ["data", "generate", "demo", "--data", str(QUESTIONS), "--out", str(out), "--limit", "3"]
    with monkeypatch.context() as patch:
        interrupts(patch, Batch, "round", 6)
        assert main([*call, "--drafter", "none", "--batch-size", "1", "--max-new-tokens", "4", "--json"]) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    kept = len(out.read_text().splitlines())
    assert 1 <= kept < 3
    more = f"{kept} answer{'s' * (kept > 1)} more"
    assert said == f"outrider: interrupted; {out} has {more}; the same command resumes from there"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_target_is_named_by_its_file(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "target"
    shutil.copytree(PACKAGE / "demo" / "target", folder)
    (folder / file).write_bytes((folder / file).read_bytes()[:400])
    assert main(["train", "eagle", str(folder), *TEXTS, "--out", str(tmp_path / "run")]) == 2
    assert f"{folder / file} is " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
