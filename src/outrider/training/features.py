"""What the frozen target makes of a batch: features, computed in the step. No dump of features is ever needed.

For repeated epochs there is a bounded cache on disk: memory-mapped, its size said before it starts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..targets import HFTarget, attention
from ..types import InputError
from .data import Batch

Say = Callable[[str], None]


@dataclass(frozen=True)
class Seen:
    """Features by tap, as `Look` has them: -1 is after the final norm, k the input of layer k."""

    features: dict[int, Float[Tensor, "b n h"]]


def mask_of(batch: Batch, dtype: torch.dtype, window: int | None = None) -> Float[Tensor, "b 1 n n"]:
    """Additive: a token sees its own document, up to itself. Padding sees itself, so that nothing becomes NaN."""
    return additive(visible(batch, window), dtype)[:, None]


def visible(batch: Batch, window: int | None = None) -> Bool[Tensor, "b n n"]:
    d, n = batch.documents, batch.documents.shape[1]
    seen = (d[:, :, None] == d[:, None, :]) & torch.ones(n, n, dtype=torch.bool, device=d.device).tril()
    if window is not None:
        seen = seen & ((batch.positions[:, :, None] - batch.positions[:, None, :]) < window)
    return seen | torch.eye(n, dtype=torch.bool, device=d.device)


def additive(seen: Bool[Tensor, "*s"], dtype: torch.dtype) -> Float[Tensor, "*s"]:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def see(target: HFTarget, batch: Batch, taps: tuple[int, ...], half: bool = False) -> Seen:
    """One frozen pass over a batch, each document by itself. `half`: computed in bfloat16."""
    with torch.no_grad():
        states = hidden(target, batch, half)
        return Seen({tap: states[tap].to(target.dtype) for tap in taps})


def hidden(target: HFTarget, batch: Batch, half: bool = False) -> Any:
    """All hidden states of a batch, with gradients where they are on."""
    family, model = target.family, target.model
    inputs: dict[str, Any] = {"input_ids": batch.tokens}
    if "position_ids" in target.accepts:
        inputs["position_ids"] = batch.positions
    if "logits_to_keep" in target.accepts:
        inputs["logits_to_keep"] = 1
    kind = torch.bfloat16 if half else target.dtype
    if family.binding is not None:
        if bool((batch.documents > 0).any()):
            raise InputError(f"{target.config.model_type} cannot share rows between documents; pack one to a row")
    else:
        made = {window: mask_of(batch, kind, window) for window in set(target.windows.values())}
        named = {name: made[window] for name, window in target.windows.items()}
        inputs["attention_mask"] = named if family.typed else named[""]
    cast = torch.autocast(target.device.type, torch.bfloat16) if half else nullcontext()
    # Of our own kernels none: a plain batch has no tree, and SDPA with a mask is what the model brings.
    with cast, attention.switched(target.config, "sdpa" if family.attention != "eager" else None, target.experts):
        out = model(**inputs, use_cache=False, output_hidden_states=True, return_dict=True)
    return out.hidden_states


class FeatureCache:
    """Features of every row on disk, filled as rows are first seen: [rows, n, taps * h] in half precision."""

    def __init__(self, folder: Path, rows: int, length: int, taps: tuple[int, ...], width: int, say: Say = print):
        self.taps, self.width = taps, width
        shape = (rows, length, len(taps) * width)
        size, free = int(np.prod(shape)) * 2, shutil.disk_usage(_existing(folder)).free
        path = folder / "features.bin"
        have = path.stat().st_size if path.exists() else 0
        say(f"feature cache: {size / 1e9:.2f} GB at {path}")
        if size - have > 0.95 * free:
            raise InputError(
                f"the feature cache needs {size / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free; "
                "leave it out, or train on fewer rows"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.data = np.memmap(path, np.uint16, "r+" if have == size else "w+", shape=shape)
        known = folder / "features.rows"
        self.known = np.memmap(known, np.uint8, "r+" if have == size and known.exists() else "w+", shape=(rows,))

    def see(self, target: HFTarget, batch: Batch, half: bool) -> Seen:
        """The batch's features: from disk where all rows are there, else computed and kept."""
        keys, n = list(batch.keys), batch.tokens.shape[1]
        if not self.known[keys].all():
            seen = see(target, batch, self.taps, half)
            joined = torch.cat([seen.features[t] for t in self.taps], -1).to(torch.bfloat16)
            self.data[keys, :n] = joined.view(torch.uint16).cpu().numpy()
            self.known[keys] = 1
        raw = torch.from_numpy(np.ascontiguousarray(self.data[keys, :n])).view(torch.bfloat16)
        parts = raw.to(target.device).to(target.dtype).split(self.width, -1)
        return Seen(dict(zip(self.taps, parts, strict=True)))


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)
