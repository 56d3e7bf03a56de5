"""The machine: its processor, its threads, the names of its devices. Imports torch only for the name of a GPU."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

PACKAGES = ("outrider", "torch", "transformers", "safetensors", "numpy")  # that results depend on
# What native passes use of a processor, by the names of /proc/cpuinfo.
X86 = "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8"
FLAGS = *X86, "asimd", "asimddp", "i8mm", "bf16"
CORES, CGROUP = Path("/sys/devices/system/cpu"), Path("/sys/fs/cgroup")
_chosen: list[int] = []  # by `use_threads`


def threads() -> int:
    """How many threads a pass uses: as many as `use_threads` said, or as torch uses where it is in use; else
    OMP_NUM_THREADS, or one for each physical core that this process may run on. No more than a container's limit,
    where nobody chose."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads()) if _chosen else min(int(torch.get_num_threads()), _quota())
    return _chosen[-1] if _chosen else _usual()


def use_threads(count: int) -> None:
    """Use so many from now on."""
    _chosen[:] = [count]
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    else:
        os.environ["OMP_NUM_THREADS"] = str(count)  # for torch, if it is imported later


@cache
def _usual() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if given.isdecimal() and int(given):
        return int(given)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return max(1, min(len({_core(number) for number in allowed}), _quota()))


@cache
def _quota() -> int:
    """How many processors a container's limit amounts to, rounded up; more than there are where there is none."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # of both versions of cgroups
        try:
            text = " ".join((CGROUP / name).read_text(encoding="ascii") for name in names)
            quota, period = map(int, text.split())
        except (OSError, ValueError):  # no limit is the word max, or -1
            continue
        if quota > 0 and period > 0:
            return ceil(quota / period)
    return 1 << 16


def _core(number: int) -> str:
    """What the logical processors of one physical core have in common."""
    try:
        return (CORES / f"cpu{number}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(number)


def device(name: str) -> str:
    """A device such as cuda:1, with the name of its GPU."""
    if not name.startswith("cuda"):
        return name
    import torch

    return f"{name} {torch.cuda.get_device_name(name)}"


@cache
def cpu() -> dict[str, str]:
    """What Linux says about the first processor, by the names of /proc/cpuinfo; empty elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").split("\n\n")[0].splitlines() if file.is_file() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def processor() -> str:
    """The processor's name and abilities, by which measurements and proofs are kept."""
    names = "model name", "cpu family", "model", "flags", "CPU part", "Features"
    return "\n".join([platform.machine(), platform.processor(), *(cpu().get(name, "") for name in names)])


def versions() -> dict[str, str]:
    """Versions of Python and of `PACKAGES`."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def environment() -> dict[str, Any]:
    """The time, the machine and the versions, for the header of a measurement."""
    torch = sys.modules.get("torch")  # without it nothing runs on a GPU
    gpus = [] if torch is None else [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": cpu().get("model name") or platform.processor() or platform.machine(),
            "flags": [flag for flag in FLAGS if flag in cpu().get("flags", cpu().get("Features", "")).split()],
            "cores": os.cpu_count(), "threads": threads(), "gpus": gpus,
        },
        "versions": versions(),
    }  # fmt: skip
