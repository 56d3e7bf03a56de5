"""Every file of examples/ runs as it stands, and shows what its first lines promise."""

from __future__ import annotations

import json
import runpy
import sys
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DEMO = Path(str(files("outrider"))) / "demo"

pytestmark = pytest.mark.trained


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run an example in an empty folder; what it prints."""

    def run(name: str, *args: object) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_run_here_and_named_on_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8")
    for file in EXAMPLES.glob("*.py"):
        assert f'show("{file.name}"' in tests
        assert f"[{file.name}]({file.name})" in page


def test_generate(show) -> None:
    shown = show("generate.py", "demo")
    assert shown.count("a round") == 2
    assert "the texts equal those of plain decoding" in shown


def test_stream(show) -> None:
    assert len(show("stream.py", "demo").split()) > 10


def test_transformers_dropin(show) -> None:
    assert show("transformers_dropin.py", DEMO / "target").startswith("The sea was")


def test_write_a_drafter(show) -> None:
    *_, line = show("write_a_drafter.py", "demo").splitlines()
    plain, drafted = (int(word) for word in line.split() if word.isdigit())
    assert drafted < plain


def test_train_a_drafter(show, tmp_path: Path) -> None:
    text = ROOT / "docs" / "methods.md"
    shown = show("train_a_drafter.py", DEMO / "target", text, tmp_path / "run", 2)
    assert "tokens per round" in shown
    assert (tmp_path / "run" / "best" / "model.safetensors").is_file()


def test_export_to_vllm(show, tmp_path: Path) -> None:
    assert "vllm serve" in show("export_to_vllm.py", DEMO / "target", DEMO / "eagle", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_read_a_report(show, tmp_path: Path) -> None:
    cell = {
        "task": "maths",
        "method": "lookup",
        "state": "done",
        "speedup": [1.5, 1.4, 1.6],
        "same_text": 3,
        "compared": 3,
    }
    slow = {**cell, "method": "none", "speedup": [1.0, 1.0, 1.0]}
    document = {"tasks": {"maths": {}, "chat": {}}, "cells": [cell, slow]}
    (tmp_path / "results.json").write_text(json.dumps(document), encoding="utf-8")
    shown = show("read_a_report.py", tmp_path).splitlines()
    assert shown[0].startswith("maths: lookup decodes 1.50 times as fast as plain (1.40 to 1.60); 3 of 3 texts")
    assert shown[1] == "chat: no figures"
