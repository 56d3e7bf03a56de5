"""The compiled pass: built by this machine's gcc for its own processor, once, in the user's cache folder.

It takes six seconds. Without gcc, or on another processor than x86 with AVX2, there is none: models run as before.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache, partial
from pathlib import Path

import torch

from . import abi, sanitized, store
from .abi import Library
from .sanitized import sanitizer

HERE = Path(__file__).parent / "c"
SOURCE = "pass.c"
FLAGS = "-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-shared", "-fPIC"
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index0/size")  # as in 48K
NAMES: dict[Library, str] = {}  # of the libraries that were loaded
logger = logging.getLogger(__name__)


@cache
def library(weights: str, rest: str) -> Library | None:
    """The pass over weights of this precision, with activations, keys and values of the `rest`; both are "bfloat16" or
    "float32". None where it cannot be had on this machine."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None or platform.system() != "Linux" or not suits():
        return None
    halves, wide = weights == "bfloat16", rest == "float32"
    flags = (
        *FLAGS,
        *sanitized.FLAGS[sanitizer()],
        f"-DFIRST={_first()}",
        *(("-DSOON=_MM_HINT_T1", "-DAHEAD=2") if tiles() or "AuthenticAMD" in _about("vendor_id") else ()),
        *(("-DTILES",) if tiles() else ()),
        *(("-DHALVES",) if halves else ()),
        *(("-DWIDE",) if halves and wide else ()),
    )
    try:
        name = _name(flags)
        code = store.load(name, partial(_compile, compiler, flags), abi.ffi.dlopen)
        NAMES[code] = Path(name).stem
        return code
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        logger.warning("the faster pass could not be compiled (%s); the model's own is used", said.strip()[-200:])
        return None


def suits() -> bool:
    """Is this a processor for which the pass is written?"""
    fit = platform.machine().lower() in ("x86_64", "amd64")
    return fit and torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))


@cache
def tiles() -> bool:
    """May this process use the processor's tiles (AMX)? Linux wants to be asked."""
    request, tile_data = 0x1023, 18  # arch_prctl's ARCH_REQ_XCOMP_PERM
    able = {"amx_tile", "amx_bf16", "avx512_bf16"} <= set(_about("flags").split())
    return able and ctypes.CDLL(None).syscall(158, request, tile_data) == 0


def _about(what: str) -> str:
    """A line of what Linux says about the processor; empty where it says nothing."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.is_file() else []
    return next((line for line in lines if line.startswith(what)), "")


def _first() -> int:
    """Bytes of the processor's first cache, or what is usual."""
    try:
        return 1024 * int(CACHE.read_text(encoding="utf-8").strip().removesuffix("K"))
    except (OSError, ValueError):
        return 32 * 1024


def _name(flags: tuple[str, ...]) -> str:
    """The library's file name, by its sources, its flags and this processor's abilities."""
    digest = hashlib.sha256(" ".join((*flags, _about("flags"), _about("model name"))).encode())
    for source in sorted(HERE.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return f"{digest.hexdigest()[:24]}.so"


def _compile(compiler: str, flags: tuple[str, ...], file: Path) -> None:
    source = str(HERE / SOURCE)
    subprocess.run(
        [compiler, *flags, source, "-o", str(file), "-lm"],
        check=True,
        capture_output=True,
        text=True,
        timeout=600 if sanitizer() else 120,
    )
