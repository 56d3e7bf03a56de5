"""Files to rows: what is learned is checked by hand, and nothing is lost or leaks on the way."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.backends.native.text_tokenizer import load_tokenizer
from outrider.params import InputError
from outrider.shipped import shipped
from outrider.training import data

WORDS = ["<end>", "<user>", "<bot>", "hi", "there", "how", "are", "you", "fine", "thanks", "bye"]
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m['role'] == 'user' else '<bot> ' }}{{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*WORDS, "<unk>"])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE)


def ids(words: str) -> list[int]:
    return [WORDS.index(w) for w in words.split()]


def test_only_the_assistants_words_are_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    """By hand: answers and the ends of their turns are learned, questions and the marks before answers are not."""
    talk = [
        {"role": "user", "content": "hi there"},
        {"role": "assistant", "content": "how are you"},
        {"role": "user", "content": "fine"},
        {"role": "assistant", "content": "bye"},
    ]
    made = data.document({"messages": talk}, "line 1", tokenizer)
    assert list(made.tokens) == ids("<user> hi there <end> <bot> how are you <end> <user> fine <end> <bot> bye <end>")
    assert [int(x) for x in made.learn] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def test_a_template_that_writes_the_date_writes_the_same_one_tomorrow(tokenizer: PreTrainedTokenizerFast) -> None:
    """Or a run that goes on would meet other texts, and hold out others; in transformers' templates and in ours."""
    template = '{%- set day = strftime_now( "%d. %b %Y" ) -%}{{ day }} ' + TEMPLATE
    theirs = copy.deepcopy(tokenizer)
    theirs.chat_template = template
    ours = replace(load_tokenizer(shipped("demo/target")), chat_template=template)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "bye"}]
    for one in (theirs, ours):
        assert data._chat(talk, one, "line 1", True).parts[0][0] == "01. Jan 2026 <user> hi <end> <bot> "


def test_an_answer_that_was_cut_off_has_no_end(tokenizer: PreTrainedTokenizerFast) -> None:
    talk = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "how are you"}]
    full, cut = (data.document({"messages": talk, "ends": ends}, "line 1", tokenizer) for ends in (True, False))
    assert [t for t, m in zip(full.tokens, full.learn, strict=True) if m] == ids("how are you <end>")
    assert [t for t, m in zip(cut.tokens, cut.learn, strict=True) if m] == ids("how are you")
    assert cut.tokens == full.tokens[: len(cut.tokens)]


def test_a_dialogue_may_begin_with_the_assistant(tokenizer: PreTrainedTokenizerFast) -> None:
    """No template opens an empty chat; the marks before its first answer are not learned either."""
    talk = [{"role": "assistant", "content": "hi there"}, {"role": "user", "content": "bye"},
            {"role": "assistant", "content": "bye"}]  # fmt: skip
    made = data.document({"messages": talk}, "line 1", tokenizer)
    assert list(made.tokens) == ids("<bot> hi there <end> <user> bye <end> <bot> bye <end>")
    assert [int(x) for x in made.learn] == [0, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def test_what_a_template_refuses_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('no system messages') }}"
    talk = [{"role": "system", "content": "hi"}, {"role": "assistant", "content": "bye"}]
    with pytest.raises(InputError, match="line 7: the chat template refuses these messages: no system messages; "):
        data.document({"messages": talk}, "line 7", strict)


def test_long_paragraphs_with_wide_gaps_are_no_empty_texts() -> None:
    text = "\n\n" + "a" * 3000 + "\n\n\n\n" + "b" * 3000
    made = list(data.pieces(text))
    assert [piece.strip() for piece in made] == ["a" * 3000, "b" * 3000]


def test_prompt_and_completion_and_text(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    rows = [{"prompt": "hi there ", "completion": "how are you"}, {"text": "fine thanks"}]
    rows.append({"text": "bye", "ends": False})
    file.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    a, b, c = data.read([file], tokenizer)
    assert list(a.tokens) == ids("hi there how are you <end>")
    assert list(a.learn) == [False, False, True, True, True, True]
    assert list(b.tokens) == ids("fine thanks <end>")
    assert all(b.learn)
    assert list(c.tokens) == ids("bye")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"d\.jsonl, line 2: not JSON"),
        ('{"question": "hi"}', "neither messages, nor prompt and completion, nor text"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "no assistant turn"),
        ('{"messages": [{"role": "assistant", "content": " "}]}', "empty assistant turn"),
        ('{"messages": [{"role": "user"}]}', "every message needs a role and a content"),
        ('{"prompt": "hi", "completion": ""}', "empty completion"),
        ('{"text": ""}', r"d\.jsonl, line 2 is empty"),
    ],
)
def test_bad_lines_are_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "hi there"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=words):
        list(data.read([file], tokenizer))


def test_bad_files_are_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        list(data.read([tmp_path / "none.jsonl"], tokenizer))
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="not UTF-8"):
        list(data.read([latin], tokenizer))


