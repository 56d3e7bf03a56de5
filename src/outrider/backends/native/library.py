"""The compiled library: which build suits this processor, where it comes from, and opening it.

A wheel carries libraries for its platform's kinds of processors in `lib/` (`variants.py`). Where none fits, and in a
clone, a compiler on this machine builds one for its own processor, once, in the user's cache folder: gcc, clang, or
zig's, where the package `ziglang` is installed. Where there is no compiler, or a processor that the code is not written
for, there is no library, and models run in torch. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from ... import files, kept, machine
from . import abi, variants
from .abi import Library
from .processor import abilities, first_cache
from .variants import AVX512, NEON, PRECISIONS, TILES

PREBUILT = Path(__file__).parent / "lib"
FLAGS = *variants.FLAGS, "-mcpu=native" if abilities() >= NEON else "-march=native", "-pthread"
SANITIZE = "OUTRIDER_SANITIZE"
ADDRESS = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-DCHECKED",
)
# Builds that look for faults (`make sanitize`): flags after the usual ones. CHECKED: `EXPECT` checks.
SANITIZERS: dict[str, tuple[str, ...]] = {
    "": (),
    "address": ADDRESS,
    "tiles": (*ADDRESS, "-DEMULATED_AMX"),  # the code for tiles (AMX), on processors with AVX-512 alone
    "thread": ("-O1", "-g", "-fsanitize=thread", "-DCHECKED"),
}
NAMES: dict[Library, str] = {}  # of the libraries that were loaded
logger = logging.getLogger(__name__)


@cache
def library(weights: str, rest: str) -> Library | None:
    """The compiled code.

    Args:
        weights: "bfloat16" or "float32".
        rest: the same, of activations, keys and values.

    Returns:
        None where this machine has neither a prebuilt library nor a compiler, or its processor is not supported. A
        compiler's error is logged.
    """
    if not suits():
        return None
    defines = PRECISIONS[weights, rest]
    file = None if sanitizer() else prebuilt(weights, rest)
    made = (None if file is None else _opened(str(file))) or _built(defines)
    if made is None:
        return None
    code, name = made
    NAMES[code] = name
    # Prefetched into the second cache, and further ahead: AMD's processors gain by it, and tiles a little.
    second = tiles() or machine.cpu().get("vendor_id") == "AuthenticAMD"
    code.tune(first_cache(), second, 2 if second else 1)
    return code


def _opened(file: str) -> tuple[Library, str] | None:
    """The wheel's library and its name; None where the system refuses it."""
    try:
        return _dlopen(file), Path(file).stem
    except OSError as error:
        logger.warning("the library of the native passes cannot be opened (%s)", error)
        return None


def _built(defines: tuple[str, ...]) -> tuple[Library, str] | None:
    """The library that this machine's compilers build, and its name: the first of them that can."""
    flags = *FLAGS, *SANITIZERS[sanitizer()], *(("-DAMX",) if tiles() else ()), *defines
    said = ""
    for compiler in _compilers():
        name = variants.digest(" ".join((*compiler, *flags, *sorted(abilities()), machine.processor())))
        try:
            return load(f"{name}.so", partial(_compile, compiler, flags), _dlopen), name
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()[-200:]
    if said:
        logger.warning("the native passes could not be compiled (%s); models run in torch", said)
    return None


def prebuilt(weights: str, rest: str) -> Path | None:
    """The wheel's library for this processor; None where it has none, or was built from other sources than these."""
    kind = variants.this()
    if kind is None:
        return None
    for variant in kind.variants:
        file = PREBUILT / variants.file_name(variant, weights, rest, kind.suffix)
        if variant.needs <= abilities() and file.is_file():
            return file
    return None


def suits() -> bool:
    """Is this a processor for which the code is written?"""
    kind = variants.this()
    return kind is not None and kind.variants[-1].needs <= abilities()


def lacks_compiler() -> bool:
    """Is a compiler all that the native passes need here?"""
    return suits() and prebuilt("float32", "float32") is None and not any(_compilers())


