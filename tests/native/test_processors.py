"""Processors that this machine is not: emulated by qemu, they compute what one with AVX2 computes, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.backends.native import variants
from outrider.backends.native.variants import PLATFORMS, PRECISIONS, Variant

DRIVER = Path(__file__).with_name("processors.c")
AVX2 = PLATFORMS["Linux-x86_64"].variants[-1]
I8MM, *_, NEON = PLATFORMS["Linux-aarch64"].variants
EMULATED = {  # the oldest processors that a library is chosen for
    "avx2": ("qemu-x86_64", "Haswell"),
    "neon": ("qemu-aarch64", "cortex-a53"),
    "dotprod": ("qemu-aarch64", "neoverse-n1"),
    "i8mm": ("qemu-aarch64", "max"),
}
ARM_LIBC = Path("/usr/aarch64-linux-gnu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(variants.zig() is None, reason="needs the package ziglang"),
    pytest.mark.skipif(not all(map(shutil.which, dict(EMULATED.values()))), reason="needs Debian's qemu-user"),
    pytest.mark.skipif(not ARM_LIBC.is_dir(), reason="needs Debian's libc6-arm64-cross"),
]
Lines = Callable[..., list[str]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """What the driver prints, compiled for a variant in a precision and run on its emulated processor."""
    folder, known = tmp_path_factory.mktemp("driver"), {}

    def run(variant: Variant, precision: tuple[str, str], sources: Path = variants.SOURCES) -> list[str]:
        if (key := (variant, precision, sources)) in known:
            return known[key]
        emulator, cpu = EMULATED[variant.name]
        program = folder / f"{len(known)}"
        kind = PLATFORMS[f"Linux-{emulator.removeprefix('qemu-')}"]
        how = "-target", kind.target, f"-mcpu={variant.cpu}", *PRECISIONS[precision], *kind.links
        command = [*(variants.zig() or []), "-O1", "-ffp-contract=off", *how, f"-I{sources}", str(DRIVER)]
        caches = {f"ZIG_{kind}_CACHE_DIR": str(folder / "zig") for kind in ("LOCAL", "GLOBAL")}
        subprocess.run([*command, "-o", str(program)], check=True, env={**os.environ, **caches}, timeout=580)
        emulated = [emulator, "-cpu", cpu, *(() if variant == AVX2 else ("-L", str(ARM_LIBC)))]
        printed = subprocess.run([*emulated, program], capture_output=True, check=True, text=True)
        known[key] = printed.stdout.splitlines()
        return known[key]

    return run


@pytest.mark.parametrize("precision", PRECISIONS, ids="-".join)
def test_arm_computes_what_avx2_computes(lines: Lines, precision: tuple[str, str]) -> None:
    """Functions, products of all kinds of weights, passes and draws."""
    right = lines(AVX2, precision)
    assert len(right) > 60
    for variant in PLATFORMS["Linux-aarch64"].variants:
        if precision in variant.precisions:
            assert lines(variant, precision) == right, variant.name


MUTANTS = {
    "sums are in another order": (NEON, "neon.h", "vpaddq_f32(ab, cd)", "vpaddq_f32(cd, ab)"),
    "products are rounded": (
        NEON,
        "neon.h",
        "N_JOIN(vfmaq_f32(N_LOW(c), N_LOW(a), N_LOW(b)), vfmaq_f32(N_HIGH(c), N_HIGH(a), N_HIGH(b)))",
        "a * b + c",
    ),
    "activations are cut off": (NEON, "neon_int8.h", "low = vcvtnq_s32_f32(", "low = vcvtq_s32_f32("),
    "rows are exchanged": (I8MM, "neon_int8.h", "vuzp2q_s32(four[0], four[1])", "vuzp1q_s32(four[0], four[1])"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_code_prints_other_results(lines: Lines, mutant: str, tmp_path: Path) -> None:
    variant, name, line, wrong = MUTANTS[mutant]
    shutil.copytree(variants.SOURCES, tmp_path / "c")
    header = tmp_path / "c" / "simd" / name
    text = header.read_text(encoding="utf-8")
    assert text.count(line) == 1
    header.write_text(text.replace(line, wrong), encoding="utf-8")
    half = "bfloat16", "bfloat16"
    assert lines(variant, half, tmp_path / "c") != lines(AVX2, half)
