"""Small tokenizers of every kind of decoder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.engine.stopping import Stop

TEXT = (
    "The carriage follows, and decides. Über-große Äpfel 🍎🍏 kosten 3 €; 猫が好き. <stop> don't stop! sto p\n\n"
    "### END ##"
)
CORPUS = ["the carriage follows, and stops. it doesn't stop! END", TEXT, "  two  spaces\n\nand   three"] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet,
                                                             special_tokens=SPECIAL, show_progress=False))  # fmt: skip
    return made


def byte_fallback(decoder: Any = None) -> Tokenizer:
    """As Llama 2 and Mistral, by default; the words are few, so that most of TEXT is written in bytes."""
    before = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learning = Tokenizer(models.BPE(unk_token="<unk>"))
    learning.normalizer, learning.pre_tokenizer = before, pre_tokenizers.Split("▁", "merged_with_next")
    learning.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=60, show_progress=False))
    learnt = json.loads(learning.to_str())["model"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(m) for m in learnt["merges"]]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = before
    made.decoder = decoder or decoders.Sequence([*_pieces(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


def _pieces() -> list[Any]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback()]


def metaspace(scheme: str = "always") -> Tokenizer:
    """As T5 and XLM-R."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>",
                                                             show_progress=False))  # fmt: skip
    return made


def word_piece(cleanup: bool) -> Tokenizer:
    """As BERT."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=cleanup)
    made.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL,
                                                               show_progress=False))  # fmt: skip
    return made


def end_of_word() -> Tokenizer:
    """As GPT-1 and CLIP."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False,
                                                         end_of_word_suffix="</w>"))  # fmt: skip
    return made


def words() -> Tokenizer:
    """Without a decoder."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    return made


def nested() -> Any:
    return decoders.Sequence([decoders.Sequence(_pieces()), decoders.Sequence([decoders.Fuse()])])


KNOWN: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, nested": lambda: byte_fallback(nested()),
    "byte fallback, metaspace": lambda: byte_fallback(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "metaspace": metaspace,
    "metaspace, never": lambda: metaspace("never"),
    "word piece": lambda: word_piece(cleanup=False),
    "word piece, cleaned": lambda: word_piece(cleanup=True),
    "end of word": end_of_word,
    "words": words,
}
FALLBACK = "byte fallback"


def made(name: str) -> Any:
    """A tokenizer as models have it, with special tokens and an added one that is plain text."""
    tokenizer = KNOWN[name]()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<think>", "two words"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def in_bytes(tokenizer: Any, text: str) -> list[int]:
    """Byte by byte, which is one of a text's tokenisations where the tokenizer has byte fallback or works on bytes."""
    if "<0x00>" in tokenizer.get_vocab():
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [tokenizer.convert_tokens_to_ids(symbol) for piece, _ in pieces for symbol in piece]


def chunks_of(ids: list[int], dice: random.Random) -> list[list[int]]:
    """A text in chunks of up to five tokens, some of them empty."""
    chunks, at = [], 0
    while at < len(ids):
        chunks.append(ids[at : at + dice.randint(0, 5)])
        at += len(chunks[-1])
    return chunks


def stopped(stop: Stop, chunks: list[list[int]], prompt: list[int] = ()) -> tuple[list[int], str | None]:  # type: ignore[assignment]
    """What is left of a text that comes in chunks, and why it ended."""
    cut, output = stop.cutting(prompt), list[int]()
    for chunk in chunks:
        kept, reason = cut(output, chunk)
        output += chunk[:kept]
        if reason:
            return output, reason
        assert kept == len(chunk)
    return output, None


class Opaque:
    """A tokenizer that says nothing of its tokens and only decodes."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.tokenizer)

    def decode(self, ids: list[int], **options: Any) -> str:
        return str(self.tokenizer.decode(ids, **options))
