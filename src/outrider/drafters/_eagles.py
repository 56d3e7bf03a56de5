"""EAGLE and EAGLE-3 in compiled code, from a folder or from a network in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.native.draft_vocab import ids_of
from ..backends.native.drafts import Weights
from ..backends.native.eagle import EagleParts, eagle
from ..backends.native.weights import Table
from ..core.protocols import Drafter, Target
from ..nets.configs import INPUTS, Eagle3Config, EagleConfig
from ._compiled import CompiledEagle
from ._growth import STATIC, Growth
from ._trained import Method, Shapes, in_tensors, layer_shapes

FLAGS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "parallel"  # that compiled code lacks


@dataclass(frozen=True)
class Options:
    """The fields of `Growth` that a SPEC may set; `scale` 0: the folder's."""

    tree: str = "dynamic"
    shape: tuple[int, ...] = ()
    depth: int = 8
    width: int = 0
    top_k: int = 10
    nodes: int = 60
    scale: float = 0.0
    value: bool = True
    rerank: bool = True
    replacement: bool = False

    def growth(self, scale: float) -> Growth:
        """With the scale of a folder. Without a shape, the static tree is EAGLE-1's."""
        return Growth(
            self.tree, self.shape, () if self.shape else STATIC, self.depth, self.width, self.top_k, self.nodes,
            self.scale or scale, self.value, self.rerank, self.replacement,
        )  # fmt: skip


def _eagle_shapes(config: EagleConfig) -> Shapes | None:
    h = config.layer.hidden
    trimmed: Shapes = {"d2t": (config.draft_vocab,)} if config.draft_vocab else {}
    bias: Shapes = {"fc.bias": (h,)} if config.bias else {}
    own: Shapes = {"fc.weight": (h, 2 * h), **bias, **layer_shapes(config.layer, "layers.0."), **trimmed}
    return own if config.inputs == INPUTS[0] else None


def _eagle3_shapes(config: Eagle3Config) -> Shapes | None:
    h = config.layer.hidden
    norms: Shapes = {f"midlayer.{name}.weight": (h,) for name in ("hidden_norm", "input_layernorm")}
    table: Shapes = {"embed_tokens.weight": (config.vocab, h)} if config.own_embedding else {}
    own: Shapes = {
        "fc.weight": (h, 3 * config.target_hidden), **layer_shapes(config.layer, "midlayer."), **norms,
        "norm.weight": (h,), "lm_head.weight": (config.draft_vocab, h), "d2t": (config.draft_vocab,),
        "t2d": (config.vocab,), **table,
    }  # fmt: skip
    return None if any(getattr(config, name) for name in FLAGS) or config.layers > 1 else own


METHODS: dict[str, Method[Any]] = {
    "eagle": Method("eagle", EagleConfig, _eagle_shapes),
    "eagle3": Method("eagle3", Eagle3Config, _eagle3_shapes, lambda config: config.taps),
}


def compiled(config: EagleConfig | Eagle3Config, weights: Weights, target: Target, growth: Growth) -> Drafter | None:
    """The drafter of a network in compiled code; None where that has no such network or target."""
    three = isinstance(config, Eagle3Config)
    method = METHODS["eagle3" if three else "eagle"]
    code, ids = method.code(config, target), None
    if code is None:
        return None
    if "d2t" in weights:
        ids = ids_of(weights["d2t"], config.vocab)
        ids = None if np.array_equal(ids, np.arange(config.vocab)) else ids
    head = weights["lm_head.weight"] if three else target.head_rows(ids)
    own = weights.get("embed_tokens.weight")
    table = target.embeddings if own is None else Table.of(own, code)
    if head is None or table is None or table.shape[1] != config.layer.hidden:
        return None
    layer, cap = ("midlayer.", 0.0) if three else ("layers.0.", target.logit_cap)
    made = eagle(code, EagleParts(weights, config.layer, layer, three, head, table, ids, cap))
    return None if made is None else CompiledEagle(made, growth, target.vocab, method.taps(config))


def loader(method: str) -> Callable[..., Drafter]:
    """The function `load` of a drafter that is compiled where its target is (`compiled`), else in tensors
    (`_METHOD.py`, imported when it is needed)."""

    def load(
        target: Target | None,
        tokenizer: Any = None,
        path: str | None = None,
        tree: str = "dynamic",
        shape: tuple[int, ...] = (),
        depth: int = 8,
        width: int = 0,
        top_k: int = 10,
        nodes: int = 60,
        scale: float = 0.0,
        value: bool = True,
        rerank: bool = True,
        replacement: bool = False,
    ) -> Drafter:
        """A trained drafter from its folder.

        The options are the fields of `Options`. Raises InputError where the folder is damaged, holds another drafter,
        or belongs to another target.
        """
        options = Options(tree, shape, depth, width, top_k, nodes, scale, value, rerank, replacement)
        read = METHODS[method].opened(target, path)
        if target is not None and read is not None:
            made = compiled(*read, target, options.growth(read[0].scale))
            if made is not None:
                return made
        own: Drafter = in_tensors(method).load(target, path, options)
        return own

    return load
