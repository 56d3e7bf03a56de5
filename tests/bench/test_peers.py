"""Which engines are measured beside ours, in which order, with what drafters; nothing is measured here."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "engines")]  # where scripts find one another

import with_transformers  # noqa: E402

import peers  # noqa: E402
from outrider import names  # noqa: E402
from outrider.backends.choose import load_tokenizer  # noqa: E402
from outrider.backends.torch import gguf  # noqa: E402
from outrider.bench.types import Prompt, Task  # noqa: E402
from outrider.shipped import shipped  # noqa: E402

SHIPS = "suffix + eagle3:smollm2/eagle3"


def given(**options: Any) -> argparse.Namespace:
    names = ("transformers", "vllm", "llama", "eagle", "draft", "draft_model", "out")
    return argparse.Namespace(**{**dict.fromkeys(names), "model": "smollm2", "batches": [1, 8], **options})


def test_an_engine_without_a_python_is_left_out() -> None:
    results = peers.runs(given())
    assert [run.name for run in results] == [
        "ours, plain", "ours, drafts", "transformers, plain", "transformers, lookup", "transformers, assisted"
    ]  # fmt: skip
    assert {run.python for run in results} == {sys.executable}


def test_each_engine_runs_under_its_own_python() -> None:
    results = peers.runs(given(transformers="a", vllm="b", llama="c", eagle="e"))
    assert {(run.engine, run.python) for run in results} == {
        ("ours", sys.executable), ("transformers", "a"), ("vllm", "b"), ("llama", sys.executable), ("eagle", "e")
    }  # fmt: skip
    assert [run.method for run in results if run.engine == "vllm"] == ["plain", "lookup", "eagle", "eagle3"]
    assert [run.method for run in results if run.engine == "eagle"] == ["plain", "tree", "small"]


def test_a_file_is_measured_with_llama_cpp_and_its_draft_model_drafts_in_both() -> None:
    results = peers.runs(given(model="coder.gguf", llama="c", draft_model=Path("small.gguf")))
    assert [run.name for run in results] == [
        "ours, plain", "ours, drafts", "ours, draft", "llama, plain", "llama, lookup", "llama, draft"
    ]  # fmt: skip
    drafters = [peers.drafter_of(run, given(draft_model=Path("small.gguf")), SHIPS) for run in results]
    assert drafters == [SHIPS, SHIPS, "model:small.gguf", SHIPS, SHIPS, "small.gguf"]


def test_other_engines_read_a_files_weights_from_a_folder(tmp_path: Path) -> None:
    """What transformers loads of it has the weights and the tokenizer of the file; it is written once."""
    shape = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None,
    )  # fmt: skip
    small = write(tmp_path / "small.1b.gguf", LlamaForCausalLM(shape))
    asked = given(model=str(small), vllm="v", transformers="t", draft_model=small, out=tmp_path / "out")
    results = peers.runs(asked)
    assert [run.name for run in results][3:] == [
        "transformers, plain", "transformers, lookup", "transformers, assisted", "vllm, plain", "vllm, lookup"
    ]  # fmt: skip
    assert peers.drafter_of(results[5], asked, SHIPS) == peers.stock_folder(small, asked.out)
    folder = Path(peers.stock_folder(small, asked.out))
    model = AutoModelForCausalLM.from_pretrained(folder)
    own = gguf.read(small)[0].state_dict()
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    assert [run.name for run in peers.runs(given(model=str(small), transformers="t", vllm="v"))][2:] == [
        "transformers, plain", "transformers, lookup", "vllm, plain", "vllm, lookup"
    ]  # fmt: skip


def test_ratios_are_of_medians_and_by_task() -> None:
    def row(name: str, task: str, *seconds: float) -> dict[str, Any]:
        return {"name": name, "task": task, "temperature": 0.0, "batch": 1, "tokens": 10, "seconds": list(seconds)}

    rows = [
        row("ours, plain", "a", 1, 1, 9), row("ours, plain", "b", 2), row("ours, drafts", "a", 0.5, 0.5, 0.1),
        row("ours, drafts", "b", 2), row("llama, plain", "a", 2), row("llama, plain", "b", 1),
    ]  # fmt: skip
    lines = peers.figures(rows, 0.0, 1)
    assert lines[0] == ["engine", "a", "b", "by its plain", "by llama.cpp's plain"]
    assert lines[2] == ["ours, drafts", "20.0 (20.0-100.0)", "5.0", "1.50", "2.25"]


def test_what_has_no_batches_is_measured_alone() -> None:
    batches = {run.name: run.batches for run in peers.runs(given(vllm="b", llama="c", eagle="e"))}
    alone = {name for name, sizes in batches.items() if sizes == (1,)}
    assert alone == {
        "transformers, lookup", "transformers, assisted", "eagle, plain", "eagle, tree", "eagle, small",
    }  # fmt: skip
    assert all(sizes == (1, 8) for name, sizes in batches.items() if name not in alone)


def test_what_each_method_drafts_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "exported", lambda network, layout, out: f"{out.name} of {network} for {layout}")
    results = {}
    for draft in (None, "a folder"):
        asked = given(vllm="b", eagle="e", draft=draft, out=tmp_path / "made")
        results[draft] = {run.name: peers.drafter_of(run, asked, SHIPS) for run in peers.runs(asked)}
    assert results[None]["ours, drafts"] == SHIPS
    assert results[None]["vllm, eagle"] == "made of smollm2/hass for vllm"
    assert results[None]["vllm, eagle3"] == "made of smollm2/eagle3 for vllm"
    assert results[None]["eagle, tree"] == "made of smollm2/hass for safeailab"
    assert results[None]["transformers, assisted"] == shipped("demo/draft")
    assert results["a folder"]["transformers, assisted"] == "a folder"


def test_a_network_is_exported_once_and_anew_when_it_has_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        Path(command[-1]).mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(peers.subprocess, "run", run)
    weights = tmp_path / "network" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"one")
    first = peers.exported(str(weights.parent), "vllm", tmp_path)
    assert peers.exported(str(weights.parent), "vllm", tmp_path) == first
    assert len(asked) == 1
    assert asked[0][-7:-1] == ["export", str(weights.parent), "smollm2", "--to", "vllm", "--out"]
    assert peers.exported(str(weights.parent), "safeailab", tmp_path) != first
    assert asked[-1][-3:-1] == ["safeailab", "--out"]
    weights.write_bytes(b"two")
    assert peers.exported(str(weights.parent), "vllm", tmp_path) != first


def test_a_failed_export_reports_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 2, "", "not this target's drafter")
    monkeypatch.setattr(peers.subprocess, "run", lambda *_, **__: failed)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(RuntimeError, match="not this target's"):
        peers.exported(str(tmp_path), "vllm", tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--draft", "nowhere"], "no config.json in nowhere"),
        (["--llama", "nowhere"], "no program llama-server in nowhere"),
        (["--eagle", sys.executable], "--eagle and --eagle-code belong together"),
        (["--eagle-code", "HERE"], "--eagle and --eagle-code belong together"),
        (["--eagle", sys.executable, "--eagle-code", "nowhere"], "no eagle/model/ea_model.py in nowhere"),
    ],
)
def test_what_is_refused(
    options: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    arguments = ["--data", "d", "--out", str(tmp_path / "out"), *(str(tmp_path) if o == "HERE" else o for o in options)]
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        peers.main()
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_kept_lines_are_those_of_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another draft model is another job."""
    monkeypatch.setattr(peers, "measure", lambda run, job: [{"drafter": job["drafter"]}])
    run = peers.Run("transformers", "assisted", sys.executable, (1,))
    kept = tmp_path / "x.json"
    assert peers.measured(run, {"drafter": "a"}, kept) == [{"drafter": "a"}]
    assert json.loads(kept.read_text(encoding="utf-8"))["asked"]["drafter"] == "a"
    assert peers.measured(run, {"drafter": "a"}, kept) == [{"drafter": "a"}]
    with pytest.raises(SystemExit, match="other settings"):
        peers.measured(run, {"drafter": "b"}, kept)


