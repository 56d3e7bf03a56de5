"""Features from a folder of another engine: looked up by the tokens of texts, and checked against the target.

The folder's `features.json` names the target and the layers of its files. Both are checked: the target computes the
first text, and every layer of the file must be nearest to the layer of its name, among all layers with and without the
final norm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..backends.torch import HFTarget
from ..checkpoints.files import json_of
from ..params import InputError
from . import hidden_states
from .data import Batch
from .features import TargetFeatures, learned, see

HEADER = "features.json"
SAME = ("hidden_size", "num_hidden_layers", "vocab_size")  # of the target's config
FAR = 0.5  # relative difference of the median token from which on a layer is not this target's
PROBE = 64  # tokens that the target computes for the check


@dataclass(frozen=True)
class Header:
    """The contents of a folder. Layer k is the input of layer k; the number of layers means the output of the last one,
    with the target's final norm if `normed`."""

    target: dict[str, int]
    layers: tuple[int, ...]
    normed: bool

    @classmethod
    def read(cls, folder: Path) -> Header:
        path = folder / HEADER
        if not path.is_file():
            raise InputError(f"{folder} has no {HEADER} that describes its files; write it as docs/training.md shows")
        header = json_of(path)
        try:
            target = {name: int(header["target"][name]) for name in SAME}
            layers, normed = tuple(int(k) for k in header["layers"]), header["normed"]
            assert isinstance(normed, bool)
            assert layers
            assert all(a < b for a, b in pairwise(layers))
        except (KeyError, TypeError, ValueError, AssertionError):
            raise InputError(
                f'{path} must have "target" ({", ".join(SAME)}), "layers" (ascending) and "normed" (true or false)'
            ) from None
        return cls(target, layers, normed)

    def check(self, target: HFTarget, taps: tuple[int, ...], where: Path) -> None:
        """Raise InputError unless it is of a target of these sizes, with the layers that the drafter reads."""
        for name in SAME:
            if (mine := int(getattr(target.config, name))) != self.target[name]:
                raise InputError(f"{where} is of a target with {name} {self.target[name]}, and this one has {mine}")
        if lacking := sorted({place(tap, target) for tap in taps} - set(self.layers)):
            raise InputError(
                f"{where} has the layers {_list(self.layers)}, and the drafter also reads {_list(lacking)}; "
                "write these too, or choose others by --option taps"
            )


def place(tap: int, target: HFTarget) -> int:
    """The layer number of a tap in other engines: -1, after the final norm, is the last one."""
    return int(target.config.num_hidden_layers) if tap == -1 else tap


class ForeignFeatures:
    """The features of a folder for the texts of `rows`; batches with other texts are computed by the target.

    Raises:
        InputError: the folder's header or its first text does not match the target, no text of the rows has features,
            or one of them is longer than a row.
    """

    def __init__(self, folder: Path, target: HFTarget, rows: Batch, taps: tuple[int, ...], say: Callable[[str], None]):
        self.header, self.taps = Header.read(folder), taps
        self.header.check(target, taps, folder / HEADER)
        self.files: dict[bytes, Path] = {}
        length = rows.tokens.shape[1]
        for path in hidden_states.paths(folder):
            tokens = hidden_states.tokens_of(path)
            if len(tokens) > length:
                raise InputError(f"{path} has {len(tokens)} tokens, more than a row; raise --length")
            self.files[key(tokens)] = path
        texts = [key(tokens) for r in range(len(rows.keys)) for _, tokens in _texts(rows, r)]
        known = [name for name in texts if name in self.files]
        if not known:
            raise InputError(
                f"{folder} has features of {len(self.files)} texts, and the data has none of these with the same tokens"
            )
        with torch.no_grad():
            self.norm = verify(target, self.header, self.files[known[0]])
        say(f"features in {folder}: {len(known)} of {len(texts)} texts; the target computes the others")

    def see(self, target: HFTarget, batch: Batch, half: bool) -> TargetFeatures:
        """The batch's features: from the folder if it has all texts, else computed by the target."""
        width, kind = int(target.config.hidden_size), learned(target.dtype)
        made = {tap: torch.zeros(*batch.tokens.shape, width, dtype=kind, device=target.device) for tap in self.taps}
        for r in range(len(batch.keys)):
            for here, tokens in _texts(batch, r):
                path = self.files.get(key(tokens))
                if path is None:
                    return see(target, batch, self.taps, half)
                layers = hidden_states.load(path, width).layers.to(target.device, kind)
                for tap in self.taps:
                    states = layers[:, self.header.layers.index(place(tap, target))]
                    made[tap][r, here] = self.normed(states) if tap == -1 else states
        return TargetFeatures(made)

    @torch.no_grad()
    def normed(self, states: Float[Tensor, "t h"]) -> Float[Tensor, "t h"]:
        """The last layer's output after the target's final norm."""
        if self.header.normed:
            return states
        return self.norm(states.to(next(self.norm.parameters()).dtype)).to(states.dtype)


