"""Tests of the compiled code in builds that look for faults: `python -m tools.sanitize [address] [tiles] [thread]`.

`address` is AddressSanitizer with UndefinedBehaviorSanitizer, where each slice of the workspace is an allocation of its
own; `tiles` is the same for the code with tiles (AMX), which are emulated; `thread` is ThreadSanitizer. All check the
code's own preconditions (`EXPECT`). A sanitizer's library must be loaded first, so each runs in processes of its own:
two, which share the files and print a line for each test. What else is given goes to pytest, as in `address -k walk`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from outrider.backends.native.variants import PRECISIONS

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build" / "sanitize"  # the sanitized libraries
# Leaks are not looked for: Python keeps much until the end. Code of others is not instrumented: what it orders is not
# seen, so its own accesses do not count for races.
ADDRESS = ("libasan.so", {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"})
OPTIONS = {
    "address": ADDRESS,
    "tiles": ADDRESS,
    "thread": ("libtsan.so", {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1"}),
}
COMPILED = re.compile(r"native import library|native\.library")  # in a test file that runs the compiled code
# Tests of how the library is built and found, and of wrong code, where each test compiles another library.
OTHERS = "test_abi", "test_library", "test_library_store", "test_thread_pool_contention", "test_compiled_mutants"
DRAFTERS = "tests/native/test_every_drafter.py"
CONTRACTS = tuple(f"tests/contract/test_{name}.py" for name in ("broken_trees", "extreme_sampling", "targets"))
THREADS = "tests/native/test_pool.py", f"{DRAFTERS}::test_the_demos_drafters", f"{DRAFTERS}::test_two_callers_at_once"
TILES = "tests/native/test_target.py", "tests/native/test_blocks.py", "tests/native/test_integer_weights.py"


def main() -> int:
    """Run them all; 1 where a test failed or a fault was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*OPTIONS, []], help="address, tiles, thread; default: all")
    given, more = parser.parse_known_args()
    failed = [kind for kind in given.kinds or OPTIONS if not clean(kind, more)]
    print("clean" if not failed else f"not clean: {', '.join(failed)}")
    return 1 if failed else 0


def tests(kind: str) -> Sequence[str]:
    """What runs under a sanitizer."""
    if kind == "thread":
        return THREADS
    return TILES if kind == "tiles" else (*CONTRACTS, *compiled())


def compiled() -> Iterator[str]:
    """The test files that run the compiled code."""
    for file in (*sorted(ROOT.glob("tests/native/test_*.py")), *sorted(ROOT.glob("tests/models/test_*.py"))):
        if file.stem not in OTHERS and COMPILED.search(file.read_text(encoding="utf-8")):
            yield str(file.relative_to(ROOT))


def clean(kind: str, more: Sequence[str]) -> bool:
    """Run the tests of one sanitizer; print what it found, and how long it took."""
    name, settings = OPTIONS[kind]
    libraries = [_library(name), _library("libstdc++.so.6")]  # the second: exceptions are intercepted from the start
    with tempfile.TemporaryDirectory(prefix="outrider-sanitize-") as folder:
        reports = {variable: f"{value}:log_path={folder}/report" for variable, value in settings.items()}
        own = {"LD_PRELOAD": " ".join(libraries), "OUTRIDER_SANITIZE": kind, "OMP_NUM_THREADS": "1"}
        own["OUTRIDER_CACHE"] = str(BUILT)  # kept, so that a part can be run again at once
        unshuffled = ["setarch", "-R"] if kind == "thread" else []  # addresses that ThreadSanitizer does not expect
        options = ["-vv", "-rfE", "-n", "2", "--dist", "load", "--durations=20", "-o", "timeout=1800"]
        pytest = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider"]
        environment = {**os.environ, **reports, **own}
        print(f"{kind} sanitizer:", flush=True)
        BUILT.mkdir(mode=0o700, parents=True, exist_ok=True)
        began = time.monotonic()
        compile_all(unshuffled, environment)
        command = [*unshuffled, *pytest, *tests(kind), *more]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        results = sorted(Path(folder).glob("report*"))
        for report in results:
            print(report.read_text(encoding="utf-8", errors="replace"))
    print(f"{kind} sanitizer: {time.monotonic() - began:.0f} s, {len(results)} reports", flush=True)
    return code == 0 and not results


def compile_all(before: Sequence[str], environment: Mapping[str, str]) -> None:
    """The libraries, all at once: otherwise each process of the tests compiles all of them."""
    script = "import sys; from outrider.backends.native.library import library; library(*sys.argv[1:])"
    commands = [[*before, sys.executable, "-c", script, *precisions] for precisions in PRECISIONS]
    for one in [subprocess.Popen(command, cwd=ROOT, env=environment) for command in commands]:
        one.wait()


def _library(name: str) -> str:
    asked = [*shlex.split(os.environ.get("CC") or "gcc"), f"-print-file-name={name}"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
