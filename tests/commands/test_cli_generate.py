"""`outrider generate` and `validate` on a tiny model of random weights: JSON, exit codes, sentences."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from cli_world import PROMPT, Run, refused

from outrider import cli
from outrider.budgets.bandit import BanditBudget
from outrider.budgets.budgeter import Report
from outrider.commands import compare
from outrider.commands.generate import unescape
from outrider.core.types import Budget, Rows, Usage
from outrider.engine.request import Output
from outrider.names import is_model
from papers import command
from papers.theory import theory


def test_the_json_has_the_documented_keys(run: Run, folder: str) -> None:
    options = ("--max-new-tokens", "12", "--seed", "5", "--temperature", "1")
    code, out, err = run("generate", folder, PROMPT, *options, "--json")
    assert (code, err) == (0, ""), err
    result = json.loads(out)
    assert result.keys() == {"outputs", "target", "drafter", "rule", "lossless", "exact", "seed", "versions"}
    assert result["target"] == folder
    assert (result["drafter"], result["rule"], result["lossless"], result["seed"]) == ("suffix", "coupled", True, 5)
    assert {"outrider", "torch", "transformers", "python"} <= result["versions"].keys()
    (output,) = result["outputs"]
    assert {"text", "tokens", "finish_reason", "usage", "prompt", "seed"} == output.keys()
    assert output["finish_reason"] in ("length", "eos")
    usage = output["usage"]
    assert {
        "prompt_tokens", "new_tokens", "rounds", "tau", "alpha", "drafted", "accepted",
        "prefill_seconds", "decode_seconds", "draft_seconds", "verify_seconds",
    } <= usage.keys()  # fmt: skip
    assert usage["prompt_tokens"] == len(PROMPT.split())
    assert usage["new_tokens"] == len(output["tokens"])


def test_every_drafter_writes_the_same_text(run: Run, folder: str) -> None:
    texts = []
    for drafter in (["none"], ["lookup"], ["suffix"], ["lookup", "suffix"], [f"model:{folder}"]):
        specs = [x for d in drafter for x in ("--drafter", d)]
        code, out, _ = run(
            "generate", folder, PROMPT, *specs, "--seed", "1", "--temperature", "1", "--max-new-tokens", "20", "--json",
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
    usage = r"9 tokens, \d+ tokens/s, \d\.\d per pass \(suffix\), (bit-exact|exact up to rounding)"
    assert re.fullmatch(f"{usage}; stopped at --max-new-tokens\n", err), "a greedy text depends on no seed"
    assert run(*args, "--temperature", "1")[2].endswith("; seed 1\n")
    assert "exact in distribution" in run(*args, "--temperature", "1", "--rule", "rejection")[2]
    assert "lossy" in run(*args, "--rule", "typical", "--lossy")[2]
    assert "without drafts" in run(*args, "--drafter", "none")[2]
    assert err.count("\n") == 1


def test_many_prompts_and_samples(run: Run, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"the cat"\n\n{"prompt": "the dog"}\n', encoding="utf-8")
    args = ("--max-new-tokens", "4", "--seed", "7", "--temperature", "1", "-n", "2")
    code, out, _ = run("generate", folder, "--prompts", str(file), *args, "--json")
    assert code == 0
    outputs = json.loads(out)["outputs"]
    assert [(o["prompt"], o["seed"]) for o in outputs] == [(0, 7), (0, 8), (1, 7), (1, 8)]
    code, out, err = run("generate", folder, "--prompts", str(file), *args)
    assert code == 0
    assert len(out.splitlines()) == len(err.splitlines()) == 4


def test_a_bandit_writes_the_same_text(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And learns from the drafted runs alone: in a plain round no shape is drafted."""
    shapes, learn = [], BanditBudget.learn

    def watched(bandit: BanditBudget, report: Report) -> None:
        shapes.append((len(bandit.last[1]), report.depth, report.nodes))
        learn(bandit, report)

    monkeypatch.setattr(BanditBudget, "learn", watched)
    args = ("generate", folder, PROMPT, "--max-new-tokens", "20", "--compare", "--json", "--budget", "2,1 1,1 none")
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
    code, out, _ = run(*args, "--drafter", "lookup", "--budget", "1:2,1 2:1,1 none")
    assert code == 0
    assert json.loads(out)["comparison"]["equal"] is True
    assert {(0, (2, 1)), (1, (1, 1))} <= played


