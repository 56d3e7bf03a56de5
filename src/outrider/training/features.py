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

TOGETHER = 4  # documents per native pass
TARGET = "target.json"  # in a cache's folder: whose features these are


@dataclass(frozen=True)
class TargetFeatures:
    """Features by tap, as `TargetOutput` has them: -1 is after the final norm, k the input of layer k."""

    features: dict[int, Float[Tensor, "b n h"]]
    read: int = 0  # tokens that the target computed for them


def mask_of(batch: Batch, dtype: torch.dtype, window: int | None = None) -> Float[Tensor, "b 1 n n"]:
    """An additive mask: a token attends to its own document up to itself. Padding attends to itself, to avoid NaN."""
    return additive(visible(batch, window), dtype)[:, None]


def visible(batch: Batch, window: int | None = None) -> Bool[Tensor, "b n n"]:
    """The attention mask [b, n, n]: earlier positions of the same document, at most `window` of them."""
    d, n = batch.documents, batch.documents.shape[1]
    seen = (d[:, :, None] == d[:, None, :]) & torch.ones(n, n, dtype=torch.bool, device=d.device).tril()
    if window is not None:
        seen = seen & ((batch.positions[:, :, None] - batch.positions[:, None, :]) < window)
    return seen | torch.eye(n, dtype=torch.bool, device=d.device)


def see(target: Target, batch: Batch, taps: tuple[int, ...], half: bool = False) -> TargetFeatures:
    """The target's hidden states by tap, [b, n, h]: one pass without gradients, documents separate.

    Args:
        target: frozen.
        batch: packed rows.
        taps: -1 is after the final norm, k the input of layer k; none gives no features, without a pass.
        half: compute a stock model in bfloat16; native passes have their own precision.

    Returns:
        Features in the precision of training, float32 at least.
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
    """The precision of training for a target of this one: at least float32, or small updates are lost."""
    return torch.promote_types(kind, torch.float32)


def compiled(target: Target, batch: Batch, taps: tuple[int, ...]) -> dict[int, Float[Tensor, "b n h"]]:
    """The same by native passes, with every document as a prompt; zeros for padding.

    TOGETHER documents at a time, of similar length, since buffers are sized for the longest.
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
    """Row and positions of every document."""
    return [
        (row, torch.nonzero(batch.documents[row] == number)[:, 0])
        for row in range(len(batch.keys))
        for number in batch.documents[row].unique().tolist()
        if number >= 0
    ]


def hidden(target: HFTarget, batch: Batch, half: bool = False) -> Any:
    """All hidden states of a batch, with gradients if enabled."""
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
    # Without our kernels: a plain batch has no tree, and the model's SDPA takes a mask.
    with cast, attention.switched(target.config, "sdpa" if family.attention != "eager" else None, target.experts):
        out = model(**inputs, use_cache=False, output_hidden_states=True, return_dict=True)
    return out.hidden_states


class FeatureCache:
    """A cache of features on disk, a file per document, for later epochs and other trainings with the same taps.

    Args:
        folder: created if missing.
        taps: the hidden states to keep.
        half: whether a stock model computes in bfloat16.
        of: the target's fingerprint.
        limit: maximum bytes of the folder; features beyond it are computed each time. None: a quarter of the free
            disk space.
        sharing: processes that share this limit, of which each may add its part.

    Raises:
        InputError: the folder holds the features of another target, or cannot be written.
    """

    def __init__(
        self, folder: Path, taps: tuple[int, ...], half: bool, of: str, limit: int | None = None, sharing: int = 1
    ):
        self.folder, self.taps, self.half = folder, taps, half
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        mark = folder / TARGET
        if mark.exists() and json.loads(mark.read_text(encoding="utf-8")) != {"target": of}:
            raise InputError(
                f"{folder} holds the features of another target or precision; give another folder, or remove it"
            )
        files.write(mark, json.dumps({"target": of}))
        # Only complete files: temporary ones of another process may vanish meanwhile.
        used = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
        self.free = (shutil.disk_usage(folder).free // 4 if limit is None else limit - used) // sharing

    def see(self, target: Target, batch: Batch) -> TargetFeatures:
        """The batch's features: loaded from disk if cached, else computed and cached."""
        batch = batch.to("cpu")
        places = [(row, at, self._path(batch.tokens[row, at])) for row, at in documents_of(batch)]
        here = [path.exists() for _, _, path in places]
        if isinstance(target, HFTarget) and target.processes > 1:  # all of them must compute it, or none
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
        if raw.nbytes > self.free:
            return
        self.free -= raw.nbytes
        try:
            files.write(path, raw.tofile)
        except InputError:  # others have filled the disk: the rest is computed each time
            self.free = 0


def digest(rows: Batch) -> str:
    """A hash of the rows, 16 hexadecimal digits."""
    parts = rows.tokens, rows.documents, rows.learn
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]


def fingerprint(target: Target, half: bool = False) -> str:
    """A fingerprint of the target: samples of every weight, and its precision."""
    if not isinstance(target, HFTarget):
        return f"{target.mark}-{target.arithmetic if target.integers else target.precision}"
    precision = "" if target.precision == "float32" else target.precision
    digest = hashlib.sha256(f"{'half' if half else ''}{precision}".encode())
    for name, p in target.model.named_parameters():
        full: Any = p.full_tensor() if isinstance(p, DTensor) else p
        some = full.detach().flatten()[:: max(1, p.numel() // 64)][:64]
        digest.update(name.encode() + some.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
