"""Integer products: the weights are the file's, and the results those of the documented order, bit for bit, by every
instruction set, whatever else is computed beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from quantised_blocks import random_blocks
from wrong_code import mutated

from outrider.backends.native import library as native
from outrider.backends.native.abi import INTEGER, PLAIN, Library, address, ffi
from outrider.backends.native.library import library
from outrider.backends.native.weights import Matrix
from outrider.core.types import Array

SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
SUPER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
HALVES = ("Q2_K", "Q3_K", "Q6_K")  # a scale for each sixteen weights
USUAL = range(0x1000, 0x3000)  # float16 scales
EXTREME = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF]
BUILDS = {
    "own": "",
    "avx512": "-march=x86-64-v4",
    "avx2": "-march=x86-64-v3",
    "tiles": "-march=native",
}  # with VNNI (where there is), and without; with AMX emulated


@pytest.fixture(params=BUILDS, scope="module")
def code(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The compiled pass for this processor, and without the instructions that it has beyond others'."""
    with pytest.MonkeyPatch.context() as patch:
        if march := BUILDS[request.param]:
            if request.param in ("avx512", "tiles") and not native.abilities() >= native.AVX512:
                pytest.skip("this processor has no AVX-512")
            emulated = ("-DAMX", "-DEMULATED_AMX", "-DCHECKED") if request.param == "tiles" else ()
            quickly = () if request.param == "avx2" else ("-O1",)  # other tests use the library for AVX2
            flags = tuple(march if f == "-march=native" else f for f in native.FLAGS)
            patch.setattr(native, "FLAGS", flags + emulated + quickly)
            patch.setattr(native, "prebuilt", lambda *_: None)
        library.cache_clear()
        result = library("bfloat16", "bfloat16" if request.param == "tiles" else "float32")
        if result is None:
            pytest.skip("native passes need AVX2 or NEON, and a compiler")
        yield result
    library.cache_clear()


@dataclass
class Case:
    """A matrix of a file's blocks."""

    name: str
    rows: Array  # uint8
    width: int

    @property
    def kind(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self.name]

    @property
    def weights(self) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(quants.dequantize(self.rows, self.kind), np.float32)

    def packed(self, code: Library, order: Array | None = None) -> Matrix:
        """As products read it."""
        size = code.int8_bytes(int(self.kind), len(self.rows), self.width)
        assert size % 64 == 0
        assert 0 < size <= 1.3 * (self.rows.nbytes + -len(self.rows) % 16 * self.rows.shape[1])
        data = np.full(size, 0xA5, np.uint8)
        given = np.ascontiguousarray(self.rows)
        kind = code.pack_int8(
            int(self.kind), address(given), len(given), self.width, address(order), 0, address(data), 2
        )
        assert kind == INTEGER + int(self.kind)
        return Matrix(kind, data)


def unpacked(code: Library, one: Matrix, rows: int, width: int) -> Array:
    made, struct = np.empty((rows, width), np.float32), one.struct
    code.unpack_int8(ffi.addressof(struct), rows, width, address(made))
    return made


def multiply(code: Library, one: Matrix, x: Array, outputs: int, threads: int = 2) -> Array:
    """float32 [n, outputs]."""
    given, made, own = np.ascontiguousarray(x, np.float32), np.empty((len(x), outputs), np.float32), one.struct
    quantised, scratch = np.empty_like(given), np.empty(code.scratch_bytes(*x.shape) * threads, np.uint8)
    places = address(quantised), address(scratch)
    code.multiply(ffi.addressof(own), address(given), *x.shape, outputs, address(made), threads, *places)
    return made


# -- the documented order, in numpy ------------------------------------------------------------------------------------


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 arrays, rounded once: the sum in float64 is rounded to odd before."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = np.asarray(product + c)
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    even = (error != 0) & (bits & 1 == 0)
    return (bits + np.where(even, np.where((error > 0) == (total > 0), 1, -1), 0)).view(np.float64).astype(np.float32)


def quantised(x: Array) -> tuple[Array, Array]:
    """Activations as int8 [n, blocks, 32], and their scales float32 [n, blocks]."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1)
    zero = largest <= np.float32(1e-30)
    factor = np.where(zero, 0, np.float32(127) / np.where(zero, 1, largest)).astype(np.float32)
    scale = np.where(zero, 0, largest * (np.float32(1) / np.float32(127))).astype(np.float32)
    return np.rint(blocks * factor[..., None]).astype(np.int64), scale


@dataclass
class Decoded:
    """A file's blocks as integers and scales, made by changing one field of the blocks at a time (with gguf-py)."""

    quants: Array  # int64 [rows, blocks, 32], signed
    d: Array  # float32 [rows, units]
    dmin: Array
    scale: Array  # int64 [rows, blocks, 1 or 2]
    minimum: Array


