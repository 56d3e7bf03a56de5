"""Requests before they run."""

from __future__ import annotations

import pytest
from play import Table

from outrider.engine.request import PADDING, Request, Row, alike, check_prompt
from outrider.params import InputError


def rows(*sizes: int) -> list[Row]:
    return [Row(Request([1] * size, 0, 1), i) for i, size in enumerate(sizes)]


def test_prompts_that_are_alike_are_read_together() -> None:
    """Every row once, and little filling: a long prompt does not make the short ones beside it long."""
    assert [[row.index for row in group] for group in alike(rows(600, 20, 25, 580, 22, 30))] == [[1, 4, 2, 5], [3, 0]]
    assert [len(group) for group in alike(rows(*[40] * 8))] == [8]
    assert list(alike([])) == []
    many = rows(*((37 * i) % 700 + 1 for i in range(64)))
    results = list(alike(many))
    assert sorted(row.index for group in results for row in group) == list(range(64))
    for group in results:
        sizes = [len(row.request.prompt) for row in group]
        filling = max(sizes) * len(sizes) - sum(sizes)
        assert filling <= max(PADDING[0], PADDING[1] * sum(sizes))
    assert len(results) < 12


def test_two_prompts_with_one_seed_share_no_draws_under_rejection() -> None:
    one, other = (Row(Request(prompt, 7, 9), 0) for prompt in ([1, 2], [2, 1]))
    assert one.key("coupled") == other.key("coupled") == 7
    assert len({one.key("rejection"), other.key("rejection"), 7}) == 3
    assert one.key("rejection") == Row(Request([1, 2], 7, 5), 3).key("rejection")


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    target = Table(context=8)
    check_prompt(Request([1] * 7, 0, 1), target)
    with pytest.raises(InputError, match="the prompt has 8 tokens and the model's context is 8"):
        check_prompt(Request([1] * 8, 0, 1), target)
