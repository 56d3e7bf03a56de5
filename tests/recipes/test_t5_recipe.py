"""The T5 recipe in miniature: pairs of a made-up dialogue, four steps, a bit-for-bit continuation."""

from __future__ import annotations

import json

import pytest
import torch
from recipes.demo import tokenizer as demo_tokenizer
from recipes.t5 import pairs, train

TINY = train.Recipe("tiny", hidden=16, inner=24, layers=1, heads=2, head_dim=8, steps=4, rows=4, warmup=2)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    for part in ("train", "heldout"):
        for domain in pairs.DOMAINS:
            path = folder / "documents" / part / f"{domain}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = []
            for i in range(8):
                words = [f"turn {i} number {j} of {domain}" for j in range(2 + i % 4)]
                messages = [{"role": ("user", "assistant")[j % 2], "content": w} for j, w in enumerate(words)]
                rows.append(json.dumps({"domain": domain, "group": str(i), "messages": messages}) + "\n")
            path.write_text("".join(rows))
    texts = ["turn number of sgd self_dialogue 0123456789"] * 3
    demo_tokenizer.save(demo_tokenizer.train(texts, vocab=300), folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def tok(work):
    return demo_tokenizer.build(work)


def test_a_pair_is_the_dialogue_so_far_and_the_reply(tok, work):
    dialogue = next(d for d in pairs.turns(tok, work, "train") if len(d) == 5)
    so_far, reply = pairs.pair(dialogue, 3)
    assert tok.decode(so_far).startswith("<|user|>turn")
    assert tok.decode(so_far).count("<|end|>") == 3
    assert reply == dialogue[3][1:]
    assert reply[-1] == tok.eos_token_id
    for domain in pairs.DOMAINS:
        held = pairs.heldout_pairs(tok, work, domain, 5)
        assert len(held) == 5
        assert all(tok.decode(a).count("<|user|>") == tok.decode(a).count("<|assistant|>") + 1 for a, _ in held)


def test_an_interrupted_run_continues_bit_for_bit(tok, work, tmp_path):
    data = pairs.Pairs(tok, work)
    full = train.train(TINY, tok, data, tmp_path / "whole", say=lambda line: None)
    train.train(TINY, tok, data, tmp_path / "parts", stop=2, say=lambda line: None)
    parts = train.train(TINY, tok, data, tmp_path / "parts", say=lambda line: None)
    assert all(torch.equal(a, b) for a, b in zip(full.parameters(), parts.parameters(), strict=True))
    loss = train.heldout_loss(full, pairs.heldout_pairs(tok, work, "sgd", 4), tok.pad_token_id)
    assert loss["tokens"] > 0
    assert 0 < loss["loss"] < 20
