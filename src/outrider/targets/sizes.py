"""Whether a folder's config.json can belong to its weights, before anything is allocated for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..types import InputError

LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
MOST_LAYERS = 1000  # each is a module, and a million of them take minutes to make
PER_BYTE = 16  # weights that a byte of a file may stand for: quantised ones take a few bits, tied ones none
SPARE = 2**24  # weights that a model may have beyond that


def check(config: Any, folder: Path, kind: Any) -> None:
    """Refuse a config of sizes that its weights cannot have, or that no model can be built from.

    Args:
        config: of transformers, as it was read from the folder.
        folder: of the model, with safetensors files.
        kind: the auto class that the model is loaded by.

    Raises:
        InputError: naming the folder's config.json and what is wrong with it.
    """
    for name in LAYERS:
        layers = getattr(config, name, None)
        if layers is not None and not (isinstance(layers, int) and 0 <= layers <= MOST_LAYERS):
            raise InputError(f"{folder}/config.json says {name} of {layers!r:.40}; it must be 0 to {MOST_LAYERS}")
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    described = weights_of(config, folder, kind)
    if described > PER_BYTE * stored + SPARE:
        raise InputError(
            f"{folder}/config.json describes a model of {described:.2g} weights, and its files have {stored:.2g} bytes; "
            "fetch both again"
        )


def weights_of(config: Any, folder: Path, kind: Any) -> int:
    """How many weights the model of a config has. Raises InputError where transformers cannot build it."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in kind.from_config(config).parameters())
    except MemoryError:
        raise
    except Exception as error:  # whatever wrong sizes do to the code of any family
        raise InputError(f"{folder}/config.json is damaged: no model can be built from it ({_why(error)})") from None


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
