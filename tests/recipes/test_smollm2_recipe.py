"""SmolLM2's data: questions that keep clear of the evaluation sets, and the packed answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.smollm2 import answers, many, questions, trim
from recipes.smollm2.openings import TURN, openings
from safetensors.torch import load_file, save_file

from outrider.targets import load_target

LONG = "how many apples does the old farmer keep in his cellar over the winter"


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_what_shares_eight_words_with_an_evaluation_prompt_is_known(tmp_path: Path) -> None:
    lines(tmp_path / "some.jsonl", [{"turns": ["Tell me: " + LONG + "?", "And why?"]}])
    barred = questions.evaluation(tmp_path)
    assert questions.runs("Please say HOW many apples does the old farmer keep, roughly", questions.RUN) & barred
    assert not questions.runs("how many apples does the old man keep in his house", questions.RUN) & barred
    assert questions.runs("And why?", questions.RUN) & barred, "short ones as a whole"


def test_near_repetitions_are_dropped() -> None:
    given = [
        LONG,
        LONG.upper() + "?",
        LONG + " and the spring",
        "Why?",
        "why",
        "Something else altogether is asked here.",
    ]
    assert list(questions.unlike(iter(given))) == [LONG, "Why?", given[-1]]


def test_openings_go_on_where_they_were() -> None:
    assert openings(9) == openings(30)[:9]
    assert all(opening.startswith(TURN) for opening in openings(9))
    assert len({opening.removeprefix(TURN) for opening in openings(60)}) > 5


def test_the_models_own_questions_are_whole(tmp_path: Path) -> None:
    """Those without an end are left out; the words that were given come back."""
    rows = [
        {"id": 2, "completion": " that there are five apples, and count them.", "ends": True},
        {"id": 0, "completion": "What is a good name for a cat?", "ends": True},
        {"id": 1, "completion": "I was wondering whether the", "ends": False},
    ]
    found = list(questions.own(lines(tmp_path / "o.jsonl", rows)))
    first = openings(3)[2].removeprefix(TURN)
    assert found == ["What is a good name for a cat?", first + " that there are five apples, and count them."]
    assert list(questions.own(tmp_path / "none.jsonl")) == []


def test_functions_are_cut_where_they_are_whole() -> None:
    code = 'def f(x):\n    """Say hello to x, and to no one else."""\n    return "hello " + x\n'
    text = "import os\n\n\n" + code + "\n\ny = 3\n"
    (match,) = questions.FUNCTION.finditer(text)
    assert match.group().rstrip() == code.rstrip()
    parts = questions.DOC.match(code)
    assert parts is not None
    assert parts.group(3).startswith("Say hello")


def test_packed_answers_come_back(tmp_path: Path) -> None:
    work, kept = tmp_path / "work", tmp_path / "kept"
    asked = [{"kind": "own", "messages": [{"role": "user", "content": f"Question {i}?"}]} for i in range(3)]
    told = [
        {"id": i, "messages": [*asked[i]["messages"], {"role": "assistant", "content": f"Answer {i}."}], "ends": i > 0}
        for i in (2, 0)
    ]
    lines(work / "questions-0.jsonl", asked)
    lines(work / "answers-0.jsonl", told)
    lines(
        work / "openings-answered.jsonl",
        [{"id": 0, "prompt": TURN, "completion": "What is it good for?", "ends": True}],
    )
    assert answers.pack(work, kept) == {f.name: f.stat().st_size for f in kept.iterdir()}
    there = tmp_path / "there"
    assert answers.unpack(there, kept) == {"openings-answered.jsonl": 1, "questions-0.jsonl": 3, "answers-0.jsonl": 2}
    for name in ("questions-0.jsonl", "answers-0.jsonl"):
        assert (there / name).read_text(encoding="utf-8") == (work / name).read_text(encoding="utf-8")
    assert list(questions.own(there / "openings-answered.jsonl")) == ["What is it good for?"]
    more = lines(there / "answers-0.jsonl", [*told, {**told[0], "id": 1}]).read_text(encoding="utf-8")
    answers.unpack(there, kept)
    assert (there / "answers-0.jsonl").read_text(encoding="utf-8") == more, "what is further along stays"
    before = (kept / "questions-0.jsonl.xz").stat().st_mtime_ns
    answers.pack(there, kept)
    assert len(answers.read(kept / "answers-0.jsonl.xz")) == 3
    assert (kept / "questions-0.jsonl.xz").stat().st_mtime_ns == before, "what has not grown is not written again"
    lines(there / "answers-0.jsonl", told)
    answers.pack(there, kept)
    assert len(answers.read(kept / "answers-0.jsonl.xz")) == 3


def test_without_the_file_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answers, "FOLDER", tmp_path / "kept")
    monkeypatch.setattr("sys.argv", ["answers", "--unpack", "--work", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        answers.main()
    assert end.value.code == 2
    assert "nothing is kept in kept/ yet" in capsys.readouterr().err


def test_unicodes_line_separators_end_no_line(tmp_path: Path) -> None:
    """Completions, questions and answers are kept as they were written, and read again."""
    odd = "one\u2028two\u0085three four"
    work, folder = tmp_path / "work", tmp_path / "kept"
    work.mkdir()
    asked, said = {"role": "user", "content": odd}, {"role": "assistant", "content": odd}
    rows = {
        "openings-answered": [{"id": 0, "completion": odd, "ends": True}],
        "questions-0": [{"kind": "own", "messages": [asked]}],
        "answers-0": [{"id": 0, "messages": [asked, said], "ends": True}],
    }
    for name, found in rows.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
        (work / f"{name}.jsonl").write_text(text, encoding="utf-8")
    assert list(questions.own(work / "openings-answered.jsonl")) == [odd]
    answers.pack(work, folder)
    assert answers.unpack(tmp_path / "again", folder) == dict.fromkeys((f"{name}.jsonl" for name in sorted(rows)), 1)
    lines_ = (tmp_path / "again" / "answers-0.jsonl").read_text(encoding="utf-8").split("\n")
    assert json.loads(lines_[0]) == rows["answers-0"][0]


@pytest.mark.parametrize("every", [3, 64])
def test_many_texts_side_by_side_are_those_of_transformers_own_loop(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_target("demo", native=False).model
    own, most = model.config._attn_implementation, 24
    asked = [list(range(5 + i, 5 + i + 2 + 3 * (i % 4))) for i in range(9)]
    plain = [
        model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0)
        for ids in asked
    ]
    right = [found[0, len(ids) :].tolist() for found, ids in zip(plain, asked, strict=True)]
    ends = {right[0][4], right[3][9]}  # some texts end soon, others late
    model.set_attn_implementation(many.NAME)
    monkeypatch.setattr(many, "EVERY", every)
    monkeypatch.setattr(many, "READ", 30)
    try:
        found = many.answer(model, asked, most, 0.0, ends)
    finally:
        model.set_attn_implementation(own)
    cut = [next((i + 1 for i, t in enumerate(text) if t in ends), most) for text in right]
    assert len(set(cut)) > 1, "the test needs texts of several lengths"
    assert found == [text[:n] for text, n in zip(right, cut, strict=True)]


def test_many_draws_by_the_law_of_the_temperature() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    drawn = many.draw(logits.expand(40_000, -1), 0.7).bincount(minlength=4) / 40_000
    torch.testing.assert_close(drawn, (logits / 0.7).softmax(0), atol=0.01, rtol=0)
    assert many.draw(logits[None], 0.0).tolist() == [3]


def test_a_draft_vocabulary_is_cut_to_what_answers_have_most_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, source, out = torch.tensor([2, 7, 11, 30, 31]), tmp_path / "from", tmp_path / "to"
    source.mkdir()
    save_file({"d2t": known - torch.arange(5), "w": torch.ones(2)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"vocab": 50, "draft_vocab": 5}), encoding="utf-8")
    rows = [
        {"prompt_token_ids": [7, 7, 7], "token_ids": [31, 2, 9, 9, 9, 31]},
        {"prompt_token_ids": [1], "token_ids": [11]},
    ]
    lines(tmp_path / "answers-0.jsonl", rows)
    monkeypatch.setattr(trim, "load_tokenizer", lambda name: None)
    monkeypatch.setattr("sys.argv", ["trim", str(source), str(out), "--size", "3", "--work", str(tmp_path)])
    trim.main()
    assert json.loads((out / "config.json").read_text(encoding="utf-8")) == {"vocab": 50, "draft_vocab": 3}
    tensors = load_file(out / "model.safetensors")
    assert (tensors["d2t"] + torch.arange(3)).tolist() == [2, 11, 31], "what is asked does not count"
    assert torch.equal(tensors["w"], torch.ones(2))
