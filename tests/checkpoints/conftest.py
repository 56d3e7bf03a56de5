from __future__ import annotations

from pathlib import Path

import layouts_foreign as foreign
import pytest

from outrider.checkpoints import Facts


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    """What exports need of their target."""
    return Facts.at(foreign.target(tmp_path / "target"))
