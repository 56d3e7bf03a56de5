"""SmolLM2's data: questions that keep clear of the evaluation sets, and the packed answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_world import target
from recipes.smollm2 import long, many, questions, train
from recipes.smollm2.openings import TURN, openings
from safetensors.torch import load_file, save_file

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.training import objectives
from outrider.training.data import Document
from recipes import answers, trim

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


def test_the_models_own_questions_are_complete(tmp_path: Path) -> None:
    """Those without an end are left out; the words that were given come back."""
    rows = [
        {"id": 2, "completion": " that there are five apples, and count them.", "ends": True},
        {"id": 0, "completion": "What is a good name for a cat?", "ends": True},
        {"id": 1, "completion": "I was wondering whether the", "ends": False},
    ]
    results = list(questions.own(lines(tmp_path / "o.jsonl", rows)))
    first = openings(3)[2].removeprefix(TURN)
    assert results == ["What is a good name for a cat?", first + " that there are five apples, and count them."]
    assert list(questions.own(tmp_path / "none.jsonl")) == []


def test_functions_are_cut_at_their_ends() -> None:
    code = 'def f(x):\n    """Say hello to x, and to no one else."""\n    return "hello " + x\n'
    text = "import os\n\n\n" + code + "\n\ny = 3\n"
    (match,) = questions.FUNCTION.finditer(text)
    assert match.group().rstrip() == code.rstrip()
    parts = questions.DOC.match(code)
    assert parts is not None
    assert parts.group(3).startswith("Say hello")


def test_packed_answers_come_back(tmp_path: Path) -> None:
    work, kept = tmp_path / "work", tmp_path / "kept"
    recorded = [{"kind": "own", "messages": [{"role": "user", "content": f"Question {i}?"}]} for i in range(3)]
    report = [
        {
            "id": i,
            "messages": [*recorded[i]["messages"], {"role": "assistant", "content": f"Answer {i}."}],
            "ends": i > 0,
        }
        for i in (2, 0)
    ]
    lines(work / "questions-0.jsonl", recorded)
    lines(work / "answers-0.jsonl", report)
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
    more = lines(there / "answers-0.jsonl", [*report, {**report[0], "id": 1}]).read_text(encoding="utf-8")
    answers.unpack(there, kept)
    assert (there / "answers-0.jsonl").read_text(encoding="utf-8") == more, "what is further along stays"
    before = (kept / "questions-0.jsonl.xz").stat().st_mtime_ns
    answers.pack(there, kept)
    assert len(answers.read(kept / "answers-0.jsonl.xz")) == 3
    assert (kept / "questions-0.jsonl.xz").stat().st_mtime_ns == before, "what has not grown is not written again"
    lines(there / "answers-0.jsonl", report)
    answers.pack(there, kept)
    assert len(answers.read(kept / "answers-0.jsonl.xz")) == 3


def test_without_the_file_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answers, "HERE", tmp_path)
    monkeypatch.setattr("sys.argv", ["answers", "smollm2", "--unpack", "--work", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        answers.main()
    assert end.value.code == 2
    assert "nothing is kept in smollm2/kept yet" in capsys.readouterr().err


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
        "larger-0": [{"id": 0, "messages": [asked, said], "ends": False, "by": {"model": "m"}, "token_ids": [5, 6]}],
        "long-questions": [{"kind": "chats", "messages": [asked, said, asked]}],
        "long-answers": [{"id": 0, "messages": [asked, said, asked, said], "ends": False}],
    }
    for name, results in rows.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in results)
        (work / f"{name}.jsonl").write_text(text, encoding="utf-8")
    assert list(questions.own(work / "openings-answered.jsonl")) == [odd]
    answers.pack(work, folder)
    assert answers.unpack(tmp_path / "again", folder) == dict.fromkeys((f"{name}.jsonl" for name in sorted(rows)), 1)
    for name in ("answers-0", "larger-0"):
        lines_ = (tmp_path / "again" / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
        assert json.loads(lines_[0]) == rows[name][0]
    (work / "answers-1.jsonl").write_text('{"id": 0, "prompt_token_ids": [1], "token_ids": [2], "ends": true}\n')
    with pytest.raises(SystemExit, match="holds token ids"):
        answers.pack(work, folder)


@pytest.mark.parametrize("every", [3, 64])
def test_many_texts_side_by_side_are_those_of_transformers_own_loop(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_target("demo").model
    own, most = model.config._attn_implementation, 24
    asked = [list(range(5 + i, 5 + i + 2 + 3 * (i % 4))) for i in range(9)]
    plain = [
        model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0)
        for ids in asked
    ]
    right = [result[0, len(ids) :].tolist() for result, ids in zip(plain, asked, strict=True)]
    ends = {right[0][4], right[3][9]}  # some texts end soon, others late
    model.set_attn_implementation(many.NAME)
    monkeypatch.setattr(many, "EVERY", every)
    monkeypatch.setattr(many, "READ", 30)
    try:
        result = many.answer(model, asked, most, 0.0, ends)
    finally:
        model.set_attn_implementation(own)
    cut = [next((i + 1 for i, t in enumerate(text) if t in ends), most) for text in right]
    assert len(set(cut)) > 1, "the test needs texts of several lengths"
    assert result == [text[:n] for text, n in zip(right, cut, strict=True)]


def test_many_draws_follow_the_distribution_of_the_temperature() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    drawn = many.draw(logits.expand(40_000, -1), 0.7).bincount(minlength=4) / 40_000
    torch.testing.assert_close(drawn, (logits / 0.7).softmax(0), atol=0.01, rtol=0)
    assert many.draw(logits[None], 0.0).tolist() == [3]


ASKED = {"prompt_token_ids": [7, 7, 7], "token_ids": [31, 2, 9, 9, 9, 31]}


def trimmed(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """Run the command on a drafter for a model without a tokenizer."""
    lines(out.parent / "answers-0.jsonl", [ASKED, {"prompt_token_ids": [1], "token_ids": [11]}])
    monkeypatch.setattr(trim, "load_tokenizer", lambda name: None)
    given = [str(source), str(out), *options, "--data", str(out.parent / "answers-0.jsonl")]
    monkeypatch.setattr("sys.argv", ["trim", *given])
    trim.main()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle3", {"taps": (0, 2, 3)}),
        ("medusa", {}),
        ("hydra", {}),
        ("block", {}),
        ("block", {"pair_head": "selector"}),
    ],
)
def test_a_draft_vocabulary_is_cut_to_what_answers_have_most_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any]
) -> None:
    """The rows of the tokens that stay are those that they were, and the drafter loads."""
    of, known = target(torch.float32), [2, 7, 11, 30, 31]
    text = Document(tuple(known * 2), (True,) * 10, "a")
    source, out = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    objectives.build(method, of, [text], {**options, "draft_vocab": 5}).save(source)
    trimmed(source, out, monkeypatch, "--size", "3")
    old, new = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert (old["d2t"] + torch.arange(5)).tolist() == known
    assert (new["d2t"] + torch.arange(3)).tolist() == [2, 11, 31], "what is asked does not count"
    places = torch.tensor([0, 2, 4])
    smaller = [name for name, tensor in new.items() if tensor.shape != old[name].shape]
    assert len(smaller) > 1
    for name, tensor in new.items():
        if name in smaller and name != "d2t":
            assert torch.equal(tensor, old[name][places]), name
        elif name not in ("d2t", "t2d"):
            assert torch.equal(tensor, old[name]), name
    if method == "eagle3":
        assert new["t2d"].nonzero()[:, 0].tolist() == [2, 11, 31]
    drafters.load(f"{method}:{out}", of)


def test_a_folder_that_cannot_be_trimmed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of, source, out = target(torch.float32), tmp_path / "from", tmp_path / "to"
    text = Document((2, 7, 11, 30, 31) * 2, (True,) * 10, "a")
    parallel = {"parallel": True, "layers": 2, "mask_token": 3}
    source.mkdir()
    objectives.build("eagle3", of, [text], {"taps": (0, 2, 3), "draft_vocab": 5, **parallel}).save(source)
    for options, words in (
        (("--intermediate", "8"), "several layers"),
        (("--size", "6"), "drafts 5 tokens"),
    ):
        with pytest.raises(SystemExit):
            trimmed(source, out, monkeypatch, *options)
        assert words in capsys.readouterr().err
        assert not out.exists()
    with pytest.raises(SystemExit):
        trimmed(source, source, monkeypatch, "--size", "3")
    assert "is there already" in capsys.readouterr().err
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "lm_head.weight.scale": torch.ones(5, 1)}, source / "model.safetensors")
    with pytest.raises(SystemExit):
        trimmed(source, out, monkeypatch, "--size", "3")
    assert "in eight bits already" in capsys.readouterr().err


def test_bits_round_what_a_training_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, source, out = target(torch.float32), tmp_path / "from", tmp_path / "to"
    text = Document((2, 7, 11, 30, 31) * 2, (True,) * 10, "a")
    source.mkdir()
    objectives.build("eagle3", of, [text], {"taps": (0, 2, 3), "draft_vocab": 5}).save(source)
    trimmed(source, out, monkeypatch, "--bits", "4")
    old, new = (load_file(folder / "model.safetensors")["fc.weight"] for folder in (source, out))
    assert old.dtype == torch.float32
    assert torch.equal(new, trim.coarse(old.bfloat16(), 4))


def test_an_mlp_keeps_its_heaviest_neurons() -> None:
    """What the others wrote is all that is missing."""
    torch.manual_seed(0)
    weights = {name: torch.randn(*size) for name, size in (("gate", (6, 4)), ("up", (6, 4)), ("down", (4, 6)))}
    weights["up"][[1, 4]] = 0
    tensors = {f"{trim.MLP}.{name}_proj.weight": weight.clone() for name, weight in weights.items()}
    trim.narrow(tensors, 4)
    gate, up, down = tensors.values()
    assert (gate.shape, up.shape, down.shape) == ((4, 4), (4, 4), (4, 4))
    x = torch.randn(3, 4)
    whole = (x @ weights["gate"].T).sigmoid() * (x @ weights["up"].T) @ weights["down"].T
    torch.testing.assert_close((x @ gate.T).sigmoid() * (x @ up.T) @ down.T, whole)


def test_weights_are_rounded_to_the_nearest_of_fewer_digits() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(64, 64) * torch.logspace(-6, 6, 64)[:, None]).bfloat16()
    assert torch.equal(trim.coarse(weight, trim.PLACES), weight)
    result = trim.coarse(weight, 5)
    fraction, power = torch.frexp(weight.double())
    assert torch.equal(
        result.double(), torch.floor(fraction.abs() * 64 + 0.5) * weight.double().sign() / 64 * 2.0**power
    )
    assert len(torch.frexp(result.float())[0].abs().unique()) <= 33


def test_a_training_that_goes_on_keeps_its_draft_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"draft_vocab": 12}), encoding="utf-8")
    assert train.vocabulary_of(str(tmp_path)) == ["draft_vocab=12"]
    assert train.vocabulary_of("smollm2/eagle3") == ["draft_vocab=4096"], "what ships goes by its name"
    assert train.vocabulary_of("") == train.vocabulary_of(str(tmp_path / "none")) == []


def test_long_texts_are_stretches_of_a_source_in_order(tmp_path: Path) -> None:
    books = [
        f"# Author {b}/Book {b}\n\n" + "\n\n".join(f"{b} {i} " + "word " * 48 for i in range(40)) for b in range(70)
    ]
    (tmp_path / "classic_books_en.txt").write_text("\n".join(books), encoding="utf-8")
    results = list(long.stretches("books", tmp_path, 9))
    sizes = {len(questions.words(text)) for text in results}
    assert sizes <= {-(-size // 50) * 50 for size in long.SIZES}
    assert len(sizes) > 2
    for text in results:
        numbers = [tuple(map(int, part.split()[:2])) for part in text.split("\n\n")]
        assert numbers == [(numbers[0][0], numbers[0][1] + i) for i in range(len(numbers))], (
            "of one book, none left out"
        )
    held = {d.content.split()[0] for d in questions.sources.read_domain("books", tmp_path)[1]}
    assert held
    assert not held & {text.split()[0] for text in results}, "what is held out is not used"


def test_chats_end_with_a_question_that_is_not_answered(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"say {i}"}]}
        for i in range(60)
    ]
    lines(tmp_path / "answers-0.jsonl", rows)
    made = list(long.chats(tmp_path))
    assert len(made) > 5
    for chat in made:
        assert [m["role"] for m in chat] == ["user", "assistant"] * (len(chat) // 2) + ["user"]
        assert 5 <= len(chat) <= 13
        assert all(
            chat[i]["content"].split()[1] == chat[i + 1]["content"].split()[1] for i in range(0, len(chat) - 1, 2)
        )
    assert {chat[-1]["content"] in long.AFTER for chat in made} == {True, False}
