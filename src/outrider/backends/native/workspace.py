"""The memory that a pass works in, kept from call to call: fresh pages cost as much as their use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.types import Array
from ...machine import threads
from .abi import EXPERT_ROWS, Library, Pointer, Struct, address
from .library import sanitizer
from .pages import aligned

APART = sanitizer() != ""  # is each part of a workspace an allocation of its own?


class Workspace:
    """Named buffers. In a sanitized build each part is an allocation of its own, exactly as large as requested, so that
    writing past its end shows.

    Args:
        code: the compiled library.
        model: `Model`, or of a drafter that has none its `hidden`, `intermediate` and `input_dim`.
    """

    def __init__(self, code: Library, model: Struct):
        self.code, self.model = code, model
        self.buffers: dict[str, Array] = {}
        self.last: dict[tuple[int, int], dict[str, Any]] = {}  # the last result of `of_pass`
        self.scratch: tuple[int, int, int, Pointer] = 0, 0, 0, None  # rows, threads, bytes for each thread, address

    def of(self, name: str, size: int, dtype: Any = np.float32) -> Array:
        """A buffer of at least `size` elements."""
        buffer = self.buffers.get(name)
        if buffer is None or len(buffer) < size or (APART and len(buffer) > size):
            buffer = self.buffers[name] = (np.empty if APART else aligned)(size, dtype)
            self.last.clear()
        return buffer

    def filled(self, name: str, values: Sequence[int]) -> Array:
        """These numbers in a buffer, int64."""
        buffer = self.of(name, len(values), np.int64)[: len(values)]
        buffer[:] = values
        return buffer

    def split(self, name: str, dtype: Any, **sizes: int) -> dict[str, Pointer]:
        """Addresses of parts of these sizes, side by side in one buffer."""
        if APART:
            return {part: address(self.of(f"{name}: {part}", size, dtype)) for part, size in sizes.items()}
        at, parts = self.of(name, sum(sizes.values()), dtype).ctypes.data, {}
        for part, size in sizes.items():
            parts[part], at = address(at), at + size * np.dtype(dtype).itemsize
        return parts

    def of_pass(self, rows: int, nodes: int) -> dict[str, Any]:
        """The workspace of a `Pass` over `rows` nodes in all, each with at most `nodes` ancestors."""
        if (known := self.last.get((rows, nodes))) is not None:
            return known
        model = self.model
        wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
        sizes = {
            "normed": max(model.hidden, model.input_dim), "query": wide, "attention": wide, "mlp": model.intermediate,
            "qkv": max(wide + 2 * narrow, model.hidden),
        }  # fmt: skip
        parts = {name: address(self.of(name, rows * size)) for name, size in sizes.items()}
        parts |= self.split("paths", np.int32, paths=rows * nodes, real_nodes=rows)
        parts |= self.split("logit nodes", np.int64, logit_from=rows, logit_to=rows)
        parts["row_starts"] = address(self.of("row starts", rows + 1, np.int64))
        if model.experts:
            parts["experts"] = self.of_experts(min(rows, EXPERT_ROWS))
        self.last = {(rows, nodes): parts}
        return parts

    def of_experts(self, rows: int) -> dict[str, Pointer]:
        """The `ExpertWork` of so many rows."""
        model, slots = self.model, rows * self.model.top_k
        integers = self.split("choices", np.int64, chosen=slots, slot=slots, starts=model.experts + 1)
        floats = self.split(
            "experts", np.float32, outputs=(slots + rows) * model.hidden, logits=rows * (model.experts + 1),
            weight=rows * (model.top_k + 1),
        )  # fmt: skip
        inner = slots * model.expert_intermediate + rows * model.shared_intermediate
        acts = {"inputs": slots * model.hidden, "inner": inner}
        return integers | floats | {name: address(self.of(f"expert {name}", size)) for name, size in acts.items()}

    def use_threads(self, pass_: Struct, rows: int) -> None:
        """Set how many threads a pass over at most `rows` nodes may use, and their scratch."""
        if self.scratch[:2] != (rows, count := threads()):
            model = self.model
            paired = model.hidden * (2 if model.pair_norms else 1)
            inner = max(model.intermediate, model.expert_intermediate, model.shared_intermediate)
            widest = max(paired, model.input_dim, inner, model.heads * model.head_dim)
            each = self.code.scratch_bytes(rows, widest)
            self.scratch = rows, count, each, address(self.of("scratch", count * each, np.uint8))
        _, pass_.threads, pass_.scratch_each, pass_.scratch = self.scratch
