"""Sampling parameters at the ends of their ranges and beyond: refused in a sentence, or the same text with drafts."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from contract_world import outputs

from outrider.backends.native.abi import ffi
from outrider.backends.native.arrays import addresses, doubles, floats, integers, seeds
from outrider.budgets.budgeter import FixedBudget
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.none import NoneDrafter
from outrider.engine import Engine
from outrider.engine.request import Request, spread_seeds
from outrider.params import InputError, Sampling

VOCAB = 40  # no multiple of sixteen: lanes beyond its end are read
SIZES = {"vocab_size": VOCAB}
HUGE = 10**5000  # Python does not even print it

REFUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (1e300, 1e10, 10**400, HUGE, -1e-12, math.nan, math.inf, "hot", None, True, 1j),
    "top_k": (-1, -(2**63), -HUGE, 1.0, math.nan, "5", None, True),
    "top_p": (0, -0.1, 1.1, math.nan, HUGE, "1"),
    "min_p": (-0.1, 1.1, math.nan, -math.inf, None),
    "repetition_penalty": (0, -1, 1e-300, 1e300, math.nan, math.inf, HUGE),
    "presence_penalty": (1e300, -math.inf, math.nan, HUGE, "0"),
    "frequency_penalty": (-1e300, math.inf, math.nan, -HUGE, [0]),
    "logit_bias": (
        {"5": 1.0}, {5: None}, {5: "1"}, {5: math.nan}, {5: math.inf}, {5: -math.inf}, {5: 1e300}, {5: HUGE},
        {1.5: 1.0}, {True: 1.0}, {None: 1.0}, [5], "5", None,
    ),
}  # fmt: skip


@pytest.mark.skipif(bool(os.environ.get("CHECK_SHAPES")), reason="here the tests' type checker would speak first")
@pytest.mark.parametrize("name", REFUSED)
def test_nonsense_is_refused_in_one_sentence(name: str) -> None:
    for value in REFUSED[name]:
        with pytest.raises(InputError, match=f"^{name} [^\n]*$") as caught:
            Sampling(**{name: value})
        assert len(str(caught.value)) < 200


def test_numeric_types_become_plain_python_numbers() -> None:
    made = Sampling(np.float32(0.5), np.int64(3), Fraction(1, 2), logit_bias={np.int64(4): np.float32(2)})  # type: ignore[arg-type]
    assert made == Sampling(0.5, 3, 0.5, logit_bias={4: 2.0})
    numbers = made.temperature, made.top_k, made.top_p, *made.logit_bias, *made.logit_bias.values()
    assert [type(number) for number in numbers] == [float, int, float, int, float]


def test_a_tiny_temperature_is_greedy_and_none_is_lost_on_the_way_to_float32() -> None:
    assert Sampling(temperature=1e-300).temperature == 0
    assert Sampling(temperature=1e-9).temperature == 1e-9
    assert torch.tensor([1e-9, 1e9, -1e9]).isfinite().all()
    assert float(torch.tensor(1e-9)) > 0


def test_a_million_samples_are_refused_at_once() -> None:
    with pytest.raises(InputError, match="n must be at most 4096, not 1000000"):
        spread_seeds(1, 1, 10**6)
    with pytest.raises(InputError, match=r"seed must be a whole number, not 0\.5"):
        spread_seeds(0.5, 1, 1)


def test_arrays_for_c_never_wrap() -> None:
    """cffi alone would: 1e300 as a float is infinite."""
    for make, values in ((integers, [2**63]), (integers, [-(2**63) - 1]), (floats, [1e300]), (integers, [1.5])):
        with pytest.raises(OverflowError, match="does not fit"):
            make(values)  # type: ignore[operator]
    assert list(integers([-(2**63), 2**63 - 1])) == [-(2**63), 2**63 - 1]
    assert list(seeds([-1, 2**64, 2**70 + 5])) == [2**64 - 1, 0, 5]
    assert list(floats([0.5, math.inf])) == [0.5, math.inf]
    assert list(doubles([1e300])) == [1e300]
    assert list(addresses([None, 8])) == [ffi.NULL, ffi.cast("void *", 8)]


def texts(target: Any, drafter: Any, sampling: Sampling, seed: int = 0) -> list[list[int]]:
    engine = Engine.of(target, drafter, FixedBudget(12, 6))
    requests = [Request([3, 9, 3, 9, 2 + i], seed + i, 24, sampling) for i in range(3)]
    return [row.output for row in outputs(engine, requests)]


BIASED = {3: 1e9, 5: 1e9, 7: -1e9}
EXTREME: list[dict[str, Any]] = [
    {"temperature": 1e9}, {"temperature": 1e9, "top_p": 0.5}, {"temperature": 1e9, "top_k": 3}, {"temperature": 1e-9},
    {"temperature": 1e-9, "top_p": 0.5}, {"temperature": 1e-9, "top_k": 3, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 2**63}, {"temperature": 1.0, "top_k": 2**63 + 2**40},
    {"temperature": 1.0, "top_k": 2**64 - 1}, {"temperature": 1.0, "top_k": 9223372037928517632},
    {"temperature": 1.0, "top_k": HUGE}, {"temperature": 1.0, "top_k": VOCAB}, {"temperature": 1.0, "top_k": VOCAB - 1},
    {"temperature": 1.0, "top_p": 1e-300}, {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "logit_bias": BIASED}, {"temperature": 1e9, "logit_bias": BIASED},
    {"temperature": 1e-9, "logit_bias": BIASED, "repetition_penalty": 1e9}, {"repetition_penalty": 1e9},
    {"temperature": 1.0, "repetition_penalty": 1e-9}, {"temperature": 1e-9, "top_p": 0.9, "frequency_penalty": 1e9},
    {"temperature": 1e9, "top_p": 0.9, "presence_penalty": -1e9, "frequency_penalty": -1e9, "repetition_penalty": 1e9},
]  # fmt: skip


@pytest.mark.parametrize("kind", range(len(EXTREME)))
def test_extremes_write_the_same_text_with_drafts_and_without(target: Any, kind: int) -> None:
    sampling = Sampling(**EXTREME[kind])
    plain = texts(target, NoneDrafter(), sampling)
    assert all(len(text) == 24 and min(text) >= 0 and max(text) < VOCAB for text in plain)
    assert texts(target, LookupDrafter(), sampling) == plain


def test_a_top_k_of_more_than_the_vocabulary_is_all_of_it(target: Any) -> None:
    """In C as in Python: 2^64 + 5 does not become 5."""
    everything = texts(target, NoneDrafter(), Sampling(1.0))
    assert texts(target, NoneDrafter(), Sampling(1.0, top_k=5)) != everything
    for k in (VOCAB, VOCAB + 1, 2**63, 2**64 + 5, HUGE):
        assert texts(target, NoneDrafter(), Sampling(1.0, top_k=k)) == everything


def test_seeds_act_modulo_two_to_the_64(target: Any) -> None:
    first = texts(target, LookupDrafter(), Sampling(1.0), 7)
    for seed in (7 + 2**64, 7 - 2**64, 7 + 2**200):
        assert texts(target, LookupDrafter(), Sampling(1.0), seed) == first
    assert texts(target, LookupDrafter(), Sampling(1.0), 8 + 2**64) != first
