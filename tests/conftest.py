"""Every test runs offline and on one thread; with CHECK_SHAPES=1 the shapes of all tensors are checked as well."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import kept  # before torchao, whose reports of kernels for other machines `outrider` filters

WORKER = "PYTEST_XDIST_WORKER" in os.environ  # whose environment is that of the process that started it
OWN = not WORKER and not (os.environ.get("OUTRIDER_SANITIZE") and os.environ.get("OUTRIDER_CACHE"))
ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
BUILT = ROOT / "build" / "tests"  # compiled libraries, kept from run to run; a name is a digest of sources and flags
MOST = 100  # of these libraries
SHAPED = "backends.torch", "checkpoints", "drafters", "nets", "proofs", "training"  # whose annotations have shapes
# Files whose fixtures or single tests take longest come first: what is left at the end is short, and shared by workers.
FIRST = "test_distributed.py", "test_cli_bench.py"

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if OWN:
    os.environ["OUTRIDER_CACHE"] = tempfile.mkdtemp(prefix="outrider-tests-")
CACHE = Path(os.environ["OUTRIDER_CACHE"])
if OWN:
    BUILT.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not kept.exposed(BUILT):  # libraries are not loaded from where others can write
        (CACHE / "native").symlink_to(BUILT)
(CACHE / "native").mkdir(mode=0o700, exist_ok=True)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests of Ctrl-C, and the processes they start, need it


def pytest_configure(config: pytest.Config) -> None:
    """Checking shapes makes tests of tensors two to three times as long, so `make test` does it only where every rule
    and every drafter is met once."""
    controller = not WORKER and config.getoption("numprocesses", None)  # which runs no test
    if os.environ.get("CHECK_SHAPES") and not controller:
        check_shapes()


def check_shapes() -> None:
    """transformers comes before the hook, with torchao where it is installed: when jaxtyping loads a module of
    outrider, whatever that module imports is compiled anew (jaxtyping changes where bytecode is cached). That takes
    half a minute, and others' syntax warnings become errors."""
    from jaxtyping import install_import_hook
    from transformers import PreTrainedModel  # noqa: F401

    install_import_hook([f"outrider.{name}" for name in SHAPED], "checking.check")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)


def pytest_unconfigure() -> None:
    if OWN:
        shutil.rmtree(CACHE, ignore_errors=True)
        libraries = sorted(BUILT.glob("*.so"), key=lambda file: file.stat().st_mtime)
        for file in libraries[:-MOST]:
            file.unlink()
            file.with_name(f"{file.name}.sha256").unlink(missing_ok=True)


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, caches: Path) -> None:
    """Nothing is written into the user's cache folder: each test has its own, where all find the compiled libraries."""
    cache = Path(tempfile.mkdtemp(dir=caches))
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    (cache / "native").symlink_to(CACHE / "native")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and tiny pretrained models beside the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"no folder {SHARED.name}/ beside the repository: tests on real data and pretrained models need it")
    return SHARED


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The contract's models."""
    from contract_world import make_world

    return make_world(tmp_path_factory.mktemp("noisy"))


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The code that processors without AVX-512 get; on such a processor nothing is changed."""
    from outrider.backends.native import library as native  # behind the hook above

    code = native.library("bfloat16", "bfloat16")
    if code is not None and code.block_lanes == 8:
        yield
        return
    native.library.cache_clear()
    flags = ["-march=x86-64-v3" if flag == "-march=native" else flag for flag in native.FLAGS]
    monkeypatch.setattr(native, "FLAGS", tuple(flags))
    yield
    native.library.cache_clear()
