""".gguf files as stock models. Those whose layers are Llama's are read as they lie (`backends/native`), at each start.

Other architectures are read by transformers' own code, which takes minutes, and kept converted as folders in the user's
cache directory (`kept.py`), one for each file's SHA-256. A quantised file's weights become bfloat16, others keep their
precision. `source.json` in a folder records path, size and time of the file it was made from, and size, time and
SHA-256 of the files in the folder: a file is hashed again only if its time has changed, and a damaged folder is made
anew.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from ... import kept
from ...files import filling
from ...names import SOURCE, Place
from ...params import InputError
from ..native.abi import Library
from ..native.files import ModelFile, open_gguf
from ..native.library import library
from ..native.model import Parameter, config_of, frequency_factors, kept_in, parameters, supports
from ..native.tokenizer import KINDS as TOKENIZERS
from ..native.tokenizer import from_gguf
from .formats import numbers
from .kernel_blocks import BLOCK

logger = logging.getLogger(__name__)

FOUR_BITS, EIGHT_BITS = ("Q4_0", "Q4_1"), "Q8_0"
_direct: set[Path] = set()  # files of which it was said that they are read anew each time


def settled(place: Place) -> Place:
    """Where the stock model of a name is loaded from: a .gguf file of a family that is not read as it lies is converted
    at its first use and kept."""
    if place.gguf is None or supports(open_gguf(file := Path(place.where) / place.gguf)):
        return place
    return _kept_as_folder(place, file)


def as_folder(place: Place) -> Place:
    """The same model as a folder or hub id, for programs that read nothing else: a .gguf file is converted and kept."""
    return place if place.gguf is None else _kept_as_folder(place, Path(place.where) / place.gguf)


def _kept_as_folder(place: Place, file: Path) -> Place:
    where, direct = converted(file)
    return replace(place, where=where, gguf=direct)


def converted(file: Path) -> tuple[str, str | None]:
    """(folder, None) of the conversion, or (its own folder, its name) if there is no place to keep that.

    The first call for a file converts it, which takes a while and is said once.
    """
    file = file.resolve()
    root, stat = kept.folder("gguf"), file.stat()
    stamp = {"path": str(file), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        for folder in _folders(root):
            if _made_from(folder) == stamp and _usable(folder):
                return str(folder), None
        if file in _direct:
            return str(file.parent), file.name
        folder = root / _digest(file)
        if not _usable(folder):
            if folder.exists():
                logger.warning("%s is damaged, so that it is made anew", folder)
            _convert(file, folder, stamp)
        elif os.access(folder, os.W_OK):  # another copy of a file that is here already
            kept.write(folder / SOURCE, {**stamp, "files": kept.read(folder / SOURCE)["files"]})
    except OSError as error:
        kept.unusable(error.strerror or _line(error))
        _direct.add(file)
        return str(file.parent), file.name
    return str(folder), None


def read(file: Path, dtype: Any = "auto") -> tuple[Any, dict[str, Any]]:
    """The stock model of a .gguf file, its weights in `dtype`, and transformers' report of what was missing."""
    from transformers import AutoModelForCausalLM, GgufConfig

    kind = getattr(torch, precision(file)) if dtype == "auto" else dtype
    if supports(open_gguf(file)):
        return _built(open_gguf(file), getattr(torch, kind) if isinstance(kind, str) else kind)
    with _explained(file):
        read_: Any = AutoModelForCausalLM.from_pretrained
        return read_(
            str(file.parent), gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=kind,
            output_loading_info=True,
        )  # fmt: skip


def _built(file: ModelFile, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A stock model whose parameters are made of the file's blocks."""
    from transformers import AutoModelForCausalLM

    config = read_config(file.path)
    code = library("bfloat16", "bfloat16")
    state = {one.name: _parameter(code, one, dtype) for one in parameters(file)}
    with _explained(file.path):
        kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
        with _quiet():
            model, found = kind.from_pretrained(
                None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
            )
    if (factors := frequency_factors(file)) is not None:
        rotary = model.model.rotary_emb
        rotary.inv_freq.div_(torch.tensor(factors))
        rotary.original_inv_freq = rotary.inv_freq.clone()
    return model, found


def _parameter(code: Library | None, one: Parameter, dtype: torch.dtype) -> Tensor:
    """A parameter's numbers. A bias whose elements have an order is a matrix of one column."""
    tensor, rows, width = one.tensor, one.tensor.rows, one.tensor.shape[-1]
    if len(tensor.shape) == 1 and one.order is not None:
        rows, width = rows.reshape(width, -1), 1
    kind = torch.float32 if one.shift else dtype
    made = numbers(code, tensor.kind.number, rows, width, one.order, kind).view(tensor.shape)
    made = made.T.contiguous() if one.transposed else made
    return (made + one.shift).to(dtype) if one.shift else made


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bar of progress: nothing is read from a disk."""
    from transformers.utils import logging as theirs

    shown = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            theirs.enable_progress_bar()


def read_config(file: Path) -> Any:
    """The config of transformers that a .gguf file's metadata stand for."""
    from transformers import AutoConfig

    with _explained(file):
        if supports(open_gguf(file)):
            return AutoConfig.for_model(**config_of(open_gguf(file)))
        return AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)


