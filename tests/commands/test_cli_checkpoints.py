"""`outrider import` and `outrider export` as a user calls them: what is shown, written, checked and refused."""

from __future__ import annotations

import json
from pathlib import Path

import layouts_foreign as foreign
import pytest
import torch
from layouts_foreign import LLAMA, H, eagle, folder, hydra

from outrider import cli


def test_import_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = foreign.target(tmp_path / "t")
    where = folder(tmp_path / "d", dict(LLAMA), eagle(bias=False) | {"fc.bias": torch.zeros(H).double()})

    def run(*args: object, code: int = 0) -> str:
        assert cli.main([str(a) for a in args]) == code
        out = capsys.readouterr()
        return out.err if code == 2 else out.out

    assert "SafeAILab EAGLE" in run("import", where)
    assert f"eagle:{tmp_path / 'n'}" in run("import", where, target, "--out", tmp_path / "n")
    result = json.loads(run("import", tmp_path / "n", "--json"))
    assert (result["layout"], result["method"], result["tensors"]["fc.weight"]) == ("native", "eagle", [H, 2 * H])
    assert "there already" in run("import", where, "--out", tmp_path / "n", code=2)
    export = ["export", tmp_path / "n", target, "--to"]
    assert "--out" in run(*export, "vllm", code=2)
    assert "no format 'onnx'" in run(*export, "onnx", "--out", tmp_path / "x", code=2)
    assert '"method": "eagle"' in run(*export, "vllm", "--out", tmp_path / "v", "--verify")
    assert "--speculative-algorithm EAGLE" in run(*export, "sglang", "--out", tmp_path / "s", "--verify")
    check = ["export", tmp_path / "v", target, "--to", "vllm", "--verify"]
    assert "is what vllm loads" in run(*check)
    config = json.loads((tmp_path / "v" / "config.json").read_text())
    (tmp_path / "v" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "tie_word_embeddings is True" in run(*check, code=1)
    assert json.loads(run(*check, "--json", code=1))["faults"]
    assert "no engine has" in run(
        "export", hydra_folder(tmp_path / "h"), target, "--to", "vllm", "--out", tmp_path / "x", code=2
    )
    assert not (tmp_path / "x").exists()


def hydra_folder(at: Path) -> Path:
    return folder(at, {}, hydra(), "hydra_lm_head.pt")
