""".gguf files: read by transformers' own code, and kept as folders so that the second start is as quick as a folder's.

The folders lie in the user's cache directory (`kept.py`), one for each file's SHA-256. A quantised file's weights
become bfloat16, others keep their precision. `source.json` in a folder remembers path, size and time of the file it was
made from, so that a file is hashed again only if it has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import kept
from ..types import InputError

logger = logging.getLogger(__name__)

MAGIC = b"GGUF"
KEPT = {"F32": "float32", "F64": "float32", "F16": "float16"}  # precision of files that are not quantised
SOURCE = "source.json"
FOUR_BITS, EIGHT_BITS = ("Q4_0", "Q4_1"), "Q8_0"
_direct: set[Path] = set()  # files of which it was said that they are read anew each time


def folder_of(file: Path) -> tuple[str, str | None]:
    """(folder, None) of the converted file; (its own folder, its name) if there is no place to keep that.

    The first use of a file converts it, which takes a while and is said once.
    """
    file = _checked(file).resolve()
    root, stat = kept.folder("gguf"), file.stat()
    stamp = {"path": str(file), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    for folder in _folders(root):
        if _source(folder) == stamp:
            return str(folder), None
    if file in _direct:
        return str(file.parent), file.name
    folder = root / _digest(file)
    try:
        if not (folder / "config.json").is_file():
            _convert(file, folder, stamp)
        elif os.access(folder, os.W_OK):  # another copy of a file that is here already
            kept.write(folder / SOURCE, stamp)
    except OSError as error:
        why = error.strerror or _line(error)
        logger.warning("%s is read anew at each start: %s cannot keep it converted (%s)", file.name, root, why)
        _direct.add(file)
        return str(file.parent), file.name
    return str(folder), None


def read(file: Path, dtype: Any = "auto") -> Any:
    """The stock model of a .gguf file, its weights in `dtype`; one sentence where it fails."""
    from transformers import AutoModelForCausalLM, GgufConfig

    with _explained(file):
        return AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, quantization_config=GgufConfig(dequantize=True),
            dtype=precision(file) if dtype == "auto" else dtype, output_loading_info=True,
        )  # fmt: skip


def read_tokenizer(file: Path) -> Any:
    """The tokenizer of a .gguf file, chat template included."""
    from transformers import AutoTokenizer

    with _explained(file, "has no tokenizer that transformers can read"):
        return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def precision(file: Path) -> str:
    """float32 or float16 if that is what most of the matrices are kept in, else bfloat16."""
    counts = Counter(t.tensor_type.name for t in _reader(file).tensors if len(t.shape) > 1)
    return KEPT.get(counts.most_common(1)[0][0], "bfloat16") if counts else "bfloat16"


def file_of(where: str, direct: str | None) -> Path | None:
    """The .gguf file that a folder was converted from, or that is read as it is; None where it is not there."""
    made = Path(where) / direct if direct else (_source(Path(where)) or {}).get("path")
    return Path(made) if made and Path(made).is_file() else None


def blocks(file: Path) -> Iterator[tuple[Any, Any]]:
    """The matrices that a file keeps in four or eight bits: (weights [o, i], what they are made of).

    That is (numbers 0 .. 15 [o, i], scales [o, i / 32], offsets [o, i / 32]) with w = (number - 8) * scale + offset for
    those of four bits, None for those of eight.
    """
    import numpy as np
    import torch

    for tensor in _reader(file).tensors:
        kind = tensor.tensor_type.name
        if kind not in (*FOUR_BITS, EIGHT_BITS) or len(tensor.shape) != 2:
            continue
        head = 4 if kind == "Q4_1" else 2  # bytes of scale, and of minimum, before the numbers of 32 weights
        raw = np.ascontiguousarray(tensor.data).reshape(
            tensor.data.shape[0], -1, head + (32 if kind == EIGHT_BITS else 16)
        )
        known = torch.from_numpy(raw[..., :head].copy().view(np.float16).astype(np.float32))
        scale = known[..., :1]
        if kind == EIGHT_BITS:
            yield (scale * torch.from_numpy(raw[..., head:].copy().view(np.int8))).flatten(1), None
            continue
        numbers = torch.from_numpy(np.concatenate([raw[..., head:] & 15, raw[..., head:] >> 4], -1))
        full = numbers.float() if kind == "Q4_1" else numbers.float() - 8
        full = full.mul_(scale).add_(known[..., 1:]) if kind == "Q4_1" else full.mul_(scale)
        offsets = known[..., 1] + 8 * known[..., 0] if kind == "Q4_1" else torch.zeros_like(known[..., 0])
        yield full.flatten(1), (numbers.flatten(1), known[..., 0], offsets)


def _convert(file: Path, folder: Path, stamp: dict[str, Any]) -> None:
    """Write the folder whole or not at all. OSError: there is no place for it."""
    import torch

    kind = precision(file)
    size = sum(int(t.n_elements) for t in _reader(file).tensors) * getattr(torch, kind).itemsize
    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < 1.1 * size:
        raise OSError(None, f"it needs {size / 1e6:.0f} MB and less is free")
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        logger.warning("converting %s, once: %.0f MB in %s", file.name, size / 1e6, folder)
        model, found = read(file, kind)
        if found["missing_keys"]:
            lacking = sorted(found["missing_keys"])
            raise InputError(f"{file} lacks {len(lacking)} tensors, {lacking[0]} among them; fetch it again")
        _save(model, made)
        read_tokenizer(file).save_pretrained(made)
        kept.write(made / SOURCE, stamp)
        made.chmod(0o755)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was sooner
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _save(model: Any, folder: Path) -> None:
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # a full disk comes as this
        raise OSError(None, _line(error)) from None


def _checked(file: Path) -> Path:
    """A file that says it is GGUF."""
    try:
        with file.open("rb") as f:
            start = f.read(len(MAGIC))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {(error.strerror or _line(error)).lower()}") from None
    if start != MAGIC:
        raise InputError(f"{file} is not a GGUF file: it does not begin with the letters GGUF")
    return file


def _reader(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InputError("reading a .gguf file needs the package gguf; run: pip install gguf") from None
    with _explained(file):
        return GGUFReader(file)


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


def _source(folder: Path) -> Any:
    try:
        return json.loads((folder / SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()[:32]


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
