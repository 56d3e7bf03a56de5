"""The configs of networks: what a trained drafter's config.json says, as dataclasses that check themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import schema
from ..params import InputError

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
    `mask_token` fills the places behind the last pair."""

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
