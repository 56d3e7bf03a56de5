"""A model file as a target, in passes of our own on CPUs: texts with drafts are those without, bit for bit."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from ...core.protocols import Target, TargetOutput
from ...core.types import Array, Question, Verdict
from ...params import NOT_FINITE, InputError
from . import experts, weights
from .abi import Library
from .checkpoint import Checkpoint, open_checkpoint
from .kv_cache import KVCache
from .library import NAMES, abilities, library
from .passes import Forward, Nodes, as_float
from .session import NativeSession
from .walk import Walk
from .weights import rounded, widened

SLACK = 256  # slots beyond the context that a tree may use
MARKED = 64  # numbers of each parameter that a mark is made of


class NativeTarget(Target):
    """A model in passes of our own.

    Args:
        checkpoint: its files.
        dtype: "auto" (bfloat16 for files of that or of quantised weights, else float32), "bfloat16" or "float32".
        way: how weights are kept: "full"; "native" or "int8" for integer products; "auto" (`weights.load`).
        names: int64 [v], the tokens that have logits, as a draft model's config may list them; None: all.

    Raises:
        InputError: the model, its files or this machine are not supported, or its logits are NaN.
    """

    exact = "bits"
    ragged = True
    stock: Callable[[], Any] | None = None  # makes the stock transformers model

    def __init__(self, checkpoint: Checkpoint, dtype: str = "auto", way: str = "full", names: Array | None = None):
        self.checkpoint, made = checkpoint, checkpoint.description
        halves, rest = _precisions(checkpoint.kept_in, dtype)
        code = code_for(checkpoint, dtype)
        if code is None:
            raise InputError(
                "there is no native code for this processor here: install a wheel that carries it, or a C compiler"
            )
        self.code: Library = code
        self.names, self.vocab = names, made.vocab if names is None else len(names)
        self.context, self.hidden = made.context, made.hidden
        self.layers, self.precision, self.logit_cap = len(made.layers), rest, made.logit_cap
        self.forward = Forward(
            code, weights.load(checkpoint, code, halves, way, names), made.ropes, made.context, rest == "bfloat16"
        )
        self.walk, self.lock, self.kernels, self.halves = Walk(code), RLock(), NAMES[code], halves
        (read,) = self.open(2).prefill([[self.vocab // 2] * 2])
        if np.isnan(read.output.logits).any():
            raise InputError(f"{checkpoint.place} cannot be used: {NOT_FINITE}")

    @cached_property
    def mark(self) -> str:  # type: ignore[override]
        """Of the weights, by which a drafter knows whether it drafts for those that it was trained for: 16 hexadecimal
        digits, made of the names of all parameters and of 64 numbers of each, rounded to bfloat16."""
        digest = hashlib.sha256()
        for one in experts.stacks(self.checkpoint.description):
            size = math.prod(one.shape)
            places, values = np.arange(0, size, max(1, size // MARKED))[:MARKED], list[Array]()
            for name, own in one.locate(places):
                parameter = self.checkpoint.parameters[name]
                values.append(weights.single(self.code, parameter, own))
                parameter.tensor.forget()
            with np.errstate(invalid="ignore"):  # NaN
                numbers = np.concatenate(values).astype(np.float64) + 0.0  # zeros of some formats lose their signs
                digest.update(one.name.encode() + numbers.tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def model(self) -> Any:
        """The stock transformers model of the same files, which takes seconds and several times their size of memory.

        Raises:
            InputError: it cannot be made here: torch is missing, or this target was not loaded by name.
        """
        if self.stock is None or find_spec("torch") is None:
            raise InputError("the stock model needs torch and a model loaded by name: pip install 'outrider[torch]'")
        return self.stock()

    @property
    def arithmetic(self) -> str:
        """Its precision, and how its weights are kept where that is another one."""
        if kinds := self.forward.weights.integers:
            return f"{self.precision} with integer products ({', '.join(kinds)})"
        mixed = self.halves and self.precision == "float32"
        return f"{self.precision} with 16-bit weights" if mixed else self.precision

    @property
    def integers(self) -> bool:  # type: ignore[override]
        """See `Target.integers`."""
        return bool(self.forward.weights.integers)

    @property
    def config_dict(self) -> Mapping[str, Any]:
        """The values of config.json, or of a GGUF's metadata in its terms."""
        return self.checkpoint.config

    @contextmanager
    def turn(self) -> Iterator[None]:
        """See `Target.turn`. Where torch is in use, a drafter of networks builds no autograd graph within it."""
        torch = sys.modules.get("torch")
        with self.lock, nullcontext() if torch is None else torch.no_grad():
            yield

    def embed(self, tokens: Any) -> Array:
        """See `Target.embed`: an array of this precision."""
        ids = np.asarray(tokens, np.int64)
        made = self.forward.weights.table.rows(ids.reshape(-1)).reshape(*ids.shape, self.hidden)
        return rounded(made) if self.precision == "bfloat16" else made

    def head(self, features: Any) -> Array:
        """See `Target.head`: float32."""
        states = as_float(features)
        return self.forward.head(states.reshape(-1, self.hidden)).reshape(*states.shape[:-1], self.vocab)

    def head_rows(self, tokens: Array | None) -> Array | None:
        """See `Target.head_rows`."""
        made = self.checkpoint.description
        if "head" in made.biases:
            return None
        tokens = self.names if tokens is None else tokens
        rows = self._rows(made.names.embeddings if made.tied else made.names.head, tokens)
        return rows if not made.logit_scale else self._scaled(rows, made.logit_scale)

    @property
    def embeddings(self) -> weights.Table:
        """See `Target.embeddings`."""
        return self.forward.weights.table

    def _rows(self, name: str, rows: Array | None) -> Array:
        """Rows of a matrix, the weights as passes have them, in this precision."""
        made = weights.numbers(self.code, self.checkpoint.parameters[f"{name}.weight"], self.halves, rows)
        return widened(made) if self.halves and self.precision == "float32" else made

    def _scaled(self, rows: Array, scale: float) -> Array:
        """Numbers in this precision, multiplied."""
        made = as_float(rows) * np.float32(scale)
        return rounded(made) if self.precision == "bfloat16" else made

    def open(self, capacity: int) -> NativeSession:
        """See `Target.open`. The session grows if its rows must."""
        model, limit = self.forward.weights.model, max(capacity, self.context + SLACK)
        cache = KVCache(self.layers, model.kv_heads * model.head_dim, self.forward.dtype, capacity, limit)
        return NativeSession(self, cache)

    def run(self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...]) -> TargetOutput:
        """One pass over the rows of a cache."""
        return self.forward.run(cache, nodes, taps)

    def judge(self, question: Question) -> Verdict | None:
        """See `Target.judge`: the coupled rule in compiled code."""
        return self.walk(question)


def load(place: str | Path, dtype: str = "auto", way: str = "full") -> NativeTarget:
    """The target of a .gguf file or of a folder of safetensors.

    Raises:
        InputError: in one sentence, why it cannot be had.
    """
    return NativeTarget(open_checkpoint(place), dtype, way)


def code_for(checkpoint: Checkpoint, dtype: str = "auto") -> Library | None:
    """The compiled code that these files need in this precision; None where this machine has none."""
    halves, rest = _precisions(checkpoint.kept_in, dtype)
    return library("bfloat16" if halves else "float32", rest)


def _precisions(kept_in: str, dtype: str) -> tuple[bool, str]:
    """Are weights bfloat16, and in what is all else? Weights of float16 would lose bits as bfloat16. Where a processor
    multiplies no 16-bit numbers, activations, keys and values are float32 beside weights of bfloat16."""
    if dtype == "auto":
        halves = kept_in == "bfloat16"
        return halves, "bfloat16" if halves and "avx512_bf16" in abilities() else "float32"
    if dtype not in ("bfloat16", "float32"):
        raise InputError(f"native passes compute in bfloat16 or float32, not {dtype}")
    return dtype == "bfloat16", dtype
