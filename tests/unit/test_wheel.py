"""The wheel: at most 40 MB, with the models that users need and without what the tests alone need."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outrider.backends.native import variants

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left in the repository."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT / "src" / "outrider", copy / "src" / "outrider", ignore=shutil.ignore_patterns("__pycache__", "_abi.py")
    )
    (copy / "tools").mkdir()
    for name in ("pyproject.toml", "setup.py", "tools/build_backend.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(out), "."]
    subprocess.run(pip, cwd=copy, check=True, timeout=900)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
@pytest.mark.process
def test_the_wheel_holds_what_users_need_and_no_more(wheel: Path) -> None:
    assert wheel.stat().st_size < 40e6
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"outrider"}
    models = {name.split("/")[2] for name in names if name.startswith("outrider/demo/") and name.count("/") > 2}
    assert models >= {"target", "draft", "eagle", "hass", "eagle3", "mamba", "block"}
    assert {f"outrider/smollm2/{name}/model.safetensors" for name in ("eagle3", "medusa")} <= set(names)
    assert not any(name.startswith("outrider/smollm2/hass/") for name in names)
    assert not models & {"medusa", "hydra", "llama"}, "which the tests and the benchmarks alone need"
    assert {"outrider/py.typed", "outrider/bench/data/tasks.json", "outrider/demo/heldout.jsonl"} <= set(names)
    code = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "outrider").rglob("*.py")}
    code |= {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "outrider").rglob("*.[ch]")}
    assert code <= set(names)
    assert "outrider/backends/native/_abi.py" in names


@pytest.mark.slow
@pytest.mark.process
def test_the_wheel_carries_the_compiled_libraries(wheel: Path) -> None:
    """They ask for no newer glibc than its name says; without zig it is a wheel for every platform, without them."""
    libraries = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    if not variants.carried():
        assert wheel.name.endswith("-py3-none-any.whl")
        assert not libraries
        pytest.skip("needs the package ziglang, on Linux on x86")
    assert wheel.name.endswith("-py3-none-manylinux_2_17_x86_64.whl")
    wanted = [(variant, precision) for variant in variants.VARIANTS for precision in variant.precisions]
    assert libraries == {f"outrider/backends/native/lib/{variants.file_name(v, *p)}" for v, p in wanted}
    for name in libraries:
        versions = re.findall(rb"GLIBC_2\.(\d+)", zipfile.ZipFile(wheel).read(name))
        assert versions
        assert max(map(int, versions)) <= 17
