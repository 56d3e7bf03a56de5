"""Weights in fewer than 16 bits, by torch's products for CPUs: int8 rows, or a .gguf file's own blocks of four bits.
For models and processors for which the compiled pass has no integer products (`c/gemm/int8.h`).

Activations are bfloat16 and no row looks at another, so drafts are exact for the packed model, bit for bit where the
probe says so. It is another target than the full one: its texts differ.
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from .blocks import blocks_of
from .kernel_blocks import BLOCK as GROUP
from .products import HalfLinear, OrderedLinear

TILE = 16  # rows that the product of four bits is packed by
Grouped = tuple[Integer[Tensor, "o i"], Float[Tensor, "o g"], Float[Tensor, "o g"]]  # numbers 0 .. 15, scales, offsets


class Int8Linear(nn.Module):
    """y = (x W8^T) * s with W = W8 * s: symmetric, one scale for each output."""

    weight: Tensor
    scale: Tensor

    def __init__(self, full: Float[Tensor, "o i"], bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = full.shape
        for name in ("weight", "scale"):
            self.register_buffer(name, None)
        self.bias = bias
        self.fill(full)

    def fill(self, full: Float[Tensor, "o i"]) -> None:
        """Take these weights, rounded."""
        self.scale = (full.float().abs().amax(1).clamp(min=1e-12) / 127).to(torch.bfloat16)
        self.weight = (full.float() / self.scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)

    def forward(self, x: Float[Tensor, "*s i"]) -> Float[Tensor, "*s o"]:
        y = torch.ops.aten._weight_int8pack_mm(_rows(x), self.weight, self.scale)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class Int4Linear(nn.Module):
    """y = x W^T with W = (q - 8) * scale + offset, q of four bits; scales and offsets are for 32 weights each."""

    weight: Tensor
    scales: Tensor

    def __init__(self, blocks: Grouped, bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = blocks[0].shape
        for name in ("weight", "scales"):
            self.register_buffer(name, None)
        self.bias = bias
        self._hold(blocks)

    def fill(self, full: Float[Tensor, "o i"]) -> None:
        """Take these weights, rounded symmetrically."""
        scale = full.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 7
        scales = scale.expand(-1, full.shape[1] // GROUP)
        self._hold(((full.float() / scale).round().int() + 8, scales, torch.zeros_like(scales)))

    def _hold(self, blocks: Grouped) -> None:
        numbers, scales, offsets = blocks
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int().contiguous(), 1)
        self.scales = torch.stack([scales, offsets], -1).transpose(0, 1).to(torch.bfloat16).contiguous()

    def forward(self, x: Float[Tensor, "*s i"]) -> Float[Tensor, "*s o"]:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(_rows(x), self.weight, GROUP, self.scales)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def _rows(x: Tensor) -> Tensor:
    return (x.flatten(end_dim=-2) if x.dim() > 1 else x[None]).contiguous()


PACKED = (Int8Linear, Int4Linear)


def pack(model: nn.Module, weights: str, file: Path | None = None) -> float:
    """Pack a model's linear layers in place, the LM head's among them.

    Args:
        model: a stock model in bfloat16 on the CPU. Layers whose shapes torch's products do not take stay as they are.
        weights: "int8", or "native" for the blocks of `file`.
        file: the .gguf file that the model was made from.

    Returns:
        The share of the layers' weights (embeddings and LM head left out) that were packed.
    """
    blocks = dict(blocks_of(model, file)) if weights == "native" and file is not None else {}
    head, done, all_ = model.get_output_embeddings(), 0, 0  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = getattr(child, "weight", None)
            if weight is None or weight.dim() != 2 or isinstance(child, nn.Embedding):
                continue
            size = 0 if child is head else weight.numel()
            all_ += size
            if type(child) is not nn.Linear or weight.shape[1] % TILE:
                continue
            if (found := blocks.get(child)) is not None and found.minima is not None and len(found.numbers) % TILE == 0:
                offsets = found.minima + 8 * found.scales
                made: nn.Module = Int4Linear((found.numbers, found.scales, offsets), child.bias)
            elif weights == "int8" or child in blocks:
                made = Int8Linear(weight.detach(), child.bias)
            else:
                continue
            setattr(parent, name, made)
            done += size
    return done / max(1, all_)


def bytes_read(model: nn.Module) -> int:
    """Bytes that a pass reads: all parameters and buffers (of a mixture of experts, more than a pass needs)."""
    kept = [module for module in model.modules() if isinstance(module, HalfLinear | OrderedLinear)]
    own = {id(module.ordered) for module in kept if isinstance(module, OrderedLinear)}  # which has no address
    plain = (t for t in (*model.parameters(), *model.buffers()) if id(t) not in own)
    held = {t.data_ptr(): t.numel() * t.element_size() for t in plain}
    return sum(held.values()) + sum(2 * module.out_features * module.in_features for module in kept)
