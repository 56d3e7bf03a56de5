"""Where texts end and how they stream, with a real byte-level tokenizer that cuts words and characters anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.core.stopping import Stop, TextStream, before_stop

TEXT = "The carriage follows, and decides. Über-große Äpfel 🍎🍏 kosten 3 €; 猫が好き. <stop> stop! sto p\n\n### END ##"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )  # fmt: skip
    found.train_from_iterator(["the carriage follows stop stop END"] * 4, trainer)
    return found


@pytest.fixture(scope="module")
def decode(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer, decode: Callable) -> list[int]:
    found = tokenizer.encode(TEXT).ids
    assert decode(found) == TEXT
    assert any("\ufffd" in decode([t]) for t in found), "some tokens are half a character"
    return found


def pieces(ids: list[int], g: random.Random) -> list[list[int]]:
    out, i = [], 0
    while i < len(ids):
        n = g.randrange(5)
        out.append(ids[i : i + n])
        i += n
    return out


def run(stop: Stop, chunks: list[list[int]]) -> tuple[list[int], str | None]:
    output: list[int] = []
    for chunk in chunks:
        kept, reason = stop.cut(output, chunk)
        output += chunk[:kept]
        if reason:
            return output, reason
        assert kept == len(chunk)
    return output, None


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
    strings: tuple[str, ...], ids: list[int], decode: Callable
) -> None:
    """Token by token, or in any pieces: the same tokens, and the text before the string."""
    stop = Stop(frozenset({0}), strings, 10_000, decode)
    wanted = next(i for i in range(1, len(ids) + 1) if any(s in decode(ids[:i]) for s in strings))
    for seed in range(12):
        output, reason = run(stop, pieces(ids, random.Random(seed)))
        assert reason == "stop"
        assert output == ids[:wanted]
        assert stop.text(output) == TEXT[: min(TEXT.find(s) for s in strings if s in TEXT)]
    assert run(stop, [ids])[0] == ids[:wanted]


def test_a_stop_string_far_into_a_long_text(ids: list[int], decode: Callable) -> None:
    """Only a window is decoded; a string that spans many tokens is found all the same."""
    calls = []

    def counted(tokens: list[int]) -> str:
        calls.append(len(tokens))
        return decode(tokens)

    long = "🍎" * 30 + "END of the carriage"
    stop = Stop(frozenset(), (long,), 10_000, counted)
    before = ids * 40
    fruit = [t for t in ids if decode([t]) == "\ufffd"]
    assert fruit
    tokens = before + _encode(decode, long)
    output, reason = run(stop, [[t] for t in tokens])
    assert (output, reason) == (tokens, "stop")
    assert max(calls) < 1000


def _encode(decode: Callable, text: str) -> list[int]:
    """Byte by byte, which is one of a text's tokenisations."""
    tok = decode.__closure__[0].cell_contents  # type: ignore[attr-defined]
    words = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    found = [tok.token_to_id(symbol) for word, _ in words for symbol in word]
    assert decode(found) == text
    return found


def test_which_end_wins(ids: list[int], decode: Callable) -> None:
    n = next(i for i in range(1, len(ids) + 1) if "decides." in decode(ids[:i]))
    early = Stop(frozenset({ids[1]}), ("decides.",), 10_000, decode)
    assert early.cut([], ids) == (2, "eos")
    same = Stop(frozenset({ids[n - 1]}) - set(ids[: n - 1]), ("decides.",), n, decode)
    assert same.cut([], ids)[0] == n
    assert Stop(frozenset(), ("decides.",), n, decode).cut([], ids) == (n, "stop")
    assert Stop(frozenset(), ("decides.",), n - 1, decode).cut([], ids) == (n - 1, "length")


def test_before_stop() -> None:
    assert before_stop("one. two", ["."]) == "one"
    assert before_stop("one. two", ["two", "e."]) == "on"
    assert before_stop("one", ["."]) == "one"
    assert before_stop(".one", ["."]) == ""
    assert before_stop("one", []) == "one"


def test_a_stop_needs_a_decoder() -> None:
    with pytest.raises(AssertionError):
        Stop(strings=("x",))
    with pytest.raises(AssertionError):
        Stop(strings=("",), decode=str)


# --- streaming


@pytest.mark.parametrize("seed", range(10))
def test_streamed_text_is_the_text(seed: int, ids: list[int], decode: Callable) -> None:
    stream, shown = TextStream(decode), ""
    for chunk in pieces(ids, random.Random(seed)):
        piece = stream.push(chunk)
        assert "\ufffd" not in piece
        shown += piece
        assert TEXT.startswith(shown)
    assert shown + stream.flush() == TEXT
    assert stream.flush() == ""


def test_whole_characters_are_not_held_back(decode: Callable) -> None:
    stream = TextStream(decode)
    apple = _encode(decode, "a🍎b")
    assert [stream.push([t]) for t in apple] == ["a", "", "", "", "🍎", "b"]
    stream = TextStream(decode)
    assert stream.push(apple[:3]) == "a", "what comes before half a character is shown"
    assert stream.push(apple[3:]) == "🍎b"


def test_half_a_character_at_the_end_comes_out_at_last(decode: Callable) -> None:
    stream = TextStream(decode)
    apple = _encode(decode, "a🍎")
    assert stream.push(apple[:-1]) == "a"
    assert stream.flush() == "\ufffd"


def test_bytes_that_are_no_text(decode: Callable) -> None:
    """Continuation bytes on their own decode to U+FFFD: held while they might be half a character, never lost."""
    tail = _encode(decode, "🍎")[1:2]
    stream = TextStream(decode)
    shown = stream.push(_encode(decode, "x") + tail) + stream.push(_encode(decode, "y")) + stream.flush()
    assert shown == "x\ufffdy"


@pytest.mark.parametrize(
    "stops", [("stop!",), ("sto p",), ("### END",), ("\n\n", "zzz"), ("🍏 kost",), ("nowhere",), ("aab",)]
)
def test_nothing_of_a_stop_string_is_shown(stops: tuple[str, ...], ids: list[int], decode: Callable) -> None:
    for seed in range(10):
        stream, shown = TextStream(decode, stops), ""
        for chunk in pieces(ids, random.Random(seed)):
            shown += stream.push(chunk)
            assert before_stop(TEXT, stops).startswith(shown), "no character that would have to be taken back"
        assert shown + stream.flush() == before_stop(TEXT, stops)


def test_a_prefix_that_comes_to_nothing_is_shown(decode: Callable) -> None:
    stream = TextStream(decode, ("aab",))
    out = [stream.push(_encode(decode, c)) for c in "aaabcx"]
    assert out == ["", "", "a", "", "", ""]
    assert stream.stopped
    stream = TextStream(decode, ("aab",))
    assert [stream.push(_encode(decode, c)) for c in "aac"] == ["", "", "aac"]
    stream = TextStream(decode, ("aab",))
    stream.push(_encode(decode, "aa"))
    assert stream.flush() == "aa"


def test_decoders_that_drop_a_leading_space() -> None:
    """As SentencePiece does: the stream must not lose the space between two pushes."""
    words = ["one", "two", "three", "four"]

    def decode(tokens: list[int]) -> str:
        return "".join(" " + words[t] for t in tokens).lstrip(" ")

    stream = TextStream(decode)
    assert "".join(stream.push([t]) for t in (0, 1, 2, 3)) + stream.flush() == "one two three four"


def test_only_a_window_is_decoded(ids: list[int], decode: Callable) -> None:
    longest = 0

    def counted(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    stream = TextStream(counted)
    for token in ids * 5:
        stream.push([token])
    assert longest < 20
