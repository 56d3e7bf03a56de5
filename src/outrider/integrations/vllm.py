"""Outrider's drafters inside stock vLLM: lookup, suffix, n-grams, draft models, Mamba drafters, and mixes of them.

    vllm serve MODEL --additional-config '{"outrider": "lookup"}' --speculative-config
        '{"method": "custom_class", "model": "outrider.integrations.vllm.Proposer", "num_speculative_tokens": 5}'

vLLM calls `propose` after every step with the rows that it decodes and their texts, and verifies the chains that come
back. It hands over no hidden states and no names of requests; rows come, go and change places between calls. So a row
is known by its text: it is the row whose text, before the tokens that were just sampled, is the one drafted from last
time. A row that is not recognised is read anew. Whatever is drafted costs or saves time only; the text is vLLM's.

Nothing of vLLM is imported: what its configuration is asked for was read in vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import drafters
from ..backends.torch import load_tokenizer
from ..core.noise import GumbelNoise
from ..core.protocols import Drafter, Drafting, Round, Session, Target, TargetOutput
from ..core.tree import root_only
from ..core.types import Budget, DraftTree, Rows
from ..drafters import _chain
from ..params import InputError, Sampling

KEY = "outrider"
HINT = f"""name a drafter in vLLM's additional config, as in --additional-config '{{"{KEY}": "lookup"}}'"""
GREEDY = Sampling(0.0)


class Proposer:
    """The class that vLLM's `{"method": "custom_class", "model": "outrider.integrations.vllm.Proposer"}` names.

    The drafter is a SPEC, or a list of SPECs for a mix, under the key `outrider` of vLLM's `additional_config`.
    """

    def __init__(self, vllm_config: Any):
        """Reads vLLM's `VllmConfig`; raises InputError where it names no drafter."""
        self.config = vllm_config
        self.specs = asked(vllm_config.additional_config)
        self.tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.live: Live | None = None

    def load_model(self, model: Any = None) -> None:
        """Load the drafter; vLLM calls this when it has loaded its own model (`model`, which is not read).

        Raises InputError for a drafter that cannot be had, does not fit, or reads hidden states.
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
        """A chain for every row that has just been given tokens.

        Args:
            sampled_token_ids: of each row, the tokens of this step; empty while its prompt is being read.
            num_tokens_no_spec: [rows or more], the length of each text, those tokens included.
            token_ids_cpu: [rows or more, context], the texts.
            slot_mappings: not read.

        Returns:
            Of each row at most `num_speculative_tokens` tokens, none where there is nothing to guess.
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
    """The target's, by vLLM's `ModelConfig`, for drafters with a tokenizer of their own; also where vLLM is told to go
    without (`skip_tokenizer_init`), but None there if it cannot be had."""
    try:
        return load_tokenizer(known.tokenizer, known.trust_remote_code)
    except InputError:
        if not known.skip_tokenizer_init:
            raise
        return None


def asked(additional: Any) -> list[str]:
    """The SPECs under the key `outrider`."""
    drafters = additional.get(KEY) if isinstance(additional, Mapping) else None
    specs = [drafters] if isinstance(drafters, str) else drafters
    if not isinstance(specs, list | tuple) or not specs or not all(isinstance(s, str) and s for s in specs):
        raise InputError(f"no drafter is named (a text or a list of texts, not {drafters!r}); {HINT}")
    return list(specs)


@dataclass
class Sizes(Target):
    """vLLM's model as far as drafters of text need it: a `Target` that has sizes, and computes nothing."""

    vocab: int
    context: int
    precision: str
    hidden: int
    layers: int
    config: Mapping[str, Any]
    device: str = "cpu"

    @classmethod
    def of(cls, vllm_config: Any) -> Sizes:
        """From vLLM's configuration."""
        model = vllm_config.model_config
        device, text = str(vllm_config.device_config.device), model.hf_text_config
        kind = str(model.dtype).removeprefix("torch.")
        return cls(
            model.get_vocab_size(), model.max_model_len, kind, model.get_hidden_size(), int(text.num_hidden_layers),
            text.to_dict(), device,
        )  # fmt: skip

    @property
    def config_dict(self) -> Mapping[str, Any]:
        """What vLLM knows of the model's configuration."""
        return self.config

    def turn(self) -> AbstractContextManager[Any]:
        """It takes no steps."""
        return nullcontext()

    def embed(self, tokens: Any) -> Any:
        """There are no embeddings: whoever asks for them is refused."""
        raise InputError(_chain.BLIND)

    def head(self, features: Any) -> Any:
        """There is no head: whoever asks for it is refused."""
        raise InputError(_chain.BLIND)

    def open(self, capacity: int) -> Session:
        """There is no model: whoever opens it is refused."""
        raise InputError(_chain.BLIND)


@dataclass
class Drafted:
    """What was drafted last: the rows in the drafting's own order, and a chain for each."""

    drafting: Drafting
    texts: list[np.ndarray]
    view: Rows
    tree: DraftTree
    chains: list[list[int]]

    def goes_on(self, texts: Sequence[np.ndarray], added: Sequence[int]) -> list[int]:
        """Of each text the row that it goes on from, -1 for none; each row once (equal texts have equal states)."""
        places: dict[bytes, list[int]] = {}
        for row, text in enumerate(self.texts):
            places.setdefault(text.tobytes(), []).append(row)
        before = (text[: len(text) - n].tobytes() for text, n in zip(texts, added, strict=True))
        return [numbers.pop(0) if (numbers := places.get(text)) else -1 for text in before]

    def tell(self, new: Mapping[int, list[int]]) -> None:
        """The round's end: the tokens of the rows that go on. Of rows that left nothing is known."""
        tokens = [new.get(row, []) for row in range(len(self.texts))]
        accepted = [same(text[:-1], chain) for text, chain in zip(tokens, self.chains, strict=True)]
        roots = [text[-1] if text else root for text, root in zip(tokens, self.view.root, strict=True)]
        observe(self.drafting, self.view, self.tree, accepted, roots, tokens)


@dataclass
class Live:
    """The drafter at work for the rows that vLLM decodes."""

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
        """A drafting of rows that were not known, as if each text's last token had just been written."""
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
        """Rows as a drafter sees them: greedy, since vLLM draws with a noise of its own and takes drafts as certain."""
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
    """Tell a drafting of a finished round: how many tokens of each row's chain were right. Logits there are none."""
    output = TargetOutput(np.zeros((*tree.tokens.shape, 0), np.float32))
    drafting.observe(Round(view, tree, output, [list(range(1 + n)) for n in accepted], roots, tokens))


def same(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
