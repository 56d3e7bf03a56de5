"""The compiled library in the cache: a damaged one is compiled again, and one that others could have put there too."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from outrider.backends.native import library as native
from outrider.backends.native import variants

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None or os.name != "posix", reason="needs gcc")
root_only = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files to another user")
NAME = "number.so"


class Compiler:
    """gcc for a library whose `number` is how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, file: Path) -> None:
        self.calls += 1
        library(file, self.calls)


def library(file: Path, number: int) -> None:
    source = f"int number(void) {{ return {number}; }}"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(file)]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


def number(code: ctypes.CDLL) -> int:
    return int(code.number())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_library_is_compiled_once(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler()
    assert [number(native.load(NAME, compiler, ctypes.CDLL)) for _ in range(3)] == [1, 1, 1]
    assert not said(caplog)
    assert {f.name for f in cache.iterdir()} == {NAME, f"{NAME}.sha256", f"{NAME}.lock"}
    digest, name = (cache / f"{NAME}.sha256").read_text().split()
    assert (digest, name) == (hashlib.sha256((cache / NAME).read_bytes()).hexdigest(), NAME)


def test_a_library_that_several_need_at_once_is_compiled_once(cache: Path) -> None:
    compiler, asked = Compiler(), Barrier(3)

    def load(_: int) -> int:
        asked.wait()
        return number(native.load(NAME, compiler, ctypes.CDLL))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(load, range(3))) == [1, 1, 1]


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def zeroed(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4096:8192] = bytes(4096)
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def without_checksum(file: Path) -> None:
    file.with_name(f"{file.name}.sha256").unlink()


DAMAGE: list[Callable[[Path], None]] = [half, zeroed, empty, without_checksum]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_compiled_again(
    damage: Callable[[Path], None], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was a SIGBUS at every start, or never replaced."""
    compiler = Compiler()
    planted(cache)  # not loaded before: it must not be cut under this process
    damage(cache / NAME)
    assert number(native.load(NAME, compiler, ctypes.CDLL)) == 1
    (line,) = said(caplog)
    assert "damaged" in line
    caplog.clear()
    assert number(native.load(NAME, compiler, ctypes.CDLL)) == compiler.calls == 1, "and kept"
    assert not said(caplog)


def test_the_damaged_pass_of_models_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same by the function that models call, with the sources of a library that does nothing."""
    if not native.suits():
        pytest.skip("this processor has no compiled pass")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / variants.SOURCE).write_text("void tune(void) {}\n", encoding="utf-8")
    monkeypatch.setattr(variants, "SOURCES", tmp_path / "c")
    native.library.cache_clear()
    try:
        assert native.library("bfloat16", "bfloat16") is not None
        (file,) = (tmp_path / "native").glob("*.so")
        full = file.read_bytes()
        file.unlink()
        file.write_bytes(full[: len(full) // 2])
        native.library.cache_clear()
        assert native.library("bfloat16", "bfloat16") is not None
        assert file.read_bytes() == full
        assert len(said(caplog)) == 1
    finally:
        native.library.cache_clear()


def planted(cache: Path, mode: int = 0o755) -> None:
    """A library that somebody else has put there, its checksum too."""
    cache.mkdir(parents=True)
    library(cache / NAME, 666)
    digest = hashlib.sha256((cache / NAME).read_bytes()).hexdigest()
    (cache / f"{NAME}.sha256").write_text(f"{digest}  {NAME}\n")
    for place in (cache / NAME, cache / f"{NAME}.sha256"):
        place.chmod(0o644)
    cache.chmod(mode)


@pytest.mark.parametrize("where", ["folder", "above"])
def test_no_library_is_loaded_from_a_folder_that_others_can_write(
    where: str, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(cache)
    (cache if where == "folder" else cache.parent).chmod(0o777)
    own = cache.parent.parent / "tmp"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    assert number(native.load(NAME, Compiler(), ctypes.CDLL)) == 1
    (line,) = said(caplog)
    assert "others can write" in line
    assert "OUTRIDER_CACHE" in line
    assert not list(own.iterdir()), "the private folder is gone"


@root_only
def test_no_library_of_another_user_is_loaded(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    planted(cache)
    os.chown(cache, 65534, 65534)
    os.chown(cache / NAME, 65534, 65534)
    assert number(native.load(NAME, Compiler(), ctypes.CDLL)) == 1
    assert "belongs to another user" in said(caplog)[0]


@pytest.mark.parametrize("change", [lambda file: file.chmod(0o666), lambda file: os.chown(file, 65534, 65534)])
@root_only
def test_a_file_that_another_user_can_write_is_replaced(
    change: Any, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planted(cache)
    change(cache / NAME)
    compiler = Compiler()
    assert [number(native.load(NAME, compiler, ctypes.CDLL)) for _ in range(2)] == [1, 1]
    assert compiler.calls == 1
    assert len(said(caplog)) == 1


def test_where_nothing_can_be_kept_it_is_compiled_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    compiler = Compiler()
    assert [number(native.load(NAME, compiler, ctypes.CDLL)) for _ in range(2)] == [1, 2]
    (line,) = said(caplog)
    assert "each start is slow" in line