@pytest.mark.trained
@pytest.mark.process
def test_transformers_drafts_with_a_model_of_the_same_tokenizer_or_another(tmp_path: Path) -> None:
    """Greedy texts in float32 are those without drafts."""
    drafters = {"": "plain", shipped("demo/draft"): "assisted", str(other(tmp_path)): "assisted"}
    job: dict[str, Any] = {
        "model": shipped("demo/target"), "prompts": {"a": [[[5, 9, 17, 33]], [[40, 41, 42], [7, 11]]]}, "ends": [1],
        "tokens": 8, "temperatures": [0.0, 1.0], "batches": [1], "repeats": 1, "dtype": "float32",
    }  # fmt: skip
    texts, prompts = [], [chat[0] for chat in job["prompts"]["a"]]
    for drafter, method in drafters.items():
        _, write, _ = with_transformers.start({**job, "method": method, "drafter": drafter})
        texts.append(write(prompts, 0.0, 1, False))
        assert len(write(prompts, 1.0, 1, False)) == 2
    assert texts == texts[:1] * 3
    run = peers.Run("transformers", "assisted", sys.executable, (1,))
    lines = peers.measure(run, {**job, "drafter": drafter})
    assert [(line["method"], line["temperature"]) for line in lines] == [("assisted", 0.0), ("assisted", 1.0)]
    first, second, third = lines[0]["texts"]
    assert [first, second] == texts[0]
    _, plain, _ = with_transformers.start({**job, "method": "plain"})
    assert [third] == plain([[40, 41, 42, *(token for token in second if token != 1), 7, 11]], 0.0, 1, False)
    assert lines[0]["tokens"] == len(first) + len(second) + len(third)
    own = peers.measure(peers.Run("ours", "plain", sys.executable, (1,)), {**job, "model": "demo", "drafter": ""})
    assert own[0]["texts"] == lines[0]["texts"]


