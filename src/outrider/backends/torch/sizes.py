"""Whether a model's config.json and weights belong together: checked before anything is allocated, and by a pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...core.protocols import Target
from ...params import NOT_FINITE, InputError, out_of_memory

COUNTS = {  # by the names that families have for them: the least and the most
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers"), (1, 1000)),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), (0, 1000)),  # modules: a million take minutes
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"), (1, 2**31)),
}
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
    for name, value in wrong_numbers(config.to_dict()):
        raise InputError(f"{folder}/config.json says {name} of {value!r:.40}; correct it, or fetch the file again")
    for name, (least, most) in COUNTS.items():
        count = getattr(config, name, None)
        if count is not None and not (isinstance(count, int) and least <= count <= most):
            raise InputError(f"{folder}/config.json says {name} of {count!r:.40}; it must be {least} to {most}")
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    described = weights_of(config, folder, kind)
    if described > PER_BYTE * stored + SPARE:
        raise InputError(
            f"{folder}/config.json describes {described:.2g} weights, and its files have {stored:.2g} bytes; "
            "fetch both again"
        )


@torch.no_grad()
def try_out(target: Target, name: object) -> None:
    """Read a prompt of two tokens. Raises InputError where that fails or logits are NaN: nothing else would say why."""
    try:
        (read,) = target.open(2).prefill([[target.vocab // 2] * 2])
    except Exception as error:
        if out_of_memory(error):
            raise
        raise InputError(f"{name} cannot run: its config.json does not fit its weights ({_why(error)})") from None
    if bool(read.output.logits.isnan().any()):
        raise InputError(f"{name} cannot be used: {NOT_FINITE}")


def wrong_numbers(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The fields, nested ones included, that are NaN, have more than 64 bits or are a rotary base below 1."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from wrong_numbers(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from wrong_numbers(inner, name)
    elif isinstance(value, int | float) and (
        value != value or (isinstance(value, int) and abs(value) >= 2**63) or (name == "rope_theta" and value < 1)
    ):
        yield name, value


def weights_of(config: Any, folder: Path, kind: Any) -> int:
    """How many weights the model of a config has. Raises InputError where transformers cannot build it."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in kind.from_config(config).parameters())
    except Exception as error:  # whatever wrong sizes do to the code of any family
        if out_of_memory(error):
            raise
        raise InputError(f"{folder}/config.json is damaged: no model can be built from it ({_why(error)})") from None


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
