"""Builds of the pass that look for faults (`make sanitize`).

The environment chooses one, since a sanitizer's library must be loaded before the process starts.
"""

from __future__ import annotations

import os

VARIABLE = "OUTRIDER_SANITIZE"
# The compiler's flags behind the usual ones. CHECKED: `EXPECT` looks. OWN_THREADS: threads that the sanitizer sees.
FLAGS: dict[str, tuple[str, ...]] = {
    "": (),
    "address": (
        "-O1",
        "-g",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-DCHECKED",
    ),
    "thread": ("-O1", "-g", "-fsanitize=thread", "-DCHECKED", "-DOWN_THREADS", "-Wl,-Bsymbolic"),
}  # fmt: skip


def sanitizer() -> str:
    """What OUTRIDER_SANITIZE asks for: "address" (with undefined behaviour), "thread", or "", the fast build. Raises
    ValueError for anything else."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in FLAGS:
        raise ValueError(f"{VARIABLE} is address or thread, or not set, not {asked!r}")
    return asked
