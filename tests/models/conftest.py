"""What several tests of models want."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.native import build as native
from outrider.native.blocks import reads


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The code that processors without AVX-512 get; on such a processor nothing is changed."""
    code = native.library("bfloat16", "bfloat16")
    if code is not None and reads(code) == 8:
        yield
        return
    native.library.cache_clear()
    flags = ["-march=x86-64-v3" if flag == "-march=native" else flag for flag in native.FLAGS]
    monkeypatch.setattr(native, "FLAGS", tuple(flags))
    yield
    native.library.cache_clear()
