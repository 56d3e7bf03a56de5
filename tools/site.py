"""A hook of mkdocs: what pages that are read in the repository too need on the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[([^\]\[]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.S | re.M)


def on_files(files: Any, config: Any) -> Any:
    """The pages that lie in the repository's root."""
    for name in ("CONTRIBUTING", "CHANGELOG"):
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        files.append(File.generated(config, f"{name.lower()}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository beside `docs/` become the names of these files: the site does not hold them."""
    rooted = page.file.generated_by is not None
    folder = ROOT if rooted else (DOCS / page.file.src_uri).parent

    def site(match: re.Match[str]) -> str:
        words, link, anchor = match[1], match[2], match[3] or ""
        if "://" in link:
            return match[0]
        aim = (folder / link).resolve()
        if aim.name in ("CONTRIBUTING.md", "CHANGELOG.md") and aim.parent == ROOT:
            aim = DOCS / aim.name.lower()
        if aim.is_relative_to(DOCS):
            return f"[{words}]({os.path.relpath(aim, DOCS if rooted else folder)}{anchor})"
        if not aim.exists():
            return match[0]  # a mistake: mkdocs says so
        return words if words.startswith("`") else f"{words} (`{aim.relative_to(ROOT)}`)"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(site, part) for part in parts)
