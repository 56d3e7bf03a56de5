"""One model on both backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import build

from outrider.backends.native.library import library
from outrider.backends.torch import load_target
from outrider.backends.torch.module import ModuleTarget


@pytest.fixture(scope="module", params=["native", "torch"])
def target(request: pytest.FixtureRequest) -> Any:
    """A tiny Llama, whose sizes the module may change by its SIZES."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, **getattr(request.module, "SIZES", {})}
    model = build("llama", torch.float32, **sizes)
    if request.param == "torch":
        return load_target(model)
    if library("float32", "float32") is None:
        pytest.skip("native passes need AVX2 or NEON, and a compiler")
    return ModuleTarget(model)
