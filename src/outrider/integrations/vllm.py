"""Outrider's drafters inside stock vLLM: lookup, suffix, n-grams, draft models, Mamba drafters, and mixes of them.

    vllm serve MODEL --additional-config '{"outrider": "lookup"}' --speculative-config
        '{"method": "custom_class", "model": "outrider.integrations.vllm.Proposer", "num_speculative_tokens": 5}'

vLLM calls `propose` after every step with the rows of its batch and their texts, and verifies the returned chains. It
passes neither hidden states nor request ids; rows come, go and move between calls. So a row is identified by its text
before the tokens just sampled. An unknown row is prefilled. Drafts affect the time only; the text is vLLM's.

Nothing of vLLM is imported; the fields of its configuration are those of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import drafters
from ..backends.torch.load import load_tokenizer, place_of
from ..core.noise import GumbelNoise
from ..core.protocols import Drafter, Drafting, Round, Session, Target, TargetOutput
from ..core.tree import root_only
from ..core.types import Budget, DraftTree, Rows
from ..drafters import _chain
from ..engine.prefixes import common
from ..params import InputError, Sampling

KEY = "outrider"
HINT = f"""name a drafter in vLLM's additional config, as in --additional-config '{{"{KEY}": "lookup"}}'"""
GREEDY = Sampling(0.0)


class Proposer:
    """The class for vLLM's `{"method": "custom_class", "model": "outrider.integrations.vllm.Proposer"}`.

    The drafter is a SPEC, or a list of SPECs for a mix, under the key `outrider` of vLLM's `additional_config`.
    """

    def __init__(self, vllm_config: Any):
        """Parse vLLM's `VllmConfig`. Raises InputError if it names no drafter."""
        self.config = vllm_config
        self.specs = specs_of(vllm_config.additional_config)
        self.tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.live: Live | None = None

    def load_model(self, model: Any = None) -> None:
        """Load the drafter; vLLM calls this after loading its model (`model`, unused).

        Raises InputError for a drafter that does not exist, does not match, or reads hidden states.
        """
        del model
        known = self.config.model_config
        target = Sizes.of(self.config)
        loaded = drafters.load(self.specs, target, tokenizer_of(known))
        noise = GumbelNoise(target.vocab)
        self.live = Live(_chain.of(loaded, self.tokens), self.tokens, target, noise)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain for every row with new tokens.

        Args:
            sampled_token_ids: the tokens of this step by row; empty during prefill.
            num_tokens_no_spec: [rows or more], the length of each text with those tokens.
            token_ids_cpu: [rows or more, context], the texts.
            slot_mappings: unused.

        Returns:
            At most `num_speculative_tokens` tokens per row, none where there is nothing to draft.
        """
        del slot_mappings
        if self.live is None:
            self.load_model()
        assert self.live is not None
        chains: list[list[int]] = [[] for _ in sampled_token_ids]
        there = [i for i, new in enumerate(sampled_token_ids) if len(new) and num_tokens_no_spec[i] > 1]
        texts = [token_ids_cpu[i, : num_tokens_no_spec[i]] for i in there]
        drafted = self.live.draft(texts, [len(sampled_token_ids[i]) for i in there])
        for i, chain in zip(there, drafted, strict=True):
            chains[i] = chain
        return chains


def tokenizer_of(known: Any) -> Any:
    """The target's tokenizer by vLLM's `ModelConfig`, for drafters with their own; also with `skip_tokenizer_init`, but
    then None if it cannot be loaded."""
    try:
        return load_tokenizer(place_of(known.tokenizer), known.trust_remote_code)
    except InputError:
        if not known.skip_tokenizer_init:
            raise
        return None


def specs_of(additional: Any) -> list[str]:
    """The SPECs under the key `outrider`."""
    drafters = additional.get(KEY) if isinstance(additional, Mapping) else None
    specs = [drafters] if isinstance(drafters, str) else drafters
    if not isinstance(specs, list | tuple) or not specs or not all(isinstance(s, str) and s for s in specs):
        raise InputError(f"no drafter is named (a text or a list of texts, not {drafters!r}); {HINT}")
    return list(specs)


@dataclass
class Sizes(Target):
    """vLLM's model for drafters that read text: a `Target` with sizes, which computes nothing."""

    vocab: int
    context: int
    precision: str
    hidden: int
    layers: int
    config: Mapping[str, Any]
    device: str = "cpu"

    @classmethod
    def of(cls, vllm_config: Any) -> Sizes:
        """By vLLM's configuration."""
        model = vllm_config.model_config
        device, text = str(vllm_config.device_config.device), model.hf_text_config
        kind = str(model.dtype).removeprefix("torch.")
        return cls(
            model.get_vocab_size(), model.max_model_len, kind, model.get_hidden_size(), int(text.num_hidden_layers),
            text.to_dict(), device,
        )  # fmt: skip

    @property
    def config_dict(self) -> Mapping[str, Any]:
        """The model's configuration in vLLM."""
        return self.config

    def turn(self) -> AbstractContextManager[Any]:
        """No turns are needed."""
        return nullcontext()

    def embed(self, tokens: Any) -> Any:
        """Raises InputError: there are no embeddings."""
        raise InputError(_chain.BLIND)

    def head(self, features: Any) -> Any:
        """Raises InputError: there is no LM head."""
        raise InputError(_chain.BLIND)

    def open(self, capacity: int) -> Session:
        """Raises InputError: there is no model."""
        raise InputError(_chain.BLIND)


