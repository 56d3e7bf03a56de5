"""The single kernels of a model, asked whether a row's result depends on what is computed beside it.

Each is fed random numbers that cancel out: what is left of a sum is rounding, so that another order of summation shows
in every element. With plain random numbers most such differences vanish when a result is rounded to 16 bits, and come
back once in ten thousand tokens.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import aligned
from .attention import switched
from .exact import BLOCK, LENGTHS, PERIOD, WINDOW
from .hf import HFTarget
from .products import HalfLinear, OrderedLinear

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 18, 20, 24, 31, 32, 33, 47, 48, 63, 64, 65, 96, 128, 129, 256)
FEWEST = 16  # a class of row counts must reach this far, or passes would be cut to pieces


def kind_of(module: Any) -> str | None:
    """What products are told apart by: the layer's type, shapes and precision; None for what multiplies nothing."""
    if isinstance(module, torch.nn.Embedding):
        return None
    if isinstance(module, HalfLinear | OrderedLinear):
        return f"{type(module).__name__} {module.out_features}x{module.in_features}"
    weights = [w for w in itertools.chain(module.parameters(False), module.buffers(False)) if w.dim() in (2, 3)]
    weights = [w for w in weights if w.dim() == 3 or hasattr(module, "weight")]
    if not weights or (weights[0].dim() == 3 and "xpert" not in type(module).__name__):
        return None
    shapes = " and ".join("x".join(map(str, w.shape)) for w in weights)
    return f"{type(module).__name__} {shapes} {str(weights[0].dtype).removeprefix('torch.')}"


def layers_of(target: HFTarget, blocks: dict[str, int]) -> list[tuple[Any, int]]:
    """The model's layers that read no more than so many rows at a time."""
    named = ((module, kind_of(module)) for module in target.model.modules())
    return [(module, blocks[kind]) for module, kind in named if kind in blocks]


def products(target: HFTarget) -> Iterator[tuple[str, Callable[[int], Tensor]]]:
    """One layer of each kind, as a function of how many rows of its random input it computes."""
    kinds = {kind_of(module): module for module in target.model.modules()}
    for kind, module in kinds.items():
        if kind is not None:
            yield kind, _product(target, module)


def _product(target: HFTarget, module: Any) -> Callable[[int], Tensor]:
    """A copy of the layer, with weights and inputs that cancel out."""
    if isinstance(module, HalfLinear):
        x, pairs = _inputs(module.in_features)
        half = HalfLinear(_opposed(torch.randn(module.out_features, module.in_features), pairs), None)
        half.threes = True
        return lambda n: half(x[:n])
    if isinstance(module, OrderedLinear):
        x, pairs = _inputs(module.in_features)
        made = OrderedLinear(_opposed(torch.randn(module.out_features, module.in_features), pairs).bfloat16(), None)
        x = x.bfloat16()
        return lambda n: made(x[:n])
    twin = copy.deepcopy(module)
    weights = [w for w in twin.parameters(False) if w.dim() >= 2 and w.is_floating_point()]
    if any(w.dim() == 3 for w in weights):
        for bias in (w for w in weights if w.dim() == 2):
            bias.zero_()
        return _experts(target, twin, [w for w in weights if w.dim() == 3])
    width = int(getattr(twin, "in_features", 0) or getattr(twin, "nx", 0) or _matrix(twin).shape[-1])
    x, pairs = _inputs(width)
    for weight in weights:
        axis = -1 if weight.shape[-1] == width and not hasattr(twin, "nx") else 0
        weight.copy_(_opposed(torch.randn(weight.shape).transpose(axis, -1), pairs).transpose(axis, -1))
    x = x.to(target.dtype)
    return lambda n: _first(twin(x[:n]))


def _experts(target: HFTarget, twin: Any, weights: list[Tensor]) -> Callable[[int], Tensor]:
    """The same for a mixture's experts: once with inputs that cancel out, once with hidden values that do."""
    width, chosen = int(target.config.hidden_size), int(getattr(target.config, "num_experts_per_tok", 1))
    pairs = torch.randperm(width)
    rows = torch.randn(SIZES[-1], width)
    x, plain = _twice(rows, pairs).to(target.dtype), rows.to(target.dtype)
    which = torch.rand(SIZES[-1], weights[0].shape[0]).topk(chosen).indices
    share = torch.rand(SIZES[-1], chosen).to(target.dtype)
    last = len(weights) - 1

    def fill(opposed: int) -> None:
        for i, weight in enumerate(weights):
            into = weight.shape[1:].index(width) if i < last else 1 - weight.shape[1:].index(width)  # the summed axis
            matrix = torch.randn(weight.shape[1:])
            if i < last and opposed == last:
                matrix = matrix.select(1 - into, 0).unsqueeze(1 - into).expand_as(matrix)  # all hidden values equal
            elif (i < last) == (opposed < last):
                summed = pairs if i < last else torch.randperm(matrix.shape[into])
                matrix = _opposed(matrix.transpose(into, 1), summed).transpose(into, 1)
            weight.copy_(matrix.expand(weight.shape))

    def experts(n: int) -> Tensor:
        found = []
        with switched(target.config, None, target.experts):
            for opposed, inputs in ((0, x), (last, plain)):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(opposed)
                    fill(opposed)
                found.append(_first(twin(inputs[:n], which[:n], share[:n])))
        return torch.cat(found, -1)

    return experts


