"""When, where and with what something was measured."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..machine import threads

PACKAGES = ("outrider", "torch", "transformers", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that a result depends on."""
    known = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    return known


def here() -> dict[str, Any]:
    """The header of a run: the time, the machine and the versions."""
    torch = sys.modules.get("torch")  # what is measured without it runs on no GPU
    gpus = [] if torch is None else [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": platform.machine(), "cores": os.cpu_count(), "threads": threads(), "gpus": gpus,
        },
        "versions": versions(),
    }  # fmt: skip
