"""The library's own threads: in a process without OpenMP's, since these would be used instead."""

from __future__ import annotations

import subprocess
import sys

import pytest
from compiled_code import needs_code

from outrider.backends.native.library import sanitizer

pytestmark = [
    pytest.mark.process,
    needs_code,
]

BEGIN = """
import os, sys, threading, time
import numpy as np
from outrider.backends.native.abi import NULL, address
from outrider.backends.native.library import library

code = library("float32", "float32")
rows, width, q8_0 = 640, 256, 8
given = np.random.default_rng(0).integers(0, 60, (rows, width // 32 * 34), np.uint8)

def weights(threads):
    result = np.empty((rows, width), np.float32)
    assert code.dequantise(q8_0, address(given), rows, width, NULL, address(result), 0, threads) == rows
    return result.tobytes()

def running():
    return len(os.listdir("/proc/self/task"))

right = weights(1)
assert weights(2) == right
before = running() - 1
"""


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


def test_threads_are_kept_from_call_to_call_and_added_where_more_are_wanted() -> None:
    run("""
assert "torch" not in sys.modules
for threads, more in ((2, 1), (2, 1), (5, 4), (1, 4), (3, 4)):
    assert weights(threads) == right
    assert running() == before + more, (threads, running())
print("done")
""")


@pytest.mark.skipif(sanitizer() == "thread", reason="ThreadSanitizer knows no threads of a child")
@pytest.mark.parametrize("begin", ["", "import torch"])
def test_a_child_has_threads_of_its_own(begin: str) -> None:
    """The parent's are gone after a fork: a child that waited for them, or for OpenMP's, would hang."""
    run(f"""
{begin}
assert weights(4) == right
child = os.fork()
if not child:
    ok = running() == 1 and weights(4) == right and running() == 4 and weights(4) == right
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert weights(4) == right
print("done")
""")


def test_callers_at_once_have_their_own_results() -> None:
    """The pool serves one; the others run on their own threads alone."""
    run("""
wrong, gate = [], threading.Barrier(6)

def call():
    gate.wait()
    wrong.extend(i for i in range(300) if weights(3) != right)

callers = [threading.Thread(target=call) for _ in range(6)]
for one in callers:
    one.start()
for one in callers:
    one.join()
assert not wrong
while running() > before + 2:  # a thread that has ended may still be counted
    time.sleep(0.01)
print("done")
""")


def test_prompts_use_all_threads_where_short_passes_leave_some_unused() -> None:
    """Else a first pass that another program delays would make the whole prompt slow."""
    run("""
import outrider
from outrider import machine

target = outrider.load("demo", "none").target
code.adapt_threads(4, 4, 10**9, 3 * 10**9)
machine.use_threads(4)
threads = code.usable_threads(4)
for tokens, more in ((20, max(1, threads - 1)), (90, 3)):
    list(target.open(128).prefill([list(range(5, 5 + tokens))]))
    assert running() == before + more, (tokens, running() - before)
assert threads < 4
print("done")
""")


def test_calls_go_on_after_the_threads_have_slept() -> None:
    run("""
for pause in (0, 0.001, 0.01, 0.05, 0.01):
    assert all(weights(3) == right for _ in range(50))
    time.sleep(pause)
print("done")
""")


def test_the_code_stays_as_long_as_its_threads() -> None:
    """They are awake for some milliseconds after a call, and Python closes the library when it ends."""
    run("""
import gc, re
from outrider.backends.native.library import NAMES

assert weights(3) == right
name = NAMES.pop(code)
del code
library.cache_clear()
gc.collect()
assert weights.__globals__.get("code") is None
with open("/proc/self/maps") as maps:
    assert name in maps.read()
print("done")
""")
