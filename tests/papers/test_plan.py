"""A plan's arithmetic by hand, its count of parameters, and its formulas beside published runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig, T5Config

from outrider.names import find
from outrider.params import InputError
from papers import command, scaling
from papers import plan as planning
from papers.plan import KINDS, MEMORY, Target, gpus_of, lines, plan, read, short, tokens_of

# Ten million weights that a token is multiplied with, hidden size 100.
TARGET = Target("hand", 11e6, 10e6, 0.0, 0.0, 100, 80, 20, 400, 1000, kv=1e6, bytes=2)


def place(folder: Path, config: Any) -> Any:
    config.save_pretrained(folder)
    return find(str(folder))


def test_parameters_are_counted(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    made = read(place(tmp_path, config))
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 40 + 2 * 16
    assert made.parameters == made.active == 3 * layer + 16 + 50 * 16  # the head, not the embedding
    assert made.total == made.parameters + 50 * 16
    assert (made.hidden, made.queries, made.keys, made.inner, made.vocab) == (16, 16, 8, 40, 50)
    assert made.kv == 3 * 2 * 8 * 2
    assert read(find(str(tmp_path / "config.json"))) == replace(made, name=str(tmp_path / "config.json"))
    tied = read(place(tmp_path, LlamaConfig(**{**config.to_dict(), "tie_word_embeddings": True})))
    assert tied.parameters == tied.total == made.parameters


def test_of_experts_a_token_uses_its_share(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    made = read(place(tmp_path, config))
    assert made.experts == 2 * 8 * 3 * 16 * 40
    assert made.share == 0.25
    assert made.active == made.parameters + made.experts / 4
    assert made.total == made.parameters + made.experts + 50 * 16


def test_quantised_weights_are_narrower(tmp_path: Path) -> None:
    config = json.loads((scaling.ROOT / "recipes/targets/llama-3.1-8b.json").read_text(encoding="utf-8"))
    for said, bytes_ in (({"quant_method": "fp8"}, 1.0), ({"quant_method": "gptq", "bits": 4}, 0.5)):
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**config, "num_hidden_layers": 1, "quantization_config": said}), encoding="utf-8")
        assert read(find(str(file))).bytes == bytes_


def test_a_plan_by_hand() -> None:
    kind = KINDS["eagle"]
    layer = 100 * (80 + 40) + 80 * 100 + 3 * 100 * 400
    assert kind.trained(TARGET) == layer + 2 * 100**2
    operations = 6 * layer + 4 * 1000 * 100 + 6 * 2 * 100**2 + 2 * 1000 * 100
    assert kind.operations(TARGET) == operations
    three = KINDS["eagle3"]
    assert three.trained(TARGET) == layer + 100 * 120 + 3 * 100**2 + 1000 * 100  # no head of more than all tokens
    made = plan(TARGET, kind, 1e9, 2, "h100", 3, 1000)
    assert made["gpu_hours"]["features"] == pytest.approx(2 * 10e6 * 1e9 / (0.25 * 989e12) / 3600)
    assert made["gpu_hours"]["training"] == pytest.approx(3 * operations * 1e9 / (0.25 * 989e12) / 3600)
    rows = int((0.9 * 80e9 - 22e6) / 1e9)  # 71 texts of 1,000 tokens fit
    seconds = 5e-4 + (2e7 + rows * 500 * 1e6) / (0.75 * 3.35e12)
    assert made["tokens_per_second"] == pytest.approx(2 * rows / seconds)
    assert made["gpu_hours"]["answers"] == pytest.approx(1e9 * seconds / rows / 3600)
    assert made["hours"]["training"] == made["gpu_hours"]["training"] / 2
    assert made["disk_bytes"] == {"tokens": 4e9, "features": 200e9, "features_of_a_token": 200.0}
    rates = made["network_bytes_per_second"]
    assert rates["features_written"] * made["hours"]["features"] * 3600 == pytest.approx(200e9)
    assert rates["features_read"] * made["hours"]["training"] * 3600 == pytest.approx(3 * 200e9)
    step = 8192 * operations / (0.25 * 989e12)
    assert rates["gradients_of_a_gpu"] * step == pytest.approx(4 * kind.trained(TARGET))
    assert "in all, features made in every epoch" in "\n".join(lines(made))


def test_more_gpus_take_as_many_hours_of_all_and_fewer_of_the_clock() -> None:
    one, eight = (plan(TARGET, KINDS["dflash"], 1e8, n, "h200", 2) for n in (1, 8))
    assert eight["gpu_hours"] == pytest.approx(one["gpu_hours"])
    assert eight["hours"]["answers"] == pytest.approx(one["hours"]["answers"] / 8)


def test_a_copy_that_does_not_fit_is_refused() -> None:
    large = replace(TARGET, name="large", total=70e9, parameters=69e9)
    with pytest.raises(InputError, match="large takes 140 GB, for which 4 h100 are needed; give --gpus 4xh100"):
        plan(large, KINDS["eagle3"], 1e6, 2, "h100", 1)
    assert plan(large, KINDS["eagle3"], 1e6, 4, "h100", 1)["gpus_of_a_copy"] == 4


@pytest.mark.parametrize("run", scaling.RUNS, ids=lambda run: run.what)
def test_published_runs(run: scaling.Run) -> None:
    if run.within:
        assert run.factor <= run.within
    else:
        assert run.factor > 3, "the page says that the formulas miss this run"


def test_numbers() -> None:
    assert [tokens_of(t) for t in ("7", "2k", "1.5M", "1.2G", "3B", "1e9")] == [7, 2e3, 1.5e6, 1.2e9, 3e9, 1e9]
    assert (gpus_of("8xH100"), gpus_of("a100")) == ((8, "h100"), (1, "a100"))
    assert [short(x) for x in (0, 5, 999.9, 16060522496, 9.996e11)] == ["0 ", "5 ", "1 k", "16.1 G", "1 T"]
    assert set(MEMORY) <= set(planning.PEAKS)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--target", "demo", "--tokens", "10M", "--gpus", "2xrtx3090", "--drafter", "eagle"]
    assert command.run(planning.main, [*args, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["target"], made["gpus"], made["epochs"]) == ("demo", "2xrtx3090", 5)
    assert command.run(planning.main, args) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == [
        "target", "drafter", "answers", "features", "training", "stored", "anew", "gradients",
    ]  # fmt: skip


def test_little_work_is_not_shown_as_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command.run(planning.main, ["--target", "demo", "--tokens", "10k", "--gpus", "h100", "--drafter", "eagle"]) == 0
    )
    hours = re.findall(r"([\d.,]+) GPU hours +([\d.,]+) h", capsys.readouterr().out)
    assert len(hours) == 5
    assert all(float(figure.replace(",", "")) > 0 for row in hours for figure in row)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--target": "nowhere/at/all"}, "there is no folder nowhere/at/all"),
        ({"--target": "pyproject.toml"}, "no config of a decoder"),
        ({"--target": "T5"}, "has an encoder"),
        ({"--tokens": "many"}, "--tokens takes a number"),
        ({"--tokens": "0"}, "--tokens takes a number"),
        ({"--gpus": "8xabacus"}, "--gpus takes COUNTxGPU"),
        ({"--gpus": "0xh100"}, "--gpus takes COUNTxGPU"),
        ({"--drafter": "medusa"}, "eagle, eagle3, dflash"),
        ({"--epochs": "0"}, "--epochs"),
    ],
)
def test_wrong_input_is_one_sentence(
    change: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    T5Config(num_layers=1).save_pretrained(tmp_path)
    asked = {"--target": "demo", "--tokens": "1M", "--gpus": "h100", "--drafter": "eagle", **change}
    asked["--target"] = asked["--target"].replace("T5", str(tmp_path))
    assert command.run(planning.main, [*(word for pair in asked.items() for word in pair)]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1
