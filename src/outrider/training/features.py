"""The frozen target's hidden states for a batch, computed in the step. No dump of features is ever needed.

For repeated epochs there is a bounded cache on disk: memory-mapped, its size said before it starts.
"""

from __future__ import annotations

import hashlib
import json
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
from torch.distributed.tensor import DTensor

from .. import files
from ..backends.torch import HFTarget, attention, spread
from ..backends.torch.padding import additive
from ..backends.torch.tensors import dtype_of, tensor
from ..core.protocols import Target
from ..params import InputError
from .data import Batch

Say = Callable[[str], None]
TOGETHER = 4  # documents that a compiled pass reads at once


@dataclass(frozen=True)
class TargetFeatures:
    """Features by tap, as `TargetOutput` has them: -1 is after the final norm, k the input of layer k."""

    features: dict[int, Float[Tensor, "b n h"]]


def mask_of(batch: Batch, dtype: torch.dtype, window: int | None = None) -> Float[Tensor, "b 1 n n"]:
    """Additive: a token sees its own document, up to itself. Padding sees itself, so that nothing becomes NaN."""
    return additive(visible(batch, window), dtype)[:, None]


def visible(batch: Batch, window: int | None = None) -> Bool[Tensor, "b n n"]:
    """Which places attend to which [b, n, n]: earlier ones of the same document, `window` of them at most."""
    d, n = batch.documents, batch.documents.shape[1]
    seen = (d[:, :, None] == d[:, None, :]) & torch.ones(n, n, dtype=torch.bool, device=d.device).tril()
    if window is not None:
        seen = seen & ((batch.positions[:, :, None] - batch.positions[:, None, :]) < window)
    return seen | torch.eye(n, dtype=torch.bool, device=d.device)


def see(target: Target, batch: Batch, taps: tuple[int, ...], half: bool = False) -> TargetFeatures:
    """The target's hidden states by tap, [b, n, h]: one pass without gradients, each document by itself.

    Args:
        target: its weights are not changed.
        batch: packed rows.
        taps: -1 is after the final norm, k the input of layer k; none gives no features, without a pass.
        half: a stock model computes in bfloat16; native passes have a precision of their own.

    Returns:
        Features in the precision that drafters learn in, float32 at least.
    """
    if not taps:  # an objective that trains the target itself
        return TargetFeatures({})
    kind = learned(dtype_of(target))
    if not isinstance(target, HFTarget):
        return TargetFeatures({tap: states.to(kind) for tap, states in compiled(target, batch, taps).items()})
    with torch.no_grad():
        states = hidden(target, batch, half)
        return TargetFeatures({tap: states[tap].to(kind) for tap in taps})


def learned(kind: torch.dtype) -> torch.dtype:
    """The precision that a drafter learns in, for a target of this one: never half, or small updates are lost."""
    return torch.promote_types(kind, torch.float32)


def compiled(target: Target, batch: Batch, taps: tuple[int, ...]) -> dict[int, Float[Tensor, "b n h"]]:
    """The same by passes in compiled code, which read every document as a prompt of its own; zeros for padding.

    TOGETHER documents at a time, those of a length side by side: room is made for the longest of them.
    """
    found = {tap: torch.zeros(*batch.tokens.shape, target.hidden, dtype=dtype_of(target)) for tap in taps}
    places = [
        (row, torch.nonzero(batch.documents[row] == number)[:, 0])
        for row in range(len(batch.keys))
        for number in batch.documents[row].unique().tolist()
        if number >= 0
    ]
    places.sort(key=lambda place: len(place[1]))
    for group in (places[i : i + TOGETHER] for i in range(0, len(places), TOGETHER)):
        session, read = target.open(batch.tokens.shape[1]), 0
        for prefill in session.prefill([batch.tokens[row, at].tolist() for row, at in group], taps):
            for tap, states in prefill.output.features.items():
                for (row, at), of in zip(group, tensor(states), strict=True):
                    here = at[read : read + of.shape[0]]
                    found[tap][row, here] = of[: len(here)]
            read += prefill.tree.tokens.shape[1]
    return found


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
    cast = torch.autocast(torch.device(target.device).type, torch.bfloat16) if half else nullcontext()
    # Of our own kernels none: a plain batch has no tree, and SDPA with a mask is what the model brings.
    with cast, attention.switched(target.config, "sdpa" if family.attention != "eager" else None, target.experts):
        out = model(**inputs, use_cache=False, output_hidden_states=True, return_dict=True)
    return out.hidden_states


