"""What several tests of models want."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.native import build as native


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same code as processors without AVX-512 get it; such a processor has it anyway."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        yield
        return
    native.library.cache_clear()
    flags = ["-march=x86-64-v3" if flag == "-march=native" else flag for flag in native.FLAGS]
    monkeypatch.setattr(native, "FLAGS", tuple(flags))
    yield
    native.library.cache_clear()
