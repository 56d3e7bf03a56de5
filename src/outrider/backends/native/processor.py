"""What this process may use of the processor, by the names of Linux's /proc/cpuinfo."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any

from ... import machine
from .variants import AVX2, NEON

FIRST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index0/size")  # as in 48K


@cache
def abilities() -> frozenset[str]:
    """Instruction sets that this process may use; none where the system does not say, or is not known."""
    system, arm = platform.system(), platform.machine() in ("aarch64", "arm64")
    if system == "Linux":
        return _linux_arm() if arm else _linux_x86()
    if system == "Darwin":
        return _macos_arm() if arm else _macos_x86()
    if system == "Windows" and not arm:
        return _windows_x86()
    return frozenset()


def _linux_x86() -> frozenset[str]:
    """Tiles (AMX) must be requested from Linux, for the whole process."""
    request, tile_data = 0x1023, 18  # arch_prctl's ARCH_REQ_XCOMP_PERM
    flags = frozenset(machine.cpu().get("flags", "").split())
    if "amx_tile" in flags and ctypes.CDLL(None).syscall(158, request, tile_data) != 0:
        return frozenset(name for name in flags if not name.startswith("amx"))
    return flags


def _linux_arm() -> frozenset[str]:
    """By the bits of the auxiliary vector, which an emulator sets to what it emulates."""
    bits = {"asimd": (16, 1), "asimddp": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}  # AT_HWCAP or AT_HWCAP2, bit
    ask = ctypes.CDLL(None).getauxval
    ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
    return frozenset(name for name, (vector, bit) in bits.items() if ask(vector) >> bit & 1)


def _macos_arm() -> frozenset[str]:
    names = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}
    return NEON | {name for name, key in names.items() if _sysctl(f"hw.optional.arm.{key}")}


def _macos_x86() -> frozenset[str]:
    """Every processor of a Mac that has AVX2 has what came with it."""
    return AVX2 if _sysctl("hw.optional.avx2_0") else frozenset()


def _windows_x86() -> frozenset[str]:
    """Every processor with AVX2 that Windows runs on has what came with it."""
    windows: Any = ctypes
    return AVX2 if windows.windll.kernel32.IsProcessorFeaturePresent(40) else frozenset()  # PF_AVX2_...


def _sysctl(name: str) -> bool:
    """A flag of macOS."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return not failed and value.value == 1


def first_cache() -> int:
    """Bytes of the processor's first-level data cache, or what is usual."""
    try:
        return 1024 * int(FIRST_CACHE.read_text(encoding="utf-8").strip().removesuffix("K"))
    except (OSError, ValueError):
        return 32 * 1024
