"""Products over multiples of 32 rows, so that there are few sizes, and what is compiled for each stays.

oneDNN compiles a product of bfloat16 for its number of rows, and keeps 1,024 of those. Texts differ in length, and so
does what is learnt of them: with as many sizes as that, nearly every product of a step would be compiled anew, a third
of a step; and with room for all of them they take gigabytes. So texts are filled up to multiples of STEP (`data.py`),
and so are the rows of every linear layer, with zeros that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .data import STEP


class FewSizes(TorchFunctionMode):
    """While it is on, linear layers on the CPU multiply a multiple of STEP rows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        given = kwargs or {}
        return _filled(*args, **given) if func is functional.linear else func(*args, **given)


def _filled(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.numel() // max(1, input.shape[-1])
    if rows % STEP == 0 or input.device.type != "cpu":
        return functional.linear(input, weight, bias)
    filled = functional.pad(input.reshape(rows, -1), (0, 0, 0, -rows % STEP))
    return functional.linear(filled, weight, bias)[:rows].view(*input.shape[:-1], -1)
