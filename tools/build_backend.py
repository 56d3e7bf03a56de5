"""setuptools' build backend, which also wants zig for a wheel, to compile the libraries that it carries (setup.py).

Not for a package that is installed in place, which compiles what its processor wants when that is first used.
"""

from __future__ import annotations

import os
import runpy
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What pip installs before it builds a wheel."""
    wanted = build_meta.get_requires_for_build_wheel(config_settings)
    variants = runpy.run_path("src/outrider/backends/native/variants.py")
    carries = variants["CHOICE"] in os.environ or variants["this"]() is not None
    return [*wanted, "ziglang>=0.17"] if carries else wanted
