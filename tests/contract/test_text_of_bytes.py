"""Texts of a tokenizer with byte fallback, drafted and plain: the same tokens, ends and texts, streamed or not."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from made_tokenizers import FALLBACK, in_bytes, made

from outrider import drafters
from outrider.llm import LLM
from outrider.testing import TableTarget
from outrider.training.data import document
from outrider.training.generate import write
from outrider.training.questions import Opening

WRITES = "\n🚀ž the 漢字 cat\n\nnaïve 🍎"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return made(FALLBACK)


def test_a_question_that_fills_the_context_stops_no_others(tokenizer: Any, tmp_path: Path) -> None:
    target = TableTarget(len(tokenizer), order=1, seed=3, context=64, scale=1.0)
    questions = [("line 1", "cat"), ("line 2", "cat " * 200), ("line 3", "naïve")]
    said: list[str] = []
    counts: list[int] = []
    for _ in range(2):
        written = write(
            target, drafters.load("none"), tokenizer, questions, tmp_path / "answers.jsonl", 8, 0.0, 1, 2, 500,
            frozenset(), counts.append, said.append,
        )  # fmt: skip
    assert written == 0
    lines = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["id"] for line in lines] == [0, 2]
    assert said == ["left out: question 2 fills the context of 64 tokens"] * 2


@pytest.mark.parametrize("template", ["", "{{ strftime_now('%d %B') }} "])
def test_answers_have_their_tokens_where_their_text_would_give_others(
    tokenizer: Any, tmp_path: Path, template: str
) -> None:
    """Text in single bytes would be tokenised in larger ones; other text stands alone, also behind a date."""
    dated = copy.deepcopy(tokenizer)
    dated.chat_template = template + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    asked = [{"role": "user", "content": "the cat"}]
    lines = {}
    for name, token in (("bytes", in_bytes(tokenizer, "a")[0]), ("words", tokenizer.convert_tokens_to_ids("▁the"))):
        (tmp_path / name).mkdir()
        out = tmp_path / name / "answers.jsonl"
        target = TableTarget(len(dated), order=1, seed=3, context=512, scale=1.0)
        target.table[:, token] += 100.0
        write(target, drafters.load("none"), dated, [("line 1", asked)], out, 8, 0.0, 1, 1, 500, frozenset())
        (lines[name],) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
        made = document(lines[name], "line 1", dated)
        assert [t for t, learned in zip(made.tokens, made.learn, strict=True) if learned]
    assert "token_ids" in lines["bytes"]
    assert len(lines["bytes"]["token_ids"]) == 8
    assert "token_ids" not in lines["words"]


def llm_of(tokenizer: Any, target: TableTarget, spec: str) -> LLM:
    return LLM(target, tokenizer, drafters.load(spec, target, tokenizer), budget="16x6")


def table(tokenizer: Any, follows: list[list[int]], certain: float) -> TableTarget:
    """A target that mostly writes one of these token sequences over and over, half of them in single bytes."""
    target = TableTarget(len(tokenizer), order=1, seed=3, context=512, scale=1.0)
    for ids in follows:
        for token, after in zip(ids, ids[1:] + ids[:1], strict=True):
            target.table[token, after] += certain
    return target


@pytest.mark.parametrize("depth", [2, 3, 4, 5, 6])
def test_a_stop_string_in_a_run_of_bytes_ends_drafted_text_where_it_ends_plain_text(tokenizer: Any, depth: int) -> None:
    """Also where the accepted run goes on after it, and ends inside a character."""
    ids = in_bytes(tokenizer, "\n🚀ž")
    target = table(tokenizer, [ids], 100.0)
    options: dict[str, Any] = {"max_new_tokens": 40, "stop": "🚀", "budget": f"16x{depth}"}
    plain, drafted = (llm_of(tokenizer, target, spec).generate([ids * 4], **options)[0] for spec in ("none", "lookup"))
    assert drafted.usage.accepted > 0, "nothing was drafted: this test proves nothing"
    assert drafted.tokens == plain.tokens == ids[:5]
    assert drafted.text == plain.text == "\n"


@pytest.mark.parametrize("spec", ["lookup", "suffix"])
def test_drafts_change_no_text_whatever_stops_it(tokenizer: Any, spec: str) -> None:
    written = tokenizer(WRITES, add_special_tokens=False)["input_ids"]
    target = table(tokenizer, [written, in_bytes(tokenizer, WRITES)], 7.0)
    plain, drafted = llm_of(tokenizer, target, "none"), llm_of(tokenizer, target, spec)
    accepted = stopped = 0
    for seed in range(24):
        dice = random.Random(seed)
        prompt = (written * 2)[: dice.randint(1, len(written) + 10)]
        free = plain.generate([prompt], max_new_tokens=60, seed=seed, temperature=dice.choice([0.0, 1.0]))[0].text
        stops = [free[i : i + dice.randint(1, 4)] for i in (dice.randrange(len(free)) for _ in range(2))]
        stops = [s for s in stops if "\ufffd" not in s]
        kind: dict[str, Any] = {"max_new_tokens": 60, "seed": seed, "stop": stops, "temperature": dice.choice([0.0, 1])}
        one, two = plain.generate([prompt], **kind)[0], drafted.generate([prompt], **kind)[0]
        assert (two.tokens, two.finish_reason, two.text) == (one.tokens, one.finish_reason, one.text)
        chunks = [(c.drafted, c.own) for c in drafted.stream(prompt, **kind).chunks()]
        assert "".join(a + b for a, b in chunks) == one.text
        accepted, stopped = accepted + two.usage.accepted, stopped + (one.finish_reason == "stop")
    assert accepted > 24
    assert stopped > 6


def test_data_that_the_model_writes_is_one_text(tokenizer: Any, tmp_path: Path) -> None:
    """A prompt and its completion, which are trained on as one text."""
    prompt, words = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the", "carriage follows"))
    target, out = table(tokenizer, [prompt + words], 100.0), tmp_path / "made.jsonl"
    drafter = drafters.load("lookup", target, tokenizer)
    write(target, drafter, tokenizer, [("", Opening("the end"))], out, len(words), 0.0, 1, 1, len(prompt), frozenset())
    (line,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert (line["prompt"], line["completion"]) == ("the", " carriage follows")


def test_prompt_and_text_are_one_text(tokenizer: Any) -> None:
    """The model's words begin with their space, in streams too."""
    prompt, words = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the", "carriage follows"))
    target = table(tokenizer, [prompt + words], 100.0)
    llm = llm_of(tokenizer, target, "lookup")
    made = llm.generate("the", max_new_tokens=len(words))[0]
    assert made.tokens == words
    assert made.text == " carriage follows" == "".join(llm.stream("the", max_new_tokens=len(words)))
    assert "the" + made.text == llm.decode(prompt + words)
