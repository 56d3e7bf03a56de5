"""A drafter's matrices in eight bits: near the full ones, read by few rows alone, and without effect on texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outrider
from outrider.core import eight
from outrider.nets.linear import Linear, linear

G = torch.Generator().manual_seed(3)
WIDE = torch.randn(1024, 256, generator=G)


@pytest.fixture
def carrying() -> torch.Tensor:
    made = WIDE.clone()
    eight.carry(made)
    return made


@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 3, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_rounded_numbers(
    carrying: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    numbers, scale = eight.rounded(WIDE)
    assert (numbers * scale.float()[:, None] - WIDE).abs().max() <= scale.float().max() * 0.51
    x, bias = torch.randn(shape, generator=G).to(dtype), torch.ones(1024, dtype=dtype)
    made = linear(x, carrying.to(dtype) if dtype == torch.float32 else keep(carrying, dtype), bias)
    assert made.dtype == dtype
    assert made.shape == (*shape[:-1], 1024)
    true = x.to(torch.bfloat16).float() @ (numbers * scale.float()[:, None]).T + 1
    torch.testing.assert_close(made.float(), true, atol=0.02 * float(true.abs().max()), rtol=0)


def keep(full: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made = full.to(dtype)
    eight.carry(made)
    return made


def test_many_rows_and_training_read_the_full_matrix(carrying: torch.Tensor) -> None:
    x = torch.randn(eight.ROWS + 1, 256, generator=G)
    assert torch.equal(linear(x, carrying), torch.nn.functional.linear(x, WIDE))
    assert not torch.equal(linear(x[:2], carrying), torch.nn.functional.linear(x[:2], WIDE))
    layer = Linear(256, 1024, bias=False)
    eight.carry(layer.weight)
    layer.weight.grad = None
    layer(x[:1]).sum().backward()
    assert layer.weight.grad is not None


def test_small_and_odd_matrices_carry_nothing() -> None:
    for shape in ((64, 64), (2**15, 9)):
        made = torch.randn(shape, generator=G)
        eight.carry(made)
        assert eight.carried(made, made[:1]) is None


@pytest.mark.trained
@pytest.mark.parametrize("drafter", ["eagle:demo", "eagle3:demo"])
def test_texts_are_those_of_full_matrices(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    monkeypatch.setattr(eight, "LEAST", 1)  # the demo's matrices are small
    found = []
    for pays in (True, False):
        monkeypatch.setattr(eight, "pays", lambda *given, pays=pays: pays)
        seen = read(monkeypatch)
        llm = outrider.load("demo", drafter=drafter, budget="4x3")
        outputs = llm.generate(["Once upon a time", "def add(a, b):"], max_new_tokens=24, temperature=0.7, seed=5)
        found.append([output.tokens for output in outputs])
        assert bool(seen) == pays
    assert found[0] == found[1]


def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is multiplied in eight bits from now on."""
    seen: list[Any] = []
    product = eight.product

    def watched(x: torch.Tensor, few: eight.Eight) -> torch.Tensor:
        seen.append(few[0].shape)
        return product(x, few)

    monkeypatch.setattr(eight, "product", watched)
    return seen
