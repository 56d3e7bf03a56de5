"""What drafters remember of their text: a Mamba the same whatever its length, a Transformer more with every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import tiny_llama
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.backends.torch.session import TreeSession
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Drafting
from outrider.drafters.mamba import MambaDrafting
from outrider.drafters.model import ModelDrafting
from outrider.engine import Batch, Engine, Request, Row

VOCAB, ROUNDS = 47, 4
LENGTHS = (50, 400)


def mamba(kind: str) -> Any:
    torch.manual_seed(2)
    shared = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    if kind == "mamba":
        return MambaForCausalLM(MambaConfig(**shared, time_step_rank=1)).eval()
    return Mamba2ForCausalLM(Mamba2Config(**shared, num_heads=8, head_dim=4, n_groups=1)).eval()


def draftings(spec: str) -> list[tuple[Drafting, Batch]]:
    """The drafter's state after prompts of LENGTHS and a few rounds of a chain."""
    target = load_target(tiny_llama(VOCAB, 1, torch.float32, max_position_embeddings=512))
    engine = Engine(target, drafters.load(spec, target).uncalibrated, FixedBudget(6, 5), GumbelNoise(VOCAB))
    results = []
    for length in LENGTHS:
        batch, _ = Batch.start(engine, [Row(Request([1 + i % 40 for i in range(length)], 0, 60), 0)])
        assert batch is not None
        results.append((batch.drafting, batch))
    return results


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_a_mamba_remembers_as_much_of_a_long_text(kind: str, tmp_path: Path) -> None:
    mamba(kind).save_pretrained(tmp_path)
    states, buffers = set(), set()
    for drafting, batch in draftings(f"mamba:{tmp_path}?tree=chain"):
        assert isinstance(drafting, MambaDrafting)
        states.add(drafting.state.bytes)
        for _ in range(ROUNDS):
            batch.round()
            states.add(drafting.state.bytes)
        assert drafting.buffer is not None
        buffers.add((drafting.buffer.conv.numel(), drafting.buffer.ssm.numel()))
    channels = 32 + (8 if kind == "mamba2" else 0)  # those of the convolution, which remembers three inputs
    assert states == {2 * 4 * (3 * channels + 32 * 4)}
    assert len(buffers) == 1


@torch.no_grad()
def test_a_transformer_remembers_every_token(tmp_path: Path) -> None:
    tiny_llama(VOCAB, 2, torch.float32, max_position_embeddings=512).save_pretrained(tmp_path)
    sizes = []
    for drafting, _ in draftings(f"model:{tmp_path}?tree=chain"):
        assert isinstance(drafting, ModelDrafting)
        assert isinstance(drafting.session, TreeSession)
        sizes.append(sum(s[:, :, : max(drafting.session.lengths)].numel() * 4 for s in drafting.session.cache.buffers))
    assert sizes == [2 * 2 * 8 * length * 4 for length in LENGTHS]  # layers, keys and values, width, tokens, bytes
