"""The linear map that comes nearest: where a network that predicts features may begin."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

LEAST = 4  # pairs for each number that is read, or the map would be one of chance
RIDGE = 1e-4  # of the mean square of what is read


def nearest(pairs: Iterable[tuple[Float[Tensor, "k i"], Float[Tensor, "k o"]]]) -> Float[Tensor, "o i"] | None:
    """W with the least |y - W x|^2 over all pairs (x, y), slightly damped; None where they are too few."""
    squares, products, count = None, None, 0
    for x, y in pairs:
        squares = x.T @ x if squares is None else squares + x.T @ x
        products = x.T @ y if products is None else products + x.T @ y
        count += len(x)
    if squares is None or products is None or count < LEAST * len(squares):
        return None
    damped = squares + RIDGE * squares.diagonal().mean() * torch.eye(len(squares)).to(squares)
    return torch.linalg.solve(damped.double(), products.double()).T.to(squares.dtype)