def test_compare_finds_equal_texts_which_theory_reads(
    run: Run, folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ("generate", folder, PROMPT, "--compare", "--max-new-tokens", "12", "--budget", "4x3")
    code, out, _ = run(*args, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["seed"] == 1
    assert result["comparison"]["equal"] is True
    assert result["comparison"]["speedup"] > 0
    assert run(*args)[0] == 0
    file = tmp_path / "run.json"
    file.write_text(out, encoding="utf-8")
    assert command.run(theory, ["--measured", str(file), "--json"]) == 0
    measured = json.loads(capfd.readouterr().out)["measured"]
    assert measured["measured_speedup"] == result["comparison"]["speedup"]


def test_prompts_come_from_stdin(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(text: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))

    args = ("--max-new-tokens", "5", "--json")
    full = json.loads(run("generate", folder, PROMPT, *args)[1])["outputs"][0]["tokens"]
    typed(PROMPT.encode() + b"\n")
    assert json.loads(run("generate", folder, "-", *args)[1])["outputs"][0]["tokens"] == full
    typed(json.dumps(PROMPT).encode() + b'\n"the dog"\n"the hill"\n')
    outputs = json.loads(run("generate", folder, "--prompts", "-", "--limit", "2", *args)[1])["outputs"]
    assert [o["prompt"] for o in outputs] == [0, 1]
    assert outputs[0]["tokens"] == full
    typed(b"caf\xe9")
    assert "not UTF-8" in refused(run("generate", folder, "-"))
    typed(b"")
    assert "empty" in refused(run("generate", folder, "-"))


def test_a_lone_model_is_not_continued_as_text(
    run: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is read from a stdin that is no terminal; on a terminal one is required."""
    monkeypatch.chdir(tmp_path)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for model in (folder, "demo", "smollm2", "org/name", "file.gguf", "./here", "demo/target"):
        monkeypatch.setattr("sys.stdin", Terminal())
        assert f"{model} is taken for the model; give a prompt too" in refused(run("generate", model))
    args = ("--max-new-tokens", "5", "--json")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode() + b"\n")))
    piped = json.loads(run("generate", folder, *args)[1])
    assert piped["target"] == folder
    assert (
        piped["outputs"][0]["tokens"] == json.loads(run("generate", folder, PROMPT, *args)[1])["outputs"][0]["tokens"]
    )


@pytest.mark.parametrize("word", ["Once upon a time", "gpt2", "yes / no", "Hello", ".", "", "x" * 5000, "and\n/ or"])
def test_a_lone_text_is_no_model(word: str) -> None:
    assert is_model(word) is (word == ".")  # the folder


def test_the_option_names_of_other_tools_mean_the_same(run: Run, folder: str) -> None:
    """llama.cpp's, vLLM's and transformers' spellings."""
    threads = torch.get_num_threads()
    ours = ("generate", folder, PROMPT, "--max-new-tokens", "6", "--temperature", "0.5", "--seed", "1", "--json")
    theirs = (
        "generate",
        "--model",
        folder,
        "-p",
        PROMPT,
        "--max-tokens",
        "6",
        "--temp",
        "0.5",
        "--seed",
        "1",
        "-t",
        "1",
    )
    ids = [json.loads(run(*line)[1])["outputs"][0]["tokens"] for line in (ours, (*theirs, "--json"))]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 6
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    assert "context" in refused(run("generate", "-m", folder, "-p", "cat " * 200))
    code, _, err = run("chat", "-m", folder, "--max-tokens", "2", "--temp", "0", "-t", "1")
    assert code == 0, err
    line = ("bench", "./nothere", "--max-tokens", "2", "--temp", "0")
    assert "there is no folder ./nothere" in refused(run(*line))


def test_a_stop_string_may_be_written_with_escapes() -> None:
    assert unescape(r"a\n\t\\n\x") == "a\n\t\\n\\x"


def test_ctrl_c_reports_the_written_answers(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of usage is interrupted: one text is finished then, and it is there."""
    echo = typer.secho

    def interrupted(message: Any = None, **how: Any) -> None:
        echo(message, **how)
        if how.get("err"):
            raise KeyboardInterrupt

    args = ("--max-new-tokens", "5", "--batch-size", "1")
    with monkeypatch.context() as patch:
        patch.setattr(typer, "secho", interrupted)
        code, out, err = run("generate", folder, PROMPT, "the dog", *args)
    assert code == cli.INTERRUPTED
    assert len(out.splitlines()) == 1
    assert err.splitlines()[-1] == "outrider: interrupted; 1 of 2 texts were written"


def test_errors_of_disks_and_folders_are_bad_input(tmp_path: Path) -> None:
    """As they come from deep within a library."""
    for number in (errno.EACCES, errno.ENOSPC, errno.EROFS, errno.ENOTDIR):
        code, sentence = cli.explain(OSError(number, os.strerror(number), str(tmp_path)))
        assert code == 2
        assert sentence.startswith(f"{tmp_path} cannot be used: ")
    assert cli.explain(RuntimeError("write failed: No space left on device (os error 28)"))[0] == 2
    assert cli.explain(OSError("no number"))[0] == 1


def test_damaged_folders_name_the_file(run: Run, folder: str, tmp_path: Path) -> None:
    """What is wrong with a model, or with a drafter's tree, is said with the file's name."""
    place = tmp_path / "model"
    shutil.copytree(folder, place)
    config, weights, words = (place / name for name in ("config.json", "model.safetensors", "tokenizer.json"))
    full = {file: file.read_bytes() for file in (config, weights, words)}
    damages = (
        (config, b"{", "config.json is not valid JSON"),
        (config, full[config].replace(b'"hidden_size": 16', b'"hidden_size": "x"'), "config.json is damaged: "),
        (config, full[config].replace(b'"hidden_size": 16', b'"hidden_size": 32'), "lm_head.weight is [17, 16], not"),
        (weights, full[weights][:4000], "model.safetensors is damaged"),
        (weights, b"", "model.safetensors is damaged"),
        (words, full[words][:50], "tokenizer.json is not valid JSON"),
    )
    for file, content, says in damages:
        file.write_bytes(content)
        code, out, err = run("generate", str(place), PROMPT)
        assert (code, out) == (2, "")
        assert says in err.splitlines()[-1]
        file.write_bytes(full[file])
    says = refused(run("generate", "demo", PROMPT, "--drafter", "medusa:demo?tree=missing.json"))
    assert "tree=missing.json: there is no such file" in says


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
    from outrider.backends.torch import validate

    prove = validate.validate

    def fail(target: Any, seed: int) -> validate.Report:
        return replace(prove(target, seed), exact=False, sentence="it is not exact")

    monkeypatch.setattr(validate, "validate", fail)
    code, out, err = run("validate", folder)
    assert (code, out) == (1, "it is not exact\n"), err


def test_audit_exits_1_under_a_lossy_rule(run: Run, folder: str) -> None:
    shown = run(
        "audit", folder, "--drafter", "lookup", "--rule", "typical", "--samples", "100", "--limit", "1", "--json"
    )
    assert shown.code == 1, shown.err
    assert json.loads(shown.out)["lossless"] is False


def test_compare_exits_1_where_texts_differ(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts are printed all the same."""
    one = compare._one
    monkeypatch.setattr(compare, "_one", lambda *args: ({**one(*args)[0], "equal": False}, one(*args)[1]))
    shown = run("generate", folder, PROMPT, "--max-new-tokens", "4", "--compare", "--json")
    assert shown.code == 1
    assert len(json.loads(shown.out)["outputs"]) == 1
    assert "differs from plain decoding: please report this" in shown.err


def test_seconds_are_scaled_by_decoding_alone() -> None:
    def of(tokens: int) -> Output:
        return Output(0, "", [5] * tokens, "length", 0, Usage(prefill_seconds=1.0))

    assert compare._as_long(11.0, of(11), 21) == 21.0
    assert compare._as_long(11.0, of(11), 11) == 11.0
    assert compare._as_long(1.5, of(1), 21) == 1.5, "a text of one token has no speed"


def test_texts_of_other_lengths_are_compared_by_the_token(
    run: Run, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `rejection` both follow one distribution and end where they end. Here each text takes 1,000 seconds."""
    clock = iter(range(0, 10**6, 1000))
    monkeypatch.setattr(compare, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(compare, "_stock_of", lambda llm: None)
    ratios = []
    for seed in range(1, 6):
        options = ("--rule", "rejection", "--temperature", "1.5", "--max-new-tokens", "90", "--seed", str(seed))
        result = json.loads(run("generate", folder, PROMPT, *options, "--compare", "--json").out)
        (row,) = result["comparison"]["prompts"]
        plain = json.loads(run("generate", folder, PROMPT, *options, "--drafter", "none", "--json").out)
        ratios.append((row["tokens"] - 1) / (len(plain["outputs"][0]["tokens"]) - 1))
        assert row["speedup"] == pytest.approx(ratios[-1], abs=0.05), "but for the prompt's share of the time"
    assert min(ratios) < 0.9 or max(ratios) > 1.1


def test_a_full_context_is_called_that(run: Run, folder: str) -> None:
    for tokens, full in (("4", False), ("999", True)):
        shown = run("generate", folder, PROMPT, "--temperature", "0", "--max-new-tokens", tokens)
        assert ("stopped at the end of the context" in shown.err) == full, shown.err


@pytest.mark.process
@pytest.mark.parametrize(("option", "code"), [("0", 0), ("warm", 2)])
def test_the_process_exits_with_the_code(option: str, code: int) -> None:
    args = ["generate", "demo", PROMPT, "--max-new-tokens", "4", "--seed", "1", "--temperature", option, "--json"]
    done = subprocess.run([sys.executable, "-m", "outrider.cli", *args], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
    else:
        assert len(json.loads(done.stdout)["outputs"][0]["tokens"]) == 4
        assert done.stderr == ""


def test_a_mix_is_one_spec_or_several(run: Run, folder: str) -> None:
    options = ("--max-new-tokens", "8", "--json")
    texts = []
    for given in (["lookup + suffix"], ["lookup", "suffix"]):
        code, out, err = run("generate", folder, PROMPT, *options, *(x for s in given for x in ("--drafter", s)))
        assert code == 0, err
        texts.append((json.loads(out)["drafter"], json.loads(out)["outputs"][0]["text"]))
    assert texts[0] == texts[1]
    assert texts[0][0] == "lookup + suffix"
