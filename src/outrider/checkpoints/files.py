"""Files of a checkpoint's folder: JSON, and lazily loaded weights."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import hub, shipped
from ..params import InputError, first_line

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # each also in shards, listed by NAME.index.json


def folder_of(path: str | Path) -> Path:
    """A folder, one that ships with the package (`demo/hass`), or the local copy of a hub id (downloaded if need be,
    without code)."""
    folder = shipped.folder_of(path)
    if folder.is_dir():
        return folder
    if folder.exists() or "/" not in str(path):
        raise InputError(f"there is no folder {path}; name the folder or the hub id of a drafter")
    return hub.folder(str(path), "", ("*.json", "*.safetensors", "*.bin", "*.pt"))


def json_of(file: Path) -> dict[str, Any]:
    """A JSON object, without a library's defaults."""
    if not file.is_file():
        raise InputError(f"{file.parent} is no folder of a drafter: it lacks {file.name}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(f"{file} is not valid JSON; fetch it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{file} is not a JSON object; fetch it again")
    return value


class Weights:
    """Tensors by name, loaded lazily."""

    def __init__(self, files: list[Path], where: object):
        self.where = where
        self.home: dict[str, Path] = {}
        self.loaded: dict[Path, Mapping[str, Tensor]] = {}
        for file in files:
            for name in self._names(file):
                if name in self.home:
                    raise InputError(f"{where} holds {name} twice, in {self.home[name].name} and {file.name}")
                self.home[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self.home

    def __iter__(self) -> Iterator[str]:
        return iter(self.home)

    def _names(self, file: Path) -> list[str]:
        if not file.is_file():
            raise InputError(f"{self.where} lacks {file.name}, which its index names; fetch it again")
        if file.suffix == ".safetensors":
            with _safe(file) as opened:
                return list(opened.keys())
        self.loaded[file] = _unpickled(file)
        return list(self.loaded[file])

    def __getitem__(self, name: str) -> Tensor:
        file = self.home[name]
        if file in self.loaded:
            return self.loaded[file][name]
        with _safe(file) as opened:
            return opened.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        file = self.home[name]
        if file in self.loaded:
            return tuple(self.loaded[file][name].shape)
        with _safe(file) as opened:
            return tuple(opened.get_slice(name).get_shape())


@contextmanager
def _safe(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is damaged ({first_line(error)}); fetch it again") from None


def _unpickled(file: Path) -> dict[str, Tensor]:
    """A pickle's tensors; pickles that would run code are refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that are refused below
            try:
                tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the format before 2020 cannot be mapped
                tensors = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(f"{file} holds more than tensors and is not loaded, since a pickle can run code") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{file} is damaged ({first_line(error)}); fetch it again") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise InputError(f"{file} is not a table of tensors; export the drafter's state dict alone")
    return tensors


def weights_of(folder: Path, *names: str) -> Weights:
    """The weights in the first of these files that exists, as one file or in shards."""
    for name in names or WEIGHTS:
        if (folder / name).is_file():
            return Weights([folder / name], folder)
        index = folder / f"{name}.index.json"
        if index.is_file():
            places = json_of(index).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise InputError(f"{index} lists no weights; fetch it again")
            return Weights([folder / str(file) for file in sorted(set(places.values()))], folder)
    raise InputError(f"{folder} has no weights: none of {', '.join(names or WEIGHTS)} is there")


def put(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = WEIGHTS[0]) -> None:
    """Write config.json and one file of weights."""
    kept = {key: t.detach().cpu().contiguous().clone() for key, t in tensors.items()}
    if name.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(kept, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise OSError(first_line(error)) from None
    else:
        torch.save(kept, folder / name)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
