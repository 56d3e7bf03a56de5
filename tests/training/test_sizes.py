"""GEMMs of few sizes: the same values, and rows of other lengths need no GEMM of another size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from objective_world import packed, target, texts
from torch.utils._python_dispatch import TorchDispatchMode
from training_world import documents

from outrider.training import objectives
from outrider.training.data import STEP
from outrider.training.features import see
from outrider.training.sizes import FewSizes

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class Products(TorchDispatchMode):
    """Notes the sizes of all products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            self.shapes.add((str(func), *(tuple(x.shape) for x in args[-2:])))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (31, 5), (32, 5), (33, 5), (2, 9, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_equal_the_plain_gemm(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(5, 7, bias=bias).double(), torch.randn(shape, dtype=torch.float64)
    results = []
    for mode in (torch.enable_grad(), FewSizes()):
        given = x.clone().requires_grad_()
        with mode:
            y = layer(given)
        layer.zero_grad()
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
        results.append((y.detach(), given.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)))
    for a, b in zip(*results, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", "hass", "eagle3"])
def test_rows_of_other_lengths_need_no_gemm_of_another_size(method: str) -> None:
    of, rows = target(), packed([texts(1, (60,)), texts(2, (37,)), texts(3, (52,))], 96)
    options: dict[str, Any] = {"taps": (0, 2, 3)} if method == "eagle3" else {}
    made: Any = objectives.build(method, of, documents(), options)
    made.double().train()
    sizes = []
    for row in range(3):
        batch = rows.rows([row])
        assert batch.tokens.shape[1] == 2 * STEP, "not all 96 columns, and no more than a multiple"
        seen, products = see(of, batch, made.taps), Products()
        with FewSizes(), products:
            made(batch, seen, 0)[0].backward()
        sizes.append({size for _, a, b in products.shapes for size in a + b})
    assert 2 * STEP in sizes[0]
    assert sizes[1] | sizes[2] <= sizes[0] | {STEP}, "what is learned of a row may be a multiple fewer"
