"""Which backend serves a model: the native one where it can, else torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import hub
from ..core.protocols import Target
from ..names import Place, check_native, find, weights_of
from ..params import INTEGERS, InputError, check_device, check_exact, check_weights
from .native.checkpoint import Checkpoint, open_checkpoint, read_json
from .native.families import describe
from .native.library import lacks_compiler, suits
from .native.target import NativeTarget, code_for
from .native.text_tokenizer import eos_of, file_ends, load_tokenizer

PRECISIONS = "auto", "float32", "bfloat16"
ABOUT, WEIGHTS = ("*.json", "*.jinja"), "*.safetensors"  # of a repository of the hub: what is fetched first, and then


@dataclass(frozen=True)
class Loaded:
    """A model, ready to decode."""

    target: Target
    tokenizer: Any  # None for a model in memory that came from nowhere
    eos: frozenset[int]  # every token that ends a text
    name: str
    place: Place | None  # None: it was in memory
    weights: str = "full"  # how they are kept: full, int8 or native


def load(
    model: Any,
    *,
    dtype: str = "auto",
    device: str = "auto",
    exact: str = "auto",
    weights: str = "auto",
    trust_remote_code: bool = False,
    compile: bool | None = None,
    **options: Any,
) -> Loaded:
    """The target of a name, or of a transformers model in memory; arguments and errors are those of `outrider.load`."""
    check_weights(weights)
    check_exact(exact)
    dtype, device = str(dtype).removeprefix("torch."), str(device)
    if in_memory(model):
        if weights in INTEGERS:
            raise InputError(f"weights={weights} is for models that are loaded by name; leave it out")
        for option, given in (("dtype", dtype != "auto"), ("device", device != "auto")):
            if given:
                raise InputError(f"{option} is for models that are loaded by name; cast or move this one before")
        return _by_torch(model, None, dtype, device, exact, trust_remote_code, compile, options)
    place = find(model)
    if weights == "native":
        check_native(place)
    if weights in INTEGERS:
        device = check_integers(weights, device, dtype, compile)
    ours = device in ("auto", "cpu") and dtype in PRECISIONS and compile is not False
    precision = place.dtype if dtype == "auto" else dtype
    if ours and not options and (files := readable(place, device, precision, trust_remote_code)) is not None:
        with ThreadPoolExecutor(1) as beside:  # a vocabulary takes about as long as the weights
            reading = beside.submit(load_tokenizer, files.place)
            target = NativeTarget(files, precision, weights_of(weights, place))
            tokenizer = reading.result()
        target.stock = partial(_stock, place)
        kept = weights if weights != "auto" else "native" if target.integers else "full"
        return Loaded(target, tokenizer, eos_of(files.place, files.config, tokenizer), str(place), place, kept)
    if weights in INTEGERS:
        need = f"which {weights} weights need; leave weights out"
        raise InputError(f"{place} is not served by native passes here, {need}")
    if find_spec("torch") is None:
        compiler = ours and not options and lacks_compiler()
        need = "a C compiler (gcc or clang) or torch" if compiler else "torch"
        raise InputError(f"{place} needs {need} here: pip install 'outrider[torch]'")
    return _by_torch(place, place, dtype, device, exact, trust_remote_code, compile, options)


def check_integers(weights: str, device: str, dtype: str, compile: bool | None) -> str:
    """Refuse what integer products cannot be combined with. Returns the device."""
    if device not in ("auto", "cpu"):
        raise InputError(f"{weights} weights are for CPUs; choose full weights, or the device cpu instead of {device}")
    if dtype not in PRECISIONS:
        raise InputError(f"{weights} weights need bfloat16 or float32 beside them, not {dtype}; leave the dtype out")
    if compile is False:
        raise InputError(f"{weights} weights are for native passes; leave compile=False (--no-compile) out")
    return "cpu"


def readable(place: Place, device: str = "auto", dtype: str = "auto", own_code: bool = False) -> Checkpoint | None:
    """The files of a model that native passes serve on this machine in this precision; None where torch must. A hub id
    is fetched.

    With `device` auto, a machine with a GPU is left to torch, where that is installed; with `own_code`, a model that
    brings code of its own.
    """
    if not suits() or (device == "auto" and torch_has_gpu()):
        return None
    try:
        folder = Path(place.where) if Path(place.where).exists() else hub.folder(place.where, place.hint, ABOUT)
        if place.gguf is None:
            config = read_json(folder / "config.json")
            if own_code and "auto_map" in config:
                return None
            describe(config)  # before weights are fetched
            if not (folder / "tokenizer.json").is_file():
                return None
            folder = folder if Path(place.where).exists() else hub.folder(place.where, place.hint, (*ABOUT, WEIGHTS))
        files = open_checkpoint(folder / place.gguf if place.gguf else folder)
        return files if files.description.layers and code_for(files, dtype) is not None else None
    except InputError:
        if find_spec("torch") is None:
            raise
        return None  # torch may serve it, and says what is wrong where it does not


def has_gpu() -> bool:
    """Is there an NVIDIA GPU? Asked of the system, not of torch."""
    return Path("/proc/driver/nvidia/version").exists()


def torch_has_gpu() -> bool:
    """Is there one that torch can use? Torch is imported only where the system has one."""
    if not has_gpu() or find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def in_memory(model: Any) -> bool:
    """Is this a transformers model? None is where transformers was never imported."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _by_torch(
    model: Any,
    place: Place | None,
    dtype: str,
    device: str,
    exact: str,
    trust: bool,
    compile: bool | None,
    options: Mapping[str, Any],
) -> Loaded:
    from .torch import load as torch

    check_device(device)
    if place is None and compile is not False and not options:
        target: Target = torch.target_of(model)
    else:
        target = torch.load_target(model, dtype=dtype, device=device, trust_remote_code=trust, **options)
    if exact == "bits" and target.exact != "bits":
        raise InputError(
            "the same bits with drafts as without are promised by native passes alone, which do not serve "
            f"{place or 'this model'} here (docs/exactness.md); leave exact out"
        )
    origin = place or torch.origin_of(target.model)
    tokenizer = torch.load_tokenizer(origin, trust, options)
    name = str(origin or type(target.model).__name__)
    ends = torch.eos_of(target.model, tokenizer)
    if place is not None and place.gguf:
        ends |= file_ends(tokenizer)
    return Loaded(target, tokenizer, ends, name, place)


def _stock(place: Place) -> Any:
    """The stock transformers model of a name, in the precision of its weights."""
    from .torch.load import from_pretrained

    return from_pretrained(place, "auto", "cpu", False, {})
