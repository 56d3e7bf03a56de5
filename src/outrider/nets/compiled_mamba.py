"""A Mamba-2 that drafts, in compiled code: what waits is read and the whole tree is grown in one call
(`native/mamba.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..backends.native.arrays import integers
from ..backends.native.blocks import for_drafts
from ..backends.native.parts import (
    DraftPart,
    MambaLayerPart,
    MambaPart,
    MatrixPart,
    ModelPart,
    PassPart,
    Room,
    SlabPart,
)
from ..backends.native.weights import STEP
from ..core.types import Budget, DraftTree, Rows
from .grown import LISTS, Places
from .wanted import KNOTS, SLOPES, Seconds, Shape, Wanted

WHOLE = 16  # what lies side by side is filled up to a multiple of this


@runtime_checkable
class States(Protocol):
    """States of n nodes of every layer and row."""

    conv: Float[Tensor, "l b n c w"]
    ssm: Float[Tensor, "l b n k p s"]


class CompiledMamba:
    """A network of `nets/mamba.py`. Weights are rounded to eight bits where `for_drafts` does so.

    Args:
        net: as it was made: its products are not replaced by faster ones.
    """

    def __init__(self, code: ctypes.CDLL, net: Any):
        self.draft, self.move = code.draft_mamba, code.step_mamba
        self.draft.restype, self.draft.argtypes = None, [ctypes.c_void_p] * 4
        self.move.restype, self.move.argtypes = None, [*[ctypes.c_void_p] * 3, ctypes.c_int64]
        self.kept: list[Any] = []
        self.code = code
        config, first = net.config, net.backbone.layers[0].mixer
        self.table, self.columns = self._hold(net.backbone.embeddings.weight), len(net.lm_head.weight)
        layers = (MambaLayerPart * len(net.backbone.layers))()
        for part, block in zip(layers, net.backbone.layers, strict=True):
            self._write(part, block.norm, block.mixer)
        shortest, longest = first.time_step_limit
        self.outputs = -(-first.in_proj.out_features // WHOLE) * WHOLE
        self.part = MambaPart(
            hidden=config.hidden_size, inner=first.intermediate_size, heads=first.num_heads, width=first.head_dim,
            states=first.ssm_state_size, groups=first.n_groups, kernel=first.conv_kernel_size, layers=len(layers),
            vocabulary=self.columns, outputs=self.outputs, normed=grouped(first),
            epsilon=net.backbone.norm_f.variance_epsilon, epsilon_out=first.norm.variance_epsilon,
            shortest=shortest, longest=longest, layer=layers, norm=self._small(net.backbone.norm_f.weight),
            head=self._matrix(net.lm_head.weight), embeddings=self.table.data_ptr(), entries=len(self.table),
        )  # fmt: skip
        shape = ModelPart(hidden=config.hidden_size, inner=first.intermediate_size)
        self.room, self.lock, self.seconds = Room(code, shape), Lock(), Seconds()
        self.places, self.asks, self.wants, self.together = Places(), PassPart(), DraftPart(), 0

    def grow(
        self,
        states: States,
        waits: Sequence[Sequence[int]],
        rows: Rows,
        budget: Budget,
        shape: Shape,
        names: Int[Tensor, " v"] | None,
    ) -> tuple[DraftTree, Int[Tensor, "b n"]]:
        """A tree for every row, and the slots of its nodes' states (-1: not fed).

        Args:
            states: with room for the nodes that are fed; slot 0 has what was before `waits`, and is moved behind them.
            waits: the tokens that are read first, one at least for each row, the root last.
            names: token ids of the head's columns.
        """
        b, fed = len(rows), (shape.depth - 1) * shape.width
        with self.lock:
            wanted = Wanted(rows, budget, shape, self.columns, self.seconds, self.room)
            self._fit(Places(b, max(1, fed), 1 + wanted.most * (1 + fed), shape.width))
            with torch.inference_mode(False):
                where = torch.empty(b * shape.nodes, dtype=torch.long)
            self.wants.names, self.wants.where = None if names is None else names.data_ptr(), where.data_ptr()
            for name, value in wanted.told.items():
                setattr(self.wants, name, value)
            self._read(states, waits)
            n = int(self.wants.kept)
            return wanted.tree(n), where[: b * n].view(b, n)

    def read(self, states: States, waits: Sequence[Sequence[int]]) -> Float[Tensor, "b v"]:
        """Logits behind what `grow` reads first."""
        with self.lock:
            self._fit(Places(len(waits)))
            self.wants.depth = 0
            self._read(states, waits)
            return self._logits(len(waits))

    def step(
        self, states: States, tokens: Int[Tensor, "b w"], above: Int[Tensor, "b w"], since: int
    ) -> Float[Tensor, "b w v"]:
        """Logits below w nodes of every row: `above` are the slots of their parents, their own are `since` and on."""
        (b, w), slots = tokens.shape, states.ssm.shape[2]
        with self.lock:
            self._fit(Places(b, width=w))
            base = slots * torch.arange(b)[:, None]
            given = tokens.contiguous(), (base + above).contiguous(), base + since + torch.arange(w)
            slab = self._slab(states)
            slab.token, slab.from_, slab.to = (part.data_ptr() for part in given)
            self.asks.rows = b
            self.room.hire(self.asks, self.together)
            self.move(*map(ctypes.byref, (self.part, slab, self.asks)), b * w)
            return self._logits(b * w).unflatten(0, (b, w))

    def _read(self, states: States, waits: Sequence[Sequence[int]]) -> None:
        counts, wants, slab = [len(row) for row in waits], self.wants, self._slab(states)
        assert min(counts) > 0, "every row's root waits"
        waiting, behind = integers(counts), integers(chain(*waits))
        wants.waits, wants.waiting, wants.behind = max(counts), ctypes.addressof(waiting), ctypes.addressof(behind)
        self.asks.rows = len(waits)
        self.room.hire(self.asks, self.together)
        self.draft(*map(ctypes.byref, (self.part, slab, self.asks, wants)))

    def _slab(self, states: States) -> SlabPart:
        nodes = self.room.cut("nodes", torch.long, **dict.fromkeys(("from_", "to", "token"), self.together))
        inputs, memory = states.conv.data_ptr(), states.ssm.data_ptr()
        return SlabPart(slots=states.ssm.shape[2], inputs=inputs, memory=memory, **nodes)

    def _logits(self, count: int) -> Float[Tensor, "n v"]:
        return self.room.held["logits"][: count * self.columns].view(count, self.columns).clone()

    def _fit(self, places: Places) -> None:
        """Make structures with room for this, unless there are; they are kept from call to call."""
        if (places := places.both(self.places)) == self.places:
            return
        self.places, room, b, hidden = places, self.room, places.rows, int(self.part.hidden)
        self.together, candidates, inner = b * places.width, b * places.candidates, int(self.part.inner)
        floats = {"states": hidden, "normed": hidden, "seen": inner, "made": self.outputs, "logits": self.columns}
        self.asks = PassPart(**{name: room.of(name, self.together * n).data_ptr() for name, n in floats.items()})
        self.wants = DraftPart(
            knots=KNOTS.data_ptr(), slopes=SLOPES.data_ptr(), candidates=places.candidates,
            place=room.of("place", b * places.fed, torch.long).data_ptr(),
            **room.cut("candidates", torch.long, **dict.fromkeys(LISTS, candidates)),
            value=room.of("value", candidates).data_ptr(),
        )  # fmt: skip

    def _write(self, part: MambaLayerPart, norm: Any, mixer: Any) -> None:
        weight = mixer.in_proj.weight
        filled = nn.functional.pad(weight.detach(), (0, 0, 0, -len(weight) % WHOLE))
        part.into, part.out = self._matrix(filled), self._matrix(mixer.out_proj.weight)
        conv = mixer.conv1d
        bias = torch.zeros(len(conv.weight)) if conv.bias is None else conv.bias
        part.norm, part.norm_out = self._small(norm.weight), self._small(mixer.norm.weight)
        part.taps, part.bias = self._small(conv.weight[:, 0]), self._small(bias)
        part.bias_time, part.skip = self._small(mixer.dt_bias), self._small(mixer.D)
        part.rate = self._small(-mixer.A_log.detach().float().exp())

    def _hold(self, tensor: Tensor) -> Tensor:
        self.kept.append(tensor.detach().contiguous())
        held: Tensor = self.kept[-1]
        return held

    def _matrix(self, weight: Tensor) -> MatrixPart:
        self.kept.append(for_drafts(weight, self.code))
        part: MatrixPart = self.kept[-1].part
        return part

    def _small(self, numbers: Tensor) -> int:
        return self._hold(numbers.detach().float().clone()).data_ptr()


def grouped(mixer: Any) -> int:
    """Numbers that the norm before a layer's last product takes together; older versions of transformers take all."""
    return int(getattr(mixer.norm, "group_size", mixer.intermediate_size))


def compiled_mamba(code: ctypes.CDLL, net: Any) -> CompiledMamba | None:
    """The network in compiled code; None where the code does not know such a network. `code`: of `code_for`."""
    config, mixer, weight = net.config, net.backbone.layers[0].mixer, net.lm_head.weight
    if config.model_type != "mamba2" or weight.device.type != "cpu" or net.lm_head.bias is not None:
        return None
    if mixer.in_proj.bias is not None or mixer.out_proj.bias is not None or mixer.conv_kernel_size < 2:
        return None
    if any(size % STEP for size in (config.hidden_size, mixer.intermediate_size)):
        return None
    if any(size % WHOLE for size in (mixer.conv_dim, mixer.ssm_state_size, grouped(mixer))):
        return None
    return CompiledMamba(code, net)
