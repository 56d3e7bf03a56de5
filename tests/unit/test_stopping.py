"""Where texts end and how they stream, with a real byte-level tokenizer that cuts words and characters anywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
from made_tokenizers import TEXT, chunks_of, in_bytes, made, stopped

from outrider.core.text import Detokenizer, TextStream, detokenizer, text_of
from outrider.engine.stopping import Stop


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return made("byte level")


@pytest.fixture(scope="module")
def table(tokenizer: Any) -> Detokenizer:
    return detokenizer(tokenizer)


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> list[int]:
    results = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(results) == TEXT
    assert any("\ufffd" in tokenizer.decode([t]) for t in results), "some tokens are half a character"
    return results


def before(text: str, stops: tuple[str, ...]) -> str:
    return text[: min((text.find(s) for s in stops if s in text), default=len(text))]


def test_eos() -> None:
    stop = Stop(frozenset({7, 8}))
    assert stop.cut([1], [2, 3]) == (2, None)
    assert stop.cut([1], [2, 8, 7, 3]) == (2, "eos")
    assert stop.cut([], [7]) == (1, "eos")
    assert stop.cut([], []) == (0, None)
    assert stop.visible([2, 8]) == [2]
    assert stop.visible([8, 2]) == [8, 2]
    assert stop.visible([]) == []


def test_length() -> None:
    stop = Stop(frozenset({7}), max_new_tokens=3)
    assert stop.cut([1], [2]) == (1, None)
    assert stop.cut([1], [2, 3]) == (2, "length")
    assert stop.cut([1], [2, 3, 4, 5]) == (2, "length")
    assert stop.cut([1], [2, 7, 4, 5]) == (2, "eos"), "the last token that fits may be EOS"
    assert stop.cut([1], [2, 3, 7]) == (2, "length"), "beyond the limit nothing counts"
    assert stop.cut([1, 2, 3], [4]) == (0, "length")


@pytest.mark.parametrize(
    "strings",
    [
        ("stop!",),
        ("decides.",),
        ("🍏",),
        ("猫が",),
        ("###", "END"),
        ("sto",),
        ("€; 猫",),
        ("\n\n",),
        ("T",),
        ("zz", "p\n"),
    ],
)
def test_stop_strings_end_at_the_token_that_completes_them(
    strings: tuple[str, ...], ids: list[int], tokenizer: Any, table: Detokenizer
) -> None:
    """Token by token, or in any pieces: the same tokens, and the text before the string."""
    stop = Stop(frozenset({0}), strings, 10_000, table)
    wanted = next(i for i in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:i]) for s in strings))
    for seed in range(12):
        output, reason = stopped(stop, chunks_of(ids, random.Random(seed)))
        assert reason == "stop"
        assert output == ids[:wanted]
        assert stop.text([], output) == before(TEXT, strings)
    assert stopped(stop, [ids])[0] == ids[:wanted]


def test_a_stop_string_far_into_a_long_text(ids: list[int], tokenizer: Any, table: Detokenizer) -> None:
    """One that spans many tokens is matched, and each token is read once."""
    long = "🍎" * 30 + "END of the carriage"
    stop, looked = Stop(frozenset(), (long,), 10_000, table), []
    tokens = ids * 40 + in_bytes(tokenizer, long)
    cut, output = stop.cutting([]), list[int]()
    for token in tokens:
        kept, reason = cut(output, [token])
        output.append(token)
        looked.append(cut.__self__.stream.tokens)  # type: ignore[attr-defined]
    assert (output, kept, reason) == (tokens, 1, "stop")
    assert looked == list(range(1, len(tokens) + 1))


def test_a_request_may_be_run_again_and_beside_itself(ids: list[int], table: Detokenizer) -> None:
    """Two rows of one request, in turn: neither sees what the other has written."""
    cut, rows = Stop(strings=("decides.",), detokenizer=table).cutting([]), ([], [], [])
    expected, _ = stopped(Stop(strings=("decides.",), detokenizer=table), [ids])
    for token in expected[:-1]:
        for row in rows[:2]:
            assert cut(row, [token]) == (1, None)
            row.append(token)
    for token in expected[:-1]:
        assert cut(rows[2], [token]) == (1, None)
        rows[2].append(token)
    assert [cut(row, expected[-1:]) for row in rows] == [(1, "stop")] * 3


def test_which_end_wins(ids: list[int], tokenizer: Any, table: Detokenizer) -> None:
    n = next(i for i in range(1, len(ids) + 1) if "decides." in tokenizer.decode(ids[:i]))

    def cut(eos: set[int], limit: int) -> tuple[int, str | None]:
        return Stop(frozenset(eos), ("decides.",), limit, table).cutting([])([], ids)

    assert cut({ids[1]}, 10_000) == (2, "eos")
    assert cut({ids[n - 1]} - set(ids[: n - 1]), 10_000)[0] == n
    assert cut(set(), n) == (n, "stop")
    assert cut(set(), n - 1) == (n - 1, "length")


def test_the_token_that_ends_a_text_completes_no_stop_string(tokenizer: Any, table: Detokenizer) -> None:
    """A stop token that has text is no part of the text."""
    end = in_bytes(tokenizer, "b")
    stop = Stop(frozenset(end), ("ab",), 100, table)
    ids = in_bytes(tokenizer, "xab")
    assert stop.cutting([])([], ids) == (3, "eos")
    assert stop.text([], ids) == "xa"


def test_half_a_surrogate_pair_stops_nothing(ids: list[int], table: Detokenizer) -> None:
    """It is no text; in place of it, no question mark is looked for."""
    assert stopped(Stop(strings=("\ud83d",), detokenizer=table), [ids, in_bytes_of(table, b"?")])[1] is None


def in_bytes_of(table: Detokenizer, raw: bytes) -> list[int]:
    return [next(i for i in range(300) if table.name(i) == bytes([b])) for b in raw]


def test_a_stop_needs_a_detokenizer(table: Detokenizer) -> None:
    with pytest.raises(AssertionError):
        Stop(strings=("x",))
    with pytest.raises(AssertionError):
        Stop(strings=("",), detokenizer=table)


# --- streaming


def stream_of(table: Detokenizer, *stops: str) -> TextStream:
    return Stop(strings=stops, detokenizer=table).stream([])


def test_complete_characters_are_not_held_back(tokenizer: Any, table: Detokenizer) -> None:
    stream = stream_of(table)
    apple = in_bytes(tokenizer, "a🍎b")
    assert [stream.push([t]) for t in apple] == ["a", "", "", "", "🍎", "b"]
    stream = stream_of(table)
    assert stream.push(apple[:3]) == "a", "what comes before half a character is shown"
    assert stream.push(apple[3:]) == "🍎b"


def test_half_a_character_at_the_end_comes_out_at_last(tokenizer: Any, table: Detokenizer) -> None:
    stream = stream_of(table)
    assert stream.push(in_bytes(tokenizer, "a🍎")[:-1]) == "a"
    assert stream.flush() == "\ufffd"


def test_bytes_that_are_no_text(table: Detokenizer) -> None:
    """U+FFFD as Python has it: one for each start of a character that is none, and for each byte that starts none."""
    for raw in (b"x\x9fy", b"\xf0\x9f\x8dz", b"\xff\xfe", b"\xe6\xe6\xbc\xa2", b"\xed\xa0\x80", b"\xc0\xaf"):
        tokens = in_bytes_of(table, raw)
        stream = stream_of(table)
        assert "".join(stream.push([t]) for t in tokens) + stream.flush() == raw.decode(errors="replace")
        assert text_of(table.open(), tokens) == raw.decode(errors="replace")


def test_half_a_character_before_a_stop_string_is_shown_as_such(tokenizer: Any, table: Detokenizer) -> None:
    tokens = in_bytes(tokenizer, "a🍎")[:-1] + in_bytes(tokenizer, "stop")
    for chunks in ([tokens], [[t] for t in tokens]):
        stream = stream_of(table, "stop")
        assert "".join(map(stream.push, chunks)) + stream.flush() == "a\ufffd"
    stop = Stop(strings=("stop",), detokenizer=table)
    assert stopped(stop, [tokens]) == stopped(stop, [[t] for t in tokens]) == (tokens, "stop")


@pytest.mark.parametrize(
    "stops", [("stop!",), ("sto p",), ("### END",), ("\n\n", "zzz"), ("🍏 kost",), ("nowhere",), ("aab",)]
)
def test_nothing_of_a_stop_string_is_shown(stops: tuple[str, ...], ids: list[int], table: Detokenizer) -> None:
    for seed in range(10):
        stream, shown = stream_of(table, *stops), ""
        for chunk in chunks_of(ids, random.Random(seed)):
            shown += stream.push(chunk)
            assert before(TEXT, stops).startswith(shown), "no character that would have to be taken back"
        assert shown + stream.flush() == before(TEXT, stops)


def test_a_prefix_that_comes_to_nothing_is_shown(tokenizer: Any, table: Detokenizer) -> None:
    stream = stream_of(table, "aab")
    out = [stream.push(in_bytes(tokenizer, c)) for c in "aaabcx"]
    assert out == ["", "", "a", "", "", ""]
    assert stream.stopped
    stream = stream_of(table, "aab")
    assert [stream.push(in_bytes(tokenizer, c)) for c in "aac"] == ["", "", "aac"]
    stream = stream_of(table, "aab")
    stream.push(in_bytes(tokenizer, "aa"))
    assert stream.flush() == "aa"


def test_the_matcher_finds_what_bytes_find(table: Detokenizer, tokenizer: Any) -> None:
    """Stop strings with every kind of border, in texts of two letters, against a plain search."""
    for seed in range(300):
        dice = random.Random(seed)
        text = "".join(dice.choices("ab", k=dice.randint(1, 20)))
        stops = tuple("".join(dice.choices("ab", k=dice.randint(1, 5))) for _ in range(dice.randint(1, 3)))
        least = dice.choice([0, 0, 3, 8])
        ends = [e for e in range(least + 1, len(text) + 1) if any(text[:e].endswith(s) for s in stops)]
        kept = ends[0] if ends else len(text)
        shown = text[: min((kept - len(s) for s in stops if text[:kept].endswith(s)), default=kept)] if ends else text
        stop = Stop(strings=stops, detokenizer=table, min_tokens=least)
        ids = in_bytes(tokenizer, text)
        output, reason = stopped(stop, chunks_of(ids, dice))
        assert (output, reason) == (ids[:kept], "stop" if ends else None)
        assert stop.text([], output) == shown
