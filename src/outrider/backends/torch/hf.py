"""Any stock causal language model as a target: trees through its own forward pass.

No modelling code is copied. Four families take slots for positions (`positions.py`); while one of our passes over a
tree runs on them, a function or attribute of theirs is replaced, and put back after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.protocols import Prefill, TargetOutput
from ...core.tree import chain
from ...params import InputError
from . import attention, families
from .cache import TreeCache
from .carrier import accepted, carrying
from .padding import padded
from .session import CHUNK, Pass, TreeSession, out
from .stock import StockTarget
from .turns import without_cudnn

SLACK = 256  # slots beyond the context that a tree may use


class HFTarget(StockTarget):
    """A stock model with a language-modelling head.

    Its config is another only while one of our passes runs, so that the user's own `model.generate` keeps its
    attention. `load_target` lets a family that is not in `families.py` prove itself first.
    """

    def __init__(self, model: Any):
        self.family, config = families.of(model), families.text_config(model)
        super().__init__(model, config, int(config.num_hidden_layers))
        self.context, self.hidden = families.context_of(model, self.family), families.width_of(model)
        self.experts, self.windows = families.experts_of(model), families.windows(config, self.family)
        self.accepts = accepted(model)

    @property
    def processes(self) -> int:
        """How many processes hold the model together, a part each (`spread.py`). They must run it together."""
        return int(getattr(self.model, "_tp_size", None) or 1)

    def embed(self, tokens: Int[Tensor, "*s"]) -> Float[Tensor, "*s h"]:
        """Token embeddings, with the family's scaling (Gemma scales inside its embedding, Granite after it)."""
        embeds = self.model.get_input_embeddings()(tokens)
        return embeds if self.scale == 1.0 else embeds * self.scale

    @cached_property
    def scale(self) -> float:
        """What embeddings are multiplied by."""
        return float(getattr(self.config, "embedding_multiplier", None) or 1.0)

    def head(self, features: Float[Tensor, "*s h"]) -> Float[Tensor, "*s v"]:
        """Logits of features taken after the final norm (tap -1), with the family's scale and soft cap."""
        lm_head = self.model.get_output_embeddings()
        kind = lm_head.weight.dtype  # a drafter in training is more precise than half a target
        logits = lm_head(features.to(kind if kind.is_floating_point else self.dtype))
        scale, divisor, cap = self._head
        logits = logits * scale if scale else logits
        logits = logits / divisor if divisor else logits
        return torch.tanh(logits / cap) * cap if cap else logits

    @cached_property
    def _head(self) -> tuple[float | None, ...]:
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return tuple(getattr(self.config, name, None) for name in names)  # looking a config up costs microseconds

    def open(self, capacity: int) -> TreeSession:
        """A session whose rows have `capacity` slots, those of the tree included; it grows if they must."""
        limit = max(capacity, self.context + SLACK)
        return TreeSession(self, TreeCache(int(self.config.num_hidden_layers), capacity, limit))

    def read(self, session: TreeSession, prompts: Sequence[Sequence[int]], taps: tuple[int, ...]) -> Iterator[Prefill]:
        """Prompts, right-padded, CHUNK tokens at a time, from where a lone row already is. Pads lie beyond a row's
        length and are overwritten. The first chunk, which has the model's own mask, is no longer than its context:
        a draft model may read more than that.

        A chunk's logits are computed at the rows' last tokens alone.
        """
        sizes, device = [len(p) for p in prompts], self.device
        b, n = len(sizes), max(sizes)
        if n > session.cache.limit:
            raise InputError(f"a prompt has {n} tokens and the cache is limited to {session.cache.limit}; shorten it")
        tokens = padded(prompts, device)
        step = min(CHUNK, self.context)
        for first in range(max(session.lengths), n, step):
            end = min(first + step, n)
            counts = [min(max(size - first, 0), end - first) for size in sizes]
            ends = [max(c, 1) - 1 for c in counts]
            logit_nodes = sorted(set(ends))
            output = session.pass_over(
                _chunk(tokens[:, first:end], first, taps, torch.tensor(logit_nodes, device=device))
            )
            rows = torch.tensor([logit_nodes.index(e) for e in ends], device=device)
            output = TargetOutput(output.logits[torch.arange(b, device=device), rows][:, None], output.features)
            session.advance(counts)
            tree = chain([prompt[first:end] for prompt in prompts], matrix=False)
            upcoming = [p[end] if end < len(p) else -1 for p in prompts]
            yield Prefill(tree, out(output), tuple(first < size <= end for size in sizes), upcoming)

    def run(self, session: TreeSession, pass_: Pass) -> TargetOutput:
        """One forward pass of the model over the tree cache."""
        with attention.passing, without_cudnn(self.device), ExitStack() as stack:
            if self.family.binding is not None and pass_.ancestors is not None:
                stack.enter_context(self.family.binding(self.model, pass_))
            logits, features = self.call(self.inputs(pass_), session.cache, pass_.taps)
        if pass_.logit_nodes is not None and "logits_to_keep" not in self.accepts:
            logits = logits[:, pass_.logit_nodes]
        return TargetOutput(logits, dict(zip(pass_.taps, features, strict=True)))

    def call(self, inputs: dict[str, Any], cache: Any, taps: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        """Logits and tapped hidden states of the stock forward with our attention."""
        if taps:
            inputs = {**inputs, "output_hidden_states": True}
        with attention.switched(self.config, self.family.attention, self.experts):
            out = self.model(**inputs, **carrying(self.model, cache), return_dict=True)
        return out.logits, [out.hidden_states[tap] for tap in taps]

    def inputs(self, pass_: Pass) -> dict[str, Any]:
        """A pass in the words of the model's forward."""
        inputs: dict[str, Any] = {"attention_mask": self._mask(pass_)}
        if pass_.embeds is None:
            inputs["input_ids"] = pass_.tokens
        else:  # a model that scales after its embedding would scale these again
            inputs["inputs_embeds"] = pass_.embeds if self.scale == 1.0 else pass_.embeds / self.scale
        if "position_ids" in self.accepts:
            inside = pass_.bound < self.context  # a tree may reach beyond the last position; nobody reads it there
            inputs["position_ids"] = pass_.places if inside else pass_.places.clamp(max=self.context - 1)
        if pass_.logit_nodes is not None and "logits_to_keep" in self.accepts:
            inputs["logits_to_keep"] = pass_.logit_nodes
        return inputs

    def _mask(self, pass_: Pass) -> Any:
        """None for a prompt's first chunk (its slots are its positions: the model's own causal masks are right)."""
        if pass_.ancestors is None:
            return None
        made = {window: pass_.mask(self.dtype, window) for window in set(self.windows.values())}
        masks = {kind: made[window] for kind, window in self.windows.items()}
        return masks if self.family.typed else masks[""]


def _chunk(tokens: Int[Tensor, "b n"], first: int, taps: tuple[int, ...], logit_nodes: Int[Tensor, " k"]) -> Pass:
    """A chunk of right-padded prompts that all begin at slot `first`: slots are positions."""
    (b, n), device = tokens.shape, tokens.device
    lower = torch.ones(1, n, n, dtype=torch.bool, device=device).tril_() if first else None
    return Pass(
        tokens=tokens,
        embeds=None,
        spots=torch.arange(first, first + n, device=device).expand(b, n),
        since=0,
        lengths=torch.full((b,), first, device=device),
        prefix=first,
        level=True,
        bound=first + n - 1,
        ancestors=lower,
        taps=taps,
        logit_nodes=logit_nodes,
    )
