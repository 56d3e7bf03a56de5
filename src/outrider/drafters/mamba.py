"""Mamba drafters (Choi et al. 2025): a state-space model as draft model, whose memory is constant in the context.

A row's state after its committed text is all there is to remember. Each round the tokens that the drafter has not read,
the root last, advance it; then the tree grows by batch generation (section 4.1 of the paper): the nodes to expand begin
with their parents' states and take one step together, one forward pass per depth. Every node that was fed
keeps its state until the round ends, so after verification the accepted node's state is selected, and nothing is
computed again. Trees, noise and distributions are those of all stepping drafters (`_growth.py`).

A Mamba-2 beside a native target runs in compiled code; any other recurrent model in tensors (`_mamba.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.native.abi import Library
from ..backends.native.checkpoint import open_checkpoint
from ..backends.native.draft_vocab import ids_in
from ..backends.native.drafts import Shape, Weights
from ..backends.native.mamba import Mamba, MambaSizes, mamba
from ..core.growth import Indices
from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.types import Array, Budget, DraftTree, Rows
from ..params import InputError, integer
from ..shipped import folder_of, placed
from . import _ranks
from ._common import accepted
from ._compiled import code_for
from ._growth import Grown, Growth
from ._text import across, check_tokenizer, check_way, tokenizer_of
from ._trained import Shapes, cast, finite, in_tensors
from ._words import Same, Words

FEW = 4  # tokens that wait: these are read one by one
FIRST = 16  # states of a new buffer, at most; it grows
PADDING = 512  # rows by which two vocabularies of one tokenizer may differ
MOST = 1 << 31  # a size is less
SIZES = {
    "hidden": "hidden_size", "heads": "num_heads", "head_dim": "head_dim", "state_size": "state_size",
    "groups": "n_groups", "conv_kernel": "conv_kernel", "layers": "num_hidden_layers",
}  # fmt: skip
PRECISIONS = "auto", "float64", "float32", "bfloat16", "float16"


@dataclass(frozen=True)
class Request:
    """The options of a SPEC. `vocab`: same (one tokenizer), shared (draft the tokens that both have) or text (draft
    text). `batch`: states that are advanced in one pass, at most."""

    growth: Growth
    batch: int = 1024
    dtype: str = "auto"
    vocab: str = "same"

    def __post_init__(self) -> None:
        growth, most = self.growth, integer("batch", self.batch)
        states = math.prod(growth.shape[:-1])
        if growth.tree == "static" and states > most:
            raise InputError(
                f"the shape {growth.shape} advances {states} states in one pass, and at most {most} are allowed; "
                "choose a narrower one, or a larger batch="
            )
        if self.dtype not in PRECISIONS:
            raise InputError(f"there is no precision {self.dtype!r}; choose {', '.join(PRECISIONS)}")
        check_way(self.vocab)

    def check_rows(self, path: str, folder: str, rows: int, target: Target, tokenizer: Any) -> None:
        """Refuse a drafter of so many tokens whose tokenizer, in this folder, is not the target's."""
        if tokenizer is not None and any(Path(folder).glob("tokenizer*")):  # the layout of mamba_ssm has none
            check_tokenizer(path, tokenizer, tokenizer_of(folder))
        elif abs(rows - target.vocab) > max(PADDING, target.vocab // 100):
            raise InputError(
                f"{path} has {rows} tokens and the target {target.vocab}, more apart than padding; "
                "a Mamba drafter needs the target's tokenizer"
            )


class MambaDrafting(Drafting):
    """What tensors and compiled code share: committed tokens wait until the next draft, the prompt too, so that a
    text without one costs nothing."""

    drafter: Any
    pending: list[list[int]]  # committed tokens that the drafter has not read, in its own words
    fed: Indices | None  # of the last proposal: also the slots of the nodes' states
    state: Any  # after the text, without the pending tokens

    def observe(self, round: Round) -> None:
        read = self.drafter.words.read
        if self.fed is None:
            for row, tokens in zip(self.pending, round.tokens, strict=True):
                row.extend(read(tokens))
            return
        # Of the accepted path, the part that was fed has its states: the last of them is selected.
        kept = accepted(self.fed, round)
        self.choose([path[-1] for path in kept])
        self.pending = [read(tokens[len(path) - 1 :]) for tokens, path in zip(round.tokens, kept, strict=True)]
        self.fed = None

    def choose(self, slots: Sequence[int]) -> None:
        """Of each row, the state in a slot becomes that of its text."""
        raise NotImplementedError

    def skip(self, tokens: Sequence[Sequence[int]]) -> None:
        """Move the state after these tokens of each row."""
        raise NotImplementedError

    def _read(self, nodes: int) -> Array:
        """Read the pending tokens; logits after the last of each row. There will be so many nodes."""
        raise NotImplementedError

    def _step(self, fed: DraftTree, since: int) -> Array:
        """Logits after the nodes of a growing tree, from `since` on."""
        raise NotImplementedError

    def propose_after(self, settled: list[list[int]], tails: list[list[int]], rows: Rows, budget: Budget) -> DraftTree:
        """For `_text.py`: a temporary tree below tokens of its own; the state is taken back to `settled`."""
        settled = [[*own, *more] for own, more in zip(self.pending, settled, strict=True)]  # the prompt first
        self.skip(settled)
        self.pending, state = tails, self.state
        tree = self.drafter.growth.propose(rows, self._read(budget.nodes), self._step, budget)[0]
        self.state, self.pending = state, [[] for _ in tails]  # long tails were read into it
        return tree

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tune-tree`."""
        first = self._read(1)
        self.choose([0] * len(rows))
        self.pending = [[] for _ in self.pending]
        return _ranks.below(rows, first, self._step, truth, k, self.drafter.words.names)

    def check_width(self, states: int) -> None:
        """Refuse more states in one pass than the SPEC allows."""
        if states > self.drafter.batch:
            raise InputError(
                f"this tree advances {states} states in one pass, and at most {self.drafter.batch} are allowed; "
                "choose a narrower shape, fewer rows, or a larger batch="
            )


@dataclass(frozen=True)
class CompiledMamba(Grown):
    """A Mamba-2 in compiled code, and how its tokens stand to the target's."""

    compiled: Mamba
    words: Same
    growth: Growth
    empty: Callable[[int], States] = field(repr=False)  # states of so many rows before the first token
    batch: int = 1024

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> CompiledMambaDrafting:
        return CompiledMambaDrafting(self, self.empty(len(prompts)), [self.words.read(p) for p in prompts])


@dataclass
class States:
    """Of several nodes of every row: conv [layers, rows, slots, channels, kernel - 1], ssm [layers, rows, slots, heads,
    head_dim, state_size]."""

    conv: Array
    ssm: Array

    @property
    def arrays(self) -> tuple[Array, Array]:
        return self.conv, self.ssm

    @property
    def slots(self) -> int:
        return self.conv.shape[2]

    def change(self, change: Callable[..., Array], *others: States) -> States:
        """The same with both arrays changed, together with those of others."""
        return States(*(change(*parts) for parts in zip(self.arrays, *(o.arrays for o in others), strict=True)))

    def take(self, slots: Sequence[int]) -> States:
        """A copy of one slot of each row."""
        return self.change(lambda part: part[:, range(len(slots)), slots][:, :, None])

    def widened(self, slots: int) -> States:
        """The same with space for so many slots."""

        def wide(part: Array) -> Array:
            made = np.empty((*part.shape[:2], slots, *part.shape[3:]), part.dtype)
            made[:, :, : part.shape[2]] = part
            return made

        return self.change(wide)


@dataclass
class CompiledMambaDrafting(MambaDrafting):
    """Each row's state after its text, and the states of the nodes that were drafted last."""

    drafter: CompiledMamba
    state: States  # of one slot: after the text, without the pending tokens
    pending: list[list[int]]
    buffer: States | None = field(default=None, repr=False)  # allocated once for a batch size, and used again
    fed: Indices | None = None

    def choose(self, slots: Sequence[int]) -> None:
        assert self.buffer is not None, "nodes were fed"
        self.state = self.buffer.take(slots)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        drafter, words = self.drafter, self.drafter.words
        arguments = drafter.growth.compiled(rows, budget)
        if arguments is not None and len(rows) * arguments[1].width <= drafter.batch:
            buffer = self._ready(_fed(arguments[1]))
            tree, self.fed = drafter.compiled.grow(*buffer.arrays, self.pending, rows, *arguments)
            return tree
        first = self._read(budget.nodes)
        tree, self.fed = drafter.growth.propose(rows, first, self._step, budget, words.names, words.vocab)
        return tree

    def select(self, index: Sequence[int]) -> None:
        self.state = self.state.change(lambda part: part[:, list(index)])
        self.pending, self.buffer = [list(self.pending[i]) for i in index], None

    def join(self, other: Drafting) -> None:
        assert isinstance(other, CompiledMambaDrafting)
        self.state = self.state.change(lambda *parts: np.concatenate(parts, 1), other.state)
        self.pending, self.buffer = self.pending + other.pending, None

    def skip(self, tokens: Sequence[Sequence[int]]) -> None:
        if any(tokens):
            self.state = self.state.change(lambda part: np.array(part, order="C"))
            self.drafter.compiled.skip(*self.state.arrays, tokens)

    def _ready(self, slots: int) -> States:
        """The buffer with space for so many states, the text's in the first; few tokens wait after it."""
        if max(map(len, self.pending)) > FEW:
            self.skip([row[:-1] for row in self.pending])
            self.pending = [row[-1:] for row in self.pending]
        if self.buffer is None or slots > self.buffer.slots:
            self.buffer = self.state.widened(slots)
        for mine, text in zip(self.buffer.arrays, self.state.arrays, strict=True):
            mine[:, :, 0] = text[:, :, 0]
        return self.buffer

    def _read(self, nodes: int) -> Array:
        """Logits [b, 1, v] after the pending tokens, the root last; its state is the buffer's first."""
        buffer = self._ready(min(nodes, FIRST))
        return self.drafter.compiled.read(*buffer.arrays, self.pending)[:, None]

    def _step(self, fed: DraftTree, since: int) -> Array:
        """Advance copies of the parents' states by the nodes from `since` on, all in one pass."""
        (b, n), w = fed.tokens.shape, fed.nodes - since
        assert self.buffer is not None, "the root was read"
        self.check_width(b * w)
        if n > self.buffer.slots:
            self.buffer = self.buffer.widened(max(n, 2 * self.buffer.slots))
        tokens, above = fed.tokens[:, since:], fed.parents[:, since:]
        return self.drafter.compiled.step(*self.buffer.arrays, tokens, above, since)


def _fed(shape: Shape) -> int:
    """Nodes that a tree of this shape feeds at most, the root included."""
    return 1 + sum(min(shape.width, shape.top_k**depth) for depth in range(1, shape.depth))


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "dynamic",
    shape: tuple[int, ...] = (3, 2, 2, 1, 1),
    depth: int = 16,
    width: int = 0,
    top_k: int = 4,
    scale: float = 1.0,
    replacement: bool = False,
    batch: int = 1024,
    dtype: str = "auto",
    vocab: str = "same",
) -> Drafter:
    """A Mamba or Mamba-2 from a folder or hub id, in transformers' layout or that of `mamba_ssm`; without a path, the
    demo Mamba. The options are the fields of `Growth` and of `Request`.

    Raises:
        InputError: the folder is damaged, or belongs to another target.
    """
    if target is None:
        raise InputError("a draft model needs the target that it drafts for")
    growth = Growth(tree, shape, (), depth, width, top_k, 1 << 30, scale, replacement=replacement)
    request = Request(growth, batch, dtype, vocab)
    path = placed(path or "demo", "mamba")
    made = _opened(target, tokenizer, path, request)
    return in_tensors("mamba").load(target, tokenizer, path, request) if made is None else made


def _opened(target: Target, tokenizer: Any, path: str, request: Request) -> Drafter | None:
    """The drafter of a folder in compiled code; None where tensors must serve it."""
    folder, precision = folder_of(path), target.precision if request.dtype == "auto" else request.dtype
    code = code_for(target, precision)
    if code is None or request.vocab == "shared" or not (folder / "config.json").is_file():
        return None
    try:
        files = open_checkpoint(folder)
        config, names = files.config, ids_in(files.config)
        sizes, rows = _sizes(config), _count(config, "vocab_size")
        if sizes is None or (names is not None and request.vocab != "same"):
            return None
        arrays = {name: one.tensor.array() for name, one in files.parameters.items()}
        _check(arrays, sizes, config)
    except (InputError, KeyError, OverflowError, TypeError, ValueError):  # tensors say what is wrong
        return None
    weights = {name: cast(x, precision) for name, x in arrays.items()}
    if not finite(weights):
        return None
    if request.vocab == "text":

        def built(words: Words) -> Drafter | None:
            return compiled(sizes, weights, code, words, request)

        return across("text", str(folder), rows, target, tokenizer, built)
    request.check_rows(path, str(folder), rows, target, tokenizer)
    return compiled(sizes, weights, code, Same(rows, target.vocab, names), request)


def _count(config: Mapping[str, Any], name: str) -> int:
    """A size that the config gives. Raises KeyError, TypeError or ValueError where it is none."""
    value = config[name]
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r}, not a whole number")
    if not 0 < value < MOST:
        raise ValueError(f"{name} is {value}, not from 1 to {MOST - 1}")
    return value


def _number(value: Any) -> float:
    """A number of at least 0, in transformers' way to write infinite ones too. Raises TypeError or ValueError."""
    value = value["__float__"] if isinstance(value, dict) else value
    if type(value) not in (int, float, str) or not (made := float(value)) >= 0:
        raise ValueError(f"{value!r} is not a number of at least 0")
    return made


def _sizes(config: Mapping[str, Any]) -> MambaSizes | None:
    """The sizes of a Mamba-2 that compiled code has; None for any other model.

    Raises:
        KeyError, TypeError, ValueError: one is missing or makes no sense, or they do not fit one another.
    """
    if config["model_type"] != "mamba2" or config["hidden_act"] not in ("silu", "swish") or config["use_bias"]:
        return None
    sizes = {name: _count(config, theirs) for name, theirs in SIZES.items()}
    inner, heads, groups = sizes["heads"] * sizes["head_dim"], sizes["heads"], sizes["groups"]
    if _count(config, "expand") * sizes["hidden"] != inner or heads % groups:
        raise ValueError(f"{heads} heads of {sizes['head_dim']} in {groups} groups do not fit the layers' width")
    (least, most), eps = map(_number, config["time_step_limit"]), _number(config["layer_norm_epsilon"])
    if not least <= most or eps > 1:
        raise ValueError(f"time steps from {least} to {most}, or an epsilon of {eps}")
    return MambaSizes(
        **sizes, intermediate=inner, norm_group=inner // groups, eps=eps, gated_eps=eps, dt_min=least, dt_max=most
    )


def _check(arrays: Mapping[str, Array], sizes: MambaSizes, config: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError where tensors are not those of these sizes, all of floating point."""
    if sizes.layers > len(arrays):
        raise ValueError(f"{sizes.layers} layers are more than tensors")
    shapes = _shapes(sizes, config)
    if "lm_head.weight" in arrays or not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["backbone.embeddings.weight"]
    if {name: x.shape for name, x in arrays.items()} != shapes:
        raise ValueError("the tensors do not have the shapes that the config says")
    if any(x.dtype.kind != "f" and x.dtype != np.uint16 for x in arrays.values()):  # bfloat16: its bits
        raise TypeError("tensors are not of floating point")


def _shapes(sizes: MambaSizes, config: Mapping[str, Any]) -> Shapes:
    h, inner, heads, v = sizes.hidden, sizes.intermediate, sizes.heads, _count(config, "vocab_size")
    channels = inner + 2 * sizes.groups * sizes.state_size
    shapes: Shapes = {"backbone.embeddings.weight": (v, h), "backbone.norm_f.weight": (h,)}
    for i in range(sizes.layers):
        mixer = f"backbone.layers.{i}.mixer"
        shapes |= {
            f"backbone.layers.{i}.norm.weight": (h,), f"{mixer}.in_proj.weight": (inner + channels + heads, h),
            f"{mixer}.conv1d.weight": (channels, 1, sizes.conv_kernel), f"{mixer}.dt_bias": (heads,),
            f"{mixer}.A_log": (heads,), f"{mixer}.D": (heads,), f"{mixer}.norm.weight": (inner,),
            f"{mixer}.out_proj.weight": (h, inner),
        }  # fmt: skip
        shapes |= {f"{mixer}.conv1d.bias": (channels,)} if config["use_conv_bias"] else {}
    return shapes


def compiled(sizes: MambaSizes, weights: Weights, code: Library, words: Words, request: Request) -> Drafter | None:
    """The drafter of a Mamba-2 in compiled code; None where that has no such network, or its tokens are others than
    those that it observes."""
    head = weights.get("lm_head.weight", table := weights["backbone.embeddings.weight"])
    if not isinstance(words, Same) or len(head) != len(table):
        return None
    if words.rows < words.vocab or (words.names is None and len(head) != words.vocab):
        return None
    made = mamba(code, sizes, weights, head if words.names is None else head[words.names], words.names)
    if made is None:
        return None
    channels = sizes.intermediate + 2 * sizes.groups * sizes.state_size

    def empty(rows: int) -> States:
        conv = (sizes.layers, rows, 1, channels, sizes.conv_kernel - 1)
        ssm = (sizes.layers, rows, 1, sizes.heads, sizes.head_dim, sizes.state_size)
        return States(np.zeros(conv, table.dtype), np.zeros(ssm, np.float32))

    return CompiledMamba(made, words, request.growth, empty, request.batch)


def __getattr__(name: str) -> Any:
    """The drafter in tensors (`_mamba.py`), imported on first use."""
    return getattr(in_tensors("mamba"), name)
