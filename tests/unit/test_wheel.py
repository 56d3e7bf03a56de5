"""The wheel: at most 40 MB, with the models that users need and without what the tests alone need."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
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
    (result,) = out.glob("*.whl")
    return result


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
    libraries = {name for name in zipfile.ZipFile(wheel).namelist() if "/lib/" in name}
    kind = variants.built_for()
    if kind is None:
        assert wheel.name.endswith("-py3-none-any.whl")
        assert not libraries
        pytest.skip("needs the package ziglang, and a platform that the code is written for")
    assert wheel.name.endswith(f"-py3-none-{kind.tag}.whl")
    wanted = [(variant, precision) for variant in kind.variants for precision in variant.precisions]
    names = {variants.file_name(variant, *precision, kind.suffix) for variant, precision in wanted}
    assert libraries == {f"outrider/backends/native/lib/{name}" for name in names}
    for name in libraries:
        check_glibc(zipfile.ZipFile(wheel).read(name))


def check_glibc(library: bytes) -> None:
    """No newer than 2.17, as manylinux_2_17 has it."""
    versions = re.findall(rb"GLIBC_2\.(\d+)", library)
    assert versions
    assert max(map(int, versions)) <= 17


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(variants.zig() is None, reason="needs the package ziglang")
@pytest.mark.parametrize("name", variants.PLATFORMS)
def test_libraries_are_cross_compiled_for_every_platform(name: str, tmp_path: Path) -> None:
    """In the system's format, for its processor, without this machine's paths; Apple's are signed."""
    kind = variants.PLATFORMS[name]
    one = replace(kind.variants[-1], precisions=variants.BF16[:1])
    (file,) = variants.build(tmp_path, kind, (one,))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    code = file.read_bytes()
    assert b"walk_trees" in code, "which Python calls"
    assert str(Path.home()).encode() not in code
    assert tempfile.gettempdir().encode() not in code
    if kind.suffix == ".so":
        assert (code[:4], code[18]) == (b"\x7fELF", {"x86_64": 62, "aarch64": 183}[name.split("-")[1]])
        check_glibc(code)
    elif kind.suffix == ".dylib":
        arm = name.endswith("arm64")
        assert code[:8] == bytes.fromhex("cffaedfe") + bytes.fromhex("0c000001" if arm else "07000001")
        assert not arm or bytes.fromhex("fade0cc0") in code, "the magic number of a signature"
    else:
        at = int.from_bytes(code[60:64], "little")
        assert (code[:2], code[at : at + 6]) == (b"MZ", b"PE\0\0" + bytes.fromhex("6486"))
