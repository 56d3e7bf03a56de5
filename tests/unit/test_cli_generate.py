"""`outrider generate` and `validate` on a tiny model of random weights: JSON, exit codes, sentences."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from outrider.bandit import BanditBudget
from outrider.budget import Report
from outrider.cli import main
from outrider.types import Budget, Rows

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "mat", "hill", "and", "then", "slept", "sang", "again", "."]
PROMPT = "the cat sat on the mat and the cat sat on"
Result = tuple[int, str, str]
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of two layers that knows a few words."""
    place = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    vocab = {word: i for i, word in enumerate(["<unk>", "<end>", *WORDS])}
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.3, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place)
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>").save_pretrained(place)
    return str(place)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: exit code, stdout, stderr."""
    disable_progress_bar()  # in a process of its own, the command line sees to it before transformers is imported

    def run(*args: str) -> Result:
        code = main(args)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def refused(result: Result) -> str:
    """Bad input: exit code 2, nothing on stdout, one sentence on stderr."""
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    return err


def test_the_json_has_the_documented_keys(run: Run, folder: str) -> None:
    options = ("--max-new-tokens", "12", "--seed", "5", "--temperature", "1")
    code, out, err = run("generate", folder, PROMPT, *options, "--json")
    assert (code, err) == (0, ""), err
    found = json.loads(out)
    assert found.keys() == {"outputs", "target", "drafter", "rule", "lossless", "seed", "versions"}
    assert found["target"] == folder
    assert (found["drafter"], found["rule"], found["lossless"], found["seed"]) == ("lookup", "coupled", True, 5)
    assert {"outrider", "torch", "transformers", "python"} <= found["versions"].keys()
    (output,) = found["outputs"]
    assert {"text", "tokens", "finish_reason", "usage", "prompt", "seed"} == output.keys()
    assert output["finish_reason"] in ("length", "eos")
    usage = output["usage"]
    assert {
        "prompt_tokens", "new_tokens", "rounds", "tau", "alpha", "drafted", "accepted",
        "prefill_seconds", "decode_seconds", "draft_seconds", "verify_seconds",
    } <= usage.keys()  # fmt: skip
    assert usage["prompt_tokens"] == len(PROMPT.split())
    assert usage["new_tokens"] == len(output["tokens"])


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_every_drafter_writes_the_same_text(run: Run, folder: str, temperature: str) -> None:
    texts = []
    for drafter in (["none"], ["lookup"], ["suffix"], ["lookup", "suffix"], [f"model:{folder}"]):
        specs = [x for d in drafter for x in ("--drafter", d)]
        code, out, _ = run(
            "generate", folder, PROMPT, *specs, "--seed", "1", "--temperature", temperature, "--max-new-tokens", "20",
            "--json",
        )  # fmt: skip
        assert code == 0
        texts.append(json.loads(out)["outputs"][0]["tokens"])
    assert all(t == texts[0] for t in texts)


def test_text_comes_on_stdout_and_usage_on_stderr(run: Run, folder: str) -> None:
    args = ("generate", folder, PROMPT, "--seed", "1", "--max-new-tokens", "9")
    document = json.loads(run(*args, "--json")[1])
    code, out, err = run(*args)
    assert code == 0
    assert out == document["outputs"][0]["text"] + "\n"
    assert err.startswith("[")
    assert "seed 1" in err
    assert err.count("\n") == 1


def test_many_prompts_and_samples(run: Run, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"the cat"\n\n{"prompt": "the dog"}\n', encoding="utf-8")
    args = ("--max-new-tokens", "4", "--seed", "7", "--temperature", "1", "-n", "2")
    code, out, _ = run("generate", folder, "--prompts-file", str(file), *args, "--json")
    assert code == 0
    outputs = json.loads(out)["outputs"]
    assert [(o["prompt"], o["seed"]) for o in outputs] == [(0, 7), (0, 8), (1, 7), (1, 8)]
    code, out, err = run("generate", folder, "--prompts-file", str(file), *args)
    assert code == 0
    assert len(out.splitlines()) == len(err.splitlines()) == 4


def test_a_bandit_writes_the_same_text(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And learns from the drafted runs alone: in a plain round no shape is drafted."""
    shapes, learn = [], BanditBudget.learn

    def watched(bandit: BanditBudget, report: Report) -> None:
        shapes.append((len(bandit.last or ()), report.depth, report.nodes))
        learn(bandit, report)

    monkeypatch.setattr(BanditBudget, "learn", watched)
    args = ("generate", folder, PROMPT, "--max-new-tokens", "20", "--compare", "--json", "--arms", "2,1 1,1 none")
    args = (*args, "--drafter", f"model:{folder}")
    code, out, _ = run(*args)
    assert code == 0
    assert json.loads(out)["comparison"]["equal"] is True
    assert any(shape for shape, _, _ in shapes)
    assert all(nodes > 1 for shape, _, nodes in shapes if shape)