def _inputs(width: int) -> tuple[Tensor, Tensor]:
    """Rows of random numbers, every second of which is the one before it in the order that is returned too."""
    pairs = torch.randperm(width)
    return _twice(torch.randn(SIZES[-1], width) * torch.randint(-3, 4, (SIZES[-1], width)).exp2(), pairs), pairs


def _twice(x: Tensor, pairs: Tensor) -> Tensor:
    """Every second element of this order := the one before it."""
    half = len(pairs) // 2
    x[..., pairs[half : 2 * half]] = x[..., pairs[:half]]
    return x


def _opposed(weight: Tensor, pairs: Tensor) -> Tensor:
    """Every second column of this order := the opposite of the one before it; an odd one: 0."""
    half = len(pairs) // 2
    weight = weight.clone()
    weight[..., pairs[half : 2 * half]] = -weight[..., pairs[:half]]
    weight[..., pairs[2 * half :]] = 0
    return weight


def _matrix(module: Any) -> Tensor:
    return next(w for w in itertools.chain(module.parameters(False), module.buffers(False)) if w.dim() >= 2)


def _first(found: Any) -> Tensor:
    """The numbers of a layer's answer; a mixture's router gives several."""
    return found if isinstance(found, Tensor) else next(f for f in found if f.is_floating_point())


def classes(run: Callable[[int], Tensor]) -> list[tuple[int, int]]:
    """Ranges of row counts, of those tried, within which no row's result changes."""
    ranges, before, first, last = [], run(SIZES[0]), SIZES[0], SIZES[0]
    for n in SIZES[1:]:
        now = run(n)
        if not torch.equal(now[:last], before):
            ranges.append((first, last))
            if last >= max(FEWEST, 2 * first):
                return ranges  # passes are cut to this; what larger ones would do does not matter
            first = n
        before, last = now, n
    return [*ranges, (first, last)]


def reach(ranges: list[tuple[int, int]], rows: int) -> int:
    """How far the class of this many rows reaches; 0 where that is not far enough to cut passes into such blocks."""
    last = next((last for first, last in ranges if first <= rows <= last), 0)
    return last if last >= max(FEWEST, 2 * rows) else 0


def activations(target: HFTarget) -> list[Callable[[Tensor], Tensor]]:
    """The elementwise functions of the model that are more than one exactly rounded operation, and the rotary ones."""
    homes = "transformers.activations", "torch.nn.modules.activation"
    found = {type(m): m for m in target.model.modules() if type(m).__module__ in homes}
    return [
        *found.values(),
        torch.tanh,
        lambda x: x.float().cos(),
        lambda x: x.float().sin(),
        lambda x: x.float().exp(),
    ]


def even(function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> bool:
    """Is an element's result the same in short tensors as in long ones? Asked of all 65,536 numbers of 16 bits."""
    numbers = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype)
    for some, size in ((numbers, 63), (numbers, 31), (numbers[::8].contiguous(), 7)):
        whole, parts = function(some), torch.cat([function(part) for part in some.split(size)])
        if not torch.equal(whole.nan_to_num(0.5), parts.nan_to_num(0.5)):
            return False
    return True


def step_of(target: HFTarget) -> int:
    """Tokens of which a pass must have a multiple, so that every tensor fills whole vectors."""
    widths = {int(target.config.hidden_size), int(getattr(target.config, "head_dim", None) or 64)}
    head = target.model.get_output_embeddings()
    for module in target.model.modules():
        if kind_of(module) is not None and module is not head:
            widths |= {int(w.shape[i]) for w in module.parameters(False) if w.dim() >= 2 for i in (-1, -2)}
    return next(s for s in (1, 2, 4, 8, 16, 32, 64) if all(s * w % 64 == 0 for w in widths))


