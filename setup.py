"""The steps that pyproject.toml cannot describe.

`_abi.py` is made of the C header, into the wheel, or beside the header where the package is installed in place
(`pip install -e`). And a wheel that is built on Linux on x86, where zig is installed, carries the compiled libraries.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("outrider") / "backends" / "native"
VARIANTS = runpy.run_path(str(Path("src") / NATIVE / "variants.py"))


class BuildWithLibraries(build_py):
    def run(self) -> None:
        super().run()
        folder = Path("src" if self.editable_mode else self.build_lib) / NATIVE
        runpy.run_path(str(Path("src") / NATIVE / "abi_source.py"))["write"](folder)
        if not self.editable_mode and VARIANTS["carried"]():
            VARIANTS["build"](folder / "lib")


class WheelOfThisPlatform(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", "manylinux_2_17_x86_64" if VARIANTS["carried"]() else "any")


setup(cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelOfThisPlatform})