def documents(count: int, seed: int = 0) -> list[data.Document]:
    torch.manual_seed(seed)
    results = []
    for i in range(count):
        n = int(torch.randint(3, 40, ()))
        tokens = tuple(torch.randint(1, 50, (n,)).tolist())
        results.append(data.Document(tokens, tuple(j >= n // 3 for j in range(n)), f"{i:04d}"))
    return results


def test_packing_keeps_every_token_once() -> None:
    given = documents(60)
    rows = data.pack(given, 48, seed=3)
    parts = []
    for tokens, positions, numbers, learn in zip(rows.tokens, rows.positions, rows.documents, rows.learn, strict=True):
        used = numbers >= 0
        assert bool((used[:-1] >= used[1:]).all()), "padding comes last"
        for number in range(int(numbers.max()) + 1):
            here = numbers == number
            assert torch.equal(positions[here], torch.arange(int(here.sum())))
            parts.append((tuple(tokens[here].tolist()), tuple(learn[here].tolist())))
    assert sorted(parts) == sorted((d.tokens, d.learn) for d in given if any(d.learn[2:]))
    assert float((rows.documents >= 0).float().mean()) > 0.8


def test_long_documents_are_cut_and_singles_stay_alone() -> None:
    long = data.Document(tuple(range(100)), (True,) * 100, "a")
    rows = data.pack([long], 32)
    assert sorted(rows.tokens[rows.documents >= 0].tolist()) == list(range(100))
    alone = data.pack(documents(10), 48, share=False)
    assert int(alone.documents.max()) == 0


def test_what_lies_ahead_stays_within_its_document() -> None:
    a = data.Document((1, 2, 3), (False, True, True), "a")
    b = data.Document((4, 5, 6, 7), (True, True, True, False), "b")
    rows = data.pack([a, b], 8)
    tokens, wanted = rows.tokens[0].tolist(), rows.wanted(2)[0].tolist()
    for i, is_wanted in enumerate(wanted):
        mine = rows.documents[0].tolist()
        inside = i + 2 < 8 and mine[i + 2] == mine[i] >= 0
        assert is_wanted == (inside and bool(rows.learn[0, i + 2]))
    assert rows.ahead(2)[0].tolist()[:5] == tokens[2:7]


def test_the_split_depends_on_the_text_alone() -> None:
    given = documents(50)
    learned, held = data.split(given, 0.2)
    again = data.split([*reversed(given), given[3]], 0.2)
    assert held == again[1]
    assert not {d.key for d in learned} & {d.key for d in held}
    assert len(learned) + len(held) == 50


def test_of_many_texts_a_fiftieth_is_held_out() -> None:
    sizes = {count: len(data.split(documents(count))[1]) for count in (10, 50, 2000)}
    assert (sizes[10], sizes[50]) == (5, 8)
    assert 25 < sizes[2000] < 60


def test_a_text_is_held_out_or_not_in_every_form(tokenizer: PreTrainedTokenizerFast) -> None:
    """A training may go on with the same answers as token ids: what was held out of it stays so."""
    talk = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "how are you"}]
    asked, answer = ids("<user> hi there <end> <bot>"), ids("how are you <end>")
    forms = (
        data.document({"messages": talk}, "line 1", tokenizer),
        data.tokens(asked, answer, "line 1"),
        data.document({"text": "<user> hi there <end> <bot> how are you <end>"}, "line 1", tokenizer),
    )
    assert len({made.tokens for made in forms}) == len({made.key for made in forms}) == 1
    assert data.tokens(asked, ids("how are you"), "line 2").key != forms[0].key


def test_too_little_text_is_refused() -> None:
    with pytest.raises(InputError, match="training needs two that differ"):
        data.split(documents(1))
    with pytest.raises(InputError, match="no document is long enough"):
        data.pack([data.Document((1, 2), (True, True), "a")], 16)


def test_texts_of_all_kinds_are_tokenised_in_order(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """More than are tokenised at once, chats, texts and token ids in turn: each as it is alone."""
    kinds = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine thanks"}]},
        {"text": "how are you"},
        {"prompt_token_ids": ids("hi there"), "token_ids": ids("bye")},
        {"prompt": "hi ", "completion": "bye", "ends": False},
    ]
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(kinds[i % 4]) + "\n" for i in range(data.TEXTS + 5)), encoding="utf-8")
    made = list(data.read([file], tokenizer))
    alone = []
    for kind in kinds:
        file.write_text(json.dumps(kind) + "\n", encoding="utf-8")
        alone += data.read([file], tokenizer)
    assert [d.tokens for d in alone[1:]] == [(*ids("how are you"), 0), tuple(ids("hi there bye")), tuple(ids("hi bye"))]
    assert made == [alone[i % 4] for i in range(data.TEXTS + 5)]
