"""T5: trees in the decoder equal stock decoding, and the engine writes the stock model's texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import PROMPTS, ROUNDS, VOCAB, tree_of
from transformers import T5Config, T5ForConditionalGeneration
from tree_paths import paths_to_leaves, seeing_siblings

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.backends.torch.carrier import carried, carrying
from outrider.backends.torch.tensors import tensor
from outrider.budgets.budgeter import FixedBudget
from outrider.core import noise
from outrider.core.noise import GumbelNoise
from outrider.core.tree import chain
from outrider.engine import Engine, Request, generate
from outrider.params import InputError, Sampling

START, NEW = 0, 14


def t5(tied: bool = True, layers: int = 2, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=layers, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=START,
        pad_token_id=0, eos_token_id=None, tie_word_embeddings=tied, initializer_factor=1.0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_(0, 2.0)  # else distances hardly matter
            if "SelfAttention.q" in name or "EncDecAttention.q" in name:
                parameter.mul_(6.0)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return t5()


@torch.no_grad()
def sequential(model: Any, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Stock decoding [len, v]: one decoder token at a time over a stock cache."""
    states, cache, logits = model.get_encoder()(input_ids=torch.tensor([prompt])), None, []
    for token in text:
        out = model(encoder_outputs=states, decoder_input_ids=torch.tensor([[token]]), **carrying(model, cache))
        cache = carried(model, out)
        logits.append(out.logits[0, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_tree_equals_sequential(tied: bool) -> None:
    model = t5(tied)
    target = load_target(model)
    session, texts = target.open(8), [[START] for _ in PROMPTS]
    (chunk,) = session.prefill(PROMPTS)
    assert chunk.tree.size.tolist() == [1, 1, 1]
    assert chunk.last == (True, True, True)
    for b, prompt in enumerate(PROMPTS):
        assert (tensor(chunk.output.logits)[b, 0] - sequential(model, prompt, [START])[-1]).abs().max() < 1e-10
    for turn in ROUNDS:
        tree = tree_of(turn["tokens"], turn["parents"])
        for given, wrong in ((seeing_siblings(tree), True), (tree, False)):
            output, worst = session.forward(given, (-1,)), 0.0
            for b, text in enumerate(texts):
                for path in paths_to_leaves(turn["parents"][b]):
                    right = sequential(model, PROMPTS[b], text + [turn["tokens"][b][i] for i in path])
                    worst = max(worst, float((tensor(output.logits)[b, path] - right[len(text) :]).abs().max()))
            assert worst > 0.02 if wrong else worst < 1e-10
        assert (target.head(tensor(output.features[-1])) - tensor(output.logits)).abs().max() < 1e-12
        session.keep(turn["paths"])
        for text, tokens, path in zip(texts, turn["tokens"], turn["paths"], strict=True):
            text += [tokens[i] for i in path]


@torch.no_grad()
def test_encoders_of_unequal_length_join_fork_and_leave(model: Any) -> None:
    target = load_target(model)
    session, other = target.open(8), target.open(40)
    for s, prompts in ((session, PROMPTS), (other, [[4] * 20, [9, 8]])):
        for _ in s.prefill(prompts):
            pass
    session.select([1, 0, 0])
    session.join(other)
    output = session.forward(chain([[5, 6]] * 5))
    for b, prompt in enumerate([PROMPTS[1], PROMPTS[0], PROMPTS[0], [4] * 20, [9, 8]]):
        assert (tensor(output.logits)[b] - sequential(model, prompt, [START, 5, 6])[-2:]).abs().max() < 1e-10


def plain(model: Any, prompt: list[int], seed: int, temperature: float, limit: int) -> list[int]:
    """Plain sampling by the shared noise, re-reading the whole text for every token."""
    text = [START]
    while len(text) <= limit:
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([text])).logits[0, -1]
        if temperature > 0:
            scores = scores / temperature + tensor(noise.gumbels([seed], [len(text)], np.arange(VOCAB))[0])
        text.append(int(scores.argmax()))
    return text[1:]


@pytest.mark.parametrize("drafter", ["none", "lookup", "model"])
def test_engine_writes_the_stock_text(model: Any, drafter: str, tmp_path: Path) -> None:
    """Greedy and sampled, a ragged batch of 2 seats for 4 requests, so that rows leave and join."""
    target = load_target(model)
    if drafter == "model":
        t5(layers=1, seed=1).save_pretrained(tmp_path)
        drafter = f"model:{tmp_path}"
    engine = Engine(target, drafters.load(drafter, target), FixedBudget(10, 4), GumbelNoise(VOCAB))  # type: ignore[arg-type]
    prompts, limits = [*PROMPTS, [5] * 9], (NEW, 5, 9, NEW)
    for temperature in (0.0, 1.0):
        requests = [
            Request(p, 7 + i, n, Sampling(temperature)) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))
        ]
        rows: dict[int, Any] = {}
        for piece in generate(engine, requests, 2):
            rows[piece.row.index] = piece.row
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            assert rows[i].output == plain(model, prompt, 7 + i, temperature, limit)
    with torch.no_grad():
        stock = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW, do_sample=False)[0, 1:].tolist()
    assert plain(model, PROMPTS[0], 7, 0.0, NEW) == stock


@pytest.mark.parametrize("penalty", [1.5, 0.6])
def test_repetition_looks_at_the_decoders_text(model: Any, penalty: float) -> None:
    """As in transformers: at its start token and the output, not at what the encoder reads."""
    engine = Engine.of(load_target(model), drafters.load("lookup", load_target(model)), FixedBudget(10, 4))
    for prompt in PROMPTS:
        request = Request(prompt, 0, NEW, Sampling(repetition_penalty=penalty))
        rows = {piece.row.index: piece.row for piece in generate(engine, [request])}
        with torch.no_grad():
            stock = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, repetition_penalty=penalty
            )[0, 1:].tolist()
        assert rows[0].output == stock


def test_other_encoder_decoders_are_refused() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    with pytest.raises(InputError, match="only T5 is"):
        load_target(BartForConditionalGeneration(config))
