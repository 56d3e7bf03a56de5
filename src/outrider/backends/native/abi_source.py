"""Makes `_abi.py`, cffi's description of the compiled code, from `c/abi.h`.

`setup.py` calls this when the package is built, so it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import cffi
from cffi import recompiler

HEADER = Path(__file__).parent / "c" / "abi.h"
NAME = "_abi.py"
BY_ADDRESS = "typedef void weight_t; typedef void kv_t; typedef void act_t;"  # float32 or bfloat16, by the build


def digest() -> int:
    """A number that stands for the header's text."""
    return int(hashlib.sha256(HEADER.read_bytes()).hexdigest()[:15], 16)


def write(folder: Path) -> Path:
    """Write `_abi.py` to a folder; its constant ABI_DIGEST says which header it was made of."""
    ffi = cffi.FFI()
    ffi.set_source(f"outrider.backends.native.{NAME}".removesuffix(".py"), None)
    ffi.cdef(f"{BY_ADDRESS}\n{HEADER.read_text(encoding='utf-8')}\n#define ABI_DIGEST {digest()}\n")
    recompiler.make_py_source(ffi, "outrider.backends.native._abi", str(folder / NAME))
    return folder / NAME
