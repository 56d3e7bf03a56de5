"""Folders with matrices in eight bits: what is written is read again, and drafts as before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import outrider
from outrider.checkpoints import native, read
from outrider.cli import app
from outrider.nets import int8
from outrider.params import InputError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's EAGLE-3, kept in eight bits by the command line."""
    out = tmp_path_factory.mktemp("int8") / "eagle3"
    result = CliRunner().invoke(app, ["import", "demo/eagle3", "--out", str(out), "--int8"])
    assert result.exit_code == 0, result.output
    return out


def test_no_weight_moves_by_more_than_half_a_step() -> None:
    x = np.random.default_rng(1).normal(size=(7, 96)).astype(np.float32) * np.float32(0.02)
    x[3] = 0  # no scale at all
    values, scale = int8.quantise(x)
    step = scale.astype(np.float32).repeat(int8.BLOCK, 1)
    assert (np.abs(int8.dequantise(values, scale) - x) <= 0.5 * step + np.abs(x) * 2**-10).all()
    assert not values[3].any()
    assert not int8.dequantise(values, scale)[3].any()


@pytest.mark.parametrize("x", [np.zeros((4, 33), np.float32), np.full((2, 32), np.nan, np.float32),
                               np.full((2, 32), 1e8, np.float32), np.zeros(32, np.float32),
                               np.zeros((2, 32), np.int64)])  # fmt: skip
def test_what_eight_bits_cannot_hold_is_left_as_it_is(x: np.ndarray) -> None:
    assert not int8.fits(x)


def test_the_file_is_half_as_large_and_names_its_format(folder: Path) -> None:
    plain = Path(outrider.__file__).parent / "demo" / "eagle3"
    size = [(at / "model.safetensors").stat().st_size for at in (folder, plain)]
    assert size[0] < 0.56 * size[1]
    assert json.loads((folder / "config.json").read_text())["format"] == 2


def test_the_matrices_are_those_that_were_written(folder: Path) -> None:
    before, after = read("demo/eagle3"), read(folder)
    native.check(after, folder)
    assert (before.config, before.mark, set(before.tensors)) == (after.config, after.mark, set(after.tensors))
    for name, x in before.tensors.items():
        if not int8.fits(x.float().numpy()):
            assert torch.equal(after.tensors[name], x), name
        else:
            assert after.tensors[name].dtype == x.dtype == torch.bfloat16, name
            assert torch.allclose(after.tensors[name], x, rtol=2**-8, atol=float(x.abs().max()) / 250), name
            assert not torch.equal(after.tensors[name], x), name


@pytest.mark.parametrize("compile", [True, False])  # compiled code, and tensors
def test_drafts_are_as_good_and_the_text_is_the_same(folder: Path, compile: bool) -> None:
    def output(drafter: str) -> outrider.Output:
        llm = outrider.load("demo", drafter, compile=compile, budget="8x4")
        return llm.generate("Once upon a time", max_new_tokens=96)[0]

    plain, full, kept = (output(drafter) for drafter in ("none", "eagle3:demo/eagle3", f"eagle3:{folder}"))
    assert kept.text == plain.text == full.text
    assert kept.usage.tau >= 0.9 * full.usage.tau


@pytest.mark.parametrize("damage", ["no matrix", "narrow", "float"])
def test_scales_without_their_matrix_are_refused(folder: Path, tmp_path: Path, damage: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(int8.SCALE))
    if damage == "no matrix":
        del tensors[name.removesuffix(int8.SCALE)]
    elif damage == "narrow":
        tensors[name] = tensors[name][:, :-1].contiguous()
    else:
        tensors[name] = tensors[name].float()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="has no int8 matrix of its size beside it"):
        read(tmp_path)
    with pytest.raises(InputError, match="has no int8 matrix of its size beside it"):
        outrider.load("demo", f"eagle3:{tmp_path}")


def test_a_folder_of_eight_bits_needs_a_place() -> None:
    result = CliRunner().invoke(app, ["import", "demo/eagle3", "--int8"])
    assert isinstance(result.exception, InputError)
    assert "--out" in str(result.exception)
