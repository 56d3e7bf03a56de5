"""The tree cache alone, without a model: where things are written, what moves, and what does not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from outrider.backends.torch.cache import FIRST, TreeCache
from outrider.params import InputError

HEADS, WIDTHS = 2, (3, 5)  # keys and values of unequal width, as latent attention has them


def states(b: int, n: int, at: float = 0.0) -> tuple[Tensor, Tensor]:
    """Keys and values [b, HEADS, n, width] in which every number tells its row and slot: 100 * row + slot + at."""
    number = 100.0 * torch.arange(b)[:, None] + torch.arange(n) + at
    keys, values = (number[:, None, :, None].expand(b, HEADS, n, w).clone() for w in WIDTHS)
    return keys, values


def opened(b: int = 2, n: int = 4, layers: int = 2, capacity: int = 8, limit: int = 32) -> TreeCache:
    """A cache after its first pass over n tokens a row."""
    cache = TreeCache(layers, capacity, limit)
    for i in range(layers):
        cache.update(*states(b, n, 1000.0 * i), i)
    cache.pack()
    return cache


def read(cache: TreeCache, layer: int = 0, part: int = 0) -> list[list[float]]:
    """The number in every slot [row][slot], after checking that all heads and widths agree."""
    wide = cache.tree_layers[layer].wide[part]
    assert (wide == wide[:, :1, :, :1]).all()
    return [[float(x) % 1000 for x in row] for row in wide[:, 0, :, 0]]


def write(cache: TreeCache, slots: list[int], view: int, values: list[float]) -> tuple[Tensor, Tensor]:
    """One pass of len(slots) / rows tokens a row, each row's tokens carrying the given numbers."""
    cache.slots, cache.view = torch.tensor(slots), view
    number = torch.tensor(values, dtype=torch.float32).view(cache.rows, 1, -1, 1)
    shape = (cache.rows, HEADS, len(slots) // cache.rows)
    seen: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
    for i in range(len(cache.tree_layers)):
        seen = cache.update(*(number.expand(*shape, w) for w in WIDTHS), i)
    return seen


def test_sizes_come_from_the_first_real_keys_and_values() -> None:
    cache = opened(layers=3)
    assert [tuple(s.shape) for s in cache.buffers] == [(3, 2, 8, HEADS * w) for w in WIDTHS], (
        "one buffer for each width"
    )
    assert cache.bytes == 3 * 2 * 8 * HEADS * sum(WIDTHS) * 4
    for part in (0, 1):
        assert read(cache, 2, part) == [[0, 1, 2, 3, 0, 0, 0, 0], [100, 101, 102, 103, 0, 0, 0, 0]]


def test_equal_widths_share_one_slab() -> None:
    cache = TreeCache(2, 8, 8)
    for i in range(2):
        cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), i)
    cache.pack()
    assert [tuple(s.shape) for s in cache.buffers] == [(4, 1, 8, 8)]


def test_a_pass_writes_at_its_slots_and_sees_its_view() -> None:
    cache = opened()
    keys, values = write(cache, [4, 5, 8 + 2, 8 + 3], 6, [7, 8, 9, 10])
    assert keys.shape == (2, HEADS, 6, WIDTHS[0])
    assert values.shape == (2, HEADS, 6, WIDTHS[1])
    assert read(cache) == [[0, 1, 2, 3, 7, 8, 0, 0], [100, 101, 9, 10, 0, 0, 0, 0]]
    assert (keys[1, 0, :, 0] % 1000).tolist() == [100, 101, 9, 10, 0, 0]


def test_a_move_reads_everything_before_it_writes() -> None:
    """Paths overlap with their destinations: 1 -> 0 and 2 -> 1 must not carry slot 2 into slot 0."""
    cache = opened()
    cache.move(torch.tensor([1, 2, 8 + 3]), torch.tensor([0, 1, 8 + 1]))
    for layer in (0, 1):
        assert read(cache, layer) == [[1, 2, 2, 3, 0, 0, 0, 0], [100, 103, 102, 103, 0, 0, 0, 0]]