def decoded(case: Case) -> Decoded:
    """What the weights are made of: d * scale * quant - dmin * minimum."""
    superblock, split = case.name in SUPER, 2 if case.name in HALVES else 1
    unit = 256 if superblock else 32
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}
    at |= {"IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (0,)}
    places = at.get(case.name, (0, 2))
    blocks = case.rows.reshape(len(case.rows), case.width // unit, -1)

    def with_scales(*values: float) -> Array:
        """The weights, had all blocks these float16 scales."""
        other = blocks.copy()
        for place, value in zip(places, values, strict=True):
            other[..., place : place + 2] = np.array([value], np.float16).view(np.uint8)
        return replace(case, rows=other.reshape(case.rows.shape)).weights.astype(np.float64)

    def halves(place: int) -> Array:
        return np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0].astype(np.float32)

    if case.name == "MXFP4":
        other = blocks.copy()
        other[..., 0] = 128  # twice the table's values, which are the integers
        numbers = replace(case, rows=other.reshape(case.rows.shape)).weights.astype(np.float64)
        d = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128).astype(np.float32)
        one = np.ones((len(case.rows), case.width // 32, 1), np.int64)
        return Decoded(numbers.reshape(len(numbers), -1, 32).astype(np.int64), d, 0 * d, one, 0 * one)
    minima = with_scales(0, 1) if len(places) == 2 else 0 * with_scales(0)
    product = with_scales(1, 0) if len(places) == 2 else with_scales(1)  # scale * quant
    scale, minimum = file_scales(case, blocks, split)
    each = np.repeat(scale, 32 // split, -1).reshape(product.shape)
    numbers = np.where(each == 0, 0, product / np.where(each == 0, 1, each))
    sign = -1 if superblock else 1
    assert np.array_equal(sign * np.repeat(minimum, 32 // split, -1).reshape(minima.shape), minima)
    d, dmin = halves(places[0]), halves(places[1]) if len(places) == 2 else 0 * halves(places[0])
    return Decoded(
        numbers.reshape(len(numbers), -1, 32).astype(np.int64), d, dmin if superblock else -dmin, scale, minimum
    )


def file_scales(case: Case, blocks: Array, split: int) -> tuple[Array, Array]:
    """Integer scales and minima [rows, blocks of 32, split] (ones without superblocks)."""
    rows, b = len(blocks), blocks.astype(np.int64)
    shape = rows, case.width // 32, split
    if case.name not in SUPER:
        return np.ones(shape, np.int64), np.full(shape, int(case.name in ("Q4_1", "Q5_1")), np.int64)
    if case.name == "Q2_K":
        return (b[..., :16] & 15).reshape(shape), (b[..., :16] >> 4).reshape(shape)
    if case.name == "Q6_K":
        return blocks[..., 192:208].view(np.int8).astype(np.int64).reshape(shape), np.zeros(shape, np.int64)
    if case.name == "Q3_K":
        p = b[..., 96:108]
        low = np.concatenate([p[..., :8] & 15, p[..., :8] >> 4], -1)
        high = np.concatenate([p[..., 8:] >> 2 * i & 3 for i in range(4)], -1)
        return ((low | high << 4) - 32).reshape(shape), np.zeros(shape, np.int64)
    if case.name == "IQ4_XS":
        high = b[..., 2] | b[..., 3] << 8
        low = np.stack([b[..., 4 + g // 2] >> g % 2 * 4 & 15 for g in range(8)], -1)
        return (low + np.stack([(high >> 2 * g & 3) << 4 for g in range(8)], -1) - 32).reshape(shape), np.zeros(
            shape, np.int64
        )
    p = b[..., 4:16]
    scale = np.concatenate([p[..., :4] & 63, p[..., 8:] & 15 | p[..., :4] >> 6 << 4], -1)
    minimum = np.concatenate([p[..., 4:8] & 63, p[..., 8:] >> 4 | p[..., 4:8] >> 6 << 4], -1)
    return scale.reshape(shape), minimum.reshape(shape)


def expected(case: Case, x: Array) -> Array:
    """The product of the documented order."""
    made, (acts, scale) = decoded(case), quantised(x)
    split = made.scale.shape[-1]
    parts = acts.reshape(*acts.shape[:2], split, -1), made.quants.reshape(*made.quants.shape[:2], split, -1)
    dots = np.einsum("nbhi,obhi->nobh", *parts)
    dot = (dots * made.scale).sum(-1)
    assert np.abs(dot).max() < 1 << 24
    total = (scale[..., None] * parts[0].sum(-1).astype(np.float32))[:, None]  # [n, 1, blocks, split]
    all_ = (scale * acts.sum(-1).astype(np.float32))[:, None]
    result = np.zeros(dot.shape[:2], np.float32)
    if case.name not in SUPER:
        for b in range(dot.shape[2]):
            result = fma(dot[:, :, b].astype(np.float32) * scale[:, None, b], made.d[:, b], result)
            if made.minimum.any():
                result = fma(all_[:, :, b], -made.dmin[:, b], result)
        return result
    for u in range(made.d.shape[1]):
        part, least = np.zeros_like(result), np.zeros_like(result)
        for b in range(8 * u, 8 * u + 8):
            part = fma(dot[:, :, b].astype(np.float32), scale[:, None, b], part)
            for h in range(split):
                least = fma(
                    made.minimum[:, b, h].astype(np.float32), total[:, :, b, h] if split == 2 else all_[:, :, b], least
                )
        result = fma(made.d[:, u], part, result)
        if case.name in ("Q2_K", "Q4_K", "Q5_K"):
            result = fma(-made.dmin[:, u], least, result)
    return result


def activations(n: int, width: int) -> Array:
    x = np.random.default_rng(n).standard_normal((n, width)).astype(np.float32)
    x[0] = np.where(np.arange(width) % 3 == 0, -1, 1)  # each is 127 or -127
    if n > 2:
        x[1] *= np.float32(1e4)
        x[2, : width // 2] = 0
    return (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # which bfloat16 holds


def matrix(name: str, rows: int, width: int, scales: range | list[int] = USUAL) -> Case:
    made = random_blocks(name, rows, width, scales)
    if name == "MXFP4":  # exponents that float16 holds
        made.reshape(rows, -1, 17)[..., 0] = np.random.default_rng(1).integers(110, 140, (rows, width // 32))
    return Case(name, made, width)


@pytest.mark.parametrize("scales", [USUAL, EXTREME], ids=["usual", "extreme"])
@pytest.mark.parametrize("name", SMALL + SUPER)
def test_weights_are_the_files(code: Library, name: str, scales: range | list[int]) -> None:
    """Also in another order of rows, and rows of zeros complete the last sixteen."""
    case = matrix(name, 21, 512, scales)
    order = np.random.default_rng(0).permutation(21)
    assert np.array_equal(unpacked(code, case.packed(code), 21, 512), case.weights)
    moved = unpacked(code, case.packed(code, order), 32, 512)
    assert np.array_equal(moved[:21], case.weights[order])
    assert not moved[21:].any()


@pytest.mark.parametrize("name", SMALL + SUPER)
def test_products_are_those_of_the_documented_order(code: Library, name: str) -> None:
    for rows, width in ((13, 256), (40, 1280)):
        case = matrix(name, rows, width)
        one, x = case.packed(code), activations(13, width)
        assert np.array_equal(multiply(code, one, x, rows), expected(case, x))


@pytest.mark.parametrize("name", SMALL + SUPER)
def test_the_largest_quants_fill_no_sum(code: Library, name: str) -> None:
    """All bits of a block are set, or none is; activations are 127 and -127."""
    for byte in (0xFF, 0x00, 0x80, 0x7F):
        case = matrix(name, 16, 256)
        if name == "MXFP4":
            case.rows.reshape(16, -1, 17)[..., 1:] = byte
        else:
            scales = matrix(name, 16, 256, [0x2C00]).rows
            case.rows[:] = np.where(scales == matrix(name, 16, 256, [0x3000]).rows, byte, scales)
        x = activations(1, 256)
        x = np.concatenate([x, np.ones_like(x), -np.ones_like(x)])
        assert np.array_equal(multiply(code, case.packed(code), x, 16), expected(case, x))


@pytest.mark.parametrize("name", SMALL + SUPER)
def test_a_row_does_not_depend_on_its_neighbours(code: Library, name: str) -> None:
    """Nor on their number or that of the threads; NaN and infinity stay in their row."""
    one, x = matrix(name, 41, 768).packed(code), activations(70, 768)
    x[4] = 1e-38
    full = multiply(code, one, x, 41)
    assert not full[4].any()
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64, 65):
        assert np.array_equal(multiply(code, one, x[:n], 41), full[:n])
    assert np.array_equal(multiply(code, one, x, 41, threads=3), full)
    x[2, 100], x[5, 7] = np.nan, np.inf
    result = multiply(code, one, x, 41)
    assert not np.isfinite(result[[2, 5]]).any()
    others = [i for i in range(70) if i not in (2, 5)]
    assert np.array_equal(result[others], full[others])


def test_rounded_weights_are_the_nearest_of_eight_bits(code: Library) -> None:
    """Of floats, and of a file's blocks: symmetric, the largest magnitude of 32 becoming 127."""
    for case in (matrix("Q5_K", 21, 512), Case("F32", random_floats(21, 96), 96)):
        data = np.zeros(code.int8_bytes(8, 21, case.width), np.uint8)
        given = np.ascontiguousarray(case.rows)
        kind = code.pack_int8(int(case.kind), address(given), 21, case.width, address(None), 1, address(data), 2)
        assert kind == INTEGER + 8
        blocks = case.weights.reshape(21, -1, 32)
        scale = np.maximum(np.abs(blocks).max(-1) / np.float32(127), np.float32(1e-7)).astype(np.float16)
        numbers = np.rint(blocks / scale[..., None].astype(np.float32)).clip(-127, 127)
        right = (numbers * scale[..., None].astype(np.float32)).reshape(21, -1)
        assert np.array_equal(unpacked(code, Matrix(kind, data), 21, case.width), right)


@pytest.mark.parametrize("place", [0, 7, 31])
def test_a_row_with_nan_is_not_a_row_of_zeros(code: Library, place: int) -> None:
    given = np.ones((16, 32), np.float32)
    given[3, place] = np.nan
    data = np.zeros(code.int8_bytes(8, 16, 32), np.uint8)
    kind = code.pack_int8(0, address(given), 16, 32, address(None), 1, address(data), 1)
    assert kind == PLAIN or np.isnan(unpacked(code, Matrix(kind, data), 16, 32)[3]).any()


def random_floats(rows: int, width: int) -> Array:
    made = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    made[3], made[5, :32], made[6, 0] = 0, 1e-9, 1e5
    return made.view(np.uint8)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_scales_that_are_not_finite_are_refused(code: Library, bits: int) -> None:
    for name in ("Q4_0", "Q4_K"):
        rows = random_blocks(name, 5, 256, [bits])
        data = np.zeros(code.int8_bytes(int(GGMLQuantizationType[name]), 5, 256), np.uint8)
        assert (
            code.pack_int8(int(GGMLQuantizationType[name]), address(rows), 5, 256, address(None), 0, address(data), 1)
            == 0
        )


def test_kinds_and_widths_that_have_no_integer_form(code: Library) -> None:
    for kind, width in ((0, 64), (1, 64), (30, 64), (12, 128), (2, 48), (99, 256)):
        assert code.int8_bytes(kind, 16, width) == 0


LANES = 16 if "avx512f" in native.abilities() else 8
KERNEL, SUM = f"gemm/int8_lanes{LANES}.h", {16: "sum[i]", 8: "of[i].sum"}[LANES]
LEAST = "v_fma(v_set1(x[i].total), v_load_f16_all(d + 2 * PANEL_ROWS)"
SCALE = {16: "v_mul(dot[i], v_set1(x[i].scale))", 8: "own_scale = v_set1(x[i].scale)"}[LANES]
ROUNDED = "_mm256_cvtps_epi32(_mm256_mul_ps(x[i], _mm256_set1_ps(factor)))"
MUTANTS = {
    "minima are left out": (KERNEL, f"{SUM} = {LEAST}", f"{SUM} = WRONG ? {SUM} : {LEAST}"),
    "a row has another's scale": (KERNEL, SCALE, SCALE.replace("x[i]", "x[WRONG ? 0 : i]")),
    "activations are cut off": ("simd/int8.h", ROUNDED, f"(WRONG ? {ROUNDED.replace('cvt', 'cvtt')} : {ROUNDED})"),
    "offsets are left out": (
        "gemm/int8_blocks.h",
        "offset = SIGNED(f) ? 0 : f.offset,",
        "offset = SIGNED(f) || WRONG ? 0 : f.offset,",
    ),
}
NAMES = [*MUTANTS]


@pytest.mark.parametrize("mutant", [*MUTANTS, "none"])
def test_wrong_products_differ_from_the_documented_order(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [matrix(name, 13, 64) for name in ("Q4_1", "Q8_0", "Q5_0")]
    x, chosen = activations(3, 64), NAMES.index(mutant) if mutant in NAMES else -1
    with mutated(monkeypatch, tmp_path, [*MUTANTS.values()], chosen):
        code = library("bfloat16", "float32")
        assert code is not None
        right = all(np.array_equal(multiply(code, case.packed(code), x, 13), expected(case, x)) for case in cases)
        assert right is (mutant == "none")
