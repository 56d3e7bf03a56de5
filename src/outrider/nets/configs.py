"""The configs of networks: what a trained drafter's config.json says, as dataclasses that check themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import schema
from ..params import InputError, integer

Path = tuple[int, ...]  # of ranks: which candidate of each depth
Paths = tuple[Path, ...]
BLOCKS = 1024  # that a drafter's heads may have together
PAIR_HEADS = ("none", "markov", "selector")
OUT = -1e4  # the logit of a token that is not to be drafted
INPUTS = ("feature+shifted", "feature+unshifted", "feature", "token")  # the paper's ablation, the first is EAGLE
ROPES = {  # by the kind of rotary positions, what its config must say
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer. `inputs` is the width of what attention reads: hidden, or 2 hidden in EAGLE-3."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    inputs: int
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    eps: float = 1e-6
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "inputs"):
            if getattr(self, name) < 1:
                raise InputError(f"a drafter's layer needs {name} of at least 1, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise InputError(f"{self.heads} heads cannot share {self.kv_heads} key heads; choose a divisor of heads")
        if self.head_dim % 2:
            raise InputError(f"rotary positions turn pairs, so head_dim must be even, not {self.head_dim}")
        _check_rope(self.rope)


def _check_rope(rope: Mapping[str, Any]) -> None:
    """Refuse rotary positions that cannot be computed."""
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPES:
        raise InputError(f"the rotary positions of a drafter are {', '.join(ROPES)}, not {kind}")
    for name in ROPES[kind]:
        if name not in rope:
            raise InputError(f"rotary positions of the kind {kind} need {name}; add it")
    for name, value in rope.items():
        needed = name == "rope_theta" or name in ROPES[kind]
        if name == "rope_type" or (isinstance(value, bool | None) and not needed):
            continue
        if schema.bounded(name, value) <= 0:
            raise InputError(f"{name} in the config must be above 0, not {value}; correct it")


def check_size(draft_vocab: int, vocab: int, least: int = 1) -> None:
    """Refuse a size that is none."""
    if not least <= draft_vocab <= vocab:
        raise InputError(f"the draft vocabulary holds {least} to {vocab} tokens, not {draft_vocab}")


@dataclass(frozen=True)
class EagleConfig:
    """`inputs`: what a step reads (INPUTS). `scale`: s of the confidences softmax(r / s)."""

    layer: LayerShape
    vocab: int
    target_hidden: int
    inputs: str = INPUTS[0]
    bias: bool = False
    scale: float = 1.0
    trained: str = "eagle"  # or hass: who trained it, for those who ask
    draft_vocab: int = 0  # tokens that can be drafted; 0: all of the target's

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise InputError(f"the inputs of EAGLE are {', '.join(INPUTS)}, not {self.inputs!r}")
        check_size(self.draft_vocab, self.vocab, 0)
        if not self.layer.hidden == self.layer.inputs == self.target_hidden:
            raise InputError(
                f"EAGLE predicts the target's features, so its layer must be {self.target_hidden} wide, "
                f"not {self.layer.hidden}; EAGLE-3 may differ"
            )


@dataclass(frozen=True)
class Eagle3Config:
    """`taps`: indices of the target's hidden states (k: the input of layer k). The flags are those found in published
    checkpoints: the residual is the normed hidden state; norms before fc over the whole or over each tap; the step fed
    back is taken after the final norm. `own_embedding`: the network has one (it must where the widths differ).
    `parallel`: how many tokens one pass drafts (0: they come one after the other), with `layers`; the embedding of
    `mask_token` fills the places after the last pair."""

    layer: LayerShape
    vocab: int
    draft_vocab: int
    target_hidden: int
    taps: tuple[int, ...]
    scale: float = 1.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    layers: int = 1
    parallel: int = 0
    mask_token: int = 0

    def __post_init__(self) -> None:
        check_taps(self.taps)
        if self.layer.inputs != 2 * self.layer.hidden:
            raise InputError(f"EAGLE-3's attention reads {2 * self.layer.hidden} numbers, not {self.layer.inputs}")
        if self.layer.hidden != self.target_hidden and not self.own_embedding:
            raise InputError("an EAGLE-3 drafter that is not as wide as its target needs an embedding of its own")
        check_size(self.draft_vocab, self.vocab)
        if self.parallel < 0 or self.layers < 1 or (self.layers > 1 and not self.parallel):
            raise InputError("EAGLE-3 has one layer; only one that drafts in parallel may have more")
        if not 0 <= self.mask_token < self.vocab:
            raise InputError(f"the mask token {self.mask_token} lies outside the vocabulary of {self.vocab} tokens")


def default_taps(layers: int) -> tuple[int, int, int]:
    """The published choice, 2, L // 2 and L - 3; refused where they are not three."""
    taps = (2, layers // 2, layers - 3)
    if not 0 < taps[0] < taps[1] < taps[2]:
        raise InputError(f"EAGLE-3's layers 2, L/2, L-3 are not distinct for {layers} layers; name three as taps")
    return taps


def check_taps(taps: tuple[int, ...]) -> None:
    """Raise InputError unless these are three different hidden states, counted from 0."""
    if len(taps) != 3 or len(set(taps)) < 3:
        raise InputError(f"EAGLE-3 fuses three distinct layers of the target, not {list(taps)}; correct its taps")
    if min(taps) < 0:
        raise InputError(f"EAGLE-3's taps count the target's hidden states from 0; {list(taps)} has a negative one")


def check_blocks(heads: int, layers: int) -> None:
    """Refuse more residual blocks than can be meant: each is a module, and a million of them take minutes to make."""
    if heads * layers > BLOCKS:
        raise InputError(f"{heads} heads of {layers} layers are more than {BLOCKS} blocks; correct the config")


def check_paths(tree: Any, where: str) -> Paths:
    """Paths as they come from JSON, best first: no path twice, none before its parent."""
    sentence = (
        f"the tree of {where} must be paths of ranks, each after its parent and its better siblings; make it by "
        "outrider tune-tree"
    )
    if not isinstance(tree, list | tuple) or not tree:
        raise InputError(sentence)
    seen: set[Path] = {()}
    for path in tree:
        ranks = isinstance(path, list | tuple) and all(type(r) is int and 0 <= r < 4096 for r in path)
        if not ranks or not path or tuple(path) in seen or tuple(path[:-1]) not in seen:
            raise InputError(sentence)
        if path[-1] and (*path[:-1], path[-1] - 1) not in seen:
            raise InputError(sentence)
        seen.add(tuple(path))
    return tuple(tuple(path) for path in tree)


@dataclass(frozen=True)
class MedusaConfig:
    """`heads`: K. `layers`: residual blocks per head. `bias`: has the LM head one? (The published heads have none.)
    `lossy`: trained together with the target (Medusa-2), which is another model since. `tree`: paths of ranks, best
    first, used unless another tree is asked for."""

    vocab: int
    hidden: int
    heads: int = 4
    layers: int = 1
    share_head: bool = False
    bias: bool = False
    scale: float = 1.0
    lossy: bool = False
    tree: tuple[tuple[int, ...], ...] | None = None
    draft_vocab: int = 0  # tokens that can be drafted; 0: all of the target's

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "heads", "layers"):
            integer(f"{name} of Medusa", getattr(self, name))
        check_blocks(self.heads, self.layers)
        check_size(self.draft_vocab, self.vocab, 0)
        if self.tree is not None:
            object.__setattr__(self, "tree", check_paths(self.tree, "its config"))


