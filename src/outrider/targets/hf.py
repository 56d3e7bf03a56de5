"""Any stock causal language model as a target: trees through its own forward pass, nothing copied, nothing patched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..tree import chain_of
from ..types import DraftTree, Look, Prefill, Session
from . import attention, families
from .cache import TreeCache

CHUNK = 512  # tokens of a prompt read per pass
SLACK = 256  # slots beyond the context that a tree may use


@dataclass
class HFTarget:
    """A stock model with a language-modelling head. It is never changed, except that it is put into `eval` mode."""

    model: Any
    family: families.Family
    vocab: int
    context: int
    dtype: torch.dtype
    device: torch.device
    layers: int

    @classmethod
    def of(cls, model: Any) -> HFTarget:
        family = families.of(model)
        model.eval()
        families.pin_experts(model)
        config = model.config
        weight = model.get_output_embeddings().weight
        return cls(
            model, family, int(weight.shape[0]), families.context_of(model, family), model.dtype, model.device,
            int(config.num_hidden_layers),
        )  # fmt: skip

    def embed(self, tokens: Int[Tensor, "*s"]) -> Float[Tensor, "*s h"]:
        """Token embeddings, with the family's scaling."""
        return self.model.get_input_embeddings()(tokens) * self.embed_scale

    @property
    def embed_scale(self) -> float:
        """Most families that scale do so inside the embedding; these multiply after it."""
        config = self.model.config
        if config.model_type == "gemma2":
            return float(torch.tensor(config.hidden_size**0.5, dtype=self.dtype))
        return float(getattr(config, "embedding_multiplier", 1.0))

    def head(self, features: Float[Tensor, "*s h"]) -> Float[Tensor, "*s v"]:
        """Logits of features taken after the final norm, with soft cap or scale."""
        config, logits = self.model.config, self.model.get_output_embeddings()(features)
        logits = logits / float(getattr(config, "logits_scaling", 1.0)) * float(getattr(config, "logit_scale", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if not cap else torch.tanh(logits / cap) * cap

    def open(self, capacity: int) -> HFSession:
        limit = self.context + SLACK
        return HFSession(self, TreeCache(self.layers, min(capacity, limit), max(limit, capacity)))


@dataclass
class HFSession:
    """One batch inside a stock model. Row b has `lengths[b]` committed tokens, in slots 0 .. lengths[b] - 1."""

    target: HFTarget
    cache: TreeCache
    lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    host: list[int] = field(default_factory=list)  # the same, on the host

    @property
    def longest(self) -> int:
        return max(self.host, default=0)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> Iterator[Prefill]:
        """Read the prompts, right-padded, CHUNK tokens at a time. Pads lie beyond a row's length and are overwritten."""
        device, sizes = self.target.device, [len(p) for p in prompts]
        n = max(sizes)
        tokens = torch.tensor([[*p, *[0] * (n - len(p))] for p in prompts], dtype=torch.long, device=device)
        self.lengths, self.host = torch.zeros(len(prompts), dtype=torch.long, device=device), [0] * len(prompts)
        for first in range(0, n, CHUNK):
            end = min(first + CHUNK, n)
            counts = [min(max(size - first, 0), end - first) for size in sizes]
            count = torch.tensor(counts, dtype=torch.long, device=device)
            tree = chain_of(tokens[:, first:end], count, matrix=False)
            look = self._read(tree, first, [max(c, 1) - 1 for c in counts], taps)
            self.lengths, self.host = self.lengths + count, [h + c for h, c in zip(self.host, counts, strict=True)]
            upcoming = [p[end] if end < len(p) else -1 for p in prompts]
            last = tuple(first < size <= end for size in sizes)
            yield Prefill(tree, look, count, last, torch.tensor(upcoming, dtype=torch.long, device=device))

    def _read(self, tree: DraftTree, first: int, last: list[int], taps: tuple[int, ...]) -> Look:
        """One chunk of right-padded prompts that all begin at slot `first`; logits of each row's last token."""
        b, n = tree.tokens.shape
        index = torch.arange(first, first + n, device=self.lengths.device).expand(b, n)
        mask = None
        self.cache.fresh = first == 0 and n > 1 and self._plain(n)
        if not self.cache.fresh:
            slots = torch.arange(first + n, device=index.device).expand(b, -1)
            mask = slots[:, None] <= index[..., None]
        asked = sorted(set(last))
        rows = torch.tensor([asked.index(i) for i in last], device=index.device)
        try:
            look = self._pass(
                tree.tokens, None, index, first + n, index, mask, taps, torch.tensor(asked, device=index.device)
            )
        finally:
            self.cache.fresh = False
        return Look(look.logits[torch.arange(b, device=rows.device), rows][:, None], look.features)

    def _plain(self, n: int) -> bool:
        """May the plain causal kernels read n tokens? Not where a window or a positional bias needs a mask."""
        return self.target.family.alibi is None and self.target.family.attention != "eager" and n <= min(
            self._windows().values(), default=n
        )

    @torch.no_grad()
    def forward(
        self, tree: DraftTree, taps: tuple[int, ...] = (), since: int = 0, embeds: Tensor | None = None
    ) -> Look:
        """Logits [b, n - since, v] of the nodes from `since` on; the nodes before are in the cache. Commits nothing."""
        assert tree.ancestors is not None
        n, longest = tree.nodes, self.longest
        self.cache.reserve(longest + n)
        here = self.lengths[:, None] + torch.arange(n, device=self.lengths.device)
        places = self.lengths[:, None] + tree.depths
        mask = self._mask(tree.ancestors[:, since:], here, longest)
        inputs = None if embeds is not None else tree.tokens[:, since:]
        where = self._positions(here, places, longest + n)
        return self._pass(inputs, embeds, here[:, since:], longest + n, places[:, since:], mask, taps, None, where)

    def _mask(
        self, ancestors: Bool[Tensor, "b m n"], here: Int[Tensor, "b n"], longest: int
    ) -> Bool[Tensor, "b m view"] | Float[Tensor, "b m view"]:
        """Who sees whom: the committed slots of the row, and a node's own ancestors."""
        b, m, n = ancestors.shape
        if min(self.host) == longest:
            return torch.nn.functional.pad(ancestors, (longest, 0), value=True)
        mask = torch.arange(longest + n, device=here.device) < self.lengths[:, None, None]
        return mask.expand(b, m, -1).scatter(2, here[:, None].expand(b, m, n), ancestors)

    def _positions(self, here: Tensor, places: Tensor, view: int) -> Tensor | None:
        """The true position of every slot, where somebody asks: windows and positional biases."""
        if self.target.family.alibi is None and not any(view > w for w in self._windows().values()):
            return None
        return torch.arange(view, device=here.device).expand(here.shape[0], -1).scatter(1, here, places)

    def _windows(self) -> dict[str, int]:
        """Sliding windows by layer type (or "" for all layers)."""
        config = self.target.model.config
        window = getattr(config, "sliding_window", None)
        if not window:
            return {}
        if self.target.family.masks == "typed":
            return {"sliding_attention": int(window)} if "sliding_attention" in (config.layer_types or ()) else {}
        return {"": int(window)}

    def _pass(
        self,
        tokens: Tensor | None,
        embeds: Tensor | None,
        slots: Int[Tensor, "b m"],
        view: int,
        places: Int[Tensor, "b m"],
        mask: Tensor | None,
        taps: tuple[int, ...],
        asked: Tensor | None = None,
        where: Tensor | None = None,
    ) -> Look:
        """One forward pass of the stock model over the tree cache."""
        target, cache = self.target, self.cache
        b = slots.shape[0]
        cache.reserve(view)
        cache.view = view
        cache.slots = (slots + torch.arange(b, device=slots.device)[:, None] * cache.capacity).flatten()
        inputs: dict[str, Any] = dict(input_ids=tokens) if embeds is None else dict(inputs_embeds=embeds)
        if asked is not None:
            inputs["logits_to_keep"] = asked
        with attention.switched(target.model.config, target.family.attention):
            out = target.model(
                **inputs,
                position_ids=places.clamp(max=target.context - 1),
                attention_mask=None if mask is None else self._given(mask, places, where),
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=bool(taps),
            )
        cache.pack()
        hidden = out.hidden_states if taps else ()
        return Look(out.logits, {t: hidden[t] for t in taps})

    def _given(self, mask: Tensor, places: Tensor, where: Tensor | None) -> Any:
        """The mask as the family takes it: floats in the model's precision, one tensor or one per layer type."""
        target = self.target

        def floats(seen: Tensor) -> Tensor:
            zero = torch.zeros((), dtype=target.dtype, device=seen.device)
            return torch.where(seen, zero, float("-inf"))[:, None]

        def windowed(window: int) -> Tensor:
            if mask.shape[2] <= window and where is None:
                return floats(mask)
            at = torch.arange(mask.shape[2], device=mask.device)[None] if where is None else where
            return floats(mask & (at[:, None] > places[..., None] - window))

        windows = self._windows()
        if target.family.masks == "typed":
            kinds = set(target.model.config.layer_types or ("full_attention",))
            return {kind: windowed(windows[kind]) if kind in windows else floats(mask) for kind in kinds}
        given = windowed(windows[""]) if windows else floats(mask)
        if target.family.alibi is not None and where is not None:
            given = target.family.alibi(target.model, where, given)
        return given

    def keep(self, path: Int[Tensor, "b k"], count: Int[Tensor, " b"]) -> None:
        """Commit the accepted path: move its slots behind the row's length (a chain moves nothing)."""
        paths, counts = path.tolist(), count.tolist()
        source, destination = [], []
        for b, (nodes, n, length) in enumerate(zip(paths, counts, self.host, strict=True)):
            start = b * self.cache.capacity + length
            for i, node in enumerate(nodes[:n]):
                if node != i:
                    source.append(start + node)
                    destination.append(start + i)
        if source:
            self.cache.move(torch.tensor(source), torch.tensor(destination))
        self.lengths = self.lengths + count
        self.host = [h + c for h, c in zip(self.host, counts, strict=True)]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of every row."""
        assert all(0 <= new <= old for new, old in zip(lengths, self.host, strict=True)), "rewinding goes back"
        self.host = list(lengths)
        self.lengths = torch.tensor(self.host, dtype=torch.long, device=self.lengths.device)

    def select(self, index: Sequence[int]) -> None:
        """Row i := old row index[i]; repeats fork."""
        self.cache.select(index)
        self.rewind_to([self.host[i] for i in index])

    def join(self, other: Session) -> None:
        """Append the rows of another session of the same target."""
        assert isinstance(other, HFSession)
        self.cache.join(other.cache)
        self.rewind_to(self.host + other.host)

    def rewind_to(self, host: list[int]) -> None:
        self.host = host
        self.lengths = torch.tensor(host, dtype=torch.long, device=self.lengths.device)
