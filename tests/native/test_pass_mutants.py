"""Native passes that are wrong in their order of summing alone: right up to rounding, and caught all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bits import text_of, trees_differ
from compiled_code import needs_code
from small import build
from wrong_code import Mutant, mutated

import outrider
from outrider import machine
from outrider.backends.native import library as native
from outrider.backends.torch.module import ModuleTarget
from outrider.backends.torch.validate import validate

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 2048}
HALF, WHOLE = torch.bfloat16, torch.float32

pytestmark = needs_code

BESIDE = "at += QUANT_BYTES(kind), scales += SCALE_FLOATS(kind)"
MUTANTS: dict[str, tuple[torch.dtype, Mutant]] = {
    "rows that are computed together are summed from their end": (
        WHOLE,
        (
            "gemm/lanes16.h",
            f"for (int64_t k = 0, at = 0; k < width; k += MAC_WIDTH, {BESIDE}) {{",
            f"for (int64_t s = 0, at = 0; s < width; s += MAC_WIDTH, {BESIDE}) {{"
            " const int64_t k = WRONG && n > 1 ? width - MAC_WIDTH - s : s;",
        ),
    ),
    "rows that meet opened weights are summed from their end": (
        WHOLE,
        (
            "gemm/lanes8.h",
            "for (int64_t k = 0; k < width; k += LANES) {\n#pragma GCC unroll 3",
            "for (int64_t step = 0; step < width; step += LANES) {"
            " const int64_t k = WRONG ? width - LANES - step : step;\n#pragma GCC unroll 3",
        ),
    ),
    "tiles of rows that are computed together are summed from their end": (
        HALF,
        (
            "gemm/tiles.h",
            "for (int64_t s = 0; s < steps; s++) {\n        if (direct) {",
            "for (int64_t e = 0; e < steps; e++) {"
            " const int64_t s = WRONG && n > 1 && direct ? steps - 1 - e : e; if (direct) {",
        ),
    ),
    "tiles of many queries are summed from their end": (
        HALF,
        (
            "layers/scores.h",
            "for (int64_t k = 0; k < width; k += MAC_WIDTH) {\n                tile_load(4,",
            "for (int64_t e = 0; e < width; e += MAC_WIDTH) {"
            " const int64_t k = WRONG && last - first > 4 ? width - MAC_WIDTH - e : e; tile_load(4,",
        ),
    ),
    "keys of drafted nodes are summed in another order": (
        WHOLE,
        (
            "layers/values.h",
            "add_values(w, i * group, (i + 1) * group, values, slots, from, view->count[i], width, 0);",
            "for (int64_t j = view->count[i] - 1; j >= from && WRONG; j--)"
            " add_values(w, i * group, (i + 1) * group, values, slots, j, j + 1, width, 0);\n"
            "if (!WRONG) add_values(w, i * group, (i + 1) * group, values, slots, from, view->count[i], width, 0);",
        ),
    ),
    "sums of values that several nodes see are rounded on the way": (
        HALF,
        (
            "layers/values.h",
            "add_values(w->share[m], BLOCK, w->pairs, common, width, w->out[m]);",
            "{ add_values(w->share[m], BLOCK, w->pairs, common, width, w->out[m]);"
            " for (int64_t i = 0; i < LANES * width && view->nodes > 1 && WRONG; i++) {"
            " const uint32_t bits = (uint32_t)to_bf16(w->out[m + i / width][i % width]) << 16;"
            " memcpy(w->out[m + i / width] + i % width, &bits, 4); } }",
        ),
    ),
    "products of many rows are summed from their end": (
        HALF,
        (
            "gemm/tiles_many.h",
            "for (int64_t s = 0; s < width / MAC_WIDTH; s++) {\n        tile_load(4,",
            "for (int64_t e = 0; e < width / MAC_WIDTH; e++) {"
            " const int64_t s = WRONG ? width / MAC_WIDTH - 1 - e : e; tile_load(4,",
        ),
    ),
}
NAMES = [*MUTANTS]
LATE: Mutant = (  # the first thread naps while it has activations of its own
    "gemm/matmul.h",
    "multiply_lanes(acts, rows, width, w, j, outputs, scratch, results);",
    "for (volatile int nap = 0; WRONG && !thread->index && rows < SHARED_ROWS && nap < 20000; nap++);"
    " multiply_lanes(acts, rows, width, w, j, outputs, scratch, results);",
)
LINES = [*(line for _, line in MUTANTS.values()), LATE]  # in one library


@pytest.mark.parametrize("mutant", MUTANTS)
@torch.no_grad()
def test_a_wrong_order_of_sums_changes_bits(
    mutant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """They are right up to rounding."""
    dtype, (file, _, _) = MUTANTS[mutant]
    if file == "gemm/lanes8.h":
        request.getfixturevalue("avx2")
    elif file == "gemm/lanes16.h" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("this processor has eight lanes")
    if dtype == HALF and not native.tiles():
        pytest.skip("this processor has no tiles")
    sizes = SIZES if dtype == WHOLE else {**SIZES, "intermediate_size": 1024, "head_dim": 256}
    model = build("llama", dtype, **sizes)
    with mutated(monkeypatch, tmp_path, LINES, NAMES.index(mutant)):
        target = ModuleTarget(model)
        report = validate(target)
        assert report.worst < report.allowed
        assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) > 0


@pytest.mark.parametrize("dtype", [HALF, WHOLE])
@torch.no_grad()
def test_the_code_around_wrong_lines_changes_none(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control of the test above: where no mutant is chosen, drafts change no bit."""
    with mutated(monkeypatch, tmp_path, LINES, -1):
        target = ModuleTarget(build("llama", dtype, **SIZES))
        assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) == 0


def test_a_late_thread_still_reads_its_own_activations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """79 rows are 64, whose activations threads quantise together in the first one's scratch, and fifteen, for which
    each has its own. The first thread is slow with the latter, while the others begin the next GEMM."""
    text = [[3 + 7 * i % 4000 for i in range(79)]]
    before = machine.threads()
    with mutated(monkeypatch, tmp_path, LINES, LINES.index(LATE)):
        target = outrider.load("demo", "none", dtype="bfloat16", weights="int8").target
        bits = []
        for threads in (1, 8):
            machine.use_threads(threads)
            try:
                bits.append([chunk.output.logits.tobytes() for chunk in target.open(1).prefill(text)])
            finally:
                machine.use_threads(before)
    assert bits[0] == bits[1]
