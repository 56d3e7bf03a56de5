"""Targets: stock transformers models behind the protocols of `core/protocols.py`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hf import HFTarget
    from .load import load_target, load_tokenizer
    from .seq2seq import SeqTarget

__all__ = ["HFTarget", "SeqTarget", "load_target", "load_tokenizer"]

# Imported at first use: a model's name can be looked up without torch.
_HOMES = {"HFTarget": "hf", "load_target": "load", "load_tokenizer": "load", "SeqTarget": "seq2seq"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
