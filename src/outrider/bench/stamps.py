"""Which files a SPEC named when it was measured, so that a drafter trained anew is not taken for the one before."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from .. import plugins, shipped
from ..params import InputError

BLOCKS, BLOCK = 64, 1 << 16  # of a large file so many are read, of so many bytes


def stamps(specs: Collection[str]) -> dict[str, str]:
    """A stamp for each SPEC that names files here: 16 hexadecimal digits, of all of them."""
    made = {}
    for spec in sorted(specs):
        files = [file for part in plugins.parts(spec) for file in files_of(part)]
        if files:
            digest = hashlib.sha256()
            for file in files:
                digest.update(file.name.encode() + _sampled(file))
            made[spec] = digest.hexdigest()[:16]
    return made


def files_of(spec: str) -> list[Path]:
    """The files of a SPEC without ` + `, sorted; none where it names none, or a hub id."""
    body = spec.partition("?")[0]
    name, _, path = body.partition(":")
    try:
        place = shipped.folder_of(path if name in plugins.names("drafters") else body)
    except InputError:  # said where it is loaded
        return []
    if place.is_dir() and place != Path():
        return sorted(file for file in place.iterdir() if file.is_file() and file.suffix != ".md")
    return [place] if place.is_file() else []


def _sampled(file: Path) -> bytes:
    """A small file, or a large one's size and blocks evenly spread over it."""
    size = file.stat().st_size
    if size <= BLOCKS * BLOCK:
        return file.read_bytes()
    parts = [str(size).encode()]
    with file.open("rb") as opened:
        for i in range(BLOCKS):
            opened.seek(i * (size - BLOCK) // (BLOCKS - 1))
            parts.append(opened.read(BLOCK))
    return b"".join(parts)
