"""Captured forwards: the kernels of a verification pass, recorded once and replayed without the model's Python.

A small model on a CPU spends half of a pass walking through Python modules. Recording it (`torch.jit.trace`) takes
about a second, one recording serves trees of every size, and the kernels and their order stay the model's own: the
logits are those of the stock forward, in most families bit for bit. A recording is not trusted, it is proved: the first
passes it serves, at several shapes, are run both ways, and where they differ by more than rounding it is dropped for
good.
(`torch.compile` needs some 25 seconds for every tree size and gains no more on the demo model: docs/log.md.)
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...core.protocols import TargetOutput
from ...params import InputError
from .aligned import carry, plan_of
from .attention import OPEN
from .cache import TreeCache
from .exact import Exactness, start
from .recorded import near, replay
from .session import Pass, TreeSession

PATIENCE = 128  # passes before the first kind is recorded, in models that were loaded by name
SOON = 2  # passes of another kind that are not recorded after that
PROOFS = 4  # passes of different shape that a recording must equal the stock forward in
ROUNDINGS = 64  # units in the last place that it may be off by, where bits do not count
logger = logging.getLogger(__name__)

# One token a row, one row, level rows, open masks, embeddings given; where bits count, what else sets its course.
Kind = tuple[bool, bool, bool, tuple[bool, ...], bool, tuple[Any, ...]]
Forward = Callable[[TreeSession, Pass], TargetOutput]


@runtime_checkable
class Recordable(Protocol):
    """What a recording needs to know of a target."""

    model: Any
    family: Any
    exactness: Exactness | None

    def inputs(self, given: Pass) -> dict[str, Any]: ...
    def call(
        self, inputs: dict[str, Any], cache: Any, taps: tuple[int, ...], rows: int
    ) -> tuple[Tensor, list[Tensor]]: ...


@dataclass
class Recording:
    """A recorded pass, the layers whose hidden states it gives, and the shapes for which it was proved."""

    made: Any
    taps: tuple[int, ...]
    proofs: set[tuple[int, ...]] = field(default_factory=set)


class Graphs:
    """The recordings of one target: one for each kind of pass, made when there have been more than `patience` passes.

    A recording wins its own time back in one or two hundred passes, which a short text does not have. `closed`: no more
    are made, and passes of another kind take the stock forward. Every recording gives the hidden states of all layers
    that were ever asked for, so that texts with and without drafts share it.
    """

    def __init__(self, target: Recordable, patience: int = 0):
        if target.family.binding is not None:
            kind = target.model.config.model_type
            raise InputError(f"{kind} reads positions off its cache, so it cannot be recorded; leave compile out")
        if not hasattr(torch.jit, "trace"):
            raise InputError(f"torch {torch.__version__} cannot record a forward pass; leave compile out")
        self.target, self.patience, self.closed = target, patience, False
        self.taps: tuple[int, ...] = (-1,)
        self.seen: Counter[tuple[Any, ...]] = Counter()
        self.made: dict[Kind, Recording | None] = {}

    def run(self, session: TreeSession, given: Pass, stock: Forward) -> TargetOutput:
        """One pass over a tree: replayed, or by the stock forward where recording it failed."""
        one, alone = given.n - given.since == 1, len(given.lengths) == 1
        if self.patience:
            short = self.target.exactness is not None and start(given.bound) == 0  # of which a text has few
            habit = one, alone, given.level, given.embeds is not None, short
            self.seen[habit] += 1
            # Were each kind to wait for itself, plain passes would be recorded first, and drafts never pay beside them.
            wait = SOON if self.seen.total() > self.patience and not short else self.patience
            if self.seen[habit] <= min(wait, self.patience):
                return stock(session, given)
        inputs = self.target.inputs(given)
        open_ = tuple(OPEN in mask.__dict__ for mask in _masks(inputs))
        if any(plan is not None and plan.rare for plan in map(plan_of, _masks(inputs))):
            return stock(session, given)
        course = self._course(given, inputs)
        kind = (one, alone, given.level, open_, given.embeds is not None, course)
        known = self.made.get(kind)
        if kind not in self.made or (known is not None and not {*given.taps} <= {*known.taps}):
            if self.closed:
                return stock(session, given)
            self.taps = tuple(sorted({*self.taps, *given.taps}))
            self.made[kind] = self._record(session.cache, given, inputs, kind)
        recording = self.made[kind]
        if recording is None:
            return stock(session, given)
        try:
            logits, *features = replay(recording.made, *_tensors(inputs, given, session.cache))
        except RuntimeError as error:  # a shape that a constant of the recording does not fit
            logger.warning("a recorded pass failed (%s); the model's own is used from now on", str(error)[-200:])
            self.made[kind] = None
            return stock(session, given)
        output = TargetOutput(logits, dict(zip(recording.taps, features, strict=True)))
        shape = (*logits.shape[:2], given.view)
        if len(recording.proofs) < PROOFS and shape not in recording.proofs:
            true = stock(session, replace(given, taps=recording.taps))
            if not _same(output, true, 0 if self.target.exactness else ROUNDINGS):
                logger.warning("a recorded pass differs from the model's own; the model's own is used from now on")
                self.made[kind] = None
                return true
            recording.proofs.add(shape)
        return TargetOutput(logits, {tap: output.features[tap] for tap in given.taps})

    def _course(self, given: Pass, inputs: dict[str, Any]) -> tuple[Any, ...]:
        """What a pass that sums by position does differently from another one."""
        exactness = self.target.exactness
        if exactness is None:
            return ()
        plans = [plan_of(mask) for mask in _masks(inputs)]
        parts = [
            (p.tail.dim(), *(t is not None and t.numel() > 0 for t in p.tensors())) for p in plans if p is not None
        ]
        rows = given.places.numel()
        blocks = {most: -(-rows // most) for most in exactness.blocks.values() if rows > most}
        config = self.target.model.config.get_text_config()
        heads = int(config.num_attention_heads)
        folded = (given.n - given.since) * (heads // int(getattr(config, "num_key_value_heads", None) or heads))
        return *parts, *sorted(blocks.items()), folded if folded < exactness.queries and not exactness.multiple else 0

    def _record(self, cache: TreeCache, given: Pass, inputs: dict[str, Any], kind: Kind) -> Recording | None:
        tensors = _tensors(inputs, given, cache)
        body = _Body(self.target, inputs, given, kind, self.taps).eval()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tracing is deprecated in favour of torch.compile (see above)
                made = torch.jit.trace(body, tensors, check_trace=False)
        except (RuntimeError, TypeError, ValueError) as error:
            logger.warning("this model's pass cannot be recorded (%s); its own forward is used", str(error)[:200])
            return None
        return Recording(made, self.taps)


class _Body(torch.nn.Module):
    """The pass as a function of tensors alone."""

    def __init__(self, target: Recordable, inputs: dict[str, Any], given: Pass, kind: Kind, taps: tuple[int, ...]):
        super().__init__()
        self.model = target.model  # so that its weights become constants of the recording
        self.target, self.kind, self.taps = target, kind, taps
        masks = inputs["attention_mask"]
        self.types = tuple(masks) if isinstance(masks, dict) else None
        self.places = "position_ids" in inputs
        self.rows = given.places.numel()
        self.plans = [plan_of(mask) for mask in _masks(inputs)]

    def forward(
        self, read: Tensor, places: Tensor, slots: Tensor, masks: list[Tensor], flat: list[Tensor], wide: list[Tensor]
    ) -> tuple[Tensor, ...]:
        _, _, level, open_, embedded, course = self.kind
        view = None if course else masks[0].shape[-1]
        if course:
            given = iter(masks)
            masks = [carry(plan.like(given)) for plan in self.plans if plan is not None]
        for mask, hides_nothing in zip(masks, open_, strict=True):
            if hides_nothing:
                mask.__dict__[OPEN] = True
        layers: list[Any] = [
            _Layer(flat[2 * i : 2 * i + 2], wide[2 * i : 2 * i + 2], slots, view, level) for i in range(len(flat) // 2)
        ]
        inputs: dict[str, Any] = {"inputs_embeds" if embedded else "input_ids": read}
        if self.places:
            inputs["position_ids"] = places
        inputs["attention_mask"] = masks[0] if self.types is None else dict(zip(self.types, masks, strict=True))
        logits, features = self.target.call(inputs, Cache(layers=layers), self.taps, self.rows)
        return (logits, *features)


class _Layer(CacheLayerMixin):
    """A layer of the tree cache whose slots, view and storage are inputs of the recording."""

    is_compileable = False
    is_sliding = False

    def __init__(self, flat: Sequence[Tensor], wide: Sequence[Tensor], slots: Tensor, view: Any, level: bool):
        super().__init__()
        self.flat, self.wide, self.slots, self.view, self.level = flat, wide, slots, view, level
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the storage is given")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for flat, wide, states in zip(self.flat, self.wide, (key_states, value_states), strict=True):
            if self.level:
                wide.index_copy_(2, self.slots, states)
            else:
                flat.index_copy_(0, self.slots, states.transpose(1, 2).reshape(-1, flat.shape[1]))
        keys, values = self.wide
        return (keys, values) if self.view is None else (keys.narrow(2, 0, self.view), values.narrow(2, 0, self.view))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.wide[0].shape[2] if self.view is None else self.view), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return int(self.wide[0].shape[2])


def _masks(inputs: dict[str, Any]) -> list[Tensor]:
    masks = inputs["attention_mask"]
    return list(masks.values()) if isinstance(masks, dict) else [masks]


def _tensors(inputs: dict[str, Any], given: Pass, cache: TreeCache) -> tuple[Any, ...]:
    read = inputs["inputs_embeds"] if given.embeds is not None else inputs["input_ids"]
    slots = given.stretch() if given.level else given.slots(cache.capacity)
    flat = [part for layer in cache.tree_layers for part in layer.flat]
    wide = [part for layer in cache.tree_layers for part in layer.wide]
    masks = _masks(inputs)
    plans = [plan_of(mask) for mask in masks]
    if any(plans):
        masks = [t for plan in plans if plan is not None for t in plan.tensors() if t is not None]
    return read, inputs.get("position_ids", given.places), slots, masks, flat, wide


def _same(a: TargetOutput, b: TargetOutput, roundings: int) -> bool:
    """Equal up to so many roundings: a folded constant may round the last bit differently."""
    pairs = (a.logits, b.logits), *((a.features[tap], b.features[tap]) for tap in b.features)
    return all(near(x, y, roundings) for x, y in pairs)
