"""The steps that pyproject.toml cannot describe.

`_abi.py` is made of the C header, into the wheel, or beside the header where the package is installed in place
(`pip install -e`). And a wheel that is built where zig is installed carries the compiled libraries of its platform:
this machine's, or the one that $OUTRIDER_WHEEL names (`tools/wheels.py`).
"""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("outrider") / "backends" / "native"
VARIANTS = runpy.run_path(str(Path("src") / NATIVE / "variants.py"))


class BuildWithLibraries(build_py):
    def run(self) -> None:
        if not self.editable_mode:  # what an earlier build left there would be packed too
            shutil.rmtree(Path(self.build_lib) / "outrider", ignore_errors=True)
        super().run()
        folder = Path("src" if self.editable_mode else self.build_lib) / NATIVE
        runpy.run_path(str(Path("src") / NATIVE / "abi_source.py"))["write"](folder)
        if self.editable_mode:
            return
        if platform := VARIANTS["built_for"]():
            VARIANTS["build"](folder / "lib", platform)


class WheelOfThisPlatform(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        platform = VARIANTS["built_for"]()
        return ("py3", "none", platform.tag if platform else "any")


setup(cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelOfThisPlatform})
