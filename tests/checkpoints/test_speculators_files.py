"""Block drafters that the library `speculators` 0.9.0 wrote, and what it computes (tools/speculators_files.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.checkpoints import native, read

FOLDERS = Path(__file__).parent / "speculators"
KINDS = ["dflash", "dflash2", "dspark"]


def network(kind: str) -> Any:
    found = read(FOLDERS / kind)
    of = native.network("block")
    net: Any = of.module(of.read(found.config, "the file")).double().eval().requires_grad_(False)
    net.load_state_dict(found.tensors, strict=True)
    return net


def states(net: Any, right: dict[str, Tensor], anchor: int) -> Tensor:
    """Normed states of the block behind one anchor."""
    size, table, context = net.config.block, right["table"], net.context(right["features"][None, :anchor])
    turn = net.rope.at(torch.arange(anchor + size)[None], table.dtype)
    keys, values = net.keys_values(context, turn[:, :anchor])
    x = net.slots(table[right["tokens"][anchor]][None, None], table[net.config.mask_token], torch.zeros(0))
    return net(x, turn[:, anchor:], keys, values, table.new_zeros(1, 1, size, anchor + size))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_slot_has_the_librarys_logits(kind: str) -> None:
    """Its norms and rotations are in float32, which moves a state by up to 5e-5, as float32 does here."""
    net, right = network(kind), load_file(FOLDERS / kind / "answers.safetensors")
    assert not net.config.causal
    assert net.config.sample_from_anchor == (kind == "dspark")
    for i, anchor in enumerate(right["anchors"].tolist()):
        hidden = states(net, right, anchor)
        logits = hidden @ right["head"].T
        torch.testing.assert_close(hidden, right["hidden"][i], rtol=0, atol=1e-4)
        torch.testing.assert_close(logits, right["logits"][i], rtol=0, atol=1e-3)
        scores = net.choice(logits, net.corrected(logits, right["above"][i], hidden))
        known = right["scores"][i].isfinite()
        assert torch.equal(known, scores > -1000)
        torch.testing.assert_close(scores[known], right["scores"][i][known], rtol=0, atol=1e-3)
        assert known.all() == (kind != "dflash2")


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_shift_mask_or_head_shows(kind: str) -> None:
    """The comparison is not blind: one position, one slot's neighbour or one factor more, and it fails."""
    net, right = network(kind), load_file(FOLDERS / kind / "answers.safetensors")
    anchor = int(right["anchors"][0])
    assert not torch.allclose(states(net, right, anchor - 1), right["hidden"][0], atol=1e-2)
    logits, hidden, above = right["logits"][0], right["hidden"][0], right["above"][0]
    if kind != "dflash":
        moved = net.corrected(logits, above.roll(1), hidden)
        assert not torch.allclose(moved, net.corrected(logits, above, hidden), atol=1e-2)