@dataclass(frozen=True)
class HydraConfig:
    """`heads`: K. `layers`: blocks per head. `prefix`: Hydra++, whose decoder layer is `layer`. `tree`: paths of ranks,
    best first, used unless another tree is asked for."""

    vocab: int
    hidden: int
    heads: int = 4
    layers: int = 1
    prefix: bool = False
    layer: LayerShape | None = None
    scale: float = 1.0
    tree: tuple[tuple[int, ...], ...] | None = None
    draft_vocab: int = 0  # tokens that can be drafted; 0: all of the target's

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "heads", "layers"):
            integer(f"{name} of Hydra", getattr(self, name))
        check_blocks(self.heads, self.layers)
        check_size(self.draft_vocab, self.vocab, 0)
        if self.prefix != (self.layer is not None):
            raise InputError("a Hydra drafter has a layer if and only if prefix is true; correct its config")
        if self.layer is not None and not self.layer.hidden == self.layer.inputs == self.hidden:
            raise InputError(f"Hydra's layer reads and writes features, so both widths must be {self.hidden}")
        if self.tree is not None:
            object.__setattr__(self, "tree", check_paths(self.tree, "its config"))


@dataclass(frozen=True)
class BlockConfig:
    """`taps`: indices of the target's hidden states (k: the input of layer k; -1: after the final norm).

    `draft_vocab` equal to `vocab` means that the target's own head is used; a smaller one has a head of its own and
    `d2t`, as in EAGLE-3. `mask_token` names the token whose embedding fills the slots after the anchor; -1: a learned
    vector. `pair_rank` is the width r of the pair head, which chooses among a slot's `pair_top` likeliest tokens (0:
    all). `conv` is how many slots a convolution reads (0: there is none), `conv_group` how many channels share a weight
    that it computes.
    """

    layer: LayerShape
    layers: int
    vocab: int
    draft_vocab: int
    target_hidden: int
    taps: tuple[int, ...]
    block: int = 8
    causal: bool | None = True  # None, what a folder that contradicts itself says, is refused
    sample_from_anchor: bool = True
    pair_head: str = "markov"
    pair_rank: int = 64
    pair_top: int = 0
    conv: int = 0
    conv_group: int = 16
    mask_token: int = -1
    scale: float = 1.0
    seeded: bool = False

    def __post_init__(self) -> None:
        if self.causal is None:
            raise InputError(
                "the config says both that slots see later slots and that they do not; say which, as in "
                "block:DIR?causal=true or outrider import DIR --causal"
            )
        if self.block < 2:
            raise InputError(f"a block holds at least 2 slots, not {self.block}")
        if self.layers < 1:
            raise InputError(f"a block drafter needs at least 1 layer, not {self.layers}")
        if not self.taps or len(set(self.taps)) < len(self.taps):
            raise InputError(f"a block drafter reads distinct layers of the target, not {list(self.taps)}; name others")
        if self.layer.hidden != self.target_hidden:
            raise InputError(
                f"a block drafter uses its target's embeddings, so it must be {self.target_hidden} wide, "
                f"not {self.layer.hidden}"
            )
        check_size(self.draft_vocab, self.vocab)
        if self.mask_token >= self.vocab:
            raise InputError(f"the mask token {self.mask_token} lies outside the vocabulary of {self.vocab} tokens")
        if self.pair_head not in PAIR_HEADS:
            raise InputError(f"the pair head is one of {', '.join(PAIR_HEADS)}, not {self.pair_head!r}")
        if self.pair_head != "none" and self.pair_rank < 1:
            raise InputError(f"a pair head is at least 1 wide, not {self.pair_rank}; correct pair_rank")
        if self.pair_top < 0:
            raise InputError(f"pair_top counts tokens, 0 meaning all; it is {self.pair_top}")
        if not 0 <= self.conv <= self.block:
            raise InputError(
                f"a convolution reads 1 to {self.block} slots of the block (0: there is none), not {self.conv}"
            )
        if self.conv and (self.conv_group < 1 or self.layer.hidden % self.conv_group):
            raise InputError(
                f"{self.layer.hidden} channels cannot be cut into groups of {self.conv_group}; give conv_group"
            )

    @property
    def drafts(self) -> int:
        """How many tokens one block drafts."""
        return self.block if self.sample_from_anchor else self.block - 1
