"""Matrix products with weights that no longer change, by the fastest way that this processor has.

Reading the weights is most of the work of a pass over few tokens. A processor without products of 16-bit numbers
computes in float32, and FBGEMM, which torch brings for x86, lets the weights stay in 16 bits all the same: they lie
packed as float16, are widened on their way into the registers, and sums are of float32. On two cores with AVX2 a pass
of SmolLM2 over 1 / 4 / 16 tokens takes 27 / 31 / 78 ms so, and 55 / 88 / 138 in plain float32 (docs/log.md).

A checkpoint's 16-bit weights survive this: bfloat16 has 8 binary digits and float16 has 11, so that only a layer's
smallest numbers can change. Layers whose change would exceed float32's own rounding are multiplied as they are.

A processor that has products of bfloat16 gets them from oneDNN, which reads weights in an order of its own. torch's
linear layer puts them into that order anew for every product, which takes as long as the product itself where rows are
few. Here they are put into it once; the results are the same, bit for bit (docs/log.md).

FBGEMM takes up to six rows at a time, and sums one or two that are left over in another order. Where a row's bits must
not depend on the others, rows are filled up to a multiple of three, which leaves none over.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

ROUNDING = 2.0**-24  # what float32 itself may change a number by, as a share of it
THREES = 3  # rows; with a multiple of it, every row is summed in the same order
LARGEST = 14  # the power of two that the largest weight is brought to, where small ones need the room


class HalfLinear(nn.Module):
    """y = x W^T + b in float32, with W packed as float16. No gradient passes through it.

    `weight` tells its shape, dtype and device to who asks; its numbers are all NaN. Weights are packed by `pack`, or by
    the first product, which must be none that is recorded; they must not change until then.
    """

    def __init__(self, weight: Float[Tensor, "o i"], bias: Tensor | None, power: int = 0):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.full((1, 1), torch.nan).expand(weight.shape)
        self.scale = 2.0**-power
        self.threes = False  # fill rows up to threes
        self.source: tuple[Tensor, Tensor | None] | None = weight.detach(), None if bias is None else bias.detach()
        self.packed: Any = None

    def pack(self) -> None:
        """Put the weights into FBGEMM's order: a second for each thirty million of them."""
        if (source := self.source) is not None:
            with torch.inference_mode(False), torch.no_grad():
                wide, bias = source[0].float() * (1 / self.scale), None if source[1] is None else source[1].float()
                self.packed = torch.ops.quantized.linear_prepack_fp16(wide, bias)
            self.source = None

    def forward(self, x: Float[Tensor, "*s i"]) -> Float[Tensor, "*s o"]:
        self.pack()
        given = x if self.scale == 1.0 else x * self.scale
        rows = given.numel() // self.in_features
        if not self.threes or rows % THREES == 0:
            whole: Tensor = torch.ops.quantized.linear_dynamic_fp16(given, self.packed)
            return whole
        filled = functional.pad(given.reshape(-1, self.in_features), (0, 0, 0, -rows % THREES))
        return torch.ops.quantized.linear_dynamic_fp16(filled, self.packed)[:rows].view(*x.shape[:-1], -1)


class OrderedLinear(nn.Module):
    """y = x W^T + b in bfloat16, with W in the order that oneDNN reads. No gradient passes through it.

    `weight` tells its shape, dtype and device to who asks; its numbers are all NaN.
    """

    def __init__(self, weight: Float[Tensor, "o i"], bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        with torch.inference_mode(False), torch.no_grad():
            self.weight = torch.full((1, 1), torch.nan, dtype=torch.bfloat16).expand(weight.shape)
            self.bias = None if bias is None else bias.detach().clone()
            ordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach().clone(), None)
            self.register_buffer("ordered", ordered, persistent=False)

    def forward(self, x: Float[Tensor, "*s i"]) -> Float[Tensor, "*s o"]:
        product: Any = _scripted().product if torch.jit.is_tracing() else _product
        made: Tensor = product(x, self.ordered, self.bias)
        return made

    def __deepcopy__(self, memo: object) -> OrderedLinear:
        return self  # its weights never change


def _product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")
    return made


@cache
def _scripted() -> Any:
    """`_product` in TorchScript: a recording of the Python one fails on the empty list in its call."""
    return torch.jit.CompilationUnit("""
        def product(x: Tensor, w: Tensor, b: Optional[Tensor]) -> Tensor:
            return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")
        """)


def can_order() -> bool:
    """Has this machine products of bfloat16 by oneDNN, as torch brings it for x86 processors?"""
    try:
        has = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
    return has and platform.machine().lower() in ("x86_64", "amd64")