def test_a_bandit_chooses_among_drafters(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of drafter and shape are no mix: each is played, and the text is the same."""
    played, choose = set(), BanditBudget.choose

    def watched(bandit: BanditBudget, rows: Rows) -> Budget:
        budget = choose(bandit, rows)
        played.add((budget.part, budget.shape))
        return budget

    monkeypatch.setattr(BanditBudget, "choose", watched)
    args = ("generate", folder, PROMPT, "--max-new-tokens", "24", "--compare", "--json", "--drafter", f"model:{folder}")
    code, out, _ = run(*args, "--drafter", "lookup", "--arms", "1:2,1 2:1,1 none")
    assert code == 0
    assert json.loads(out)["comparison"]["equal"] is True
    assert {(0, (2, 1)), (1, (1, 1))} <= played


def test_compare_finds_equal_texts_which_theory_reads(run: Run, folder: str, tmp_path: Path) -> None:
    args = ("generate", folder, PROMPT, "--compare", "--max-new-tokens", "12", "--nodes", "4", "--depth", "3")
    code, out, _ = run(*args, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["seed"] == 1
    assert found["comparison"]["equal"] is True
    assert found["comparison"]["speedup"] > 0
    assert run(*args)[0] == 0
    file = tmp_path / "run.json"
    file.write_text(out, encoding="utf-8")
    code, out, _ = run("theory", "--measured", str(file), "--json")
    assert code == 0
    assert json.loads(out)["measured"]["measured_speedup"] == found["comparison"]["speedup"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rule", "typical"], "--lossy"),
        (["--rule", "nonsense"], "coupled, rejection, block, typical"),
        (["--drafter", "nonsense"], "lookup"),
        (["--drafter", "lookup?nonsense=1"], "nonsense"),
        (["--drafter", "none", "--drafter", "lookup"], "none"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "warm"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--nodes", "0"], "--nodes"),
        (["--arms", "3,b"], "3,b"),
        (["--arms", "2,1 2,1"], "once"),
        (["--arms", "2,1", "--depth", "3"], "leave out"),
        (["--arms", "0:2,1"], "counted from 1"),
        (["--arms", "1:2,1 2:1,1"], "name each of them"),
        (["--drafter", "lookup", "--drafter", "ngram", "--arms", "1:2,1"], "name each of them"),
        (["-n", "0"], "n must"),
        (["--batch-size", "0"], "batch_size"),
        (["--chat"], "chat template"),
        (["--stop", ""], "stop string"),
        (["--device", "moon"], "moon"),
        (["--dtype", "float99"], "float99"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(run: Run, folder: str, options: list[str], says: str) -> None:
    assert says in refused(run("generate", folder, PROMPT, *options, "--json"))


def test_bad_prompts_are_refused(run: Run, folder: str, tmp_path: Path) -> None:
    assert "empty" in refused(run("generate", folder, ""))
    assert "empty" in refused(run("generate", ""))
    assert "give a prompt" in refused(run("generate"))
    assert "context" in refused(run("generate", folder, "cat " * 200))
    assert "no prompts file" in refused(run("generate", folder, "--prompts-file", str(tmp_path / "none.jsonl")))
    file = tmp_path / "bad.jsonl"
    file.write_text('"the cat"\n{"prompt": \n', encoding="utf-8")
    assert "line 2" in refused(run("generate", folder, "--prompts-file", str(file)))
    assert "not both" in refused(run("generate", folder, PROMPT, "--prompts-file", str(file)))


def test_bad_models_are_refused(run: Run, tmp_path: Path) -> None:
    assert "config.json" in refused(run("generate", str(tmp_path), PROMPT))
    assert "config.json" in refused(run("validate", str(tmp_path)))


def test_typical_is_called_lossy(run: Run, folder: str) -> None:
    options = ("--rule", "typical", "--lossy", "--temperature", "1", "--max-new-tokens", "4")
    code, out, _ = run("generate", folder, PROMPT, *options, "--json")
    assert code == 0
    assert json.loads(out)["lossless"] is False


def test_validate_proves_the_model(run: Run, folder: str) -> None:
    code, out, err = run("validate", folder, "--dtype", "float64", "--json")
    assert (code, err) == (0, ""), err
    report = json.loads(out)
    assert report["exact"] is True
    assert report["worst"] < 1e-9 < report["control"]
    code, out, err = run("validate", folder, "--dtype", "float64")
    assert (code, out.strip(), err) == (0, report["sentence"], "")


def test_validate_exits_1_where_a_tree_is_not_exact(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider import targets

    prove = targets.validate

    def fail(target: Any, seed: int) -> targets.Report:
        return replace(prove(target, seed), exact=False, sentence="it is not exact")

    monkeypatch.setattr(targets, "validate", fail)
    code, out, err = run("validate", folder)
    assert (code, out) == (1, "it is not exact\n"), err


@pytest.mark.parametrize(("option", "code"), [("0", 0), ("warm", 2)])
def test_the_process_exits_with_the_code(folder: str, option: str, code: int) -> None:
    args = ["generate", folder, PROMPT, "--max-new-tokens", "4", "--seed", "1", "--temperature", option, "--json"]
    done = subprocess.run([sys.executable, "-m", "outrider.cli", *args], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
    else:
        assert len(json.loads(done.stdout)["outputs"][0]["tokens"]) == 4
        assert done.stderr == ""
