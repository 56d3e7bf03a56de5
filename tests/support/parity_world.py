"""A tiny target, a drafter for it, and an engine written the slow way: stock greedy text, and the drafter's network
applied to the whole text at every step, without any cache."""

from __future__ import annotations

from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm_world import config

from outrider.checkpoints import native, read
from outrider.drafters import eagle
from outrider.nets.layer import LayerShape
from outrider.targets import load_target

VOCAB, HIDDEN, NEW, TOKENS = 23, 16, 20, 3
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [11, 3], *([i, 3 * i % VOCAB] for i in range(1, 13))]


def target_at(folder: Path) -> Path:
    torch.manual_seed(1)
    sizes = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    LlamaForCausalLM(sizes).save_pretrained(folder)
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def drafter_at(folder: Path) -> Path:
    """An EAGLE that foretells its own input feature: right wherever the text repeats a token, and at random."""
    torch.manual_seed(2)
    shape = LayerShape(HIDDEN, 2, 1, 8, 24, HIDDEN)
    net = eagle.EagleNet(eagle.EagleConfig(shape, VOCAB, HIDDEN))
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
        net.fc.weight[:, HIDDEN:] += torch.eye(HIDDEN)
    native.save(folder, "eagle", net)
    return folder


def engine(job: dict[str, Any]) -> Generator[dict[str, Any]]:
    """What vLLM is asked to do, the slow way: with nothing, from the EXPORTED folder, or with the drafter inside."""
    stock = LlamaForCausalLM.from_pretrained(job["target"]).eval()

    def greedy(tokens: list[int]) -> int:
        return int(stock(torch.tensor([tokens])).logits[0, -1].argmax())

    for run in job["runs"]:
        yield {"done": 0}
        with torch.no_grad():
            found = decode(job, run, stock, greedy)
        yield {"vllm": "0", **found}


def decode(job: dict[str, Any], run: dict[str, Any], stock: Any, greedy: Any) -> dict[str, Any]:
    """One run: a chain is drafted behind every text, and verified token by token."""
    how = run["speculative"] or {"method": "none", "num_speculative_tokens": 0}
    tokens, texts, drafts, accepted = how["num_speculative_tokens"], [], [], []
    chain = {"none": lambda *_: None, "eagle": exported, "custom_class": inside}[how["method"]](run, stock)
    for prompt in job["prompts"]:
        text, rounds, reached = [greedy(prompt)], 0, [0] * tokens
        while len(text) < job["max_new_tokens"]:
            drafted = chain([*prompt, *text]) if chain else []
            rounds += bool(drafted)
            for depth, token in enumerate(drafted):
                right = greedy([*prompt, *text])
                text.append(right)
                if token != right:
                    break
                reached[depth] += 1
            else:
                text.append(greedy([*prompt, *text]))
        texts.append(text[: job["max_new_tokens"]])
        drafts.append(rounds)
        accepted.append(reached)
    return {"texts": texts, "drafts": drafts, "accepted_at": accepted}


def exported(run: dict[str, Any], stock: Any) -> Any:
    """The drafter's own continuation behind tokens[-1]."""
    found = read(run["speculative"]["model"])
    net = eagle.EagleNet(eagle.NETWORK.read(found.config, "here"))
    net.load_state_dict(found.tensors)
    embed = stock.get_input_embeddings()

    def chain(tokens: list[int]) -> list[int]:
        features = list(stock.model(torch.tensor([tokens[:-1]])).last_hidden_state[0])
        drafted: list[int] = []
        while len(drafted) < run["speculative"]["num_speculative_tokens"]:
            known = [*tokens, *drafted]
            made = net(
                torch.stack(features)[None], embed(torch.tensor([known[1:]])), torch.arange(len(known) - 1)[None]
            )
            features.append(made[0, -1])
            drafted.append(int(stock.lm_head(made[0, -1]).argmax()))
        return drafted

    return chain


def inside(run: dict[str, Any], stock: Any) -> Any:
    """The proposer that vLLM would load, which is told of every text as of one that it has not seen."""
    target = load_target(stock)
    module, _, name = run["speculative"]["model"].rpartition(".")
    asked = config(target, run["additional"]["outrider"], run["speculative"]["num_speculative_tokens"], 64)
    proposer = getattr(import_module(module), name)(asked)
    table = np.zeros((1, 64), np.int32)

    def chain(tokens: list[int]) -> list[int]:
        proposer.propose([], table[:, 0], table)
        table[0, : len(tokens)] = tokens
        return proposer.propose([tokens[-1:]], np.array([len(tokens)]), table)[0]

    return chain
