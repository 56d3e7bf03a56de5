"""Dialogues -> (dialogue so far, reply) pairs of token numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.demo.data import documents

DOMAINS = ("sgd", "self_dialogue")
SO_FAR, REPLY = 192, 64  # the last tokens of the dialogue; the first tokens of the reply
IGNORED = -100


def turns(tokenizer, work: Path, part: str) -> Iterator[list[list[int]]]:
    """Each dialogue as its turns; a turn is its role mark, its words and the end mark."""
    for domain in DOMAINS:
        for document in documents(work, part, domain):
            yield [
                [
                    tokenizer.convert_tokens_to_ids(f"<|{role}|>"),
                    *tokenizer(words, add_special_tokens=False)["input_ids"],
                    tokenizer.eos_token_id,
                ]
                for role, words in document.messages
            ]


def pair(dialogue: list[list[int]], turn: int) -> tuple[list[int], list[int]]:
    """The encoder's text and the reply at `turn`, which ends with the end mark unless it is very long."""
    so_far = [token for earlier in dialogue[:turn] for token in earlier]
    return so_far[-SO_FAR:], dialogue[turn][1:][:REPLY]


def heldout_pairs(tokenizer, work: Path, domain: str, limit: int) -> list[tuple[list[int], list[int]]]:
    """One pair of each of the first `limit` held-out dialogues of a domain: the reply in the middle."""
    results = []
    for document, dialogue in zip(
        (d for name in DOMAINS for d in documents(work, "heldout", name)),
        turns(tokenizer, work, "heldout"),
        strict=True,
    ):
        if document.domain == domain and len(results) < limit:
            results.append(pair(dialogue, len(dialogue) // 4 * 2 + 1 if len(dialogue) > 3 else 1))
    return results


class Pairs:
    """All training dialogues in memory; step k's batch is a function of (seed, k) alone."""

    def __init__(self, tokenizer, work: Path, part: str = "train") -> None:
        self.pad = tokenizer.pad_token_id
        self.dialogues = [d for d in turns(tokenizer, work, part) if len(d) > 1]

    def batch(self, seed: int, step: int, rows: int) -> dict[str, Tensor]:
        draw = np.random.default_rng([seed, step])
        chosen = []
        for index in draw.integers(len(self.dialogues), size=rows):
            dialogue = self.dialogues[index]
            chosen.append(pair(dialogue, 1 + 2 * int(draw.integers(len(dialogue) // 2))))
        return collate(chosen, self.pad)


def collate(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, Tensor]:
    """Pads on the right; `labels` are -100 where there is nothing to learn."""
    wide, long = max(len(a) for a, _ in rows), max(len(b) for _, b in rows)
    inputs, labels = torch.full((len(rows), wide), pad), torch.full((len(rows), long), IGNORED)
    for i, (a, b) in enumerate(rows):
        inputs[i, : len(a)], labels[i, : len(b)] = torch.tensor(a), torch.tensor(b)
    mask = torch.arange(wide)[None] < torch.tensor([len(a) for a, _ in rows])[:, None]
    return {"input_ids": inputs, "attention_mask": mask.long(), "labels": labels}
