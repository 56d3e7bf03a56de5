"""Models that cannot write, and memory that runs out: one sentence, and exit code 2."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import outrider
from outrider import InputError, cli


def spoilt(to: Path, what: str, value: float) -> Path:
    """The demo model with such values in the tensors of this name."""
    shutil.copytree(str(files("outrider") / "demo" / "target"), to)
    tensors = {name: tensor.clone() for name, tensor in load_file(to / "model.safetensors").items()}
    for name in tensors:
        if what in name:
            tensors[name].fill_(value)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.fixture(scope="module", params=[float("nan"), float("inf")], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoilt(tmp_path_factory.mktemp("spoilt") / "m", "down_proj", request.param)


@pytest.mark.parametrize("command", ["generate", "chat", "validate", "audit", "serve"])
def test_a_model_of_nans_is_refused(command: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`generate` printed nothing and ended with 0."""
    assert cli.main([command, str(model), *(["hello"] if command == "generate" else [])]) == 2
    out, err = capsys.readouterr()
    assert not out.strip()
    (line,) = [line for line in err.splitlines() if line.startswith("outrider:")]
    assert "NaN or infinite" in line


def test_load_refuses_a_model_of_nans(model: Path) -> None:
    with pytest.raises(InputError, match="NaN or infinite"):
        outrider.load(model)


@pytest.mark.parametrize("more", [[], ["--json"], ["and another"]])
def test_a_text_that_meets_nans_ends_with_2(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model writes; one token's embedding is NaN, which only some prompts hold."""
    model = spoilt(tmp_path / "m", "nothing", 0)
    tensors = load_file(model / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    (poison,) = outrider.load("demo", "none").encode("hello")[-1:]
    rows = tensors[embedding].clone()
    rows[poison] = float("nan")
    head = {"lm_head.weight": tensors[embedding].clone()}  # tied: it would make every logit NaN
    save_file({**tensors, **head, embedding: rows}, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}), encoding="utf-8")
    arguments = ["generate", str(model), "hello", *more, "--max-new-tokens", "4", "--drafter", "lookup", "--no-compile"]
    assert cli.main(arguments) == 2
    assert "NaN or infinite" in capsys.readouterr().err
    outputs = outrider.load(model, "lookup", compile=False).generate(["hello", "Once"], max_new_tokens=4)
    assert outputs[0].finish_reason == "error"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize("limit", [60_000, 80_000])
def test_too_little_memory_is_reported(limit: int, tmp_path: Path) -> None:
    """It was `MemoryError: no message`."""
    done = subprocess.run(
        [sys.executable, "-m", "outrider", "generate", "demo", "hello", "--max-new-tokens", "2"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit * 1024, limit * 1024)),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("outrider: memory ran out; ")


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate 2 GiB", "can't allocate memory: you tried"])
def test_torch_without_memory_is_reported(text: str) -> None:
    assert cli.explain(RuntimeError(text))[0] == 2
    assert cli.explain(MemoryError()) == cli.explain(torch.OutOfMemoryError(text))


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), SystemError("error return without exception set")]
)
def test_pythons_other_words_for_it_are_understood(error: Exception) -> None:
    assert cli.explain(error) == cli.explain(MemoryError())
