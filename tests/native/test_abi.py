"""What Python and C share, and what may lie on a thread's stack."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_code import needs_code

from outrider.backends.native import abi, abi_source, workspace
from outrider.backends.native.abi import ffi, struct
from outrider.backends.native.library import FLAGS, SANITIZE, library, sanitizer
from outrider.backends.native.variants import SOURCES
from outrider.backends.native.workspace import Workspace

CODE = library("float32", "float32")
pytestmark = needs_code
BUILDS = [
    [], ["-DBF16_WEIGHTS"], ["-DBF16_WEIGHTS", "-DF32_STATE"], ["-march=x86-64-v3", "-DBF16_WEIGHTS"],
    ["-march=sapphirerapids", "-DBF16_WEIGHTS", "-DAMX"],
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


WARNINGS = "-Wall", "-Wextra", "-Wvla", "-Werror"


@pytest.mark.parametrize("build", BUILDS)
def test_the_code_compiles_without_warnings(build: list[str]) -> None:
    """Nor are there variable-length arrays: a call's workspace is allocated before it."""
    flags = [flag for flag in FLAGS if flag != "-shared"]
    subprocess.run(["gcc", *flags, *build, *WARNINGS, "-fsyntax-only", str(SOURCES / "pass.c")], check=True)


def test_every_header_can_be_included_alone(tmp_path: Path) -> None:
    flags = [flag for flag in FLAGS if flag != "-shared"]
    eight, sixteen = BUILDS[3], BUILDS[4]
    for header in sorted(SOURCES.rglob("*.h")):
        if header.name in ("abi.h", "amx_emulated.h"):  # which types.h and amx.h include
            continue
        if header.name.startswith("neon") and "-march=native" in FLAGS:  # of another processor
            continue
        name = header.relative_to(SOURCES).as_posix()
        build = eight if "8.h" in name or header.stem in ("bf12", "avx2") else sixteen
        source = tmp_path / "alone.c"
        source.write_text(f'#include "{name}"\n', encoding="utf-8")
        command = ["gcc", *flags, *build, *WARNINGS, "-Wno-unused-function", "-Wno-unused-variable", "-fsyntax-only"]
        done = subprocess.run([*command, f"-I{SOURCES}", str(source)], capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"


def test_intrinsics_stand_in_one_folder() -> None:
    for source in SOURCES.rglob("*.[ch]"):
        if source.parent.name != "simd":
            result = re.search(r"\b_(mm|tile)\d*_\w+|immintrin|__m\d+", source.read_text(encoding="utf-8"))
            assert result is None, f"{source.name}: {result}"


def test_parts_of_a_sanitized_workspace_are_allocations_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exactly as large as requested; in the fast build they lie side by side."""
    for apart in (False, True):
        monkeypatch.setattr(workspace, "APART", apart)
        made = Workspace(CODE, struct("Model", hidden=32))
        parts = made.split("x", np.float32, a=3, b=5)
        at = {name: int(ffi.cast("intptr_t", part)) for name, part in parts.items()}
        assert (at["b"] == at["a"] + 12) is not apart
        made.of("y", 8)
        assert len(made.of("y", 4)) == (4 if apart else 8)


def test_a_sanitizer_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("", "address", "tiles", "thread"):
        monkeypatch.setenv(SANITIZE, kind)
        assert sanitizer() == kind
    monkeypatch.setenv(SANITIZE, "memory")
    with pytest.raises(ValueError, match="address, tiles or thread, or not set, not 'memory'"):
        sanitizer()
