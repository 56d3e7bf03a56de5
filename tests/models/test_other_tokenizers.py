"""Drafters with another tokenizer: spelling, the tokens that both have, text, and that nothing is lost."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from restless import Restless
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedTokenizerFast,
)

import outrider
from outrider.budgets.budgeter import FixedBudget
from outrider.core.types import Budget
from outrider.drafters._text import LOOSE, MUCH, Line
from outrider.drafters._words import Shared, Spelling
from outrider.engine import Batch, Request, Row
from outrider.params import InputError, Sampling

DRAFT = str(files("outrider") / "demo" / "draft")
TEXTS = [
    "Hello there, naïve world — 東京 🙂!\n\nOne  two   three",
    " leading",
    "trailing ",
    "a",
    "\n\n",
    "x=1;y=22 if z else'q'",
]


def corpus() -> list[str]:
    rows = map(json.loads, (files("outrider") / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines())
    return [row.get("text") or " ".join(m["content"] for m in row["messages"]) for row in rows][:60]


def byte_level(size: int = 400) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet,
                                                           special_tokens=["<end>", "<turn>"]))  # fmt: skip
    return made


def sentencepiece(size: int = 300, fallback: bool = True) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    before = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.normalizer = before
    plain = ["".join(c for c in text if c.isascii()) for text in corpus()]
    made.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"]))
    learnt = json.loads(made.to_str())["model"]
    vocab = dict(learnt["vocab"])
    for byte in range(256 if fallback else 0):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(m) for m in learnt["merges"]]
    new = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=fallback))
    new.normalizer = before
    new.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    new.add_special_tokens(["<unk>", "<s>", "</s>"])
    return new


MADE = {"bytes": byte_level, "pieces": sentencepiece, "ascii": lambda: sentencepiece(fallback=False)}
ENDS = {"bytes": {"eos_token": "<end>"}, "pieces": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}}
ENDS["ascii"] = ENDS["pieces"]


def wrapped(name: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=MADE[name](), **ENDS[name])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A random model beside every tokenizer, and a Mamba."""
    place, result = tmp_path_factory.mktemp("models"), {}
    for name in (*MADE, "mamba"):
        tokenizer = wrapped("pieces" if name == "mamba" else name)
        torch.manual_seed(5)
        shared = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "initializer_range": 0.5,
                  "eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}  # fmt: skip
        if name == "mamba":
            made: Any = Mamba2ForCausalLM(Mamba2Config(**shared, num_heads=8, head_dim=4, state_size=4, n_groups=1))
        else:
            made = LlamaForCausalLM(LlamaConfig(**shared, intermediate_size=16, num_attention_heads=2,
                                                num_key_value_heads=1, max_position_embeddings=512))  # fmt: skip
        made.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
        result[name] = str(place / name)
    return result


def spelt(spelling: Spelling, tokens: list[int]) -> bytes:
    return b"".join(spelling.bytes_of(t) or b"" for t in tokens)


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_tokens_spell_the_text_wherever_it_is_cut(name: str) -> None:
    """Also within words, characters and runs of spaces, whatever stands before."""
    spelling = Spelling.of(wrapped(name), name)
    for text in (t.encode() for t in TEXTS):
        for cut in range(len(text) + 1):
            if cut:
                assert spelt(spelling, spelling.write(text[:cut], text[cut:])) == text[cut:]
            alone = spelt(spelling, spelling.write(b"", text[cut:]))
            assert alone == text[cut:] or (name == "pieces" and alone == b" " + text[cut:])  # its own space


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_at_a_border_the_division_is_the_tokenizers_own(name: str) -> None:
    tokenizer = wrapped(name)
    spelling = Spelling.of(tokenizer, name)
    text = "One  two three, naïve"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert spelling.write(b"", text.encode()) == tokens
    assert spelling.write(b"", b" " + text.encode())[-3:] == tokens[-3:]
    full = spelt(spelling, tokens)
    for k in range(1, len(tokens)):
        before = spelt(spelling, tokens[:k])
        assert spelling.write(before, full[len(before) :]) == tokens[k:]


