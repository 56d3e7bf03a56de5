"""The commands, one file each. Importing them must not import torch, so that --help is fast."""

from __future__ import annotations

import re
from typing import Any

from ..params import InputError, check_device

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")

# Settings of every typer app.
PLAIN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": "rich",  # with panels; `[x]` in a help text would be markup
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def check_names(dtype: str, device: str) -> None:
    """Raise InputError for an unknown precision or device; needs no torch."""
    if dtype not in DTYPES:
        raise InputError(f"there is no dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise InputError(f"there is no device {device!r}; choose one of auto, cpu, cuda, cuda:N, mps")


def check_place(dtype: str, device: str) -> None:
    """Raise InputError for a precision or a device that this machine lacks, before a model is loaded."""
    check_names(dtype, device)
    check_device(device)
