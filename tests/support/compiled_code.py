"""Where compiled passes run, and in which precisions compiled drafters are tested."""

from __future__ import annotations

import pytest
import torch

from outrider.backends.native.library import library

HALF, FULL = torch.bfloat16, torch.float32
needs_code = pytest.mark.skipif(
    library("float32", "float32") is None, reason="native passes need AVX2 or NEON, and a compiler"
)
# `halves`: weights are bfloat16 and all else is float32, as on processors without products of bfloat16.
precisions = pytest.mark.parametrize(("dtype", "halves"), [(HALF, False), (FULL, False), (FULL, True)])
