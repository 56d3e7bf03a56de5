"""A command line in this process: what it exits with and says; and the words that the tests' tiny model knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "mat", "hill", "and", "then", "slept", "sang", "again", "."]
PROMPT = "the cat sat on the mat and the cat sat on"


class Result(NamedTuple):
    """The exit code, and what was written to stdout and stderr."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


def refused(result: Result) -> str:
    """Bad input: exit code 2, nothing on stdout, one sentence on stderr."""
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    return err
