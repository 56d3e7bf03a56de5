"""A tiny target, a drafter for it, and an engine written the slow way: stock greedy text, and the drafter's network
applied to the whole text at every step, without any cache."""

from __future__ import annotations

import hashlib
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

from outrider.backends.torch import load_target
from outrider.backends.torch.padding import additive
from outrider.checkpoints import native, read
from outrider.drafters import eagle, eagle3
from outrider.nets import block
from outrider.nets.layer import LayerShape

VOCAB, HIDDEN, NEW, TOKENS = 23, 16, 20, 3
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [11, 3], *([i, 3 * i % VOCAB] for i in range(1, 13))]


GREEDY: dict[str, dict[tuple[int, ...], int]] = {}  # of each target's folder: what follows on a text
CHAINS: dict[Any, dict[tuple[int, ...], list[int]]] = {}  # of a target's folder, a drafter's weights and a length


def target_at(folder: Path) -> Path:
    GREEDY.pop(str(folder), None)
    CHAINS.clear()
    torch.manual_seed(1)
    sizes = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    LlamaForCausalLM(sizes).save_pretrained(folder)
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def drafter_at(folder: Path) -> Path:
    """An EAGLE that predicts its own input feature: right wherever the text repeats a token, and at random."""
    torch.manual_seed(2)
    shape = LayerShape(HIDDEN, 2, 1, 8, 24, HIDDEN)
    net = eagle.EagleNet(eagle.EagleConfig(shape, VOCAB, HIDDEN))
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
        net.fc.weight[:, HIDDEN:] += torch.eye(HIDDEN)
    native.save(folder, "eagle", net)
    return folder


def block_at(folder: Path, causal: bool) -> Path:
    """A random block drafter in a form that DFlash has a place for."""
    torch.manual_seed(3)
    shape = LayerShape(HIDDEN, 2, 1, 8, 24, HIDDEN)
    given = {"pair_head": "none", "sample_from_anchor": False, "mask_token": 0, "block": TOKENS + 1, "causal": causal}
    config = block.BlockConfig(shape, 2, VOCAB, VOCAB, HIDDEN, (1, 2), **given)
    native.save(folder, "block", shaken(block.BlockNet(config)))
    return folder


def parallel_at(folder: Path) -> Path:
    """A random P-EAGLE of two layers."""
    torch.manual_seed(4)
    shape = LayerShape(HIDDEN, 2, 1, 8, 24, 2 * HIDDEN)
    config = eagle3.Eagle3Config(shape, VOCAB, VOCAB, HIDDEN, (1, 2, 3), layers=2, parallel=TOKENS, mask_token=5)
    native.save(folder, "eagle3", shaken(eagle3.Eagle3Net(config)))
    return folder


def shaken(net: Any) -> Any:
    """Weights at which a shift by one, another mask or another depth drafts other tokens."""
    for name, p in net.named_parameters():
        torch.nn.init.normal_(p, std=0.5, mean=1.0 if name.endswith("norm.weight") else 0.0)
    return net


def engine(job: dict[str, Any]) -> Generator[dict[str, Any]]:
    """vLLM's runs, the slow way: with nothing, from the EXPORTED folder, or with the drafter inside."""
    stock = LlamaForCausalLM.from_pretrained(job["target"]).eval()

    def greedy(tokens: list[int]) -> int:
        known = GREEDY.setdefault(job["target"], {})
        if tuple(tokens) not in known:
            known[tuple(tokens)] = int(stock(torch.tensor([tokens])).logits[0, -1].argmax())
        return known[tuple(tokens)]

    for run in job["runs"]:
        yield {"done": 0}
        with torch.no_grad():
            result = decode(job, run, stock, greedy)
        yield {"vllm": "0", **result}


def decode(job: dict[str, Any], run: dict[str, Any], stock: Any, greedy: Any) -> dict[str, Any]:
    """One run: a chain is drafted after every text, and verified token by token."""
    how = run["speculative"] or {"method": "none", "num_speculative_tokens": 0}
    tokens, texts, drafts, accepted = how["num_speculative_tokens"], [], [], []
    ways = {"none": lambda *_: None, "eagle": exported, "dflash": slots, "eagle3": masks, "custom_class": inside}
    chain = ways[how["method"]](run, stock)
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
    """The drafter's own continuation after tokens[-1]."""
    checkpoint = read(run["speculative"]["model"])
    net = eagle.EagleNet(eagle.NETWORK.read(checkpoint.config, "here"))
    net.load_state_dict(checkpoint.tensors)
    embed = stock.get_input_embeddings()
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in checkpoint.tensors.values())).digest()
    drafts = CHAINS.setdefault((stock.config.name_or_path, digest, run["speculative"]["num_speculative_tokens"]), {})

    def chain(tokens: list[int]) -> list[int]:
        if tuple(tokens) not in drafts:
            drafts[tuple(tokens)] = drafted_behind(tokens)
        return drafts[tuple(tokens)]

    def drafted_behind(tokens: list[int]) -> list[int]:
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


def loaded(run: dict[str, Any], module: Any) -> Any:
    checkpoint = read(run["speculative"]["model"])
    net = module(native.network(checkpoint.method).read(checkpoint.config, "here"))
    net.load_state_dict(checkpoint.tensors)
    return net


def states(stock: Any, taps: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """The target's features of a text [1, t, taps * h]."""
    seen = stock.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([seen[tap] for tap in taps], -1)


def slots(run: dict[str, Any], stock: Any) -> Any:
    """DFlash: tokens[-1] and masks, after the features of all tokens before it."""
    net, embed = loaded(run, block.BlockNet), stock.get_input_embeddings()
    size, most = net.config.block, run["speculative"]["num_speculative_tokens"]
    seen = torch.ones(size, size, dtype=torch.bool)

    def chain(tokens: list[int]) -> list[int]:
        at = len(tokens) - 1
        turn = net.rope.at(torch.arange(at + size)[None], torch.float32)
        keys, values = net.keys_values(net.context(states(stock, net.config.taps, tokens[:-1])), turn[:, :at])
        x = embed(torch.tensor([[tokens[-1], *[net.config.mask_token] * (size - 1)]]))
        own = additive(seen.tril() if net.config.causal else seen, torch.float32)
        made = net(x, turn[:, at:], keys, values, torch.nn.functional.pad(own, (at, 0))[None, None])
        return stock.lm_head(made[0, 1 : 1 + most]).argmax(-1).tolist()

    return chain


def masks(run: dict[str, Any], stock: Any) -> Any:
    """P-EAGLE: all true pairs and the masks after them, as one sequence."""
    assert run["speculative"]["parallel_drafting"]
    net, embed = loaded(run, eagle3.Eagle3Net), stock.get_input_embeddings()
    more = run["speculative"]["num_speculative_tokens"] - 1

    def chain(tokens: list[int]) -> list[int]:
        true = net.fuse(states(stock, net.config.taps, tokens[:-1]))
        given = torch.cat([true, net.fuse(net.mask_hidden).expand(1, more, -1)], 1)
        spelled = embed(torch.tensor([[*tokens[1:], *[net.config.mask_token] * more]]))
        made = net.logits(net(given, spelled, torch.arange(given.shape[1])[None]))
        return made[0, -1 - more :].argmax(-1).tolist()

    return chain


def inside(run: dict[str, Any], stock: Any) -> Any:
    """The proposer that vLLM would load, which gets every text as a new one."""
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