def ordered(weight: Float[Tensor, "o i"], bias: Tensor | None = None) -> OrderedLinear | None:
    """The product with these weights in oneDNN's order; None where this machine has none, or they are not bfloat16."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not can_order():
        return None
    return OrderedLinear(weight, bias)


def can_halve() -> bool:
    """Has this machine products of 16-bit weights? FBGEMM has them for x86 processors with AVX2."""
    return torch.backends.quantized.engine in ("fbgemm", "x86")


def halved(weight: Float[Tensor, "o i"], bias: Tensor | None = None) -> HalfLinear | None:
    """The product with these weights in 16 bits; None where this machine has none, or it would change them."""
    if not can_halve() or weight.device.type != "cpu":
        return None
    with torch.inference_mode(False), torch.no_grad():
        wide = weight.detach().float()
        most = wide.abs().max()
        if not 0 < float(most) < float("inf"):
            return None
        powers = 0, LARGEST - int(most.log2().floor())
        power = next((p for p in powers if _faithful(wide * 2.0**p)), None)
    return None if power is None else HalfLinear(weight, bias, power)


def _faithful(weight: Float[Tensor, "o i"]) -> bool:
    """Is every row's change smaller than what float32 rounds off?"""
    change = (weight.half().float() - weight).norm(dim=1)
    return bool((change <= ROUNDING * weight.norm(dim=1)).all())


def halve(model: nn.Module) -> int:
    """Multiply by 16-bit weights in all of a model's linear layers that can. Its passes must be in float32 then.

    Returns:
        How many weights that are.
    """
    return _replaced(model, halved)


def pack(model: nn.Module) -> None:
    """Pack now what the first products would pack."""
    for module in model.modules():
        if isinstance(module, HalfLinear):
            module.pack()


def order(model: nn.Module) -> None:
    """Put the bfloat16 weights of all of a model's linear layers into oneDNN's order, where this machine reads that."""
    _replaced(model, ordered)


def hasten(model: nn.Module, leave: Collection[str] = ()) -> None:
    """Multiply in the fastest way in all of a model's linear layers, each in its own precision, but those of these
    names. No gradient passes through them any more."""
    _replaced(model, fastest, leave)


def fastest(weight: Float[Tensor, "o i"], bias: Tensor | None = None) -> HalfLinear | OrderedLinear | None:
    """The fastest product with these weights, in their precision; None where that is the plain one."""
    return halved(weight, bias) if weight.dtype == torch.float32 else ordered(weight, bias)


def _replaced(
    model: nn.Module, make: Callable[[Tensor, Tensor | None], nn.Module | None], leave: Collection[str] = ()
) -> int:
    done = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or name in leave:
                continue
            if (made := make(child.weight, child.bias)) is not None:
                setattr(parent, name, made)
                done += child.weight.numel()
    return done


class PlainLinear(nn.Module):
    """y = x W^T + b with the weights as they are."""

    def __init__(self, weight: Float[Tensor, "o i"], bias: Tensor | None):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Float[Tensor, "*s i"]) -> Float[Tensor, "*s o"]:
        """A CPU reads the weights of a single bfloat16 vector up to twice as fast by `mv` (docs/log.md)."""
        if x.dtype != torch.bfloat16 or x.numel() != x.shape[-1] or x.device.type != "cpu":
            return functional.linear(x, self.weight, self.bias)
        made = torch.mv(self.weight, x.reshape(-1)).view(*x.shape[:-1], -1)
        return made if self.bias is None else made + self.bias


def has_halves(model: object) -> bool:
    """Is this a network, and any product of it one of 16-bit weights?"""
    return isinstance(model, nn.Module) and any(isinstance(module, HalfLinear) for module in model.modules())


def in_threes(model: nn.Module, on: bool) -> None:
    """Fill rows up to threes from now on, or no longer, in all of a model's products of 16-bit weights."""
    for module in model.modules():
        if isinstance(module, HalfLinear):
            module.threes = on


def hastened(model: object) -> bool:
    """Is this a network, and any product of it one that takes no gradients, for speed?"""
    fast = HalfLinear, OrderedLinear
    return isinstance(model, nn.Module) and any(isinstance(module, fast) for module in model.modules())


def product(weight: Float[Tensor, "o i"], bias: Tensor | None = None) -> HalfLinear | OrderedLinear | PlainLinear:
    """x W^T + b for drafters while they draft; no gradient passes through it."""
    made = fastest(weight, bias)
    return PlainLinear(weight.detach(), None if bias is None else bias.detach()) if made is None else made


def freeze(net: nn.Module, *names: str) -> None:
    """Replace linear layers of a network that drafts by their `product`."""
    for name in names:
        layer = getattr(net, name)
        setattr(net, name, product(layer.weight, layer.bias))
