"""A tiny target, a drafter for it, and an engine written the slow way: stock greedy text, and the drafter's network
applied to the whole text at every step, without any cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.checkpoints import native, read
from outrider.drafters import eagle
from outrider.nets.layer import LayerShape

VOCAB, HIDDEN, NEW, TOKENS = 23, 16, 20, 3
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [11, 3], *([i, 3 * i % VOCAB] for i in range(1, 13))]


def target_at(folder: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
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


def engine(job: dict[str, Any]) -> dict[str, Any]:
    """What vLLM is asked to do, the slow way: from the EXPORTED folder."""
    stock = LlamaForCausalLM.from_pretrained(job["target"]).eval()
    found = read(job["drafter"])
    net = eagle.EagleNet(eagle.NETWORK.read(found.config, "here"))
    net.load_state_dict(found.tensors)
    embed, texts, drafts, accepted = stock.get_input_embeddings(), [], [], []

    def greedy(tokens: list[int]) -> int:
        return int(stock(torch.tensor([tokens])).logits[0, -1].argmax())

    def chain(tokens: list[int]) -> list[int]:
        """The drafter's own continuation behind tokens[-1]."""
        features = list(stock.model(torch.tensor([tokens[:-1]])).last_hidden_state[0])
        drafted: list[int] = []
        while len(drafted) < job["tokens"]:
            known = [*tokens, *drafted]
            made = net(
                torch.stack(features)[None], embed(torch.tensor([known[1:]])), torch.arange(len(known) - 1)[None]
            )
            features.append(made[0, -1])
            drafted.append(int(stock.lm_head(made[0, -1]).argmax()))
        return drafted

    with torch.no_grad():
        for prompt in job["prompts"]:
            text, rounds, reached = [greedy(prompt)], 0, [0] * job["tokens"]
            while len(text) < job["max_new_tokens"]:
                rounds += 1
                for depth, token in enumerate(chain([*prompt, *text])):
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
    return {"vllm": "0", "texts": texts, "drafts": drafts, "accepted_at": accepted}
