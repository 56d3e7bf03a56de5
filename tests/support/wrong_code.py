"""The compiled pass with a wrong line, which tests of its proof must catch."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.backends.native import library as native
from outrider.backends.native import variants
from outrider.backends.native.abi import Library

Mutant = tuple[str, str, str]  # a file of the sources, a line that it contains once, what replaces the line
HEADER = '#include "abi.h"'  # in types.h, which all files include


@contextmanager
def mutated(monkeypatch: pytest.MonkeyPatch, folder: Path, mutants: Sequence[Mutant], chosen: int) -> Iterator[None]:
    """Compiled code in which one of `mutants` is wrong, or none of them (-1).

    All of them are compiled into one library: what replaces a line computes what the line did, except where WRONG is 1,
    as it is for the chosen one alone.

    Args:
        folder: for a copy of the sources.
        chosen: index of a mutant.
    """
    if native.sanitizer():
        pytest.skip("faults are looked for in the code as it is")
    shutil.copytree(variants.SOURCES, folder, dirs_exist_ok=True)
    for i, (name, line, wrong) in enumerate((("types.h", HEADER, f"{HEADER}\nint wrong_line;"), *mutants), -1):
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count(line) == 1
        assert i < 0 or "WRONG" in wrong
        replaced = text.replace(line, wrong.replace("WRONG", f"(wrong_line == {i})"))
        (folder / name).write_text(replaced, encoding="utf-8")
    opened = native._dlopen

    def choosing(file: str) -> Library:
        code = opened(file)
        ctypes.c_int.in_dll(ctypes.CDLL(file), "wrong_line").value = chosen
        return code

    monkeypatch.setattr(native, "_dlopen", choosing)
    monkeypatch.setattr(variants, "SOURCES", folder)
    quickly = tuple("-O1" if flag == "-O3" else flag for flag in native.FLAGS)  # compiled in half the time
    monkeypatch.setattr(native, "FLAGS", quickly)
    native.library.cache_clear()
    try:
        yield
    finally:
        native.library.cache_clear()