@dataclass
class Drafted:
    """The last drafts: rows in the drafting's order, with their chains."""

    drafting: Drafting
    texts: list[np.ndarray]
    view: Rows
    tree: DraftTree
    chains: list[list[int]]

    def goes_on(self, texts: Sequence[np.ndarray], added: Sequence[int]) -> list[int]:
        """The row that each text continues, -1 for none; each row once (equal texts have equal states)."""
        places: dict[bytes, list[int]] = {}
        for row, text in enumerate(self.texts):
            places.setdefault(text.tobytes(), []).append(row)
        before = (text[: len(text) - n].tobytes() for text, n in zip(texts, added, strict=True))
        return [numbers.pop(0) if (numbers := places.get(text)) else -1 for text in before]

    def tell(self, new: Mapping[int, list[int]]) -> None:
        """The end of the round: the tokens of continuing rows; nothing is known of rows that left."""
        tokens = [new.get(row, []) for row in range(len(self.texts))]
        accepted = [common(text[:-1], chain) for text, chain in zip(tokens, self.chains, strict=True)]
        roots = [text[-1] if text else root for text, root in zip(tokens, self.view.root, strict=True)]
        observe(self.drafting, self.view, self.tree, accepted, roots, tokens)


@dataclass
class Live:
    """The drafter's state for the rows that vLLM decodes."""

    drafter: Drafter
    tokens: int
    target: Sizes
    gumbel: GumbelNoise
    last: Drafted | None = None

    @torch.no_grad()
    def draft(self, texts: Sequence[np.ndarray], added: Sequence[int]) -> list[list[int]]:
        """A chain for every text; the last `added[i]` tokens of text i are new since the last call."""
        if not texts:
            self.last = None
            return []
        rows = self.last.goes_on(texts, added) if self.last else [-1] * len(texts)
        known, fresh = ([i for i, row in enumerate(rows) if (row < 0) == new] for new in (False, True))
        drafting: Drafting | None = None
        if self.last and known:
            self.last.tell({rows[i]: texts[i][len(texts[i]) - added[i] :].tolist() for i in known})
            drafting = self.last.drafting
            drafting.select([rows[i] for i in known])
        if fresh:
            opened = self.read([texts[i].tolist() for i in fresh])
            if drafting is None:
                drafting = opened
            else:
                drafting.join(opened)
        assert drafting is not None
        order = [*known, *fresh]
        self.last = self.propose(drafting, [texts[i].copy() for i in order])
        chains = dict(zip(order, self.last.chains, strict=True))
        return [chains[i] for i in range(len(texts))]

    def read(self, texts: Sequence[Sequence[int]]) -> Drafting:
        """A drafting of new rows, as if each text's last token had just been generated."""
        prompts, last = [text[:-1] for text in texts], [text[-1] for text in texts]
        drafting = self.drafter.open(prompts, self.target.context + self.tokens + 1)
        view = self.seen(prompts)
        observe(drafting, view, root_only(view.root), [0] * len(last), last, [[token] for token in last])
        return drafting

    def propose(self, drafting: Drafting, texts: list[np.ndarray]) -> Drafted:
        """The drafting's chains for its rows."""
        view = self.seen(texts)
        tree = root_only(view.root)
        if max(view.remaining) > 1:
            tree = drafting.propose(view, Budget(self.tokens + 1, self.tokens))
        rows = zip(tree.tokens.tolist(), tree.size.tolist(), view.remaining, strict=True)
        return Drafted(drafting, texts, view, tree, [tokens[1:size][: left - 1] for tokens, size, left in rows])

    def seen(self, texts: Sequence[Sequence[int] | np.ndarray]) -> Rows:
        """Rows for a drafter: greedy, since vLLM samples with its own noise and treats drafts as deterministic."""
        b = len(texts)
        start = tuple(len(text) - 1 for text in texts)
        return Rows(
            root=tuple(int(text[-1]) for text in texts),
            start=start,
            seeds=(0,) * b,
            serial=(0,) * b,
            sampling=(GREEDY,) * b,
            rule="coupled",
            remaining=tuple(max(1, self.target.context - 1 - s) for s in start),
            gumbel=self.gumbel,
        )


def observe(
    drafting: Drafting, view: Rows, tree: DraftTree, accepted: list[int], roots: list[int], tokens: list[list[int]]
) -> None:
    """Update a drafting after a round, with the number of accepted tokens of each row's chain; without logits."""
    output = TargetOutput(np.zeros((*tree.tokens.shape, 0), np.float32))
    drafting.observe(Round(view, tree, output, [list(range(1 + n)) for n in accepted], roots, tokens))
