"""Bad input to every command: exit code 2, one sentence on stderr that says what to do, nothing written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from cli_world import PROMPT, Run, refused

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ROOT / "recipes" / "demo" / "questions.jsonl"

# A command line, and what its sentence contains. FOLDER is a tiny model, PROMPT a text for it.
REFUSED = {
    "": {
        "benhc": "Did you mean 'bench'?",
        "--nothing": "No such option",
        "data generate demo --data none.jsonl --out x": "there is no file none.jsonl",
        "data generate demo --data x --out x --max-new-tokens 0": "must be at least 1",
        "data generate demo --data x --out x --limit 0": "must be at least 1",
        "validate empty": "config.json",
        "generate run/best x": "is a drafter, not a model",
    },
    "generate": {
        "": "give a prompt",
        "FOLDER ''": "empty",
        "''": "empty",
        "empty PROMPT": "config.json",
        "FOLDER --prompts none.jsonl": "no prompts file",
        "FOLDER --prompts empty": "empty is a folder",
        "FOLDER --prompts bad.jsonl": "line 2",
        "FOLDER PROMPT --prompts bad.jsonl": "use one of these",
        f"FOLDER '{'cat ' * 200}'": "context",
    },
    "generate FOLDER PROMPT --json": {
        "--rule typical": "--lossy",
        "--rule nonsense": "coupled, rejection, block, typical",
        "--drafter nonsense": "lookup",
        "--drafter lookup?nonsense=1": "nonsense",
        "--drafter none --drafter lookup": "none",
        "--drafter 'lookup + '": "beside a +",
        "--drafter 'lookup + ghost'": "no drafter 'ghost'",
        "--temperature -1": "temperature",
        "--temperature warm": "temperature",
        "--top-p 0": "top_p",
        "--max-new-tokens 0": "--max-new-tokens must",
        "--budget 1x3": "2 to 256 nodes",
        "--budget 3,b": "3,b",
        "--budget '2,1 2,1'": "each of them once",
        "--budget 0:2,1": "counted from 1",
        "--budget '1:2,1 2:1,1'": "name each of them",
        "--drafter lookup --drafter ngram --budget 1:2,1": "name each of them",
        "-n 0": "--samples must",
        "--batch-size 0": "--batch-size must",
        "--batch-size 0 --compare": "--batch-size must",
        "--chat": "chat template",
        "--stop ''": "stop string",
        "--device moon": "moon",
        "--threads 100000": "the number of processors of this machine",
        "--drafter run": "its drafter is run/best",
        "--dtype float99": "float99",
        "--nonsense": "--nonsense",
    },
    "chat FOLDER": {
        "--max-new-tokens 0": "--max-new-tokens",
        "--rule typical": "--lossy",
        "--temperature -1": "temperature",
        "--budget x": "a budget is",
        "--stop ''": "stop string",
    },
    "bench": {
        "demo --tasks gsm8k": "Possible options: --data, --task",
        "compare nowhere nowhere": "nowhere",
    },
    "bench demo --task demo/tldr --limit 1 --out x": {
        "--task gsm9k": "gsm8k",
        "--task demo/tldr --max-new-tokens 1": "must be at least 2",
        "--drafter looup": "there is no drafter 'looup'",
        "--peer vllm": "there is no peer 'vllm'",
        "--drafter lookup@typical": "typical acceptance at temperature 0",
        "--drafter lookup@16y2": "there is no drafter 'lookup@16y2'",
        "--drafter lookup --drafter lookup@auto": "two methods are called 'lookup'",
        "--drafter lookup@native": "native weights are those of a .gguf file",
        "--max-new-tokens 0": "--max-new-tokens must be at least 1",
        "--temperature 0 1": "unexpected argument '1'",
        "suffix": "unexpected argument 'suffix'",
        "--max-new-tokens 4000": "fits into the model's context",
        "--data nowhere": "there is no folder nowhere",
    },
    "train": {
        "eagle demo --data none.jsonl --out x": "there is no file none.jsonl",
        "oracle demo --data x --out x": "no method 'oracle'",
        "eagle demo --data x --out x --option colour=1": "no option 'colour'",
        "eagle demo --data x --out x --option passes": "no option 'passes'",
        f"hass demo --data {QUESTIONS} --out x --option passes=two": "must be a whole number",
    },
    "tune-tree demo --prompts good.jsonl": {
        "--drafter demo/medusa": "give --out FILE for the tree",
        "--drafter demo/medusa --out x --budget 1x8": "2 to 256 nodes",
        "--drafter demo/medusa --out x --batch-size 0": "--batch-size must be at least 1",
        "--drafter lookup --out x": "does not rank candidates",
        "--drafter demo/medusa --out no/x": "cannot be written",
        "--drafter demo/medusa --out x --temperature -1": "temperature must be",
        "--drafter demo/medusa --out x --ranks 0": "must be at least 1",
        "--drafter demo/medusa --out x --max-new-tokens 1": "too short",
    },
}


@pytest.mark.parametrize(
    ("line", "words"),
    [(f"{command} {more}", words) for command, lines in REFUSED.items() for more, words in lines.items()],
)
def test_bad_input_is_refused_in_one_sentence(
    line: str, words: str, run: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("run/best").mkdir(parents=True)
    Path("run/best/config.json").write_text('{"outrider_method": "eagle"}', encoding="utf-8")
    Path("good.jsonl").write_text('"the cat"\n', encoding="utf-8")
    Path("bad.jsonl").write_text('"the cat"\n{"prompt": \n', encoding="utf-8")
    names = {"FOLDER": folder, "PROMPT": PROMPT}
    said = refused(run(*(names.get(word, word) for word in shlex.split(line))))
    assert words in said
    assert said.startswith("outrider: ")
    assert not Path("x").exists(), "a refusal leaves nothing behind"