def test_turns_are_what_the_template_writes_between_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}<assistant>"
    tokenizer = replace(load_tokenizer(names.find("demo").where), chat_template=template)
    monkeypatch.setattr(peers, "load_tokenizer", lambda place: tokenizer)
    task = Task("chats", (Prompt("a", ("Who?", "Why?", "When?")), Prompt("b", ("Where?",))))
    monkeypatch.setattr(peers.tasks, "expand", lambda names: names)
    monkeypatch.setattr(peers.tasks, "load", lambda name, data: task)
    made, _ = peers.prompts(names.find("demo"), given(tasks=["x"], data=None, limit=2))
    wrote = [[tokenizer.decode(turn) for turn in chat] for chat in made["x"]]
    assert wrote == [
        ["<user>Who?|<assistant>", "|<user>Why?|<assistant>", "|<user>When?|<assistant>"], ["<user>Where?|<assistant>"]
    ]  # fmt: skip


def other(folder: Path) -> Path:
    """An untrained Llama over bytes."""
    signs = {sign: i for i, sign in enumerate(["<end>", *sorted(ByteLevel.alphabet())])}
    words = Tokenizer(BPE(vocab=signs, merges=[]))
    words.pre_tokenizer, words.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    shape = LlamaConfig(
        vocab_size=len(signs), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def test_a_failed_run_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(run: peers.Run, job: dict[str, Any], kept: Path) -> list[dict[str, Any]]:
        if run.method == "lookup":
            raise RuntimeError("out of memory")
        return [{"batch": job["batch"], "kept": kept.name}]

    monkeypatch.setattr(peers, "measured", measured)
    asked = [peers.Run("e", method, "python", (1,)) for method in ("plain", "lookup", "eagle")]
    results = list(peers.in_turn(asked, lambda run: {"batch": len(run.method)}, tmp_path / "out"))
    assert results == [
        [{"name": "e, plain", "batch": 5, "kept": "e-plain.json"}], [],
        [{"name": "e, eagle", "batch": 5, "kept": "e-eagle.json"}],
    ]  # fmt: skip
    assert capsys.readouterr().err == "out of memory\n"
    assert (tmp_path / "out").is_dir()
