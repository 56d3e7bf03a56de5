"""Passes of Llama-shaped models in compiled code of our own (`native/`), over trees and prompts alike.

Each result depends on its own row and its own path alone, whatever is computed beside it, so logits have the same bits
with drafts and without. It is not trusted, it is proved: `validate.py` holds it to the stock model's own forward.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.protocols import TargetOutput
from ...params import InputError
from ..native.abi import PLAIN, Library, address, struct
from ..native.arrays import addresses, integers
from ..native.library import NAMES, library
from ..native.rope import Rope
from ..native.walk import Walk
from ..native.workspace import Workspace
from . import blocks, families
from .cache import TreeCache
from .kernel_blocks import Packed, reads
from .module_weights import Weights, gather, lacking, read
from .session import Pass, TreeSession, index
from .tensors import copied

FIRST = 1024  # positions whose turns are computed at first


class Forward:
    """The compiled pass over one model's weights."""

    def __init__(self, library: Library, target: Any, weights: Weights):
        self.code, self.call, self.target, self.weights = library, library.forward, target, weights
        self.kept = torch.float32 if target.dtype == torch.float32 else weights.dtype  # keys, values and features
        self.walk = Walk(library)
        self.lock = Lock()  # of the workspace
        self.workspace = Workspace(library, weights.model)
        self.turns = torch.zeros(0, 2, weights.model.head_dim)
        self.embeddings = embeddings(target, weights.dtype)
        self.known: tuple[Any, ...] = ()  # the slabs that the pointers are of
        self.pointers: Any = None

    @property
    def library_name(self) -> str:
        """Of the compiled code: other sources, flags or processors have other names."""
        return NAMES[self.code]

    @property
    def bytes(self) -> int:
        """What a pass reads of weights."""
        return sum(one.rows.nbytes for one in self.weights.kept if isinstance(one, Packed))

    def run(self, session: TreeSession, given: Pass) -> TargetOutput:
        """One pass over a tree or a chunk of prompts. Logits are of float32, and those of padding whatever memory held;
        features are of the target's precision, and zeros there."""
        model, cache, target = self.weights.model, session.cache, self.target
        (b, n), m = given.spots.shape, given.n - given.since
        if cache.fresh:
            cache.begin(b, (model.kv_heads, model.head_dim), self.kept)
        cache.reserve(given.view)
        assert given.embeds is not None or given.tokens is not None
        tokens = None if given.tokens is None or self.embeddings is None else given.tokens.contiguous()
        spots, lengths = given.spots.contiguous(), given.lengths.contiguous()
        sizes = None if given.sizes is None else given.sizes.contiguous()
        tree = None if given.chunk or given.ancestors is None else given.ancestors.contiguous()
        ask = index(m, spots.device) if given.asked is None else given.asked.contiguous()
        taps = integers(t if t >= 0 else model.layers + 1 + t for t in given.taps)
        room_for = torch.empty if sizes is None else torch.zeros  # a drafter's masks hide padding, but no NaN in it
        told = [room_for(b, m, model.hidden, dtype=self.kept) for _ in taps]
        features = addresses(states.data_ptr() for states in told)
        logits = torch.empty(b, len(ask), model.vocab)
        with self.lock:
            if tokens is None:
                given_states = target.embed(given.tokens) if given.embeds is None else given.embeds
                states: Any = copied(self.workspace, "states", given_states)
            else:
                states = self.workspace.of("states", b * m * model.hidden)
            turns = self._turns(given.bound + 1)
            pass_ = struct(
                "Pass", rows=b, nodes=m, first_node=given.since, total_nodes=n, capacity=cache.capacity,
                shared_tree=tree is None or len(tree) == 1, lengths=address(lengths), positions=address(spots),
                sizes=address(sizes), ancestors=address(tree), cache=self._pointers(cache),
                rope=address(turns), rope_positions=len(turns), hidden_states=address(states),
                tokens=address(tokens), embeddings=address(self.embeddings),
                embedding_rows=0 if self.embeddings is None else len(self.embeddings),
                taps=len(taps), tap_layers=taps, features=features,
                logit_count=len(ask), logit_nodes=address(ask), logits=address(logits),
                **self.workspace.of_pass(b * m, n),
            )  # fmt: skip
            self.workspace.use_threads(pass_, b * m)
            self.call(model, pass_)
        if self.kept != target.dtype:
            told = [states.to(target.dtype) for states in told]
        return TargetOutput(logits, dict(zip(given.taps, told, strict=True)))

    def _turns(self, positions: int) -> Tensor:
        """Cosines and sines [position, 2, width] of the rotary embedding, in float32."""
        if len(self.turns) < min(positions, self.target.context):
            most = min(self.target.context, max(FIRST, 1 << (positions - 1).bit_length()))
            self.turns = torch.from_numpy(rope_of(self.target.model).table(most))
        return self.turns

    def _pointers(self, cache: TreeCache) -> Any:
        """Addresses of every layer's keys and values; they change only where the cache grows."""
        now = tuple((slab.data_ptr(), slab.shape) for slab in cache.slabs)
        if now != self.known:
            found = [part.data_ptr() for layer in cache.tree_layers for part in layer.flat]
            self.known, self.pointers = now, addresses(found)
        return self.pointers


def rope_of(model: Any) -> Rope:
    """The rotary embedding of a stock model: that of native targets, wherever it is the same up to rounding."""
    rotary, config = model.model.rotary_emb, families.text_config(model)
    own = Rope(rotary.inv_freq.detach().float().cpu().numpy(), float(rotary.attention_scaling))
    try:
        same = Rope.of(config.rope_parameters, 2 * len(own.frequencies))
    except InputError:
        return own
    return (
        same if np.allclose(same.frequencies, own.frequencies, rtol=1e-6, atol=0) and same.scale == own.scale else own
    )


def embeddings(target: Any, dtype: torch.dtype) -> Tensor | None:
    """The table [v, h] of the target's embeddings, where it is that and nothing else, in this precision."""
    model = target.model if target.tensors else None
    table = None if model is None else model.get_input_embeddings()
    if type(table) is not torch.nn.Embedding or getattr(target, "scale", None) != 1.0:
        return None
    weight: Tensor = table.weight.detach()
    return weight if weight.dtype == dtype and weight.is_contiguous() else None


def weights_of(model: Any, move: bool = False, file: Path | None = None) -> Weights | None:
    """A stock model's weights for the compiled pass; None where it does not read them, or there is no such pass here.

    Args:
        model: a stock model, whose parameters stay where they are.
        move: move those that a pass reads to one stretch of memory first.
        file: the .gguf file that it was made from, whose blocks are read in place of the weights that they are.
    """
    config = families.text_config(model)
    code = None if lacking(model, config) else library(_name(model.dtype), _name(model.dtype))
    if code is None:
        return None
    lanes = reads(code)
    packed = blocks.read(model, file, code) if lanes else {}
    if move and lanes != 8:
        gather(model, packed)
    if lanes == 8:
        packed |= blocks.twelve(model, packed, code)
    return read(model, config, families.windows(config, families.of(model)), packed)


def forward_of(target: Any, weights: Weights) -> Forward | None:
    """The compiled pass over these weights, in the precision of the target; None where there is none, or where it does
    not read the blocks among them."""
    found = library(_name(weights.dtype), _name(target.dtype))
    blocked = any(isinstance(one, Packed) and one.kind != PLAIN for one in weights.kept)
    if found is None or (blocked and not reads(found)):
        return None
    return Forward(found, target, weights)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
