"""Native passes that are wrong in their order of summing alone: right up to rounding, and caught all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bits import text_of, trees_differ
from small import build
from wrong_code import mutated

from outrider.backends.native import library as native
from outrider.backends.torch.module import ModuleTarget
from outrider.backends.torch.validate import validate

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 2048}
HALF, WHOLE = torch.bfloat16, torch.float32

pytestmark = pytest.mark.skipif(
    native.library("float32", "float32") is None, reason="the compiled pass wants gcc and an x86 processor with AVX2"
)

MUTANTS = {
    "rows that are computed together are summed from their end": (
        "gemm/lanes16.h",
        WHOLE,
        "for (int64_t k = 0, at = 0; k < width; k += MAC_WIDTH, at += QUANT_BYTES(kind), scales += SCALE_FLOATS(kind))"
        " {",
        "for (int64_t s = 0, at = 0; s < width; s += MAC_WIDTH) { const int64_t k = n > 1 ? width - MAC_WIDTH - s : s;",
    ),
    "rows that meet opened weights are summed from their end": (
        "gemm/lanes8.h",
        WHOLE,
        "for (int64_t k = 0; k < width; k += LANES) {\n#pragma GCC unroll 3",
        "for (int64_t k = width - LANES; k >= 0; k -= LANES) {\n#pragma GCC unroll 3",
    ),
    "tiles of rows that are computed together are summed from their end": (
        "gemm/tiles.h",
        HALF,
        "for (int64_t s = 0; s < steps; s++) {\n        if (direct) {",
        "for (int64_t e = 0; e < steps; e++) { const int64_t s = n > 1 && direct ? steps - 1 - e : e; if (direct) {",
    ),
    "tiles of many queries are summed from their end": (
        "layers/scores.h",
        HALF,
        "for (int64_t k = 0; k < width; k += MAC_WIDTH) {\n                tile_load(4,",
        "for (int64_t e = 0; e < width; e += MAC_WIDTH) {"
        " const int64_t k = last - first > 4 ? width - MAC_WIDTH - e : e; tile_load(4,",
    ),
    "keys of drafted nodes are summed in another order": (
        "layers/values.h",
        WHOLE,
        "add_values(w, i * group, (i + 1) * group, values, slots, from, view->count[i], width, 0);",
        "for (int64_t j = view->count[i] - 1; j >= from; j--)"
        " add_values(w, i * group, (i + 1) * group, values, slots, j, j + 1, width, 0);",
    ),
    "sums of values that several nodes see are rounded on the way": (
        "layers/values.h",
        HALF,
        "add_values(w->share[m], BLOCK, w->pairs, common, width, w->out[m]);",
        "{ add_values(w->share[m], BLOCK, w->pairs, common, width, w->out[m]);"
        " for (int64_t i = 0; i < LANES * width && view->nodes > 1; i++) {"
        " const uint32_t bits = (uint32_t)to_bf16(w->out[m + i / width][i % width]) << 16;"
        " memcpy(w->out[m + i / width] + i % width, &bits, 4); } }",
    ),
    "products of many rows are summed from their end": (
        "gemm/tiles_many.h",
        HALF,
        "for (int64_t s = 0; s < width / MAC_WIDTH; s++) {\n        tile_load(4,",
        "for (int64_t e = 0; e < width / MAC_WIDTH; e++) { const int64_t s = width / MAC_WIDTH - 1 - e; tile_load(4,",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@torch.no_grad()
def test_mutants_are_caught(
    mutant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """They are right up to rounding."""
    file, dtype, line, wrong = MUTANTS[mutant]
    if file == "gemm/lanes8.h":
        request.getfixturevalue("avx2")
    elif file == "gemm/lanes16.h" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("this processor has eight lanes")
    if dtype == HALF and not native.tiles():
        pytest.skip("this processor has no tiles")
    sizes = SIZES if dtype == WHOLE else {**SIZES, "intermediate_size": 1024, "head_dim": 256}
    with mutated(monkeypatch, tmp_path, file, line, wrong):
        target = ModuleTarget(build("llama", dtype, **sizes))
        report = validate(target)
        assert report.worst < report.allowed
        assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) > 0
