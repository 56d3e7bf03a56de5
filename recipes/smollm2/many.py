"""Answers to very many questions on a GPU, thousands of texts at a time: `python -m recipes.smollm2.many --help`.

It writes what `outrider data generate` writes, drawn with other random numbers, and is quicker there: questions of
about the same length are read together, every text has its place in one block of keys and values, and texts that have
ended are taken out now and then. Lines hold token ids: {"id", "prompt_token_ids", "token_ids", "ends"}.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache

from outrider import prompts
from outrider.backends.torch import load_target, load_tokenizer
from outrider.backends.torch.carrier import carrying

TOGETHER, READ = 8192, 1 << 17  # texts that are written side by side at most; tokens that are read in one pass
EVERY = 16  # tokens between two looks at which texts have ended
NAME = "outrider-recipe-grouped"


def grouped(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> tuple[Tensor, None]:
    """Attention that reads each head's keys once for all queries that share them, [b, heads, n, d]."""
    b, heads, n, d = query.shape
    share = heads // key.shape[1]
    q = query.reshape(b * key.shape[1], share * n, d)
    k, v = (t.reshape(b * key.shape[1], -1, d) for t in (key, value))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, key.shape[1], share, n, -1) * more["scaling"]
    weights = (scores + mask[:, :, None]).softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights.view(b * key.shape[1], share * n, -1), v).view(b, heads, n, d).transpose(1, 2), None


AttentionInterface.register(NAME, grouped)


def heads_of(model: Any) -> tuple[int, int]:
    """How many heads keys have, and their size."""
    c = model.config
    return c.num_key_value_heads, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


class Block:
    """Keys and values of all layers, [b, heads, room, d] each, filled up to `used`."""

    def __init__(self, model: Any, b: int, room: int):
        heads, d = heads_of(model)
        shape, kind = (2, b, heads, room, d), {"dtype": model.dtype, "device": model.device}
        made = [torch.empty(shape, **kind) for _ in range(model.config.num_hidden_layers)]
        self.layers, self.used = made, 0

    def keep(self, rows: Tensor) -> None:
        """These texts alone, layer by layer: both copies of all layers at once would be twice the memory."""
        for i, layer in enumerate(self.layers):
            self.layers[i] = layer[:, rows]


