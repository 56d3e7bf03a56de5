"""Questions for a coding model: planted faults, functions without annotations, openings."""

from __future__ import annotations

import ast
import json
import random
import sys
from pathlib import Path

import pytest
from recipes.qwen_coder import fine_tune
from recipes.qwen_coder.faults import planted
from recipes.qwen_coder.openings import TURN, openings
from recipes.qwen_coder.questions import FUNCTION, fields, untyped

import outrider
from outrider import names

CODE = '''def bigger(items: list[int], least: int = 3) -> int:
    """Count the items that are at least `least`, é included."""
    total = 0
    for item in items:
        if item >= least and item != 7:
            total = total + 1
    return total
'''


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_fault_is_one_change_that_is_still_python(seed: int) -> None:
    wrong = planted(CODE, random.Random(seed))
    assert wrong is not None
    ast.parse(wrong)
    lines = [(a, b) for a, b in zip(CODE.split("\n"), wrong.split("\n"), strict=True) if a != b]
    assert len(lines) == 1
    assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(CODE)), "another program"


def test_code_without_a_place_for_a_fault_has_none() -> None:
    assert planted("def same(x):\n    return x\n", random.Random(0)) is None
    assert planted("def (", random.Random(0)) is None


def test_a_function_without_annotations_computes_the_same() -> None:
    bare = untyped(CODE)
    assert "list[int]" not in bare
    assert "->" not in bare
    spaces: list[dict] = [{}, {}]
    for code, space in zip((CODE, bare), spaces, strict=True):
        exec(code, space)
    assert {space["bigger"]([1, 3, 7, 9]) for space in spaces} == {2}


def test_every_form_finds_its_fields() -> None:
    given = fields(CODE.rstrip(), "bigger", random.Random(0))
    assert all(value is not None for name, value in given.items() if name != "half"), given
    for forms in FUNCTION.values():
        for form in forms:
            assert "{" not in form.format(**dict.fromkeys(given, "x"))


def test_a_longer_list_of_openings_begins_with_a_shorter_one() -> None:
    assert openings(50)[:20] == openings(20)
    assert all(prompt.startswith(TURN) for prompt in openings(50))


@pytest.mark.trained
def test_a_fine_tune_is_a_changed_model_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer to a question that it learned is more likely than before, and the questions left over are written."""
    answer = {"role": "assistant", "content": "zebra " * 6}
    dialogues = [[{"role": "user", "content": f"Say {n}."}, answer] for n in range(4)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in dialogues), encoding="utf-8")
    folder, out = names.find("demo").where, tmp_path / "out"
    options = ["--steps", "6", "--questions", "1", "--lr", "0.01"]
    monkeypatch.setattr(sys, "argv", ["fine_tune", folder, "--data", str(data), "--out", str(out), *options])
    fine_tune.main()
    prompt = [{"role": "user", "content": "Say 0."}]
    before, after = (
        outrider.load(where, "none").generate(prompt, max_new_tokens=16)[0].text
        for where in (folder, str(out / "model"))
    )
    assert "zebra" in after
    assert "zebra" not in before
    (asked,) = (out / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(asked) == {"messages": [{"role": "user", "content": "Say 3."}]}
