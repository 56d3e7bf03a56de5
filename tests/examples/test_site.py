"""The site is built strictly, and fetches nothing when it is read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.process]


def test_the_site_is_complete_and_offline(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site needs the extra: pip install outrider[docs]")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "tutorial.html", "api.html", "contributing.html"} <= {p.name for p in pages}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?://[^"]+)"', text)
        assert not fetched, f"{page.name} fetches {fetched[0]}"
