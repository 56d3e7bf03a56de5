"""`outrider tune-tree` on heads of a tiny model: the file, the stored default, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small import VOCAB, build

from outrider import cli, drafters
from outrider.backends.torch import load_target
from outrider.checkpoints import native
from outrider.commands import loading
from outrider.drafters import medusa


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str, str]:
    """A target, its heads, prompts."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    model = build("llama", torch.float32)
    model.save_pretrained(tmp_path / "target")
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "target")
    net = medusa.fresh(load_target(model))
    torch.manual_seed(2)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    native.save(tmp_path / "heads", "medusa", net)
    (tmp_path / "prompts.jsonl").write_text('"w3 w14 w15"\n{"prompt": "w9 w26"}\n')
    return str(tmp_path / "target"), f"medusa:{tmp_path / 'heads'}", str(tmp_path / "prompts.jsonl")


def test_a_tree_is_written_and_stored(
    folders: tuple[str, str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target, spec, prompts = folders
    out = str(tmp_path / "tree.json")
    command = ["tune-tree", target, "--drafter", spec, "--prompts", prompts, "--budget", "9x8"]
    command += ["--max-new-tokens", "60"]
    assert cli.main([*command, "--out", out, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result == json.loads(Path(out).read_text())
    assert result["nodes"] == 9
    assert len(result["paths"]) == len(result["values"]) == 8
    assert result["expected_tau"] == pytest.approx(1 + sum(result["values"]))
    assert cli.main([*command, "--store"]) == 0
    shown = capfd.readouterr().out
    assert "9 nodes with the root" in shown
    assert "stored as the drafter's default" in shown
    bare = Path(spec.partition(":")[2]) / "config.json"
    config = json.loads(bare.read_text())
    bare.write_text(json.dumps({name: value for name, value in config.items() if name != "tree"}))
    assert cli.main([*command, "--store"]) == 2
    assert "has no config for a tree" in capfd.readouterr().err

    def load(*args: object, **options: object) -> None:
        raise AssertionError("a folder that cannot hold a tree is refused before the model is loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", load)
        assert cli.main([*command, "--store"]) == 2
    bare.write_text(json.dumps(config))
    loaded = load_target(target)
    ranks = [drafters.load(s, loaded).uncalibrated.options.ranks for s in (f"{spec}?tree={out}", spec)]  # type: ignore[attr-defined]
    assert ranks[0] == ranks[1] == tuple(map(tuple, result["paths"]))
