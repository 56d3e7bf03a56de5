"""Parts of other packages whose source cannot be read: they say nothing of themselves, and stop nobody."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from outrider import plugins


@pytest.mark.parametrize("content", [b"\xff\xfe\x00compiled", b"def load(:", None], ids=["compiled", "torn", "gone"])
def test_a_part_without_source_has_no_summary(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "odd_part.py").write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.util.find_spec("odd_part")
    module = "odd_part" if content is not None else "a_package_that_is_gone.part"
    entry = EntryPoint("odd", module, plugins.GROUPS["drafters"])
    monkeypatch.setattr(plugins, "_entries", lambda kind: {"odd": entry})
    assert plugins.summary("drafters", "odd") == ""
    plugins.check_options("drafters", "odd", ["anything"])