class View(Cache):
    """What transformers' layers see of a block: rows first .. first + b."""

    def __init__(self, block: Block, first: int, b: int):
        super().__init__(layers=DynamicCache().layers)
        self.block, self.rows = block, slice(first, first + b)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        both, end = self.block.layers[layer_idx], self.block.used + key.shape[2]
        for i, new in enumerate((key, value)):
            both[i, self.rows, :, self.block.used : end] = new
        return both[0, self.rows, :, :end], both[1, self.rows, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.block.used


@torch.inference_mode()
def answer(
    model: Any, asked: Sequence[Sequence[int]], most: int, temperature: float, ends: set[int]
) -> list[list[int]]:
    """The answers to these questions, each up to and with the token that ends it."""
    device, b, n = model.device, len(asked), max(map(len, asked))
    block = Block(model, b, n + most)
    pads = torch.tensor([n - len(q) for q in asked], device=device)
    tokens = torch.tensor([[0] * (n - len(q)) + list(q) for q in asked], device=device)
    low = torch.finfo(model.dtype).min
    hidden = torch.zeros(b, 1, 1, n + most, dtype=model.dtype, device=device)  # padding stands on the left
    hidden.masked_fill_(torch.arange(n + most, device=device) < pads[:, None, None, None], low)
    later = torch.full((n, n), low, dtype=model.dtype, device=device).triu(1)
    logits = []
    for first in range(0, b, max(1, READ // n)):
        some = slice(first, first + max(1, READ // n))
        places = (torch.arange(n, device=device) - pads[some, None]).clamp(min=0)
        mask = (hidden[some, :, :, :n] + later).clamp(min=low)
        logits.append(step(model, block, first, tokens[some], places, mask))
    block.used = n
    logits, alive = torch.cat(logits), torch.arange(b, device=device)
    final = torch.tensor(sorted(ends), device=device)
    results, done = (
        torch.zeros(b, most, dtype=torch.long, device=device),
        torch.zeros(b, dtype=torch.bool, device=device),
    )
    for i in range(most):
        new = draw(logits, temperature)
        results[alive, i] = torch.where(done, -1, new)
        done = done | torch.isin(new, final)
        if i + 1 == most:
            break
        if i % EVERY == EVERY - 1:
            rows = (~done).nonzero()[:, 0]
            if not len(rows):
                results[:, i + 1 :] = -1
                break
            if len(rows) < 0.9 * len(done):
                results[alive[done], i + 1 :] = -1
                block.keep(rows)
                alive, done, new, pads, hidden = alive[rows], done[rows], new[rows], pads[rows], hidden[rows]
        places = block.used - pads[:, None]
        logits = step(model, block, 0, new[:, None], places, hidden[:, :, :, : block.used + 1])
        block.used += 1
    return [[t for t in row if t >= 0] for row in results.tolist()]


def step(model: Any, block: Block, first: int, tokens: Tensor, places: Tensor, mask: Tensor) -> Tensor:
    """Logits of the last tokens, [b, v]."""
    view = View(block, first, len(tokens))
    given = {"input_ids": tokens, "position_ids": places, "attention_mask": mask, "logits_to_keep": 1}
    return model(**given, **carrying(model, view)).logits[:, -1]


def draw(logits: Tensor, temperature: float) -> Tensor:
    """A token of each row's distribution; the likeliest at T = 0."""
    if not temperature:
        return logits.argmax(-1)
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_()
    return (logits.float() / temperature - noise.log()).argmax(-1)


def questions(files: Sequence[Path], tokenizer: Any, length: int) -> Iterator[tuple[int, list[int]]]:
    """(number, token ids) of every question that leaves room for an answer."""
    number = -1
    for file in files:
        for _, row in prompts.rows(file):
            number += 1
            if "messages" in row:
                ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            else:
                ids = tokenizer(row["prompt"])["input_ids"]
            if len(ids) <= length:
                yield number, list(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSON lines with messages or a prompt")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; begun anew")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7], help="question i has the i-th, in turn")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--longest", type=int, default=384, help="longer questions, in tokens, are left out")
    parser.add_argument("--memory", type=float, default=40, help="GB that keys and values may take")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further texts are begun after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    a = parser.parse_args()
    if a.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; give --device cpu, or take outrider data generate")
    if missing := [str(file) for file in a.data if not file.is_file()]:
        parser.error(f"there is no file {missing[0]}")
    target = load_target(a.target, "bfloat16", a.device)
    tokenizer, model = load_tokenizer(a.target), target.model
    model.set_attn_implementation(NAME)
    final = model.generation_config.eos_token_id
    ends = set(final if isinstance(final, list) else [final])
    torch.manual_seed(a.seed)
    rows = list(questions(a.data, tokenizer, a.longest))
    jobs = []
    token = 2 * 2 * model.config.num_hidden_layers * math.prod(heads_of(model))  # bytes of its keys and values
    for turn, temperature in enumerate(a.temperature):
        mine = sorted(rows[turn :: len(a.temperature)], key=lambda row: -len(row[1]))
        while mine:
            size = min(TOGETHER, max(1, int(a.memory * 1e9 / (token * (len(mine[0][1]) + a.max_new_tokens)))))
            jobs.append((temperature, mine[:size]))
            mine = mine[size:]
    order = torch.randperm(len(jobs), generator=torch.Generator().manual_seed(a.seed)).tolist()
    began, written, tokens = time.monotonic(), 0, 0
    with a.out.open("w", encoding="utf-8") as out:
        for j in order:
            if time.monotonic() - began > a.seconds:
                break
            temperature, some = jobs[j]
            results = answer(model, [ids for _, ids in some], a.max_new_tokens, temperature, ends)
            for (number, ids), new in zip(some, results, strict=True):
                row = {"id": number, "prompt_token_ids": ids, "token_ids": new, "ends": new[-1] in ends}
                out.write(json.dumps(row) + "\n")
                written, tokens = written + 1, tokens + len(new)
            took = time.monotonic() - began
            print(f"{written} answers, {tokens} tokens, {tokens / took:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
