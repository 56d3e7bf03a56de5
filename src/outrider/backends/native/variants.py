"""The libraries that wheels carry, for kinds of processors and for each precision, and how zig builds them.

`setup.py` runs this file when a wheel is built, so it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "c"
SOURCE = "pass.c"
FLAGS = "-O3", "-ffp-contract=off", "-shared", "-fPIC"
PRECISIONS = {  # of weights, and of the rest: activations, keys and values
    ("bfloat16", "bfloat16"): ("-DBF16_WEIGHTS",),
    ("bfloat16", "float32"): ("-DBF16_WEIGHTS", "-DF32_STATE"),
    ("float32", "float32"): (),
}
BF16 = ("bfloat16", "bfloat16"), ("bfloat16", "float32")
CHOICE = "OUTRIDER_WHEEL"  # the platform that a wheel is built for, where that is not this machine's


@dataclass(frozen=True)
class Variant:
    """A kind of processors.

    Attributes:
        name: in the names of files.
        title: for readers.
        cpu: the kind, as zig's `-mcpu` has it.
        needs: what a processor must have, by the names of /proc/cpuinfo.
        defines: the compiler's flags beside it.
        precisions: for which its code is not that of a later variant.
        tested: how the tests run its code.
    """

    name: str
    title: str
    cpu: str
    needs: frozenset[str]
    defines: tuple[str, ...] = ()
    precisions: tuple[tuple[str, str], ...] = tuple(PRECISIONS)
    tested: str = "on such processors"


@dataclass(frozen=True)
class Platform:
    """A system and a kind of machine that wheels are built for.

    Attributes:
        title: for readers.
        target: as zig's `-target` has it, with the oldest version of the system that is served.
        tag: of its wheels.
        variants: of the library, best first.
        suffix: of the library's file.
        links: libraries that it is linked with.
        tested: are its libraries run by the tests, at least in an emulator?
    """

    title: str
    target: str
    tag: str
    variants: tuple[Variant, ...]
    suffix: str = ".so"
    links: tuple[str, ...] = ("-lm", "-lpthread", "-ldl")
    tested: bool = True


AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
AVX512 = AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"])
TILES = AVX512 | frozenset(["amx_tile", "amx_bf16", "amx_int8"])
NEON = frozenset(["asimd"])
X86 = (
    Variant(
        "amx",
        "AMX",
        "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16+amx_int8",
        TILES,
        ("-DAMX",),
        BF16[:1],
        "on such processors; with emulated tiles on others",
    ),
    Variant("avx512", "AVX-512 with VNNI and BF16", "x86_64_v4+avx512vnni+avx512bf16", AVX512),
    Variant("avxvnni", "AVX2 with AVX-VNNI", "x86_64_v3+avxvnni", AVX2 | {"avx_vnni"}, (), BF16, "no: built only"),
    Variant("avx2", "AVX2", "x86_64_v3", AVX2, tested="on such processors, and emulated (Haswell)"),
)
ARM = (
    Variant("i8mm", "int8 matrix products", "generic+dotprod+i8mm", NEON | {"asimddp", "i8mm"}, (), BF16, "emulated"),
    Variant("dotprod", "dot products", "generic+dotprod", NEON | {"asimddp"}, (), BF16, "emulated (Neoverse N1)"),
    Variant("neon", "any", "generic", NEON, tested="emulated (Cortex-A53)"),
)
MACOS = ("-Wl,-install_name,@rpath/outrider.dylib",)
PLATFORMS = {  # by system and machine, as Python's `platform` names them
    "Linux-x86_64": Platform("Linux, x86-64", "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", X86),
    "Linux-aarch64": Platform("Linux, ARM (64 bits)", "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", ARM),
    "Darwin-arm64": Platform(
        "macOS, Apple silicon", "aarch64-macos.11.0", "macosx_11_0_arm64", ARM, ".dylib", MACOS, False
    ),
    "Darwin-x86_64": Platform(
        "macOS, Intel", "x86_64-macos.11.0", "macosx_11_0_x86_64", X86[-1:], ".dylib", MACOS, False
    ),
    "Windows-AMD64": Platform(
        "Windows, x86-64", "x86_64-windows-gnu", "win_amd64", X86[-1:], ".dll", ("-lpthread",), False
    ),
}


def this() -> Platform | None:
    """This machine's platform; None where the code is not written for it."""
    return PLATFORMS.get(f"{platform.system()}-{platform.machine()}")


def built_for() -> Platform | None:
    """The platform that a wheel is built for here: $OUTRIDER_WHEEL's, else this machine's. None: the wheel carries no
    libraries, since zig is not installed or the code is not written for this machine. KeyError: no such platform."""
    chosen = os.environ.get(CHOICE)
    return None if zig() is None else PLATFORMS[chosen] if chosen else this()


def zig() -> list[str] | None:
    """The command of zig's C compiler, where the package `ziglang` is installed."""
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def digest(how: str = "") -> str:
    """A name for what is compiled from these sources in this way."""
    sha = hashlib.sha256(how.encode())
    for source in sorted(SOURCES.rglob("*.[ch]")):
        sha.update(source.read_bytes())
    return sha.hexdigest()[:24]


def file_name(variant: Variant, weights: str, rest: str, suffix: str = ".so") -> str:
    """Of a library; it tells apart what was built from other sources."""
    return f"{variant.name}-{weights}-{rest}-{digest()[:12]}{suffix}"


def build(folder: Path, kind: Platform, variants: tuple[Variant, ...] = ()) -> list[Path]:
    """Build a platform's libraries, or some of its variants alone, into a folder with zig, which must be installed.
    Raises CalledProcessError."""
    compiler = zig()
    assert compiler is not None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="outrider-") as kept, ThreadPoolExecutor(os.cpu_count()) as pool:
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": kept, "ZIG_LOCAL_CACHE_DIR": kept}

        def one(variant: Variant, weights: str, rest: str) -> Path:
            name = file_name(variant, weights, rest, kind.suffix)
            own = Path(tempfile.mkdtemp(dir=kept)) / name  # where files that Windows' linker writes beside it stay
            how = "-target", kind.target, f"-mcpu={variant.cpu}", "-s", *variant.defines, *PRECISIONS[weights, rest]
            command = [*compiler, *FLAGS, *how, str(SOURCES / SOURCE), "-o", str(own), *kind.links]
            subprocess.run(command, check=True, env=environment)
            return Path(shutil.copy(own, folder))

        of = variants or kind.variants
        made = [pool.submit(one, variant, *precision) for variant in of for precision in variant.precisions]
        return [job.result() for job in made]