def test_a_vocabulary_that_lacks_characters_writes_the_others() -> None:
    spelling = Spelling.of(wrapped("ascii"), "ascii")
    assert spelt(spelling, spelling.write(b"", "na\u00efve \u6771 town".encode())).strip() == b"nave  town"


def test_special_tokens_spell_nothing_and_match_by_name_or_use() -> None:
    here, there = (Spelling.of(wrapped(n), n) for n in ("bytes", "pieces"))
    end = here.special["<end>"]
    assert here.bytes_of(end) is None
    assert here.bytes_of(10**6) is None
    assert there.mark(here, end) == there.special["</s>"]
    assert here.mark(there, there.special["</s>"]) == end
    assert there.mark(here, here.special["<turn>"]) is None


def test_a_tokenizer_whose_text_is_unknown() -> None:
    odd = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    odd.decoder = decoders.WordPiece()
    with pytest.raises(InputError, match="neither of bytes nor of sentencepiece"):
        Spelling.of(PreTrainedTokenizerFast(tokenizer_object=odd), "odd")


def test_shared_words_are_those_that_both_have() -> None:
    here, there = (Spelling.of(wrapped(n), n) for n in ("bytes", "pieces"))
    rows, vocab = len(there.spelt), len(here.spelt)
    words = Shared.of(here, there, rows, vocab, "there")
    for name, column in zip(words.names.tolist(), words.columns.tolist(), strict=True):
        text = here.bytes_of(name)
        assert text == there.bytes_of(column) if text else there.mark(here, name) == column
        assert words.read([name]) == [column]
        assert int(words.feed(np.array(name))) == column
    assert len(set(words.names.tolist())) == len(set(words.columns.tolist())) == len(words.names) > 60
    for token in range(vocab):
        text = here.bytes_of(token)
        assert words.read([token])
        assert not text or spelt(there, words.read([token])) == text
    logits = torch.randn(2, rows)
    assert torch.equal(words.restrict(logits)[:, 0], logits[:, int(words.columns[0])])


def test_a_line_settles_at_word_borders_and_reads_everything_once() -> None:
    here, there = (Spelling.of(wrapped(n), n) for n in ("bytes", "pieces"))
    text = "The quick brown fox jumps over the lazy dog, naïvely; and then it sleeps. " * 2
    line, read, heard = Line(), [], b""
    for token in here.tokenizer(text)["input_ids"]:
        line.add([token], here, there)
        heard += here.bytes_of(token) or b""
        read += line.settle()
        settled = spelt(there, read + line.unread).removeprefix(b" ")
        assert settled + line.tail == heard
        assert len(line.tail) <= MUCH
        assert settled == b"" or line.tail[:1] == b" "
    assert len(line.tail) >= LOOSE
    line.add([here.special["<turn>"]], here, there)  # a wall: all before it is settled, a line's end stands for it
    assert spelt(there, read + line.unread).strip(b" ") == heard.strip(b" ") + b" \n"
    assert line.tail == line.before == b""


PAIRS = [("bytes", "pieces"), ("pieces", "bytes"), ("bytes", "ascii"), ("pieces", "ascii"), ("bytes", "mamba")]
WAYS = ["text", "shared"]
MIXED = ["Hello there", "naïve 東", [5, 1, 9]]
LIMITS: dict[str, Any] = {"max_new_tokens": 24, "seed": 3, "ignore_eos": True}
CASES = [
    *((pair, way, "coupled", t) for pair in PAIRS for way in WAYS for t in (0.0, 1.0)),
    *((pair, way, "rejection", float((i + j) % 2)) for i, pair in enumerate(PAIRS) for j, way in enumerate(WAYS)),
]


@pytest.fixture(scope="module")
def plain(folders: Any) -> Any:
    """Texts of plain decoding, by target and temperature."""

    @cache
    def texts(name: str, temperature: float) -> list[list[int]]:
        outputs = outrider.load(folders[name], "none", dtype="float64").generate(
            MIXED, temperature=temperature, **LIMITS
        )
        return [output.tokens for output in outputs]

    return texts


