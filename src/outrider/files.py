"""Atomic writes: a file or folder appears under its name when it is complete, or not at all.

Both are written beside their place first, synced to the disk, and then renamed; `replace` and `filling` do so for the
package, and raise OSError. `one_at_a_time` raises OSError too; the others raise an
InputError where something cannot be written.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from .params import InputError, first_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

READABLE = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
PARTIAL = ".partial-"  # what the names of unfinished files' folders begin with; one that a crash leaves may be deleted


def write(path: str | Path, content: str | Callable[[Path], object]) -> Path:
    """Write a file, replacing the one of that name.

    Args:
        path: the file; its folder must exist.
        content: UTF-8 text, or a function that writes the file that it is given.

    Raises:
        InputError: the disk is full or the place cannot be written. The old file is then still complete.
    """
    path = Path(path)
    try:
        replace(path, partial(Path.write_text, data=content, encoding="utf-8") if isinstance(content, str) else content)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        raise _refused(path, error) from None
    return path


def replace(path: Path, content: Callable[[Path], object]) -> None:
    """Write a file under its name once it is complete and on the disk, replacing the one of that name.

    Each attempt writes in a folder of its own beside the file, so that threads and processes do not meet.

    Args:
        path: the file; its folder must exist.
        content: writes the file that it is given; called once.

    Raises:
        OSError: the system refuses; `content` may raise others. The file that was there is then untouched.
    """
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=path.parent) as own:
        made = Path(own) / path.name
        content(made)
        _finish(made, Path(own))
        made.replace(path)


def append(path: str | Path, line: str) -> None:
    """Append a line to a file, atomically; a file without a line is not left behind.

    Args:
        path: the file, which may be there or not; its folder must exist.
        line: UTF-8 text without the line's end.

    Raises:
        InputError: the disk is full or the file cannot be written.
    """
    path = Path(path)
    with writing(path), path.open("ab", buffering=0) as file:
        end = file.tell()
        rest = line.encode() + b"\n"
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            if not end:
                path.unlink()
            raise


@contextmanager
def alone(path: str | Path, name: object = None) -> Iterator[None]:
    """A block that appends to a file, which no other process does meanwhile (where the system has such locks).

    Args:
        path: the file, which may be there or not; folders above it are made. Without a line it is not left behind.
        name: of what it locks, if that is not the file.

    Raises:
        InputError: another process is in such a block, or the file cannot be written.
    """
    path = regular(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another run is writing {name or path}; wait until it ends, or name another"
                ) from None
            except OSError:  # a file system without locks
                pass
        try:
            yield
        finally:
            if path.exists() and not path.stat().st_size:
                with suppress(PermissionError):  # Windows removes no open file
                    path.unlink()


@contextmanager
def alone_in(folder: str | Path) -> Iterator[None]:
    """A block that fills a folder, which no other process does meanwhile. Folders that it makes are not left empty.

    Raises:
        InputError: another process is in such a block, or the folder cannot be written.
    """
    folder = Path(folder)
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with alone(folder / "lock", folder):
            yield
    finally:
        for place in new:
            with suppress(OSError):  # not empty, or gone
                place.rmdir()


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """A block that processes and threads that name this lock file run one after the other.

    Where the system or its file system has no locks, all run it at once. The file remains, empty.

    Args:
        path: its folder must exist.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("ab") as file:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    if path.resolve() == Path.cwd():
        raise InputError(f"{path} is the current folder; name a new one")
    if not replace and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} is there already; name a folder that is not, or remove it")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with filling(path) as made:
            yield made


@contextmanager
def filling(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which replaces the one of that name at the end of the block; after an error it is gone.

    Args:
        path: the name; the folder above it must exist.

    Raises:
        OSError: the system refuses.
    """
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=path.parent) as own:
        made = Path(own) / "new"
        made.mkdir()
        yield made
        for file in made.rglob("*"):
            if file.is_file():
                _finish(file, Path(own))
        old = Path(own) / "old"  # removed with `own`
        try:
            if path.exists():
                path.replace(old)
            made.replace(path)
        except BaseException:  # an interrupt between the two
            if old.exists() and not path.exists():
                old.replace(path)
            raise


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """A block that writes `path`, or files below it: what the system refuses becomes an `InputError`."""
    try:
        yield
    except OSError as error:
        raise _refused(path, error) from None


def regular(path: str | Path) -> Path:
    """An output file, checked before work begins: it may be there or not, but is no device, pipe or folder.

    Raises:
        InputError: it is one, or a folder above it is none.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file, which the output must be; name a file")
    _check_above(path)
    return path


def fillable(path: str | Path) -> Path:
    """An output folder, checked before work begins: it may be there or not, but it is no file.

    Raises:
        InputError: it is one, or a folder above it is none.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; --out names a folder")
    _check_above(path)
    return path


def _check_above(path: Path) -> None:
    above = next((p for p in path.absolute().parents if p.exists()), path.absolute().parent)
    if not above.is_dir():
        raise InputError(f"{path} cannot be written, since {above} is a file; name another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written, since you may not write to {above}; name another place")


@contextmanager
def clearing(folder: str | Path, *results: str) -> Iterator[None]:
    """A block that fills a folder. If it is refused before it has a result, what it wrote is removed.

    Args:
        folder: made by the block, or there before; what was in it then stays.
        results: patterns of the files that are worth keeping, such as "*.safetensors".
    """
    folder = Path(folder)
    before = {p for p in (folder, *folder.parents) if p.exists()} | set(folder.glob("*"))
    try:
        yield
    except InputError:
        if not any(file for pattern in results for file in folder.rglob(pattern)):
            for made in set(folder.glob("*")) - before:
                shutil.rmtree(made) if made.is_dir() else made.unlink()
            for made in (folder, *folder.parents):
                if made.exists() and made not in before:
                    made.rmdir()
        raise


def _refused(path: str | Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or first_line(error)
    return InputError(f"{path} cannot be written ({reason.rstrip('.')}); free space, or name another place")


def _finish(file: Path, own: Path) -> None:
    """Let those read a file who may read the user's others (safetensors writes for its owner alone), and wait until its
    bytes are on the disk: a rename may get there before them."""
    (usual := own / "usual").touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    if lacking := usual.stat().st_mode & READABLE & ~mode:  # some mounts know no modes, and refuse to change them
        file.chmod(mode | lacking)
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
