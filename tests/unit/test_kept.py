"""Files in the cache directory: complete or not there, from nobody else, and said once where there is no place."""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from outrider import files, kept
from outrider.params import InputError

root_only = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files to another user")


def test_two_threads_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    """The partial file was named by the process alone: the second thread wrote into the first one's."""
    file, both = tmp_path / "x.json", threading.Barrier(2)
    failed: list[BaseException] = []

    def content(text: str, place: Path) -> None:
        place.write_text(text[: len(text) // 2])
        both.wait(10)
        with place.open("a") as opened:
            opened.write(text[len(text) // 2 :])
        both.wait(10)

    def write(text: str) -> None:
        try:
            kept.replace(file, lambda place: content(text, place))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(letter * 1000,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert file.read_text() in ("a" * 1000, "b" * 1000)
    assert [f.name for f in tmp_path.iterdir()] == ["x.json"]


def test_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename that reaches the disk before the bytes leaves a file of zeros after a power cut."""
    steps: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (steps.append("sync"), sync(file))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (steps.append(Path(to).name), replace(self, to))[1])
    files.write(tmp_path / "a.txt", "text")
    with files.folder(tmp_path / "f") as made:
        (made / "one").write_text("1")
    assert steps == ["sync", "a.txt", "sync", "f"]


def test_what_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    files.write(tmp_path / "a", "before")

    def broken(place: Path) -> None:
        place.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="No space left"):
        files.write(tmp_path / "a", broken)
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("a", "before")]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(
    ("mode", "why"), [(0o755, ""), (0o700, ""), (0o777, "others can write"), (0o775, "others can")]
)
def test_a_folder_that_others_can_write_is_exposed(mode: int, why: str, tmp_path: Path) -> None:
    """Itself or a folder above it, which they could rename. A sticky one above is none: /tmp is."""
    folder = tmp_path / "above" / "native"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert bool(why) == bool(kept.exposed(folder))
    assert why in kept.exposed(folder)
    folder.chmod(0o755)
    folder.parent.chmod(mode)
    assert bool(why) == bool(kept.exposed(folder))
    folder.parent.chmod(mode | 0o1000)
    assert not kept.exposed(folder)
    folder.chmod(0o1777)
    assert kept.exposed(folder), "there, others can make files"


@root_only
def test_what_another_user_owns_is_exposed(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    assert "belongs to another user" in kept.exposed(tmp_path)
    (tmp_path / "mine").mkdir()
    assert "belongs to another user" in kept.exposed(tmp_path / "mine")


def test_files_are_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        kept.write(kept.folder("budgets") / "x.json", 1)
    finally:
        os.umask(before)
    assert not kept.exposed(tmp_path / "cache" / "budgets" / "x.json")
    assert not kept.exposed(tmp_path / "cache" / "budgets")


def test_a_cache_that_cannot_be_written_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for name in ("exact", "validated"):
            with kept.keeping():
                kept.write(kept.folder(name) / "x.json", {})
    (said,) = [r.getMessage() for r in caplog.records]
    assert "each start is slow" in said
    assert "OUTRIDER_CACHE" in said


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00" * 50, "[" * 100_000])
def test_a_damaged_record_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    assert kept.read(tmp_path / "x.json") == {}
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    assert kept.read(tmp_path / "x.json") == {"a": 1}


def test_weights_can_be_read_by_those_who_can_read_other_files(tmp_path: Path) -> None:
    """safetensors writes for its owner alone; a folder of weights is for all who may read the user's files."""
    before = os.umask(0o027)
    try:
        with files.folder(tmp_path / "drafter") as made:
            (made / "model.safetensors").touch(0o600)
            (made / "config.json").touch()
            (made / "run.sh").touch(0o700)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "drafter").iterdir()}
    assert modes == {"model.safetensors": 0o640, "config.json": 0o640, "run.sh": 0o740}


def test_an_interrupt_between_the_two_renames_leaves_the_old_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place, rename = tmp_path / "last", Path.replace
    place.mkdir()
    (place / "old").touch()

    def interrupted(path: Path, to: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), files.filling(place) as made:
        (made / "fresh").touch()
    assert [p.name for p in tmp_path.rglob("*")] == ["last", "old"]


@pytest.mark.skipif(os.name != "posix", reason="Windows always has a home")
def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(kind: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("OUTRIDER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", classmethod(none))
    assert kept.root() == Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}"


def test_the_current_folder_is_no_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing can take its name while it is in use."""
    monkeypatch.chdir(tmp_path)
    for name in (".", str(tmp_path)):
        with pytest.raises(InputError, match="is the current folder; name a new one"), files.folder(name):
            pass
