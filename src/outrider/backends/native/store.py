"""Compiled libraries in the user's cache folder, each with its checksum beside it.

A library is loaded only from a folder and a file that nobody else can write, and only if its checksum is right;
otherwise it is compiled again. Where the folder cannot be used it is compiled for this process alone.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ... import kept

logger = logging.getLogger(__name__)


def load(name: str, compile_to: Callable[[Path], object], dlopen: Callable[[str], Any]) -> Any:
    """The library of this name.

    Args:
        name: of its file; it must tell apart whatever could be compiled.
        compile_to: compiles it to the file that it is given; called only where no usable library is kept.
        dlopen: opens the file of a library.

    Raises:
        OSError: what was compiled cannot be loaded. What `compile_to` raises is passed on.
    """
    file = kept.folder("native") / name
    try:
        if _usable(file):
            return dlopen(str(file))
    except OSError as error:
        kept.unusable(error.strerror or str(error))
    with tempfile.TemporaryDirectory(prefix="outrider-") as own:  # mode 0700; a loaded library outlives its file
        made = Path(own) / name
        compile_to(made)
        try:
            return dlopen(str(_keep(made, file)))
        except OSError as error:
            kept.unusable(error.strerror or str(error))
        return dlopen(str(made))


def _usable(file: Path) -> bool:
    """Is this a library to load? What is wrong with one that is there is said. OSError: it is not to be kept there."""
    if not file.exists():
        return False
    _check(file.parent)
    if why := kept.exposed(file) or ("" if _checksum(file) == _read(_beside(file)) else f"{file} is damaged"):
        logger.warning("%s, so that it is compiled again", why)
    return not why


def _keep(made: Path, file: Path) -> Path:
    """Copy a library into the cache folder. OSError where nothing can be kept there."""
    _check(kept.make(file.parent))
    checksum = _checksum(made)
    kept.replace(file, partial(shutil.copyfile, made))
    kept.replace(_beside(file), lambda place: place.write_text(checksum, encoding="ascii"))
    return file


def _check(folder: Path) -> None:
    if why := kept.exposed(folder):
        raise PermissionError(None, why)


def _beside(file: Path) -> Path:
    return file.with_name(f"{file.name}.sha256")


def _checksum(file: Path) -> str:
    """As `sha256sum` writes it."""
    return f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii", errors="replace") if file.is_file() else ""
