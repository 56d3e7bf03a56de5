"""A `tokenizers.Tokenizer` made of what a .gguf file says about its vocabulary.

Byte-level BPE (`tokenizer.ggml.model` gpt2) differs between models in how text is split before merging, which
`tokenizer.ggml.pre` names; the expressions are those of the models' own tokenizer.json. SentencePiece (llama) is BPE
over characters, whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ...params import InputError

KINDS = "gpt2", "llama", "gemma4"  # tokenizer.ggml.model: byte-level BPE; SentencePiece
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "\u2581"  # how SentencePiece spells a space

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HAN = "[一-龥\u0800-\u4e00가-\ud7ff]+"
KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
PHI3_PLAIN = "<unk>", "<s>", "<|endoftext|>"
# Where a file of before 2024 does not say how its text is split.
PRE_OF = {"gpt2": "gpt-2", "phi2": "phi-2", "starcoder2": "starcoder", "qwen2": "qwen2"}


def words(digits: str, letters: str = r"\p{L}", but: str = r"\p{L}\p{N}") -> str:
    """The expression of Llama 3 and those that follow it: contractions, words, digits, symbols, line ends."""
    return rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{but}]+[\r\n]*|{END}"


def cased(digits: str, contraction: str) -> str:
    """The expression of GPT-4o and Tekken, where a capital begins a word."""
    start = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = f"{start}{UPPER}*{LOWER}+{contraction}", f"{start}{UPPER}+{LOWER}*{contraction}"
    return rf"{upper}|{lower}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}"


@dataclass(frozen=True)
class Pre:
    """What happens to a text before byte-level merges.

    Attributes:
        split: expressions that isolate their matches, one after another.
        nfc: is the text brought into normalisation form C first?
        whole: is a piece that is in the vocabulary one token, whatever the merges say?
        bos: does a text begin with the begin-of-text token where the file does not say?
        late: expressions that are applied to the bytes' characters, after `split`.
    """

    split: Sequence[str]
    nfc: bool = False
    whole: bool = False
    bos: bool = False
    late: Sequence[str] = field(default=())


DIGIT_GPT2 = (r"\p{N}", GPT2)
LLAMA3 = words(r"\p{N}{1,3}")
QWEN2 = words(r"\p{N}")
FALCON = Pre((r"[\p{P}$+<=>^~|`]+", GPT2), late=(r"\p{N}+", "[0-9][0-9][0-9]"))
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    KANA,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + END,
)
PRE: dict[str, Pre] = {
    "default": FALCON,
    "falcon": FALCON,
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "mellum", "gigachat", "a.x-4.0", "modern-bert"), Pre((GPT2,))),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion"), Pre((GPT2,), nfc=True)),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), Pre(DIGIT_GPT2)),
    "command-r": Pre(DIGIT_GPT2, nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        Pre((LLAMA3,), whole=True, bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Pre((LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), Pre((LLAMA3,), whole=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), Pre((QWEN2,), nfc=True)),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2"), Pre((QWEN2,))),
    "qwen35": Pre((words(r"\p{N}", r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}"),)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), Pre((cased(r"\p{N}{1,3}", CONTRACTION + "?"),), whole=True)),
    "tekken": Pre((cased(r"\p{N}", ""),), whole=True, bos=True),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Pre(DEEPSEEK3)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Pre((r" ?[^(\s|[.,!?…。，、।۔،])]+",))),
}  # fmt: skip


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a .gguf file.

    Args:
        metadata: the file's values, as `files.open_gguf` gives them.

    Returns:
        A tokenizer that writes the same ids as the model's own; it begins texts with the begin-of-text token where the
        file says so.

    Raises:
        InputError: the file has no vocabulary, a damaged one, or one of a kind that is not supported.
    """
    known = _Vocabulary(metadata)
    if known.model not in KINDS:
        raise InputError(
            f"tokenizers of the kind {known.model!r} are not supported, only {', '.join(KINDS)} (tokenizer.ggml.model)"
        )
    tokenizer = _byte_level(known) if known.model == "gpt2" else _sentencepiece(known)
    strips = known.architecture == "phi3" and known.model == "llama"  # its marks take the space after them
    added = [
        AddedToken(text, normalized=False, special=kind != USER, rstrip=strips and text not in PHI3_PLAIN)
        for text, kind in zip(known.tokens, known.types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER) and text
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    default = known.model != "gpt2" or PRE[known.pre].bos
    begins = [known.special("bos")] if metadata.get("tokenizer.ggml.add_bos_token", default) else []
    ends = [known.special("eos")] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if begins or ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begins, "$A", *ends],
            pair=[*begins, "$A", *begins, "$B", *ends],
            special_tokens=[(text, known.tokens.index(text)) for text in {*begins, *ends}],
        )
    return tokenizer


