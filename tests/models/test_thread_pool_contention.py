"""How many threads a compiled pass takes beside other programs: judged by times that are given here, not by a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from outrider.backends.native import library as native
from outrider.backends.native.abi import Library

MILLISECONDS = 1_000_000
library = native.library("float32", "float32")

pytestmark = pytest.mark.skipif(library is None, reason="native passes need AVX2 or NEON, and a compiler")


def afresh(check: Callable[[Library], None]) -> None:
    """What is learnt belongs to the thread that calls, so each test gets a thread of its own."""
    assert library is not None
    failed: list[BaseException] = []

    def run() -> None:
        try:
            check(library)
        except BaseException as error:  # shown below, in the thread of the tests
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def passes(code: Library, allowed: int, threads: int, took: float, late: float, count: int = 1) -> int:
    """Count passes, in milliseconds, each by so many threads; returns how many of those allowed the next one takes."""
    for _ in range(count):
        code.adapt_threads(allowed, threads, int(took * MILLISECONDS), int(late * MILLISECONDS))
    return int(code.usable_threads(allowed))


def test_a_thread_that_slows_a_pass_is_dropped_for_a_while() -> None:
    def check(code: Library) -> None:
        assert passes(code, 2, 2, 5, 0, 100) == 2
        assert passes(code, 2, 2, 60, 29) == 2  # half of the work in 31: alone it would take 62
        assert passes(code, 2, 2, 60, 31) == 1  # half of the work in 29: alone 58
        assert passes(code, 2, 1, 55, 0, 3) == 1
        assert passes(code, 2, 1, 55, 0) == 2  # 220 milliseconds later the other one is tried again
        assert passes(code, 2, 2, 60, 50) == 1
        assert passes(code, 2, 1, 55, 0, 7) == 1  # in vain, so the next trial comes after twice the time
        assert passes(code, 2, 1, 55, 0) == 2
        assert passes(code, 2, 2, 60, 0) == 2

    afresh(check)


def test_one_late_thread_delays_all_others() -> None:
    def check(code: Library) -> None:
        assert passes(code, 8, 8, 60, 7 * 7) == 8  # 7 of 60 lost, as seven threads say; an eighth of the work takes 53
        assert passes(code, 8, 8, 60, 7 * 8) == 7  # 8 lost, more than 52 / 7
        assert passes(code, 8, 7, 60, 6 * 10) == 6
        assert code.usable_threads(1) == 1

    afresh(check)


def test_threads_that_are_left_out_are_fewer_than_those_allowed() -> None:
    def check(code: Library) -> None:
        for threads in (8, 7, 6):
            assert passes(code, 8, threads, 60, (threads - 1) * 50) == threads - 1
        assert code.usable_threads(1) == 1  # a call for one row
        assert passes(code, 8, 5, 1, 0) == 5  # changes nothing
        assert passes(code, 2, 1, 1, 0) == 1
        assert code.usable_threads(8) == 7  # of two, one is left out

    afresh(check)


def test_short_passes_are_judged_together() -> None:
    def check(code: Library) -> None:
        assert passes(code, 2, 2, 5, 4.5, 9) == 2  # not yet 50 milliseconds
        assert passes(code, 2, 2, 5, 4.5) == 1

    afresh(check)
