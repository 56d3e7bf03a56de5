"""Atomic writes: a file or folder appears under its name when it is complete, or not at all.

Both are written beside their place first and then renamed. What cannot be written is refused in one sentence.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .params import InputError


def write(path: str | Path, content: str | Callable[[Path], object]) -> Path:
    """Write a file, replacing the one of that name.

    Args:
        path: the file; its folder must exist.
        content: UTF-8 text, or a function that writes the file that it is given.

    Raises:
        InputError: the disk is full or the place cannot be written. The file that was there is then still whole.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if isinstance(content, str):
            beside.write_text(content, encoding="utf-8")
        else:
            content(beside)
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # torch.save tells of a full disk by a RuntimeError
        raise _refused(path, error) from None
    finally:
        beside.unlink(missing_ok=True)
    return path


@contextmanager
def folder(path: str | Path, replace: bool = False) -> Iterator[Path]:
    """An empty folder to fill, which gets its name at the end of the block; after an error there is nothing.

    Args:
        path: the name; folders above it are made.
        replace: may a folder of that name be replaced? Otherwise it must be absent or empty.

    Raises:
        InputError: it is there already, or cannot be written.
    """
    path = Path(path)
    if not replace and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} is there already; name a folder that is not, or remove it")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            yield made
            made.chmod(0o777 & ~_umask())
            if path.exists():
                shutil.rmtree(path)
            made.replace(path)
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """A block that writes `path`, or files below it: what the system refuses becomes an `InputError`."""
    try:
        yield
    except OSError as error:
        raise _refused(path, error) from None


def regular(path: str | Path) -> Path:
    """An output file that may be there or not, but is no device, pipe or folder.

    Raises:
        InputError: it is one.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file, which the output must be; name a file")
    return path


def _refused(path: str | Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    return InputError(f"{path} cannot be written ({reason.rstrip('.')}); make room, or name another place")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
