"""What Python and C must agree on, and what may lie on a thread's stack."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest
import torch

from outrider.backends.native import parts, sanitized
from outrider.backends.native.build import FLAGS, HERE, library
from outrider.backends.native.parts import ModelPart, Room, check, fresh

CODE = library("float32", "float32")
pytestmark = pytest.mark.skipif(CODE is None, reason="there is no compiled pass on this machine")


class Longer(ctypes.Structure):
    """`Walk`, with a field that C does not know."""

    _fields_ = [*parts.WalkPart._fields_, ("more", ctypes.c_int64)]


def test_structures_and_constants_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CODE is not None
    check(CODE)
    mine = {kind for kind in vars(parts).values() if isinstance(kind, type) and issubclass(kind, ctypes.Structure)}
    assert mine == set(parts.STRUCTURES)
    monkeypatch.setattr(parts, "STRUCTURES", (*parts.STRUCTURES[:-1], Longer))
    with pytest.raises(RuntimeError, match=r"^Longer is \d+ in parts.py and \d+ in the compiled code"):
        check(CODE)
    monkeypatch.undo()
    for name in ("FEW", "WIDEST", "BLOCK"):
        monkeypatch.setattr(parts, name, 17)
        with pytest.raises(RuntimeError, match=r"is 17 in parts.py and \d+ in the compiled code"):
            check(CODE)
        monkeypatch.undo()


def test_libraries_are_checked_when_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FEW", 17)
    library.cache_clear()
    with pytest.raises(RuntimeError, match="few_pairs is 17"):
        library("float32", "float32")
    library.cache_clear()


# By name, the arrays whose size is not known to the compiler: each follows a width of the model, none the request,
# the budget or the number of rows.
WIDTHS = {"found", "own", "known", "opened", "room", "y"}


@pytest.mark.parametrize(
    "more", [[], ["-DHALVES"], ["-DHALVES", "-mno-avx512f"], ["-DHALVES", "-DTILES", "-mamx-bf16"]]
)
def test_no_array_on_a_stack_follows_the_request_or_the_budget(more: list[str]) -> None:
    """Each lies in the workspace, which is sized before the call."""
    flags = [flag for flag in FLAGS if flag not in ("-O3", "-shared")]
    command = ["gcc", *flags, *more, "-O0", "-fsyntax-only", "-Wvla", str(HERE / "pass.c")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = set(re.findall(r"warning: ISO C90 forbids (?:variable length )?array .(\w+).", said))
    assert found
    assert found <= WIDTHS, said
    for line in re.findall(r"^\s+\d+ \|\s+(.*\[.*\].*)$", said, re.MULTILINE):
        assert not re.search(r"\[[^\]]*\b(rows|asked|candidates|nodes|most|pool|depth|wide)\b[^\]]*\]", line), line


def test_slices_of_a_sanitized_workspace_are_allocations_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exactly as large as was asked for; in the fast build they lie side by side."""
    assert CODE is not None
    for apart in (False, True):
        monkeypatch.setattr(parts, "APART", apart)
        room = Room(CODE, ModelPart(hidden=32))
        at = room.cut("x", torch.float32, a=3, b=5)
        assert (at["b"] == at["a"] + 12) is not apart
        one, two = fresh(2, 3)
        assert (two.data_ptr() == one.data_ptr() + 24) is not apart
        room.of("y", 8)
        assert len(room.of("y", 4)) == (4 if apart else 8)


def test_a_sanitizer_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("", "address", "thread"):
        monkeypatch.setenv(sanitized.VARIABLE, kind)
        assert sanitized.sanitizer() == kind
    monkeypatch.setenv(sanitized.VARIABLE, "memory")
    with pytest.raises(ValueError, match="address or thread, or not set, not 'memory'"):
        sanitized.sanitizer()
