"""Outputs that cannot be written: refused in one sentence, with exit code 2, and nothing is left behind.

The places are such that nobody may write there, the system's administrator included. A full disk is a limit on the size
of files (RLIMIT_FSIZE), which the system itself enforces.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from cli_world import Result, Run, refused
from transformers.utils import logging
from transformers.utils.logging import disable_progress_bar

from outrider import files
from outrider.cli import main
from outrider.params import InputError

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ROOT / "recipes" / "demo" / "questions.jsonl"
PAGES = ROOT / "docs" / "howto"
TRAIN = ("train", "eagle", "demo", "--data", str(PAGES / "prove.md"), "--data", str(PAGES / "choose.md"),
         "--steps", "2", "--rows", "1", "--length", "64", "--limit", "1",
         "--evaluate", "1", "--save", "1", "--option", "noise=0")  # fmt: skip
BENCH = ("bench", "demo", "--task", "demo/tldr", "--limit", "1", "--max-new-tokens", "4",
         "--drafter", "lookup")  # fmt: skip
DATA = ("data", "generate", "demo", "--data", str(QUESTIONS), "--limit", "2", "--max-new-tokens", "8")
TREE = ("tune-tree", "demo", "--drafter", "medusa:demo/medusa", "--prompts", str(QUESTIONS), "--limit", "1",
        "--max-new-tokens", "8")  # fmt: skip
COMMANDS = {"train": TRAIN, "bench": BENCH, "data generate": DATA, "tune-tree": TREE}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run a command line in this process. What it says is kept in memory, where no limit on files reaches it."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    disable_progress_bar()

    def run(*args: str) -> Result:
        return Result(main(args), *capsys.readouterr())

    yield run
    logging.set_verbosity(before)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes. Python ignores the signal for it, so that writing fails with EFBIG."""
    before, compiled = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # or half a module lies in __pycache__, and no later process can import it
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = compiled


PLACES = ("file/run", "file/deep/run", "/dev/full", "/dev/null/run")


@pytest.mark.parametrize(
    ("command", "place"),
    [*product(COMMANDS, PLACES), *product(("train", "bench", "data generate"), ["/proc/self/run"])],
)
def test_a_place_that_cannot_be_written_is_refused(
    run: Run, command: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine", encoding="utf-8")
    said = refused(run(*COMMANDS[command], "--out", place, "--json"))
    assert place in said
    assert [p.name for p in tmp_path.rglob("*")] == ["file"]
    assert Path("file").read_text(encoding="utf-8") == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="an administrator may write into every folder")
def test_a_folder_without_the_right_to_write_is_refused_at_once(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    for check in (files.regular, files.fillable):
        with pytest.raises(InputError, match=f"you may not write to {closed}"):
            check(closed / "run")


@pytest.mark.parametrize("size", [100, 2_000, 1_000_000])
def test_a_full_disk_leaves_nothing_of_a_training_without_a_result(run: Run, size: int, tmp_path: Path) -> None:
    """Too small for the recipe, for the log, and for the drafter's weights."""
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with full_disk(size):
        said = refused(run(*TRAIN, "--out", str(tmp_path / "deep" / "run"), "--json"))
    assert "cannot be written" in said
    assert [p.name for p in tmp_path.rglob("*")] == ["mine.txt"]


def test_a_full_disk_is_the_same_to_a_draft_model(run: Run, tmp_path: Path) -> None:
    """transformers writes it."""
    with full_disk(100_000):
        said = refused(run("train", "draft-lm", *TRAIN[2:-2], "--out", str(tmp_path / "run"), "--json"))
    assert "cannot be written" in said
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_the_drafter_that_a_training_has_written(run: Run, tmp_path: Path) -> None:
    """The drafter has 1.9 MB and the checkpoint 5.6 MB; with more space the same command starts over."""
    out = tmp_path / "run"
    with full_disk(3_000_000):
        refused(run(*TRAIN, "--out", str(out), "--json"))
    assert {p.name for p in out.iterdir()} == {"recipe.json", "log.jsonl", "best"}
    assert {p.name for p in (out / "best").iterdir()} == {"config.json", "model.safetensors"}
    code, messages, _ = run(*TRAIN, "--out", str(out), "--json")
    assert (code, json.loads(messages)["steps"]) == (0, 2)


def test_a_full_disk_ends_a_benchmark_between_two_answers(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with full_disk(3_000):
        assert "cannot be written" in refused(run(*BENCH, "--out", str(out), "--json"))
    lines = (out / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines
    assert all(json.loads(line) for line in lines)
    code, messages, _ = run(*BENCH, "--out", str(out), "--json")
    assert code == 0
    assert json.loads(messages)["run"]["sessions"] == 2


def test_a_full_disk_ends_the_writing_of_answers_between_two_lines(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    with full_disk(50):
        assert "cannot be written" in refused(run(*DATA, "--out", str(out), "--json"))
    assert not any(tmp_path.iterdir())
    assert run(*DATA, "--out", str(out), "--json")[0] == 0
    full = out.read_bytes()
    out.unlink()
    with full_disk(len(full) - 10):
        refused(run(*DATA, "--out", str(out), "--json"))
    kept = out.read_bytes()
    assert kept.count(b"\n") == 1
    assert kept in full


def test_a_tree_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "tree.json"
    with full_disk(50):
        assert "cannot be written" in refused(run(*TREE, "--out", str(out), "--json"))
    assert not any(tmp_path.iterdir())


def test_appending_is_atomic(tmp_path: Path) -> None:
    place = tmp_path / "lines"
    files.append(place, "first")
    with full_disk(10), pytest.raises(InputError, match="File too large"):
        files.append(place, "second")
    assert place.read_text() == "first\n"
    files.append(place, "third")
    assert place.read_text() == "first\nthird\n"


@pytest.mark.process
def test_the_import_prints_nothing() -> None:
    """transformers imports torchao where it is installed, which reports kernels for other machines."""
    pytest.importorskip("torchao")
    code = "import logging, outrider.llm, torchao; logging.getLogger('torchao').warning('another matter')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "another matter")