def attention(target: HFTarget) -> tuple[aligned.Queries, tuple[int, ...]] | None:
    """What rows an attention product must have, and what lengths beyond a multiple of PERIOD; None where nothing
    helps. The more lengths there are, the fewer keys are read for nothing."""
    config = target.config
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    width = max(
        width, int(getattr(config, "qk_nope_head_dim", 0) or 0) + int(getattr(config, "qk_rope_head_dim", 0) or 0)
    )
    best: tuple[aligned.Queries, tuple[int, ...]] | None = None
    for multiple, least in itertools.product((False, True), (1, 2, 4, 8)):
        queries = aligned.Queries(least, multiple)
        lengths = _steady(groups, width, heads // groups, target.dtype, queries)
        if len(lengths) > (len(best[1]) if best else 0):
            best = queries, lengths
        if len(lengths) == len(LENGTHS):
            break
    return best


def _steady(groups: int, width: int, shared: int, dtype: torch.dtype, queries: aligned.Queries) -> tuple[int, ...]:
    """The lengths, to PERIOD, with which no row of these attention products changes with the rows, rows of a batch and
    hidden keys beside it; none where multiples of PERIOD themselves change one."""
    sizes = sorted({m for m in (1, 2, 3, 4, 8, 31, 32, 33, 65) if m >= queries.least} | {BLOCK * shared})
    many = 195, 579, 771  # as in prompts: the kernel cuts rows into groups of 32, 64 or 256, and some are left over
    few = sizes[0], 33, sizes[-1]
    longest, heads = 3 * PERIOD, min(groups, 2)
    query = torch.randn(2, heads, many[-1], width, dtype=dtype)
    lengths = list(LENGTHS)
    for seen in (WINDOW, 4 * BLOCK, 8 * BLOCK, 10 * BLOCK, 15 * BLOCK, PERIOD + BLOCK, PERIOD + 8 * BLOCK, 2 * PERIOD):
        pairs, half = torch.randperm(seen), seen // 2  # values that cancel out, as in `_product`
        keys, values = torch.randn(2, 2, longest, heads, width, dtype=dtype)
        keys[:, pairs[half:]], values[:, pairs[half:]] = keys[:, pairs[:half]], -values[:, pairs[:half]]
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)

        def run(
            rows: int, length: int, batch: int, start: int = 0, keys: Tensor = keys, values: Tensor = values,
            seen: int = seen,
        ) -> Any:  # fmt: skip
            mask = torch.zeros(1, 1, 1, length, dtype=dtype)
            mask[..., seen:] = float("-inf")
            part = slice(2 - batch, 2)
            kept = keys[part, :, :length], values[part, :, :length], mask if seen < length else None
            at = aligned.filled(rows, queries)
            return aligned.kernel(query[part, :, start : start + rows], *kept, 0.2, at)

        def alone(length: int, run: Any = run) -> list[Tensor]:
            """Every row beside as few others as there can be."""
            least = sizes[0]
            parts = zip(*(run(least, length, 1, start=i) for i in range(0, sizes[-1], least)), strict=True)
            return [torch.cat(part, 2) for part in parts]

        def same(rows: int, length: int, right: Any, run: Any = run) -> bool:
            pairs = zip(run(rows, length, 2), right, strict=True)
            return all(torch.equal(f[1:, :, : r.shape[2]], r[:, :, :rows]) for f, r in pairs)

        first = -(-seen // PERIOD) * PERIOD
        right = alone(first)
        ends = many if seen == 8 * BLOCK else ()  # once will do: these groups are of rows, whatever the keys
        if not all(same_ends(run(rows, first, 2), run, rows, first, sizes[0]) for rows in ends):
            return ()
        if not all(same(*tried, right) for tried in itertools.product(sizes, range(first, longest + 1, PERIOD))):
            return ()
        for length in tuple(lengths):
            places = range(length + max(0, -(-(seen - length) // PERIOD)) * PERIOD, longest + 1, PERIOD)
            if not all(same(*tried, right) for tried in itertools.product(few, places)):
                lengths.remove(length)
        if seen == WINDOW:  # which is the length of tails, too
            right = alone(WINDOW)
            if not all(same(rows, WINDOW, right) for rows in sizes):
                return ()
    return tuple(lengths)


def same_ends(found: Any, run: Any, rows: int, length: int, least: int) -> bool:
    """Are the last rows of so many what they are beside few others?"""
    right = run(least, length, 1, start=rows - least)
    return all(torch.equal(f[1:, :, -least:], r) for f, r in zip(found, right, strict=True))
