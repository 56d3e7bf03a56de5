"""Builds wheels for all platforms on this machine: `python -m tools.wheels [PLATFORM ...]`, into dist/.

Their libraries are cross-compiled by zig (the package `ziglang`). Platforms are those of
`src/outrider/backends/native/variants.py`; without names, all of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from outrider.backends.native.variants import CHOICE, PLATFORMS, zig

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Returns an exit code: 2 where zig is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=", ".join(PLATFORMS))
    names = parser.parse_args().platforms or [*PLATFORMS]
    if unknown := [name for name in names if name not in PLATFORMS]:
        parser.error(f"there is no platform {unknown[0]}; choose from {', '.join(PLATFORMS)}")
    if zig() is None:
        print("wheels with libraries need zig: pip install ziglang", file=sys.stderr)
        return 2
    for name in names:
        print(f"{name}{'' if PLATFORMS[name].tested else ' (untested)'}", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(ROOT / "dist"), str(ROOT)]
        subprocess.run(pip, check=True, env={**os.environ, CHOICE: name})
    return 0


if __name__ == "__main__":
    sys.exit(main())