def test_growth_doubles_and_ends_at_the_limit() -> None:
    cache = opened(limit=20)
    cache.reserve(9)
    assert cache.capacity == 16
    assert read(cache)[1][:5] == [100, 101, 102, 103, 0]
    cache.reserve(17)
    assert cache.capacity == 20
    with pytest.raises(InputError, match="needs 21 slots and its limit is 20"):
        cache.reserve(21)


def test_a_great_capacity_is_not_taken_at_once() -> None:
    cache = opened(capacity=1 << 20, limit=1 << 20)
    assert cache.capacity == FIRST
    cache.reserve(FIRST + 1)
    assert cache.capacity == 2 * FIRST


def test_rows_that_leave_move_in_place_and_free_their_slots() -> None:
    cache = opened(b=4)
    before = [s.data_ptr() for s in cache.buffers]
    cache.select([1, 3], used=4)
    assert [row[:4] for row in read(cache)] == [[100, 101, 102, 103], [300, 301, 302, 303]]
    cache.join(opened(b=2), used=4)
    assert [row[0] for row in read(cache, 1)] == [100, 300, 0, 100]
    assert [s.data_ptr() for s in cache.buffers] == before, "newcomers took the places of those who left"


def test_the_last_row_fills_a_gap_in_place() -> None:
    """Three rows leave six: the last takes the place of the second, the others stay where they are."""
    cache = opened(b=6)
    before = [s.data_ptr() for s in cache.buffers]
    cache.select([0, 5, 2], used=4)
    assert [row[0] for row in read(cache, 1)] == [0, 500, 200]
    assert [s.data_ptr() for s in cache.buffers] == before


@pytest.mark.parametrize("index", [[2, 0, 1], [0, 0, 2, 2], [1, 1]])
def test_rows_fork_and_change_places(index: list[int]) -> None:
    cache = opened(b=3)
    cache.select(index, used=4)
    assert [row[:4] for row in read(cache, 1, 1)] == [[100 * i, 100 * i + 1, 100 * i + 2, 100 * i + 3] for i in index]
    write(cache, [4 + i * cache.capacity for i in range(len(index))], 5, [float(i) for i in range(len(index))])
    assert [row[4] for row in read(cache)] == [float(i) for i in range(len(index))], "copies are apart"


@pytest.mark.parametrize(("mine", "theirs"), [(8, 16), (16, 8)])
def test_caches_of_different_capacity_join(mine: int, theirs: int) -> None:
    cache, other = opened(b=1, capacity=mine), opened(b=2, n=8, capacity=theirs, limit=64)
    cache.join(other, used=8)
    assert cache.rows == 3
    assert cache.limit == 64
    assert cache.capacity == 16, "slots for the longest are reserved at once, not in a later round"
    assert read(cache)[0][:4] == [0, 1, 2, 3]
    assert read(cache)[2][:8] == [100, 101, 102, 103, 104, 105, 106, 107]


def test_unused_slots_hold_finite_values() -> None:
    """A mask hides a slot by weight 0, and 0 * NaN is NaN."""
    cache = opened(b=2)
    cache.resize(16, 4)
    cache.join(opened(b=2, n=8, capacity=16), used=8)
    cache.select([3, 0, 0], used=8)
    assert all(bool(buffer.isfinite().all()) for buffer in cache.buffers)


def test_a_cache_made_under_inference_mode_can_be_written_later() -> None:
    with torch.inference_mode():
        cache = opened()
        cache.select([1, 0], used=4)
        cache.reserve(9)
    with torch.no_grad():
        write(cache, [4, 16 + 4], 5, [7, 8])
    assert [row[4] for row in read(cache)] == [7, 8]


def test_a_model_that_caches_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="no keys and values"):
        TreeCache(2, 8, 8).pack()


def test_a_cache_is_freed_with_its_last_user() -> None:
    """Without waiting for a garbage collection: caches are large."""
    cache = opened()
    alive = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert alive() is None
    finally:
        gc.enable()
