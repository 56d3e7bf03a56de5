"""GEMMs over multiples of 32 rows, so that there are few sizes and their kernels stay cached.

oneDNN compiles a bfloat16 GEMM for its number of rows and caches 1,024 kernels. Texts differ in length: with that many
sizes, almost every GEMM would be compiled again, a third of a step, and a larger cache takes gigabytes. So texts are
padded to multiples of STEP (`data.py`), and so are the rows of every linear layer, with zeros whose results are
discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .data import STEP


class FewSizes(TorchFunctionMode):
    """A context in which linear layers on the CPU compute multiples of STEP rows."""

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
