"""Outrider: lossless speculative decoding of language models."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.types import Usage
    from .engine.request import Output
    from .integrations.transformers import custom_generate
    from .llm import LLM, load
    from .params import InputError, Sampling

__version__ = "0.1.0"
__all__ = ["LLM", "InputError", "Output", "Sampling", "Usage", "__version__", "custom_generate", "load"]

# Imported on first access (PEP 562): torch and transformers take seconds, and `outrider --help` needs neither.
_HOMES = {
    "LLM": "llm", "Output": "engine.request", "load": "llm", "custom_generate": "integrations.transformers",
    "InputError": "params", "Sampling": "params", "Usage": "core.types",
}  # fmt: skip


# transformers imports torchao where it is installed, and that warns of its kernels for other machines.
UNWANTED = "Failed to load ", "is an Enum subclass and is now natively supported"
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).addFilter(lambda record: not any(words in record.getMessage() for words in UNWANTED))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