def verify(target: HFTarget, header: Header, path: Path) -> nn.Module:
    """Compare a file's layers with the target's for the same tokens.

    Returns:
        The target's final norm.

    Raises:
        InputError: a layer is nearer to another one than to the one of its name, or far from all.
    """
    states = hidden_states.load(path, int(target.config.hidden_size))
    if states.layers.shape[1] != len(header.layers):
        raise InputError(f"{path} has {states.layers.shape[1]} layers, and {HEADER} names {len(header.layers)}")
    norm, mine = own(target, states.tokens[:PROBE])
    last = int(target.config.num_hidden_layers)
    for i, layer in enumerate(header.layers):
        theirs = states.layers[: len(states.tokens[:PROBE]), i].to(target.device, torch.float32)
        apart = {name: float(((theirs - x).norm(dim=-1) / x.norm(dim=-1)).median()) for name, x in mine.items()}
        nearest = min(apart, key=lambda name: apart[name])
        claimed = f"{layer}" if layer < last else f"{last} {'after' if header.normed else 'before'} the final norm"
        if apart[nearest] > FAR:
            raise InputError(f"{path} is not of this target: its layer {claimed} resembles none of the target's")
        if nearest != claimed:
            raise InputError(f"{path} has layer {nearest} where {HEADER} says layer {claimed}; correct the header")
    return norm


def own(target: HFTarget, tokens: Sequence[int]) -> tuple[nn.Module, dict[str, Float[Tensor, "t h"]]]:
    """The final norm, and the target's hidden states of a text, by the names in `verify`."""
    called: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, given: Any, out: Any) -> None:
        if given and isinstance(given[0], Tensor) and given[0].is_floating_point() and isinstance(out, Tensor):
            called.append((module, given[0]))

    decoder = target.model.get_decoder()
    hooks = [child.register_forward_hook(note) for child in decoder.children()]
    try:
        out = target.model(
            input_ids=torch.tensor([list(tokens)], device=target.device),
            use_cache=False, output_hidden_states=True, return_dict=True,
        )  # fmt: skip
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        raise InputError(f"{target.config.model_type} has no recognisable final norm; leave --features out")
    norm, before = called[-1]  # the decoder's last part
    last = int(target.config.num_hidden_layers)
    mine = {str(k): x[0].float() for k, x in enumerate(out.hidden_states[:last])}
    mine[f"{last} before the final norm"] = before[0].float()
    mine[f"{last} after the final norm"] = out.hidden_states[-1][0].float()
    return norm, mine


def key(tokens: Sequence[int]) -> bytes:
    """A hash of a text's tokens."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).digest()


def _texts(batch: Batch, row: int) -> list[tuple[Tensor, list[int]]]:
    """The texts of a row: positions and tokens."""
    numbers = batch.documents[row]
    places = [(numbers == number).nonzero()[:, 0] for number in range(int(numbers.max()) + 1)]
    return [(here, batch.tokens[row, here].tolist()) for here in places]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
