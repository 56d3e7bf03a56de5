"""What Python and the compiled code share: the structures, constants and functions of `c/abi.h`, through cffi."""

from __future__ import annotations

import runpy
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from . import abi_source

Pointer = Any  # cffi's `void *`
Struct = Any  # a pointer to one of the structures of abi.h, which owns its memory
Library = Any  # a compiled library: the functions of abi.h as attributes


def _ffi() -> Any:
    """cffi's module, made when the package was built. A clone that was not installed has none, and after a change of
    the header there is an old one: then it is made for this process, which takes a tenth of a second."""
    try:
        ffi = import_module("._abi", __package__).ffi
        if ffi.integer_const("ABI_DIGEST") == abi_source.digest():
            return ffi
    except ImportError:
        pass
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        return runpy.run_path(str(abi_source.write(Path(folder))))["ffi"]


ffi = _ffi()
NULL, ADDRESS = ffi.NULL, ffi.typeof("void *")
PLAIN, Q4, Q8, BF12, INTEGER = (ffi.integer_const(kind) for kind in ("PLAIN", "Q4", "Q8", "BF12", "INTEGER"))
BLOCK_WEIGHTS: int = ffi.integer_const("BLOCK_WEIGHTS")
MAX_HEAD_DIM: int = ffi.integer_const("MAX_HEAD_DIM")
MAX_FED_PAIRS: int = ffi.integer_const("MAX_FED_PAIRS")
EXPERT_ROWS: int = ffi.integer_const("EXPERT_ROWS")
CHANGE_BYTES: int = ffi.integer_const("CHANGE_BYTES")


def address(x: Any) -> Pointer:
    """Where the data of a torch tensor or a numpy array lies, which must be contiguous and outlive what uses it; an
    integer is an address itself, and None is NULL."""
    if x is None:
        return NULL
    if isinstance(x, np.ndarray):
        x = x.__array_interface__["data"][0]
    elif not isinstance(x, int):
        x = x.data_ptr()
    return ffi.cast(ADDRESS, x)


def struct(name: str, /, **fields: Any) -> Struct:
    """A structure of abi.h; fields that are not given are zero. What its pointers point to must outlive it."""
    return ffi.new(f"{name} *", fields)
