"""Requests before they run."""

from __future__ import annotations

from outrider.engine.request import PADDING, Request, Row, alike


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
