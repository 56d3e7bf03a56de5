"""Files in the user's cache directory, written atomically.

What runs as code, or becomes a model's weights, is taken from there only where nobody else could have put it
(`exposed`). Records are JSON, whose numbers are checked by those who read them.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from . import files

logger = logging.getLogger(__name__)
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def root() -> Path:
    """`$OUTRIDER_CACHE`, else `$XDG_CACHE_HOME/outrider`, else `~/.cache/outrider`; of a user without a home, a folder
    for temporary files."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "outrider"
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError:  # as in a container whose user has no entry
        return Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}"


def folder(name: str) -> Path:
    """The folder of this name in the cache directory; it may not exist yet."""
    return root() / name


def make(folder: Path) -> Path:
    """The folder, made where it is missing, with those above it: others cannot write to it, whatever the umask.

    Raises:
        OSError: it cannot be made.
    """
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(mode=0o755, exist_ok=True)
    return folder


def read(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where the file is missing or damaged."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write(file: Path, value: Any) -> None:
    """Write a value as JSON. OSError where the folder cannot be written."""
    replace(file, lambda place: place.write_text(json.dumps(value), encoding="utf-8"))


def replace(file: Path, content: Callable[[Path], object]) -> None:
    """Write what a function writes to the file that it is given (`files.replace`). OSError as above."""

    def made(place: Path) -> None:
        content(place)
        protect(place)

    make(file.parent)
    files.replace(file, made)


def protect(place: Path) -> None:
    """Make this file or folder writable by its owner alone, whatever the umask."""
    place.chmod(stat.S_IMODE(place.stat().st_mode) & ~OTHERS)


@contextmanager
def keeping() -> Iterator[None]:
    """A block that writes to the cache; an OSError is reported once, since it only makes every start slow."""
    try:
        yield
    except OSError as error:
        unusable(error.strerror or str(error))


def unusable(why: str) -> None:
    """Say, once for each cache directory, that nothing can be kept there."""
    _say_unusable(str(root()), why[:1].lower() + why[1:])


@cache
def _say_unusable(where: str, why: str) -> None:
    logger.warning(
        "each start is slow, since compiled code, converted models and proofs cannot be kept in %s (%s); "
        "free space there, or set OUTRIDER_CACHE to a folder that only you can write to",
        where,
        why,
    )


def exposed(place: Path) -> str:
    """Why others could have written this file or folder, as a clause; empty where only its user and root can.

    Its owner is one of these and nobody else may write it. Nor may others rename a folder above it.

    Raises:
        OSError: it is not there.
    """
    if os.name != "posix":
        return ""
    place = place.resolve()
    trusted = {0, os.geteuid()}
    for path in (place, *place.parents):
        about = path.stat()
        above = path != place
        if about.st_uid not in trusted and not (above and about.st_uid == Path("/").stat().st_uid):  # as in containers
            return f"{path} belongs to another user"
        if about.st_mode & OTHERS and not (above and about.st_mode & stat.S_ISVTX):  # sticky, as /tmp is
            return f"others can write to {path}"
    return ""
