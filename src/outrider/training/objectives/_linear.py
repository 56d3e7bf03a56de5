"""Ridge regression: the initialisation of networks that predict features."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

LEAST = 4  # minimum pairs per input dimension
RIDGE = 1e-4  # relative to the mean square of the inputs


def nearest(pairs: Iterable[tuple[Float[Tensor, "k i"], Float[Tensor, "k o"]]]) -> Float[Tensor, "o i"] | None:
    """W minimising |y - W x|^2 over pairs (x, y), with a small ridge; None for too few pairs."""
    squares, products, count = None, None, 0
    for x, y in pairs:
        squares = x.T @ x if squares is None else squares + x.T @ x
        products = x.T @ y if products is None else products + x.T @ y
        count += len(x)
    if squares is None or products is None or count < LEAST * len(squares):
        return None
    damped = squares + RIDGE * squares.diagonal().mean() * torch.eye(len(squares)).to(squares)
    return torch.linalg.solve(damped.double(), products.double()).T.to(squares.dtype)
