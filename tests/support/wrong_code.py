"""The compiled pass with a wrong line, which tests of its proof must find."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.backends.native import library as native
from outrider.backends.native import variants


@contextmanager
def mutated(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, line: str, wrong: str) -> Iterator[None]:
    """Sources copied to a folder; in the one of this `name` the only `line` of this text is replaced by `wrong`."""
    if native.sanitizer():
        pytest.skip("faults are looked for in the code as it is")
    shutil.copytree(variants.SOURCES, folder, dirs_exist_ok=True)
    text = (folder / name).read_text(encoding="utf-8")
    assert text.count(line) == 1
    (folder / name).write_text(text.replace(line, wrong), encoding="utf-8")
    monkeypatch.setattr(variants, "SOURCES", folder)
    quickly = tuple("-O1" if flag == "-O3" else flag for flag in native.FLAGS)  # compiled in half the time
    monkeypatch.setattr(native, "FLAGS", quickly)
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    native.library.cache_clear()
    try:
        yield
    finally:
        native.library.cache_clear()