def tiles() -> bool:
    """Does this machine's own build multiply with tiles (AMX)? In a sanitized build they may be emulated."""
    return abilities() >= (AVX512 if sanitizer() == "tiles" else TILES)


def sanitizer() -> str:
    """The sanitizer that OUTRIDER_SANITIZE names: "address" (with undefined behaviour), "tiles" (the same, emulating
    AMX), "thread", or "", the fast build. Raises ValueError for anything else."""
    name = os.environ.get(SANITIZE, "")
    if name not in SANITIZERS:
        raise ValueError(f"{SANITIZE} is address, tiles or thread, or not set, not {name!r}")
    return name


def load(name: str, compile_to: Callable[[Path], object], dlopen: Callable[[str], Any]) -> Any:
    """A library of the user's cache folder, which is compiled where it is not there. Its checksum lies beside it.

    One process compiles it while others wait. It is loaded only from a folder and a file that nobody else can write,
    and only if its checksum is right; otherwise it is compiled again. Where the folder cannot be used it is compiled
    for this process alone.

    Args:
        name: of its file; it must tell apart whatever could be compiled.
        compile_to: compiles it to this file; called only where no usable library is kept.
        dlopen: opens the file of a library.

    Raises:
        OSError: what was compiled cannot be loaded. What `compile_to` raises is passed on.
    """
    file = kept.folder("native") / name
    with ExitStack() as held:
        try:
            if _flaw(file) == "":
                return dlopen(str(file))
            _check(kept.make(file.parent))
            held.enter_context(files.one_at_a_time(file.with_name(f"{file.name}.lock")))
            if (flaw := _flaw(file)) == "":  # another process compiled it in the meantime
                return dlopen(str(file))
            if flaw:
                logger.warning("%s, so that it is compiled again", flaw)
        except OSError as error:
            kept.unusable(error.strerror or str(error))
        return _made(file, compile_to, dlopen)


def _made(file: Path, compile_to: Callable[[Path], object], dlopen: Callable[[str], Any]) -> Any:
    """A library that is compiled now, and kept in this file of the cache folder where that can be."""
    with tempfile.TemporaryDirectory(prefix="outrider-") as own:  # mode 0700; a loaded library outlives its file
        made = Path(own) / file.name
        compile_to(made)
        try:
            return dlopen(str(_keep(made, file)))
        except OSError as error:
            kept.unusable(error.strerror or str(error))
        return dlopen(str(made))


def _dlopen(file: str) -> Library:
    """Open a library for as long as the process lives: its threads outlive the interpreter, and would run code that is
    gone."""
    return abi.ffi.dlopen(file, abi.ffi.RTLD_NOW | getattr(abi.ffi, "RTLD_NODELETE", 0))


def _compilers() -> Iterator[list[str]]:
    """The commands of the C compilers that are there: $CC, or else gcc, clang and zig's."""
    given = shlex.split(os.environ.get("CC", ""), posix=os.name == "posix")
    for name, *options in [given] if given else [["gcc"], ["clang"]]:
        if (path := shutil.which(name)) is not None:
            yield [path, *options]
        elif given:
            logger.warning("there is no %s, which $CC names", name)
    if not given and (zig := variants.zig()) is not None:
        yield zig


def _compile(compiler: list[str], flags: tuple[str, ...], file: Path) -> None:
    command = [*compiler, *flags, str(variants.SOURCES / variants.SOURCE), "-o", str(file), *_links()]
    # zig keeps what it makes on the way in folders of its own; these go with the folder of `file`.
    caches = {f"ZIG_{kind}_CACHE_DIR": str(file.parent / "zig") for kind in ("LOCAL", "GLOBAL")}
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's library
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, env={**own, **caches})


def _links() -> tuple[str, ...]:
    kind = variants.this()
    return kind.links if kind else ()


def _flaw(file: Path) -> str | None:
    """Why this library cannot be loaded: "" if it can, None if there is none. OSError: the folder cannot be used."""
    if not file.exists():
        return None
    _check(file.parent)
    return kept.exposed(file) or ("" if _checksum(file) == _read(_beside(file)) else f"{file} is damaged")


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
