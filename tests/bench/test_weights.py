"""What fewer bits cost: losses and divergences of texts, by each way's own passes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write
from small import BASE
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.backends.torch import gguf
from outrider.bench.types import Prompt

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # where scripts find one another

import weights


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    more = {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 1, "vocab_size": 120, "hidden_size": 64}
    stock = LlamaForCausalLM(LlamaConfig(**{**BASE, **more, "intermediate_size": 96, "num_attention_heads": 2}))
    return write(tmp_path / "m.gguf", stock, "Q4_1")


def test_full_weights_have_the_stock_models_loss_and_fewer_bits_another(file: Path) -> None:
    texts = [[(7 * i + b) % 97 for i in range(20 + 9 * b)] for b in range(3)]
    ways: dict[str, Any] = {way: weights.load(str(file), way).target for way in ("full", "native", "int8")}
    result = weights.costs(ways, texts)
    count = sum(len(ids) - 1 for ids in texts)
    assert {cost.tokens for cost in result.values()} == {count}
    stock = gguf.read(file, "bfloat16")[0].float()
    with torch.no_grad():
        right = sum(float(stock(t, labels=t).loss) * (t.shape[1] - 1) for t in (torch.tensor([ids]) for ids in texts))
    assert result["full"].loss == pytest.approx(right, rel=5e-3), "bfloat16 where processors multiply it"
    assert (result["full"].divergence, result["full"].same) == (0.0, count)
    for way in ("native", "int8"):
        assert 0 < result[way].divergence < 0.1 * count
        assert result[way].loss == pytest.approx(right, rel=0.05)
        assert result[way].loss != result["full"].loss


def test_a_text_is_its_turns_and_its_reference() -> None:
    assert weights.whole_text(Prompt("a", ("one", "two"), reference="three")) == "one\ntwo\nthree"
    assert weights.whole_text(Prompt("a", ("one",))) == "one"


def test_the_command_prints_its_table(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(*more: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["weights.py", str(file), *more])
        weights.main()
        return capsys.readouterr().out.splitlines()

    lines = asked("--weights", "int8", "--limit", "1", "--length", "12")
    assert [line.split(" | ")[0] for line in lines] == ["| weights", "|---|--:|--:|--:|--:|", "| full", "| int8"]
    (short := file.with_name("short.jsonl")).write_text('{"prompt": "a"}\n')
    for bad in (
        ["--length", "2"],
        ["--length", "99999"],
        ["--task", str(short)],
        ["--task", "no-such-task"],
        ["--limit", "0"],
    ):
        with pytest.raises(SystemExit, match="2"):
            asked(*bad)
