"""A tree's pass never waits for the device: on the meta device, no scalar is read and no mask is counted. Neither does
`keep`, nor a rule. A round's one wait is for the verdict.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import build
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.backends.torch import hf, load_target, verify
from outrider.core.noise import GumbelNoise
from outrider.core.tree import from_paths
from outrider.core.types import DraftTree, Question, Rows, RowText
from outrider.params import Rule, Sampling

FREE = [
    "llama", "qwen2", "qwen2-sliding", "qwen3", "mistral", "gpt_neox", "gpt2", "gemma2", "gemma3", "phi3", "opt",
    "mixtral", "qwen3_moe",
]  # fmt: skip
WAITS = ("_local_scalar_dense", "nonzero")


class Counting(TorchDispatchMode):
    """Remembers every operation that would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in WAITS:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


def on_meta(name: str) -> tuple[Any, DraftTree]:
    """A session of two unequal rows on the meta device, beyond every window, and a tree for it."""
    target = load_target(build(name, torch.bfloat16).to("meta"))
    assert isinstance(target, hf.HFTarget)
    session = target.open(64)
    for _ in session.prefill([[1] * 11, [2] * 5]):
        pass
    return session, from_paths([9, 8], [[[1, 2, 3], [1, 4], [5]], [[6]]])[0]


@pytest.mark.parametrize("name", FREE)
def test_a_tree_is_read_without_waiting(name: str) -> None:
    session, tree = on_meta(name)
    with Counting() as mode:
        output = session.forward(tree, taps=(-1,))
        session.keep([[0, 1, 4], [0]])
    assert output.logits.shape == (2, 6, 97)
    assert mode.waits == []


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.8, top_k=5, top_p=0.9, repetition_penalty=1.2)], ids=str
)
def test_a_verdict_is_reached_without_waiting(rule: Rule, sampling: Sampling) -> None:
    """All of it, but for fetching the verdict itself, which is no scalar."""
    tree, _ = from_paths([9, 8], [[[1, 2, 3], [1, 4], [5]], [[6]]])
    rows = Rows((9, 8), (3, 3), (1, 2), (0, 0), (sampling, sampling), rule, (9, 9), GumbelNoise(97))
    logits = torch.randn(2, tree.nodes, 97, generator=torch.Generator().manual_seed(0))
    with Counting() as mode:
        verdict = verify.judge(Question(rows, tree, logits, [RowText([1, 2, 9], []), RowText([1, 2, 8], [])]))
    assert all(verdict.finite)
    assert mode.waits == []


def test_the_counter_counts() -> None:
    with Counting() as mode:
        torch.ones(3).sum().item()
        torch.ones(3).nonzero()
    assert sorted(mode.waits) == sorted(WAITS)
