"""A scheduler that calls a proposer as vLLM's does: arrays whose rows come, go and change places."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from outrider.backends.torch.tensors import dtype_of
from outrider.core.protocols import Target
from outrider.integrations.vllm import Proposer


def config(target: Target, drafter: Any, tokens: int, context: int = 256, tokenizer: str = "") -> Any:
    """What a proposer reads of vLLM's configuration, under vLLM's names."""
    text = SimpleNamespace(num_hidden_layers=target.layers, to_dict=lambda: dict(target.config_dict))
    return SimpleNamespace(
        additional_config={} if drafter is None else {"outrider": drafter},
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        device_config=SimpleNamespace(device=torch.device("cpu")),
        model_config=SimpleNamespace(
            skip_tokenizer_init=True, tokenizer=tokenizer, trust_remote_code=False, dtype=dtype_of(target),
            max_model_len=context, hf_text_config=text,
            get_vocab_size=lambda: target.vocab, get_hidden_size=lambda: target.hidden,
        ),
    )  # fmt: skip


class Scheduler:
    """Rows of a table as vLLM keeps them. `stories` are the whole texts that the target writes."""

    def __init__(self, proposer: Proposer, stories: Sequence[Sequence[int]], context: int = 256):
        self.proposer, self.stories = proposer, stories
        self.table, self.length = np.zeros((8, context), np.int32), np.zeros(8, np.int32)
        self.rows: list[int] = []  # the story of each row
        self.at: list[int] = []  # tokens of it that are written
        self.chains: list[list[int]] = []
        self.drafts: list[tuple[int, int, list[int]]] = []  # (story, length of the text, chain)
        self.accepted = 0

    def come(self, story: int, prompt: int) -> None:
        """A row whose prompt is being read: it has no sampled token in the next step, and one in the step after."""
        self.rows.append(story)
        self.at.append(prompt)
        self.chains.append([])

    def leave(self, row: int) -> None:
        """A row ends, and the last one takes its place, as vLLM condenses its batch."""
        for kept in (self.rows, self.at, self.chains):
            last = kept.pop()
            if row < len(kept):
                kept[row] = last  # type: ignore[call-overload]

    def swap(self, a: int, b: int) -> None:
        for kept in (self.rows, self.at, self.chains):
            kept[a], kept[b] = kept[b], kept[a]  # type: ignore[call-overload]

    def step(self, reading: Sequence[int] = ()) -> None:
        """Every row gets what the target writes after the part of its chain that is right; `reading` rows nothing."""
        sampled: list[list[int]] = []
        for i, (story, at) in enumerate(zip(self.rows, self.at, strict=True)):
            text, right = self.stories[story], 0
            while right < len(self.chains[i]) and text[at + right] == self.chains[i][right]:
                right += 1
            self.accepted += right
            new = [] if i in reading else list(text[at : at + right + 1])
            sampled.append(new)
            self.at[i] += len(new)
            self.table[i, : self.at[i]] = text[: self.at[i]]
            self.table[i, self.at[i] :] = 0
            self.length[i] = self.at[i]
        self.chains = self.proposer.propose(sampled, self.length, self.table, slot_mappings=None)
        self.drafts += [(s, n, c) for s, n, c in zip(self.rows, self.at, self.chains, strict=True)]
        assert len(self.chains) == len(sampled)
        assert not any(self.chains[i] for i in reading)
