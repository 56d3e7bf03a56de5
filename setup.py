"""The one step that pyproject.toml cannot describe: `_abi.py` is made of the C header, into the wheel, or beside the
header where the package is installed in place (`pip install -e`)."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NATIVE = Path("outrider") / "backends" / "native"


class BuildWithAbi(build_py):
    def run(self) -> None:
        super().run()
        folder = Path("src" if self.editable_mode else self.build_lib) / NATIVE
        runpy.run_path(str(Path("src") / NATIVE / "abi_source.py"))["write"](folder)


setup(cmdclass={"build_py": BuildWithAbi})