@pytest.mark.parametrize(("pair", "way", "rule", "temperature"), CASES)
def test_no_draft_changes_a_text(
    pair: tuple[str, str], way: str, rule: str, temperature: float, folders: Any, plain: Any
) -> None:
    """Random models write any bytes: half characters, special tokens, and text that is divided otherwise.

    Under `rejection` at T > 0 a text depends on more than its seed; there it must run, and its distribution is
    that of any deterministic or static tree.
    """
    kind = "mamba" if pair[1] == "mamba" else "model"
    llm = outrider.load(folders[pair[0]], f"{kind}:{folders[pair[1]]}?vocab={way}&top_k=3", dtype="float64")
    options: dict[str, Any] = {"rule": rule, "temperature": temperature, **LIMITS}
    budgets = Restless((Budget(8, 4), Budget(1, 0), Budget(12, 3)))
    outputs = llm.generate(MIXED, budget=budgets, batch_size=2, **options)  # rows join and leave
    assert all(o.usage.drafted > 0 for o in outputs)
    if rule == "coupled" or temperature == 0:
        assert [o.tokens for o in outputs] == plain(pair[0], temperature)


@pytest.mark.parametrize("way", ["text", "shared", "same"])
def test_a_model_that_drafts_for_itself_is_right(way: str) -> None:
    """With one tokenizer all three ways draft the same text, so at T = 0 whole drafts are accepted."""
    llm = outrider.load(DRAFT, f"model:{DRAFT}?vocab={way}&tree=chain", dtype="float32")
    taus = [o.usage.tau for o in llm.generate([t[:300] for t in corpus()[::12]], max_new_tokens=40, seed=0,
                                              temperature=0.0, budget=FixedBudget(5, 4), ignore_eos=True)]  # fmt: skip
    assert min(taus) > (4.8 if way != "text" else 3.5), taus


