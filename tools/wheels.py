"""Builds wheels for all platforms on this machine: `python -m tools.wheels [PLATFORM ...]`, into dist/.

Their libraries are cross-compiled by zig (the package `ziglang`). Platforms are those of
`src/outrider/backends/native/variants.py`; without names, all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from outrider.backends.native.variants import CHOICE, PLATFORMS, zig

ROOT = Path(__file__).resolve().parents[1]


def main(names: list[str]) -> int:
    """Returns an exit code."""
    if unknown := [name for name in names if name not in PLATFORMS]:
        print(f"unknown platform {unknown[0]}; there are {', '.join(PLATFORMS)}", file=sys.stderr)
        return 2
    if zig() is None:
        print("wheels with libraries need zig: pip install ziglang", file=sys.stderr)
        return 2
    for name in names or PLATFORMS:
        print(f"{name}{'' if PLATFORMS[name].tested else ' (untested)'}", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(ROOT / "dist"), str(ROOT)]
        subprocess.run(pip, check=True, env={**os.environ, CHOICE: name})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
