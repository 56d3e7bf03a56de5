"""T5 as a target: the prompt goes through the encoder, the tree through the decoder.

A row has its encoder's keys and values (the cross-attention cache, written once) and the mask of its real encoder
tokens beside its tree cache. T5 has no positions but a bias by distance, computed by stock code from slots; during a
tree's pass it is computed from the slots' true positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ...core.protocols import Prefill, TargetOutput
from ...core.tree import chain
from ...params import InputError
from .attention import passing
from .cache import TreeCache
from .carrier import carrying
from .padding import padded
from .session import Companion, Pass, TreeSession, out
from .stock import StockTarget
from .turns import without_cudnn

FAMILIES = ("t5", "mt5")


@dataclass
class Encoded:
    """What the encoder left for a batch: real tokens [b, e], and each decoder layer's keys and values of them."""

    sizes: list[int]  # prompt lengths, on the host
    mask: Bool[Tensor, "b e"]
    states: Float[Tensor, "b e h"]
    cross: DynamicCache

    @property
    def padded(self) -> bool:
        return min(self.sizes) < self.mask.shape[1]

    @property
    def layers(self) -> list[Any]:
        return self.cross.layers

    def select(self, index: Sequence[int]) -> None:
        rows = torch.tensor(list(index), dtype=torch.long, device=self.mask.device)
        self.sizes = [self.sizes[i] for i in index]
        self.mask, self.states = self.mask[rows], self.states[rows]
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def join(self, other: Companion) -> None:
        assert isinstance(other, Encoded)
        self.sizes = self.sizes + other.sizes
        longest = max(self.mask.shape[1], other.mask.shape[1])
        pads = longest - self.mask.shape[1], longest - other.mask.shape[1]

        def both(a: Tensor, b: Tensor, after: int) -> Tensor:
            """One above the other, padded along the encoder's axis, which has `after` axes after it."""
            still = (0, 0) * after
            return torch.cat([torch.nn.functional.pad(x, (*still, 0, p)) for x, p in zip((a, b), pads, strict=True)])

        self.mask, self.states = both(self.mask, other.mask, 0), both(self.states, other.states, 1)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.keys, mine.values = both(mine.keys, theirs.keys, 1), both(mine.values, theirs.values, 1)


class SeqTarget(StockTarget):
    """An encoder-decoder of the T5 kind. A text is what the decoder writes; its first token is the start token."""

    def __init__(self, model: Any):
        kind = model.config.model_type
        if kind not in FAMILIES:
            raise InputError(f"{kind} is an encoder-decoder whose positions are not known for a tree; only T5 is")
        super().__init__(model, model.config, int(model.config.num_decoder_layers))
        self.context = 1 << 20  # distances beyond the last bucket share it: there is no last position
        self.hidden = int(model.config.d_model)
        start = self.config.decoder_start_token_id
        if start is None:
            raise InputError("the model's config has no decoder_start_token_id, so nobody knows how its texts begin")
        self.opening = (int(start),)

    def embed(self, tokens: Int[Tensor, "*s"]) -> Float[Tensor, "*s h"]:
        """Token embeddings."""
        return self.model.get_input_embeddings()(tokens)

    def head(self, features: Float[Tensor, "*s h"]) -> Float[Tensor, "*s v"]:
        """Logits of features taken after the decoder's final norm (tap -1)."""
        scale = self.model.model_dim**-0.5 if self.config.scale_decoder_outputs else 1.0
        return self.model.lm_head(features * scale)

    def open(self, capacity: int) -> TreeSession:
        """A session whose rows have `capacity` slots of decoder tokens; it grows if they must."""
        return TreeSession(self, TreeCache(int(self.config.num_decoder_layers), capacity, 1 << 20))

    def read(self, session: TreeSession, prompts: Sequence[Sequence[int]], taps: tuple[int, ...]) -> Iterator[Prefill]:
        """Run the encoder over the prompts, right-padded, and commit the decoder's start token."""
        sizes, device, b = [len(p) for p in prompts], self.device, len(prompts)
        ids = padded(prompts, device)
        mask = torch.arange(max(sizes), device=device) < torch.tensor(sizes, device=device)[:, None]
        with torch.no_grad():
            states = self.model.get_encoder()(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        session.companion = Encoded(sizes, mask, states, DynamicCache())
        start = torch.full((b, 1), self.opening[0], device=device)
        output = session.pass_over(
            Pass(start, None, start * 0, 0, session.there, prefix=0, level=True, bound=0, taps=taps)
        )
        session.advance([1] * b)
        yield Prefill(chain([list(self.opening)] * b, matrix=False), out(output), (True,) * b, [-1] * b)

    def run(self, session: TreeSession, pass_: Pass) -> TargetOutput:
        """One decoder pass over the tree cache."""
        encoded = session.companion
        assert isinstance(encoded, Encoded)
        cache = EncoderDecoderCache(session.cache, encoded.cross)
        cache.is_updated = dict.fromkeys(range(len(session.cache.layers)), len(encoded.layers) > 0)
        name, read = ("input_ids", pass_.tokens) if pass_.embeds is None else ("inputs_embeds", pass_.embeds)
        with passing, without_cudnn(self.device), _biased(self.model, pass_):
            out = self.model(
                **{f"decoder_{name}": read},
                encoder_outputs=(encoded.states,),
                attention_mask=encoded.mask.long() if encoded.padded else None,
                decoder_attention_mask=None if pass_.ancestors is None else pass_.mask(self.dtype),
                **carrying(self.model, cache),
                output_hidden_states=bool(pass_.taps),
                return_dict=True,
            )
        return TargetOutput(out.logits, {tap: out.decoder_hidden_states[tap] for tap in pass_.taps})


@contextmanager
def _biased(model: Any, pass_: Pass) -> Iterator[None]:
    """During a tree's pass, the decoder's first layer, whose bias all layers share, counts true positions."""
    if pass_.ancestors is None:
        yield
        return
    layer = model.decoder.block[0].layer[0].SelfAttention

    def compute_bias(*args: Any, **kwargs: Any) -> Float[Tensor, "b heads m view"]:
        distance = pass_.where()[:, None] - pass_.places[..., None]
        bucket = layer._relative_position_bucket(
            distance,
            bidirectional=False,
            num_buckets=layer.relative_attention_num_buckets,
            max_distance=layer.relative_attention_max_distance,
        )
        return layer.relative_attention_bias(bucket).permute(0, 3, 1, 2)

    layer.compute_bias = compute_bias
    try:
        yield
    finally:
        del layer.compute_bias
