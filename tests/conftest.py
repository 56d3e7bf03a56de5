"""Every test runs offline and on one thread; with CHECK_SHAPES=1 the shapes of all tensors are checked as well."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from jaxtyping import install_import_hook
from transformers import PreTrainedModel  # noqa: F401

with contextlib.suppress(ImportError):
    import torchao  # noqa: F401

# Checking the shapes and types of every call makes a test two to three times as long, so `make test` does it only where
# every rule and every drafter is met once. transformers and torchao come before the hook: when jaxtyping loads a module
# of outrider, whatever that module imports is compiled anew (jaxtyping changes where bytecode is cached). That takes
# half a minute, and others' syntax warnings become errors.
if os.environ.get("CHECK_SHAPES"):
    install_import_hook("outrider", "checking.check")

WORKER = "PYTEST_XDIST_WORKER" in os.environ  # whose environment is that of the process that started it
OWN = not WORKER and not (os.environ.get("OUTRIDER_SANITIZE") and os.environ.get("OUTRIDER_CACHE"))
if OWN:
    os.environ["OUTRIDER_CACHE"] = tempfile.mkdtemp(prefix="outrider-tests-")
CACHE = Path(os.environ["OUTRIDER_CACHE"])

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests of Ctrl-C, and the processes they start, need it
SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_unconfigure() -> None:
    if OWN:
        shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is written into the user's cache folder: each test has its own. The compiled pass is built once for all
    tests and workers, in the folder that fixtures of modules write into."""
    cache, built = tmp_path_factory.mktemp("cache"), CACHE / "native"
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    built.mkdir(mode=0o700, exist_ok=True)  # nobody else may write where libraries are loaded from
    (cache / "native").symlink_to(built)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and tiny pretrained models beside the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"no folder {SHARED.name}/ beside the repository: tests on real data and pretrained models need it")
    return SHARED


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
