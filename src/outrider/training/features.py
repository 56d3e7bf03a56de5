"""The frozen target's hidden states for a batch, computed in the step; later epochs read them from a cache on disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import files
from ..backends.torch import HFTarget, attention, spread
from ..backends.torch.padding import additive
from ..backends.torch.tensors import dtype_of, tensor
from ..core.protocols import Target
from ..params import InputError
from .data import Batch

TOGETHER = 4  # documents that a compiled pass reads at once


@dataclass(frozen=True)
class TargetFeatures:
    """Features by tap, as `TargetOutput` has them: -1 is after the final norm, k the input of layer k."""

    features: dict[int, Float[Tensor, "b n h"]]
    read: int = 0  # tokens that the target has read for them now


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
    kind, read = learned(dtype_of(target)), int((batch.documents >= 0).sum())
    if not isinstance(target, HFTarget):
        return TargetFeatures({tap: x.to(kind) for tap, x in compiled(target, batch, taps).items()}, read)
    with torch.no_grad():
        states = hidden(target, batch, half)
        return TargetFeatures({tap: states[tap].to(kind) for tap in taps}, read)


def learned(kind: torch.dtype) -> torch.dtype:
    """The precision that a drafter learns in, for a target of this one: never half, or small updates are lost."""
    return torch.promote_types(kind, torch.float32)


def compiled(target: Target, batch: Batch, taps: tuple[int, ...]) -> dict[int, Float[Tensor, "b n h"]]:
    """The same by passes in compiled code, which read every document as a prompt of its own; zeros for padding.

    TOGETHER documents at a time, those of a length side by side: room is made for the longest of them.
    """
    states_by_tap = {tap: torch.zeros(*batch.tokens.shape, target.hidden, dtype=dtype_of(target)) for tap in taps}
    places = documents_of(batch)
    places.sort(key=lambda place: len(place[1]))
    for group in (places[i : i + TOGETHER] for i in range(0, len(places), TOGETHER)):
        session, read = target.open(batch.tokens.shape[1]), 0
        for prefill in session.prefill([batch.tokens[row, at].tolist() for row, at in group], taps):
            for tap, states in prefill.output.features.items():
                for (row, at), of in zip(group, tensor(states), strict=True):
                    here = at[read : read + of.shape[0]]
                    states_by_tap[tap][row, here] = of[: len(here)]
            read += prefill.tree.tokens.shape[1]
    return states_by_tap


def documents_of(batch: Batch) -> list[tuple[int, Int[Tensor, " n"]]]:
    """Row and places of every document."""
    return [
        (row, torch.nonzero(batch.documents[row] == number)[:, 0])
        for row in range(len(batch.keys))
        for number in batch.documents[row].unique().tolist()
        if number >= 0
    ]


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
    """Features of documents on disk, a file each, for later epochs and for other trainings that read the same taps.

    Args:
        folder: made if it is not there.
        taps: the hidden states that are kept.
        half: does a stock model compute in bfloat16?
        of: the target's fingerprint.
        limit: bytes that the folder may hold; what comes later is computed anew each time. None: a quarter of what is
            free on the disk.

    Raises:
        InputError: the folder holds the features of another target, or cannot be written.
    """

    def __init__(self, folder: Path, taps: tuple[int, ...], half: bool, of: str, limit: int | None = None):
        self.folder, self.taps, self.half = folder, taps, half
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        mark = folder / "target.json"
        if mark.exists() and json.loads(mark.read_text(encoding="utf-8")) != {"target": of}:
            raise InputError(
                f"{folder} holds the features of another target or precision; give another folder, or remove it"
            )
        files.write(mark, json.dumps({"target": of}))
        # Finished files alone: another process's unfinished ones may vanish meanwhile.
        used = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
        self.room = (shutil.disk_usage(folder).free // 4 + used if limit is None else limit) - used

    def see(self, target: Target, batch: Batch) -> TargetFeatures:
        """The batch's features: those of documents that are here from disk, others computed and kept."""
        batch = batch.to("cpu")
        places = [(row, at, self._path(batch.tokens[row, at])) for row, at in documents_of(batch)]
        here = [path.exists() for _, _, path in places]
        if isinstance(target, HFTarget) and target.processes > 1:  # they see it together or not at all
            here = [spread.agreed(target.model, all(here))] * len(here)
        lacking = [place for place, known in zip(places, here, strict=True) if not known]
        kind = torch.bfloat16 if self.half and isinstance(target, HFTarget) else dtype_of(target)
        every = torch.zeros(len(self.taps), *batch.tokens.shape, target.hidden, dtype=kind)
        read = 0
        if lacking:
            part = batch.only([(row, at) for row, at, _ in lacking])
            seen = see(target, part.to(target.device), self.taps, self.half)
            states, read = torch.stack([seen.features[tap] for tap in self.taps]).to("cpu", kind), seen.read
            for row, at, path in lacking:
                every[:, row, at] = states[:, row, at]
                self._keep(path, every[:, row, at])
        for row, at, path in (place for place, known in zip(places, here, strict=True) if known):
            raw = np.fromfile(path, np.uint8).reshape(len(self.taps), len(at), -1)
            every[:, row, at] = torch.from_numpy(raw).view(kind)
        taken = every.to(target.device, learned(dtype_of(target)))
        return TargetFeatures(dict(zip(self.taps, taken, strict=True)), read)

    def _path(self, tokens: Int[Tensor, " n"]) -> Path:
        name = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:24]
        return self.folder / f"{name}.{'_'.join(map(str, self.taps))}"

    def _keep(self, path: Path, states: Float[Tensor, "taps n h"]) -> None:
        raw = states.contiguous().view(torch.uint8).numpy()
        if raw.nbytes <= self.room:
            self.room -= raw.nbytes
            files.write(path, raw.tofile)


def digest(rows: Batch) -> str:
    """Which rows these are, as 16 hexadecimal digits."""
    return hashlib.sha256(rows.tokens.numpy().tobytes() + rows.documents.numpy().tobytes()).hexdigest()[:16]


def fingerprint(target: Target, half: bool = False) -> str:
    """Which target this is, by some numbers of every weight, and in which precision it is run."""
    if not isinstance(target, HFTarget):
        return f"{target.mark}-{target.precision}"
    digest = hashlib.sha256(b"half" if half else b"")
    for name, p in target.model.named_parameters():
        whole: Any = p.full_tensor() if isinstance(p, DTensor) else p
        some = whole.detach().flatten()[:: max(1, p.numel() // 64)][:64]
        digest.update(name.encode() + some.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
