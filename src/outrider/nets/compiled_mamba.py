"""A Mamba-2 that drafts, in compiled code: what waits is read and the whole tree is grown in one call
(`native/mamba.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..backends.native.abi import Library, Pointer, Struct, address, ffi, struct
from ..backends.native.arrays import integers
from ..backends.native.blocks import for_drafts
from ..backends.native.weights import STEP
from ..backends.native.workspace import Workspace
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

    def __init__(self, code: Library, net: Any):
        self.kept: list[Any] = []
        self.code = code
        config, first = net.config, net.backbone.layers[0].mixer
        self.table, self.columns = self._hold(net.backbone.embeddings.weight), len(net.lm_head.weight)
        layers = ffi.new("MambaLayer[]", len(net.backbone.layers))
        for part, block in zip(layers, net.backbone.layers, strict=True):
            self._write(part, block.norm, block.mixer)
        shortest, longest = first.time_step_limit
        self.outputs = -(-first.in_proj.out_features // WHOLE) * WHOLE
        self.layers = layers
        self.model = struct(
            "Mamba", hidden=config.hidden_size, intermediate=first.intermediate_size, heads=first.num_heads,
            head_dim=first.head_dim, state_size=first.ssm_state_size, groups=first.n_groups,
            conv_kernel=first.conv_kernel_size, layers=len(layers), vocab=self.columns, in_proj_rows=self.outputs,
            norm_group=grouped(first), eps=net.backbone.norm_f.variance_epsilon,
            gated_eps=first.norm.variance_epsilon, dt_min=shortest, dt_max=longest, layer=layers,
            norm=self._small(net.backbone.norm_f.weight), head=self._matrix(net.lm_head.weight),
            embeddings=address(self.table), embedding_rows=len(self.table),
        )  # fmt: skip
        shape = struct("Model", hidden=config.hidden_size, intermediate=first.intermediate_size)
        self.workspace, self.lock, self.seconds = Workspace(code, shape), Lock(), Seconds()
        self.places, self.pass_, self.draft, self.together = Places(), struct("Pass"), struct("Draft"), 0

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
            wanted = Wanted(rows, budget, shape, self.columns, self.seconds, self.workspace)
            self._fit(Places(b, max(1, fed), 1 + wanted.most * (1 + fed), shape.width))
            with torch.inference_mode(False):
                where = torch.empty(b * shape.nodes, dtype=torch.long)
            self.draft.token_ids, self.draft.fed_index = address(names), address(where)
            for name, value in wanted.told.items():
                setattr(self.draft, name, value)
            self._read(states, waits)
            n = self.draft.widest
            return wanted.tree(n), where[: b * n].view(b, n)

    def read(self, states: States, waits: Sequence[Sequence[int]]) -> Float[Tensor, "b v"]:
        """Logits behind what `grow` reads first."""
        with self.lock:
            self._fit(Places(len(waits)))
            self.draft.depth = 0
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
            slots_of = self._states(states)
            slots_of.token, slots_of.source, slots_of.target = map(address, given)
            self.pass_.rows = b
            self.workspace.use_threads(self.pass_, self.together)
            self.code.step_mamba(self.model, slots_of, self.pass_, b * w)
            return self._logits(b * w).unflatten(0, (b, w))

    def _read(self, states: States, waits: Sequence[Sequence[int]]) -> None:
        counts, draft = [len(row) for row in waits], self.draft
        assert min(counts) > 0, "every row's root waits"
        waiting, behind = integers(counts), integers(chain(*waits))
        draft.most_pending, draft.pending, draft.next_tokens = max(counts), waiting, behind
        self.pass_.rows = len(waits)
        self.workspace.use_threads(self.pass_, self.together)
        self.code.draft_mamba(self.model, self._states(states), self.pass_, draft)

    def _states(self, states: States) -> Struct:
        nodes = self.workspace.split("nodes", torch.long, **dict.fromkeys(("source", "target", "token"), self.together))
        conv, ssm = address(states.conv), address(states.ssm)
        return struct("MambaStates", slots=states.ssm.shape[2], conv=conv, ssm=ssm, **nodes)

    def _logits(self, count: int) -> Float[Tensor, "n v"]:
        return self.workspace.buffers["logits"][: count * self.columns].view(count, self.columns).clone()

    def _fit(self, places: Places) -> None:
        """Make structures with room for this, unless there are; they are kept from call to call."""
        if (places := places.both(self.places)) == self.places:
            return
        self.places, room, b, hidden = places, self.workspace, places.rows, self.model.hidden
        self.together, candidates, inner = b * places.width, b * places.candidates, self.model.intermediate
        sizes = {
            "hidden_states": hidden, "normed": hidden, "attention": inner, "qkv": self.outputs, "logits": self.columns,
        }  # fmt: skip
        self.pass_ = struct("Pass", **{name: address(room.of(name, self.together * n)) for name, n in sizes.items()})
        self.draft = struct(
            "Draft", knots=address(KNOTS), slopes=address(SLOPES), max_candidates=places.candidates,
            fed_candidate=address(room.of("fed", b * places.fed, torch.long)),
            **room.split("candidates", torch.long, **dict.fromkeys(LISTS, candidates)),
            value=address(room.of("value", candidates)),
        )  # fmt: skip

    def _write(self, part: Struct, norm: Any, mixer: Any) -> None:
        weight = mixer.in_proj.weight
        filled = nn.functional.pad(weight.detach(), (0, 0, 0, -len(weight) % WHOLE))
        part.in_proj, part.out_proj = self._matrix(filled), self._matrix(mixer.out_proj.weight)
        conv = mixer.conv1d
        bias = torch.zeros(len(conv.weight)) if conv.bias is None else conv.bias
        part.norm, part.gated_norm = self._small(norm.weight), self._small(mixer.norm.weight)
        part.conv_weight, part.conv_bias = self._small(conv.weight[:, 0]), self._small(bias)
        part.dt_bias, part.d = self._small(mixer.dt_bias), self._small(mixer.D)
        part.a = self._small(-mixer.A_log.detach().float().exp())

    def _hold(self, tensor: Tensor) -> Tensor:
        self.kept.append(tensor.detach().contiguous())
        held: Tensor = self.kept[-1]
        return held

    def _matrix(self, weight: Tensor) -> Struct:
        self.kept.append(for_drafts(weight, self.code))
        return self.kept[-1].struct

    def _small(self, values: Tensor) -> Pointer:
        return address(self._hold(values.detach().float().clone()))


def grouped(mixer: Any) -> int:
    """Numbers that the norm before a layer's last product takes together; older versions of transformers take all."""
    return int(getattr(mixer.norm, "group_size", mixer.intermediate_size))


def compiled_mamba(code: Library, net: Any) -> CompiledMamba | None:
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