class _Vocabulary:
    """The checked parts of `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.model = self.value("model", str)
        self.architecture = str(metadata.get("general.architecture"))
        self.pre = str(metadata.get("tokenizer.ggml.pre", PRE_OF.get(self.architecture, "default")))
        self.tokens: list[str] = self.value("tokens", list)
        types = metadata.get("tokenizer.ggml.token_type")
        self.types = [NORMAL] * len(self.tokens) if types is None else np.asarray(types, np.int64).tolist()
        if not self.tokens or len(self.types) != len(self.tokens):
            raise InputError("the file's vocabulary is damaged: it has not one type for each token; fetch it again")

    def value(self, name: str, kind: type) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, kind):
            raise InputError(f"the file has no tokenizer: tokenizer.ggml.{name} is missing or damaged")
        return value

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs that are merged, the first ones first. A part may begin with a space, but none ends with one."""
        return [_parts(merge) for merge in self.value("merges", list)]

    @property
    def pieces(self) -> list[tuple[str, float]]:
        """SentencePiece's pieces that merges can make, with their scores."""
        scores = self.metadata.get("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(self.tokens):
            raise InputError("the file's vocabulary is damaged: it has not one score for each token; fetch it again")
        known = zip(self.tokens, scores, self.types, strict=True)
        return [(piece, float(score)) for piece, score, kind in known if kind in (NORMAL, USER, UNUSED)]

    def special(self, name: str) -> str:
        """The text of the token that has this function."""
        number = self.metadata.get(f"tokenizer.ggml.{name}_token_id", {"bos": 1, "eos": 2}[name])
        if not 0 <= number < len(self.tokens):
            raise InputError(f"the file's vocabulary is damaged: its {name} token is outside of it; fetch it again")
        return self.tokens[number]


def _byte_level(known: _Vocabulary) -> Tokenizer:
    if known.pre not in PRE:
        raise InputError(
            f"tokenizers that split text like {known.pre!r} (tokenizer.ggml.pre) are not supported; take the model's "
            "safetensors folder, which has its tokenizer.json"
        )
    pre = PRE[known.pre]
    tokenizer = Tokenizer(models.BPE(_ids(known.tokens), known.merges, ignore_merges=pre.whole))
    tokenizer.normalizer = normalizers.NFC() if pre.nfc else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), "isolated") for one in pre.split),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            *(pre_tokenizers.Split(Regex(one), "isolated") for one in pre.late),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(known: _Vocabulary) -> Tokenizer:
    ids = _ids(known.tokens)
    merges = known.merges if "tokenizer.ggml.merges" in known.metadata else merges_of(known.pieces, ids)
    unknown = known.tokens[known.types.index(UNKNOWN)] if UNKNOWN in known.types else None
    model = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = known.metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer = Tokenizer(model)
    spell = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell]) if prefix else spell
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def merges_of(pieces: Iterable[tuple[str, float]], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges that give SentencePiece's BPE: of two adjacent pieces, those whose joined piece has the best score."""
    merges = [
        (-score, ids[piece[:i]], ids[piece[i:]], piece[:i], piece[i:])
        for piece, score in pieces
        for i in range(1, len(piece))
        if piece[:i] in ids and piece[i:] in ids
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    """Token -> id; of tokens that are spelled alike, the first."""
    return dict(zip(reversed(tokens), reversed(range(len(tokens))), strict=True))


def _parts(merge: str) -> tuple[str, str]:
    """The two parts of a merge, between which stands a space."""
    left, _, right = merge.partition(" ")
    if left:
        return left, right
    left, _, right = right.partition(" ")
    return f" {left}", right