class FeatureCache:
    """Features of every row on disk, a file per tap, each filled as rows are first seen: [rows, n, h].

    Trainings of several methods on the same rows may share a folder.
    """

    def __init__(
        self, folder: Path, rows: Batch, taps: tuple[int, ...], width: int, kind: str, say: Say = print, of: str = ""
    ):
        if kind not in KINDS:
            raise InputError(f"the feature cache keeps {', '.join(KINDS)}, not {kind!r}")
        self.taps, (self.bits, self.dtype) = taps, KINDS[kind]
        self.shape = (*rows.tokens.shape, width)
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        size = int(np.prod(self.shape)) * np.dtype(self.bits).itemsize
        lacking = [t for t in taps if not (folder / f"{t}.bin").exists()]
        free = shutil.disk_usage(folder).free
        new = len(lacking) * size
        say(f"feature cache in {folder}: {len(taps)} x {size / 1e9:.2f} GB, {new / 1e9:.2f} GB of it new")
        if new > 0.95 * free:
            raise InputError(
                f"the feature cache needs {new / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free; "
                "leave it out, or train on fewer rows"
            )
        mark = folder / "rows.json"
        told = {"rows": digest(rows), "shape": list(self.shape), "dtype": kind, "of": of}
        if mark.exists() and json.loads(mark.read_text(encoding="utf-8")) != told:
            raise InputError(
                f"{folder} holds the features of other rows, or of another target or precision; "
                "give another folder, or remove it"
            )
        files.write(mark, json.dumps(told))
        self.data = {t: self._map(folder / f"{t}.bin", self.bits, self.shape) for t in taps}
        self.known = {t: self._map(folder / f"{t}.rows", np.uint8, self.shape[:1]) for t in taps}

    @staticmethod
    def _map(path: Path, kind: Any, shape: tuple[int, ...]) -> Any:
        return np.memmap(path, kind, "r+" if path.exists() else "w+", shape=shape)

    def see(self, target: Target, batch: Batch, half: bool) -> TargetFeatures:
        """The batch's features: from disk where all rows are there, else computed and kept."""
        keys, n = list(batch.keys), batch.tokens.shape[1]
        there = all(self.known[t][keys].all() for t in self.taps)
        if isinstance(target, HFTarget) and target.processes > 1:  # they see it together or not at all
            there = spread.agreed(target.model, there)
        if not there:
            seen = see(target, batch, self.taps, half)
            for t in self.taps:
                raw = seen.features[t].to(self.dtype).cpu().contiguous().view(getattr(torch, self.bits.__name__))
                self.data[t][keys, :n] = raw.numpy()
                self.known[t][keys] = 1
        found = {}
        for t in self.taps:
            raw = torch.from_numpy(np.ascontiguousarray(self.data[t][keys, :n])).view(self.dtype)
            found[t] = raw.to(target.device).to(learned(dtype_of(target)))
        return TargetFeatures(found)


KINDS: dict[str, tuple[Any, torch.dtype]] = {
    "bfloat16": (np.int16, torch.bfloat16),
    "float16": (np.int16, torch.float16),
    "float32": (np.int32, torch.float32),
}


def digest(rows: Batch) -> str:
    """Which rows these are, as 16 hexadecimal digits."""
    return hashlib.sha256(rows.tokens.numpy().tobytes() + rows.documents.numpy().tobytes()).hexdigest()[:16]


def fingerprint(target: Target, half: bool = False) -> str:
    """Which target this is, by some numbers of every weight, and in which precision it is run."""
    if not isinstance(target, HFTarget):
        return f"{target.mark}-{target.precision}"
    found = hashlib.sha256(b"half" if half else b"")
    for name, p in target.model.named_parameters():
        whole: Any = p.full_tensor() if isinstance(p, DTensor) else p
        some = whole.detach().flatten()[:: max(1, p.numel() // 64)][:64]
        found.update(name.encode() + some.double().cpu().numpy().tobytes())
    return found.hexdigest()[:16]
