"""The libraries that a wheel carries, one for each kind of processor and each precision, and how zig builds them.

`setup.py` runs this file when a wheel is built, so it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "c"
SOURCE = "pass.c"
FLAGS = "-O3", "-ffp-contract=off", "-shared", "-fPIC"
LIBRARIES = "-lm", "-lpthread", "-ldl"
OLDEST = "x86_64-linux-gnu.2.17"  # glibc, as manylinux_2_17 has it
PRECISIONS = {  # of weights, and of the rest: activations, keys and values
    ("bfloat16", "bfloat16"): ("-DBF16_WEIGHTS",),
    ("bfloat16", "float32"): ("-DBF16_WEIGHTS", "-DF32_STATE"),
    ("float32", "float32"): (),
}


@dataclass(frozen=True)
class Variant:
    """A kind of processors.

    Attributes:
        name: in the names of files.
        cpu: the kind, as zig's `-mcpu` has it.
        needs: what a processor must have, by the names of /proc/cpuinfo.
        defines: the compiler's flags beside it.
        precisions: for which its code is not that of a later variant.
    """

    name: str
    cpu: str
    needs: frozenset[str]
    defines: tuple[str, ...] = ()
    precisions: tuple[tuple[str, str], ...] = tuple(PRECISIONS)


AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
AVX512 = AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"])
TILES = AVX512 | frozenset(["amx_tile", "amx_bf16", "amx_int8"])
VARIANTS = (  # best first
    Variant(
        "amx",
        "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16+amx_int8",
        TILES,
        ("-DAMX",),
        (("bfloat16", "bfloat16"),),
    ),
    Variant("avx512", "x86_64_v4+avx512vnni+avx512bf16", AVX512),
    Variant(
        "avxvnni",
        "x86_64_v3+avxvnni",
        AVX2 | {"avx_vnni"},
        precisions=(("bfloat16", "bfloat16"), ("bfloat16", "float32")),
    ),
    Variant("avx2", "x86_64_v3", AVX2),
)


def carried() -> bool:
    """Does a wheel that is built on this machine carry the libraries?"""
    return (platform.system(), platform.machine()) == ("Linux", "x86_64") and zig() is not None


def zig() -> list[str] | None:
    """The command of zig's C compiler, where the package `ziglang` is installed."""
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def digest(how: str = "") -> str:
    """A name for what is compiled from these sources in this way."""
    sha = hashlib.sha256(how.encode())
    for source in sorted(SOURCES.rglob("*.[ch]")):
        sha.update(source.read_bytes())
    return sha.hexdigest()[:24]


def file_name(variant: Variant, weights: str, rest: str) -> str:
    """Of a library; it tells apart what was built from other sources."""
    return f"{variant.name}-{weights}-{rest}-{digest()[:12]}.so"


def build(folder: Path, variants: tuple[Variant, ...] = VARIANTS) -> list[Path]:
    """Build these libraries into a folder with zig, which must be installed. Raises CalledProcessError."""
    compiler = zig()
    assert compiler is not None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="outrider-") as kept, ThreadPoolExecutor(os.cpu_count()) as pool:
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": kept, "ZIG_LOCAL_CACHE_DIR": kept}

        def one(variant: Variant, weights: str, rest: str) -> Path:
            file = folder / file_name(variant, weights, rest)
            how = "-target", OLDEST, f"-mcpu={variant.cpu}", "-s", *variant.defines, *PRECISIONS[weights, rest]
            command = [*compiler, *FLAGS, *how, str(SOURCES / SOURCE), "-o", str(file), *LIBRARIES]
            subprocess.run(command, check=True, env=environment)
            return file

        made = [pool.submit(one, variant, *precision) for variant in variants for precision in variant.precisions]
        return [job.result() for job in made]