@pytest.mark.parametrize("way", ["same", "text", "shared"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neo"])
def test_beyond_its_context_a_draft_model_loses_nothing(kind: str, way: str, folders: Any, tmp_path: Path) -> None:
    """Also one with learnt positions, of which there are no more, or with a mask of that size; and a long row harms
    none beside it."""
    rows = len(wrapped("bytes"))
    if kind == "llama":
        config: Any = LlamaConfig(vocab_size=rows, max_position_embeddings=24, hidden_size=8, intermediate_size=8,
                                  num_hidden_layers=1, num_attention_heads=1)  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    elif kind == "gpt_neo":
        config = GPTNeoConfig(vocab_size=rows, max_position_embeddings=24, hidden_size=8, num_layers=1, num_heads=1,
                              attention_types=[[["global"], 1]])  # fmt: skip
        GPTNeoForCausalLM(config).save_pretrained(tmp_path)
    else:
        GPT2LMHeadModel(GPT2Config(vocab_size=rows, n_positions=24, n_embd=8, n_layer=1, n_head=1)).save_pretrained(
            tmp_path
        )
    wrapped("bytes").save_pretrained(tmp_path)
    llm = outrider.load(folders["bytes"], f"model:{tmp_path}?vocab={way}", dtype="float64")
    plain = outrider.load(folders["bytes"], "none", dtype="float64")
    options: dict[str, Any] = {"max_new_tokens": 40, "seed": 1, "temperature": 1.0, "ignore_eos": True}
    prompts = [[5, 6, 7], [8] * 60]
    results = llm.generate(prompts, budget=FixedBudget(4, 3), batch_size=2, **options)
    assert [o.tokens for o in results] == [o.tokens for o in plain.generate(prompts, **options)]
    assert all(o.usage.drafted > o.usage.rounds for o in results)


def test_however_short_the_prompt_the_text_is_read_once() -> None:
    """What was read, what waits to be read and what is loose make the drafter's own tokens of the text."""
    llm = outrider.load(DRAFT, f"model:{DRAFT}?vocab=text", dtype="float32")
    drafter: Any = llm.drafter
    for text in ("T", "The lazy", "The lazy dog sleeps; the quick brown fox, who jumps over it, does not."):
        drafting = drafter.open([llm.encode(text)], 64)
        line = drafting.lines[0]
        read = int(drafting.inner.session.lengths[0])
        assert read + len(line.unread) + len(drafter.there.write(line.before, line.tail)) == len(llm.encode(text))
        assert read >= 1


def test_shared_distributions_sum_to_one(folders: Any) -> None:
    """Sampled trees keep the drafter's distribution over the shared tokens, as q over the target's vocabulary."""
    llm = outrider.load(
        folders["bytes"], f"model:{folders['pieces']}?vocab=shared&tree=static&shape=2,2", dtype="float64"
    )
    drafter: Any = llm.drafter.uncalibrated
    seen = []
    engine = llm.engine("rejection", FixedBudget(7, 2))
    batch, _ = Batch.start(engine, [Row(Request([5, 6, 7, 8], 1, 30, Sampling(1.0)), 0)])
    assert batch is not None
    inner = batch.drafting.propose

    def propose(rows: Any, budget: Any) -> Any:
        tree = inner(rows, budget)
        text = [*batch.rows[0].request.prompt, *batch.rows[0].output]
        seen.append((text, tree))
        return tree

    batch.drafting.propose = propose  # type: ignore[method-assign]
    for _ in range(5):
        batch.round()
    words = drafter.words
    for text, tree in seen:
        with torch.no_grad():
            logits = drafter.model.model(torch.tensor([words.read(text)])).logits[0, -1]
        distribution = np.zeros(llm.target.vocab)
        distribution[words.names] = logits[words.columns].softmax(-1).numpy()
        assert np.allclose(tree.q[0, 0], distribution, atol=1e-9)
        assert np.allclose(tree.q[0].sum(-1), 1)


def test_text_without_spaces_is_settled_between_characters() -> None:
    here, there = (Spelling.of(wrapped(n), n) for n in ("bytes", "pieces"))
    text, line, read = "東京は日本の首都であり、" * 30, Line(), []
    for token in here.tokenizer(text)["input_ids"]:
        line.add([token], here, there)
        read += line.settle()
        assert len(line.tail) <= 2 * MUCH + 4
    assert spelt(there, read + line.unread).removeprefix(b" ") + line.tail == text.encode()


def test_what_cannot_be_drafted_across(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="vocab=shared or vocab=text"):
        outrider.load(folders["bytes"], f"model:{folders['pieces']}")
    with pytest.raises(InputError, match="tokenizer"):
        outrider.load(folders["bytes"], f"mamba:{folders['mamba']}")
    with pytest.raises(InputError, match="vocab is same, shared, text"):
        outrider.load(folders["bytes"], f"model:{folders['pieces']}?vocab=bytes")
    with pytest.raises(InputError, match="too few for vocab=shared"):
        outrider.load(DRAFT, f"model:{folders['ascii']}?vocab=shared")


TINY = [("stories260K", "tinystories-656k"), ("tinystories-656k", "stories260K"),
        ("tinystories-chat-neo-3m", "tinystories-656k"), ("tinystories-656k", "tinystories-chat-neo-3m")]  # fmt: skip


@pytest.mark.parametrize("pair", TINY)
def test_pretrained_models_of_unrelated_tokenizers(shared: Path, pair: tuple[str, str]) -> None:
    """Trained elsewhere, each with a tokenizer of its own: drafts are accepted now and then, and nothing is lost."""
    theirs, mine = (str(shared / "models" / name) for name in pair)
    llm = outrider.load(theirs, f"model:{mine}?vocab=text", dtype="float32")
    plain = outrider.load(theirs, "none", dtype="float32")
    prompts = ["Once upon a time, there was a little girl named Lily. She", "One day, Tom and his dog"]
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_new_tokens": 40, "seed": 2, "temperature": temperature, "ignore_eos": True}
        results = llm.generate(prompts, budget=FixedBudget(8, 4), **options)
        assert [o.tokens for o in results] == [o.tokens for o in plain.generate(prompts, **options)]
        assert sum(o.usage.accepted for o in results) > 1
