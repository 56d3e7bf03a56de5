"""Every format of GGUF tensors dequantises as gguf-py does, bit for bit, whatever the blocks hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from quantised_blocks import random_blocks

from outrider.backends.native.abi import address
from outrider.backends.native.library import library
from outrider.backends.native.weights import rounded, widened
from outrider.backends.torch.formats import numbers

READ = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
READ += ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
WIDTH, ROWS = 512, 24
EXTREME = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00]  # zeros, subnormals, the largest


ANY = range(0x7C00)  # all that are not negative, and finite


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0x7FFFE000])
def test_nan_stays_nan(bits: int) -> None:
    """The largest payloads would be carried into the sign, and become zeros: a damaged file would load."""
    given = np.full((1, 32), bits, np.uint32)
    for made in (rounded(given.view(np.float32)), dequantised(given, GGMLQuantizationType.F32)):
        assert np.isnan(widened(made)).all()


def dequantised(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """bfloat16 numbers of a file's rows, by the compiled code."""
    code, made = library("bfloat16", "bfloat16"), np.empty(rows.shape, np.uint16)
    assert code is not None
    assert code.dequantise(int(kind), address(rows), *rows.shape, address(None), address(made), 1, 1) == len(rows)
    return made


@pytest.mark.parametrize("scales", [ANY, EXTREME])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", READ)
def test_values_equal_gguf_py_bit_for_bit(name: str, compiled: bool, scales: Sequence[int]) -> None:
    code = library("bfloat16", "bfloat16") if compiled else None
    if compiled and code is None:
        pytest.skip("this machine has no compiled pass")
    kind = GGMLQuantizationType[name]
    rows = random_blocks(name, ROWS, WIDTH, scales)
    order = np.random.default_rng(0).permutation(ROWS)
    with np.errstate(all="ignore"):  # some bit patterns are infinite
        theirs = torch.from_numpy(np.array(quants.dequantize(rows, kind)))
        ours = numbers(code, kind, rows, WIDTH, None, torch.float32)
        moved = {d: numbers(code, kind, rows, WIDTH, order, d) for d in (torch.float32, torch.bfloat16, torch.float16)}
    finite = theirs.isfinite()
    assert torch.equal(ours.view(torch.int32)[finite], theirs.view(torch.int32)[finite])
    assert torch.equal(ours.isfinite(), finite)
    for dtype, other in moved.items():
        assert torch.equal(other[finite[order]], theirs[order].to(dtype)[finite[order]])
