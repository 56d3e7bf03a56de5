"""A loaded transformers model in native passes, which read its parameters where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.types import Array
from ...params import InputError
from ..native import weights
from ..native.checkpoint import Checkpoint
from ..native.description import Description
from ..native.experts import IN_TURN, apart, stacks
from ..native.families import describe
from ..native.files import SAFETENSORS
from ..native.files import Tensor as Stored
from ..native.model import Parameter
from ..native.session import NativeSession
from ..native.target import NativeTarget
from .families import text_config
from .tensors import array

KINDS = {torch.bfloat16: "BF16", torch.float32: "F32"}
CODE, OTHER_CODE = ("torch.nn.modules.", "transformers."), "transformers.integrations."  # whose forward is known
HOOKS = "_forward_hooks", "_forward_pre_hooks"
CAPTURES = "transformers.utils.output_capturing"  # whose hooks change nothing


class ModuleTarget(NativeTarget):
    """A loaded model in passes of our own.

    Matrices are read where they lie; norms and biases are copied when a session is opened. So weights that are changed
    in place are seen, and so are other tensors in place of them.

    Args:
        model: a stock causal language model; it is put into `eval` mode.

    Raises:
        InputError: native passes do not compute what this model computes.
    """

    def __init__(self, model: Any):
        if why := refused(model):
            raise InputError(f"native passes do not serve this model: {why}")
        self.module, self.places = model.eval(), _places(model)
        super().__init__(checkpoint_of(model), _name(model.dtype))
        self.stock = lambda: model

    @property
    def signature(self) -> str:
        """A fingerprint of its weights, as they were at first use."""
        return self.mark

    def open(self, capacity: int) -> NativeSession:
        """See `Target.open`."""
        with self.lock:
            self.follow()
        return super().open(capacity)

    def follow(self) -> None:
        """See that passes read the weights that the model has now.

        Raises:
            InputError: it was cast, moved or changed in its layers since it became a target.
        """
        if (places := _places(self.module)) == self.places:
            self.forward.weights.refresh()
            return
        why, before = refused(self.module), self.checkpoint.description
        now = None if why else checkpoint_of(self.module)
        if now is None or now.kept_in != self.precision or _sizes(now.description) != _sizes(before):
            why = why or "its sizes or its precision are others"
            raise InputError(f"the model was changed after it was loaded ({why}); load it again")
        self.checkpoint, self.places = now, places
        self.forward.read(weights.load(now, self.code, self.halves), now.description.ropes)
        self.__dict__.pop("embeddings", None)


def refused(model: Any) -> str:
    """Why native passes cannot stand in for this model's own code and memory; empty where they can, if its config is
    one of theirs."""
    parameters = list(model.parameters())
    if any(p.device.type != "cpu" for p in parameters):
        return "it is not on a CPU"
    if any(type(p.data) is not Tensor or not p.is_contiguous() for p in parameters):
        return "its weights are quantised, or not plain tensors"
    if {p.dtype for p in parameters} not in [{kind} for kind in KINDS]:
        return "its weights are neither all bfloat16 nor all float32"
    for module in model.modules():
        home = f"{type(module).__module__}."
        patched = "forward" in vars(module) or not f"{type(module).forward.__module__}.".startswith(CODE)
        if not home.startswith(CODE) or home.startswith(OTHER_CODE) or patched:
            return f"its part {type(module).__name__} is not one of transformers'"
    return "it has hooks" if hooked(model) else ""


def hooked(model: Any) -> bool:
    """Does some code of the user's run in its forward?"""
    hooks = (hook for module in model.modules() for name in HOOKS for hook in vars(module)[name].values())
    return any(getattr(hook, "__module__", "") != CAPTURES for hook in hooks)


def checkpoint_of(model: Any) -> Checkpoint:
    """A model's parameters, where they lie in memory.

    Raises:
        InputError: they are not those of a family with native passes.
    """
    config = text_config(model).to_dict()
    if model.get_output_embeddings() is None:
        raise InputError(f"{type(model).__name__} has no head that writes tokens; load a causal language model")
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    config["tie_word_embeddings"] = head.data_ptr() == table.data_ptr()
    config["vocab_size"] = len(head)
    named = dict(model.named_parameters(remove_duplicate=False))
    made = Checkpoint(
        place=Path(str(model.config._name_or_path or type(model).__name__)),
        config=config,
        parameters=apart({name: _parameter(name, p) for name, p in named.items()}, config["model_type"] == IN_TURN),
        kept_in=_name(model.dtype),
        factors=_factors(model, describe(config)),
    )
    known = {stack.name for stack in stacks(made.description)}
    if other := [name for name in named if name not in known and named[name] is not table]:
        raise InputError(f"{made.place} has the parameter {other[0]}, which its config does not describe")
    return made


def _parameter(name: str, p: Tensor) -> Parameter:
    bytes_ = array(p).reshape(-1).view(np.uint8)
    return Parameter(name, Stored(name, SAFETENSORS[KINDS[p.dtype]], tuple(p.shape), bytes_), None)


def _factors(model: Any, made: Description) -> Array | None:
    """What the config's rotary frequencies are divided by to get the model's: casts round its buffers."""
    if not made.ropes:
        return None
    buffers = dict(model.get_decoder().named_buffers())
    names = [f"rotary_emb.{kind}original_inv_freq" for kind in ("", "full_attention_", "sliding_attention_")]
    own = [buffers[name].float().numpy() for name in names if name in buffers]
    frequencies = [rope.frequencies for rope in made.ropes]
    if len(own) == len(frequencies) and all(
        len(a) == len(b) and np.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(own, frequencies, strict=True)
    ):
        return None
    if len(own) != 1 or len(frequencies) != 1 or len(own[0]) != len(frequencies[0]):
        raise InputError("its rotary frequencies are not those of its config")
    factors: Array = frequencies[0] / own[0]
    return factors


def _places(model: Any) -> tuple[tuple[str, int, torch.Size, torch.dtype], ...]:
    """Where all parameters and buffers lie."""
    named = *model.named_parameters(remove_duplicate=False), *model.named_buffers()
    return tuple((name, p.data_ptr(), p.shape, p.dtype) for name, p in named)


def _sizes(made: Description) -> tuple[Any, ...]:
    return made.vocab, made.hidden, made.kv_heads, made.head_dim, made.context, made.layers


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
