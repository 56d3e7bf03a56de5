"""Tests of the compiled code in builds that look for faults: `python -m tools.sanitize [address] [tiles] [thread]`.

`address` is AddressSanitizer with UndefinedBehaviorSanitizer, where each slice of the workspace is an allocation of its
own; `tiles` is the same for the code with tiles (AMX), which are emulated; `thread` is ThreadSanitizer. All check the
code's own preconditions (`EXPECT`). A sanitizer's library must be loaded first, so each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Leaks are not looked for: Python keeps much until the end. Code of others is not instrumented: what it orders is not
# seen, so its own accesses do not count for races.
OPTIONS = {
    "address": ("libasan.so", {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}),
    "tiles": ("libasan.so", {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}),
    "thread": ("libtsan.so", {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1"}),
}
DRAFTERS = "tests/native/test_every_drafter.py"
TESTS = {
    "address": (
        "tests/native", "tests/contract/test_broken_trees.py", "tests/contract/test_extreme_sampling.py",
        *(
            f"tests/models/test_{name}.py"
            for name in (
                "walk", "compiled", "grown", "block_compiled", "hydra_compiled", "medusa_compiled", "mamba_compiled",
                "integers", "blocks",
            )
        ),
    ),
    "tiles": tuple(f"tests/models/test_{name}.py" for name in ("compiled", "compiled_mutants", "blocks", "grown")),
    "thread": (
        "tests/native/test_pool.py", f"{DRAFTERS}::test_the_demos_drafters", f"{DRAFTERS}::test_two_callers_at_once",
    ),
}  # fmt: skip


def main() -> int:
    """Run them; the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*OPTIONS, []], help="address, tiles, thread; default: all")
    for kind in parser.parse_args().kinds or OPTIONS:
        print(f"{kind} sanitizer:", flush=True)
        if code := run(kind):
            return code
    return 0


def run(kind: str) -> int:
    """The tests of one sanitizer."""
    name, settings = OPTIONS[kind]
    libraries = [_library(name), _library("libstdc++.so.6")]  # the second: exceptions are intercepted from the start
    environment = {**os.environ, **settings, "LD_PRELOAD": " ".join(libraries), "OUTRIDER_SANITIZE": kind}
    shuffled = ["setarch", "-R"] if kind == "thread" else []  # addresses that ThreadSanitizer does not expect
    options = ["-q", "-x", "--capture=no", "-p", "no:cacheprovider", "-o", "timeout=3600"]
    pytest = [sys.executable, "-m", "pytest", *options]
    return subprocess.run([*shuffled, *pytest, *TESTS[kind]], cwd=ROOT, env=environment, check=False).returncode


def _library(name: str) -> str:
    compiler = os.environ.get("CC", "gcc")
    asked = [compiler, f"-print-file-name={name}"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
