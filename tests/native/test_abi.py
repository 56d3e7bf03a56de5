"""What Python and C share, and what may lie on a thread's stack."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from outrider.backends.native import abi, abi_source, workspace
from outrider.backends.native.abi import ffi, struct
from outrider.backends.native.library import FLAGS, SANITIZE, library, sanitizer
from outrider.backends.native.variants import SOURCES
from outrider.backends.native.workspace import Workspace, fresh

CODE = library("float32", "float32")
pytestmark = pytest.mark.skipif(CODE is None, reason="there is no compiled pass on this machine")
BUILDS = [
    [], ["-DHALVES"], ["-DHALVES", "-DWIDE"], ["-march=x86-64-v3", "-DHALVES"],
    ["-march=sapphirerapids", "-DHALVES", "-DTILES"],
]  # fmt: skip


@pytest.mark.parametrize("build", BUILDS)
def test_python_lays_structures_out_as_the_compiler_does(build: list[str], tmp_path: Path) -> None:
    """Also where weights, keys and activations are bfloat16, of which Python knows the addresses alone."""
    lines, names = ['#include "types.h"', "#include <stddef.h>"], ffi.list_types()[0]
    structures = [name for name in names if ffi.typeof(name).kind == "struct"]
    assert {"Model", "Pass", "Draft", "Walk"} <= set(structures)
    for name in structures:
        lines.append(f'_Static_assert(sizeof({name}) == {ffi.sizeof(name)}, "{name}");')
        for field, kind in ffi.typeof(name).fields:
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {kind.offset}, "{name}.{field}");')
    source = tmp_path / "layout.c"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = [flag for flag in FLAGS if flag != "-shared"]
    subprocess.run(["gcc", *flags, *build, "-fsyntax-only", f"-I{SOURCES}", str(source)], check=True)
    source.write_text("\n".join([*lines, '_Static_assert(sizeof(Walk) == 8, "");']), encoding="utf-8")
    assert subprocess.run(["gcc", *flags, "-fsyntax-only", f"-I{SOURCES}", str(source)], capture_output=True).returncode


def test_an_old_description_of_the_header_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after a change of the header in a clone that is installed in place."""
    changed = tmp_path / "abi.h"
    text = abi_source.HEADER.read_text(encoding="utf-8")
    changed.write_text(text.replace("#define MAX_FED_PAIRS 16", "#define MAX_FED_PAIRS 17"), encoding="utf-8")
    assert abi._ffi().integer_const("MAX_FED_PAIRS") == abi.MAX_FED_PAIRS == 16
    monkeypatch.setattr(abi_source, "HEADER", changed)
    assert abi._ffi().integer_const("MAX_FED_PAIRS") == 17


def test_addresses_are_those_of_the_data() -> None:
    tensor = torch.arange(3, dtype=torch.long)
    for data in (tensor, tensor.numpy(), tensor.data_ptr()):
        assert struct("Pass", lengths=abi.address(data)).lengths[2] == 2
    assert abi.address(None) == ffi.NULL
    with pytest.raises(AttributeError):
        abi.address([1, 2])
    with pytest.raises(KeyError):
        struct("Pass", lenghts=ffi.NULL)
    with pytest.raises(OverflowError):
        struct("Pass", rows=2**63)


# By name, the arrays whose size is not known to the compiler: each follows a width of the model, none the request,
# the budget or the number of rows.
WIDTHS = {"found", "own", "known", "opened", "room", "y"}


@pytest.mark.parametrize(
    "more", [[], ["-DHALVES"], ["-DHALVES", "-mno-avx512f"], ["-DHALVES", "-DTILES", "-mamx-bf16"]]
)
def test_no_array_on_a_stack_follows_the_request_or_the_budget(more: list[str]) -> None:
    """Each lies in the workspace, which is sized before the call."""
    flags = [flag for flag in FLAGS if flag not in ("-O3", "-shared")]
    command = ["gcc", *flags, *more, "-O0", "-fsyntax-only", "-Wvla", str(SOURCES / "pass.c")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = set(re.findall(r"warning: ISO C90 forbids (?:variable length )?array .(\w+).", said))
    assert found
    assert found <= WIDTHS, said
    for line in re.findall(r"^\s+\d+ \|\s+(.*\[.*\].*)$", said, re.MULTILINE):
        assert not re.search(r"\[[^\]]*\b(rows|asked|candidates|nodes|most|pool|depth|wide)\b[^\]]*\]", line), line


def test_parts_of_a_sanitized_workspace_are_allocations_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exactly as large as requested; in the fast build they lie side by side."""
    for apart in (False, True):
        monkeypatch.setattr(workspace, "APART", apart)
        room = Workspace(CODE, struct("Model", hidden=32))
        parts = room.split("x", torch.float32, a=3, b=5)
        at = {name: int(ffi.cast("intptr_t", part)) for name, part in parts.items()}
        assert (at["b"] == at["a"] + 12) is not apart
        one, two = fresh(2, 3)
        assert (two.data_ptr() == one.data_ptr() + 24) is not apart
        room.of("y", 8)
        assert len(room.of("y", 4)) == (4 if apart else 8)


def test_a_sanitizer_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("", "address", "thread"):
        monkeypatch.setenv(SANITIZE, kind)
        assert sanitizer() == kind
    monkeypatch.setenv(SANITIZE, "memory")
    with pytest.raises(ValueError, match="address or thread, or not set, not 'memory'"):
        sanitizer()