def read_tokenizer(file: Path) -> Any:
    """The tokenizer of a .gguf file, chat template included."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    values = open_gguf(file).metadata
    if values.get("tokenizer.ggml.model") in TOKENIZERS:
        words = values["tokenizer.ggml.tokens"]
        names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        known = {name: values.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in names.items()}
        special = {f"{name}_token": words[i] for name, i in known.items() if i is not None and 0 <= i < len(words)}
        made = PreTrainedTokenizerFast(
            tokenizer_object=from_gguf(values), clean_up_tokenization_spaces=False, **special
        )
        made.chat_template = values.get("tokenizer.chat_template")
        return made
    with _explained(file, "has no tokenizer that transformers can read"):
        return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def precision(file: Path) -> str:
    """float32 or float16 if that is what most of the matrices are kept in, else bfloat16."""
    return kept_in(open_gguf(file))


def file_of(where: str, direct: str | None) -> Path | None:
    """The .gguf file that a folder was converted from, or that is read as it is; None where it is not there."""
    made = Path(where) / direct if direct else kept.read(Path(where) / SOURCE).get("path")
    return Path(made) if made and Path(made).is_file() else None


@dataclass(frozen=True)
class Blocks:
    """A matrix [o, i] in blocks of 32: number * scale + minimum, in float32. Numbers are 0 .. 15, or of eight bits with
    a sign and without minima."""

    numbers: Integer[Tensor, "o i"]
    scales: Float[Tensor, "o g"]
    minima: Float[Tensor, "o g"] | None

    def full(self) -> Float[Tensor, "o i"]:
        """The weights, as the file's own reader makes them."""
        wide = self.numbers.float().unflatten(1, (-1, BLOCK)) * self.scales[..., None]
        return (wide if self.minima is None else wide + self.minima[..., None]).flatten(1)

    def rows(self, order: Integer[Tensor, " o"]) -> Blocks:
        """The same with its rows in another order."""
        return Blocks(self.numbers[order], self.scales[order], None if self.minima is None else self.minima[order])


def blocks(file: Path) -> Iterator[Blocks]:
    """The matrices that a file keeps in blocks of four or eight bits."""
    for tensor in open_gguf(file).tensors.values():
        kind = tensor.kind.name
        if kind not in (*FOUR_BITS, EIGHT_BITS) or len(tensor.shape) != 2:
            continue
        head = 4 if kind == "Q4_1" else 2  # bytes of scale, and of minimum, before a block's numbers
        data = torch.from_numpy(tensor.rows.copy())
        raw = data.view(len(data), -1, tensor.kind.bytes)
        known = raw[..., :head].contiguous().view(torch.float16).float()
        scales, own = known[..., 0], raw[..., head:].contiguous()
        if kind == EIGHT_BITS:
            yield Blocks(own.view(torch.int8).flatten(1), scales, None)
        else:
            minima = known[..., 1] if kind == "Q4_1" else -8 * scales  # Q4_0: (number - 8) * scale, exact either way
            yield Blocks(torch.cat([own & 15, own >> 4], -1).flatten(1), scales, minima)


def _convert(file: Path, folder: Path, stamp: dict[str, Any]) -> None:
    """Write the folder whole or not at all. OSError: there is no place for it."""
    kind = precision(file)
    read_config(file)  # refuses an unknown architecture before anything is promised
    size = sum(math.prod(t.shape) for t in open_gguf(file).tensors.values()) * getattr(torch, kind).itemsize
    kept.make(folder.parent)
    if shutil.disk_usage(folder.parent).free < 1.1 * size:
        raise OSError(None, f"it needs {size / 1e6:.0f} MB and less is free")
    with filling(folder) as made:
        logger.warning("converting %s, once: %.0f MB in %s", file.name, size / 1e6, folder)
        model, found = read(file, kind)
        if found["missing_keys"]:
            lacking = sorted(found["missing_keys"])
            raise InputError(f"{file} lacks {len(lacking)} tensors, {lacking[0]} among them; fetch it again")
        _save(model, made)
        read_tokenizer(file).save_pretrained(made)
        for place in (made, *made.iterdir()):
            kept.protect(place)
        files = {part.name: {**_state(part), "sha256": _digest(part)} for part in made.iterdir()}
        kept.write(made / SOURCE, {**stamp, "files": files})


def _save(model: Any, folder: Path) -> None:
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # a full disk comes as this
        raise OSError(None, _line(error)) from None


@contextmanager
def _explained(file: Path, fault: str = "is damaged or cut off") -> Iterator[None]:
    """Whatever a damaged file makes its readers raise, as one sentence."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        why = _line(error)
        if "not supported" in why and "GGUF" in why:
            raise InputError(f"{file} cannot be loaded: {why}") from None
        raise InputError(f"{file} {fault} ({why}); fetch it again") from None


def _folders(root: Path) -> list[Path]:
    try:
        return [folder for folder in sorted(root.iterdir()) if not folder.name.startswith(".")]
    except OSError:
        return []


def _made_from(folder: Path) -> dict[str, Any]:
    """Path, size and time of the file that a folder was made from."""
    return {key: value for key, value in kept.read(folder / SOURCE).items() if key != "files"}


def _usable(folder: Path) -> bool:
    """Is there a conversion that is as it was made?

    Raises:
        OSError: others could have written it.
    """
    if not folder.is_dir():
        return False
    files = kept.read(folder / SOURCE).get("files")
    for place in (folder, *sorted(folder.iterdir())):
        if why := kept.exposed(place):
            raise PermissionError(None, why)
    return isinstance(files, dict) and bool(files) and all(_intact(folder / name, one) for name, one in files.items())


def _intact(file: Path, state: Any) -> bool:
    """Is a file as it was made?"""
    try:
        now = _state(file)
    except OSError:
        return False
    if not isinstance(state, dict) or state.get("size") != now["size"]:
        return False
    return state.get("mtime_ns") == now["mtime_ns"] or state.get("sha256") == _digest(file)


def _state(file: Path) -> dict[str, int]:
    about = file.stat()
    return {"size": about.st_size, "mtime_ns": about.st_mtime_ns}


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()[:32]


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
