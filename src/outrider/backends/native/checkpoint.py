"""A model's files: its config, and where its parameters lie, from a .gguf file or a folder of safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.types import Array
from ...params import InputError, understood
from . import model
from .description import Description
from .experts import IN_TURN, apart
from .families import describe, renamed
from .files import ModelFile, open_gguf, open_safetensors
from .model import Parameter

INDEX = "model.safetensors.index.json"
GGUF = ".gguf"
FLOATS = "F32", "F16", "BF16"
PRECISIONS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Checkpoint:
    """What the files of a model hold.

    Attributes:
        place: the .gguf file, or the folder.
        config: the values of config.json, or of a GGUF's metadata in its terms.
        parameters: by their names in the hub's checkpoint.
        factors: by which rotary frequencies are divided; None: 1.
        kept_in: what most weights are kept in: float32, float16, or bfloat16 for all that is quantised.
        gguf: the file, where it is one.
    """

    place: Path
    config: Mapping[str, Any]
    parameters: Mapping[str, Parameter]
    kept_in: str
    factors: Array | None = None
    gguf: ModelFile | None = None

    @cached_property
    def description(self) -> Description:
        """The model, whose parameters are all there. Raises InputError where it is not supported or they do not fit."""
        made = describe(self.config, self.factors)
        wanted = dict(made.shapes())
        if lacking := sorted(set(wanted) - set(self.parameters)):
            raise InputError(
                f"the weights of {self.place} lack {len(lacking)} tensors, {lacking[0]} among them; fetch them again"
            )
        if self.gguf is not None and (others := sorted(set(self.parameters) - set(wanted))):
            raise InputError(f"{self.place} has {others[0]}, which native passes of this family do not read")
        for name, shape in wanted.items():
            one = self.parameters[name]
            if one.tensor.kind.name not in model.READABLE:
                raise InputError(
                    f"{self.place} keeps {name} as {one.tensor.kind.name}, which native passes do not read"
                )
            if (there := one.shape) != shape:
                raise InputError(
                    f"the weights of {self.place} do not have the shapes that its config says: {name} is "
                    f"{list(there)}, not {list(shape)}; fetch both again"
                )
        return made


def open_checkpoint(place: str | Path) -> Checkpoint:
    """The files of a model: a .gguf file, or a folder with config.json and safetensors.

    Raises:
        InputError: they cannot be read, or are of a kind that is not supported.
    """
    place = Path(place)
    return _of_gguf(place) if place.name.lower().endswith(GGUF) else _of_folder(place)


def _of_gguf(place: Path) -> Checkpoint:
    file = open_gguf(place)
    if not model.supports(file):
        raise InputError(f"{place} cannot be read as it lies: {model.refused(file)}")
    with understood(str(place)):
        parameters = apart({one.name: one for one in model.parameters(file)})
        return Checkpoint(
            place, model.config_of(file), parameters, model.kept_in(file), model.frequency_factors(file), gguf=file
        )


def _of_folder(folder: Path) -> Checkpoint:
    config = read_json(folder / "config.json")
    parameters: dict[str, Parameter] = {}
    for file in _shards(folder):
        for name, tensor in open_safetensors(file).tensors.items():
            name = renamed(config, name)
            if name in parameters:
                raise InputError(f"{folder} holds the tensor {name} twice; fetch it again")
            parameters[name] = Parameter(name, tensor)
    with understood(str(folder)):
        parameters = apart(parameters, config.get("model_type") == IN_TURN)
    known = config.get("dtype") or config.get("torch_dtype")
    kinds = (one.tensor.kind.name for one in parameters.values())
    first = next((kind for kind in kinds if kind in FLOATS), "F32")
    return Checkpoint(folder, config, parameters, str(known) if known in PRECISIONS.values() else PRECISIONS[first])


def _shards(folder: Path) -> list[Path]:
    """The files of the weights: those of the index, or all where there is none."""
    if (folder / INDEX).is_file():
        names = read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise InputError(f"{folder / INDEX} has no weight_map; fetch it again")
        return [folder / Path(name).name for name in sorted(set(names.values()))]
    one = folder / "model.safetensors"
    files = [one] if one.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        hint = "it has only a pickle; convert it to safetensors" if any(folder.glob("*.bin")) else "fetch them too"
        raise InputError(f"{folder} has a config but no safetensors weights; {hint}")
    return files


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError where there is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file.parent} has no {file.name}; it is not the folder of a model") from None
    except (OSError, ValueError, RecursionError) as error:
        line = " ".join(str(error).split())[:100]
        raise InputError(f"{file} is not valid JSON ({line}); fetch it again") from None
    if not isinstance(values, dict):
        raise InputError(f"{file} is not a JSON object; fetch it again")
    return values
