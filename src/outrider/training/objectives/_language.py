"""Small language models as drafters: a Mamba, and a Transformer of its size for comparison.

Three stages (the first two as in Choi et al. 2025), each a separate training that starts from the folder of the one
before (`init=DIR`):

    pretrain   next token, every token of every document
    sft        next token, with the loss mask: the assistant's answers
    distil     the target's distribution at those tokens, by forward KL, reverse KL or total variation

The folder is a stock transformers model with the target's tokenizer; its config names the completed stages and the
tokens of its draft vocabulary, if any, to which the loss is restricted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ...backends.native.draft_vocab import DRAFT_VOCAB
from ...backends.torch import HFTarget, vocabulary
from ...backends.torch.load import from_pretrained, save_pretrained, save_tokenizer
from ...drafters import _heads
from ...nets import mamba as ssm
from ...params import InputError
from ..data import Batch
from ..features import TargetFeatures, hidden, learned
from ._losses import DIVERGENCES, likeliest, precise
from ._objective import NetworkObjective, Optimiser

STAGES = ("pretrain", "sft", "distil")

OPTIMISER = Optimiser(lr=2e-3, clip=1.0, warmup=100)


class LanguageObjective(NetworkObjective):
    """net: a causal language model of transformers, in the precision of training."""

    ids: Tensor | None  # tokens of the draft vocabulary; None: all of the target's
    places: Tensor | None  # indices of the target's tokens in it, -1: none

    def __init__(self, target: HFTarget, net: Any, stage: str, loss: str):
        super().__init__(target, net)
        self.drafter = "mamba" if net.config.model_type in ssm.KINDS else "model"
        self.stage, self.loss = stage, loss
        self.taps = (-1,) if stage == "distil" else ()
        self.view = None if net.config.model_type in ssm.KINDS else HFTarget(net)
        self.before = list(getattr(net.config, "outrider_stages", ()))
        self.register_buffer("ids", vocabulary.ids_named(net))
        self._read_vocabulary()

    def _read_vocabulary(self) -> None:
        ids = self.ids
        self.teacher = _heads.rows(self.target, ids)
        places = None if ids is None else vocabulary.places_of(ids, self.target.vocab)
        self.register_buffer("places", places, persistent=False)
        if ids is not None:
            setattr(self.net.config, DRAFT_VOCAB, ids.tolist())

    def load_state_dict(self, state_dict: Mapping[str, Any], *given: Any, **options: Any) -> Any:
        """As of any module; a resumed run keeps its draft vocabulary, whatever data has come since."""
        kept = {} if self.ids is None else {"ids": self.ids}  # which checkpoints of older versions lack
        made = super().load_state_dict({**kept, **state_dict}, *given, **options)
        self._read_vocabulary()
        return made

    def features(self, batch: Batch) -> Float[Tensor, "b n h"]:
        """Hidden states after the last norm, documents separate."""
        if self.view is not None:
            return hidden(self.view, batch)[-1]
        fresh = (batch.positions == 0) & (batch.documents >= 0)
        return ssm.run(self.net, batch.tokens, ssm.empty(self.net, len(batch.tokens)), None, fresh)[0]

    def forward(self, batch: Batch, seen: TargetFeatures, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The summed loss, the number of positions, and the accuracy."""
        places, tokens = batch.same(1) if self.stage == "pretrain" else batch.wanted(1), batch.ahead(1)
        asked = places.sum()
        if self.places is not None:  # tokens outside the draft vocabulary have no loss
            tokens = self.places[tokens]
            places = places & (tokens >= 0)
        tokens = tokens[places]
        student = precise(self._head(self.features(batch)[places]))
        if self.stage == "distil":
            with torch.no_grad():
                teacher = precise(self.teacher(seen.features[-1][places]))
            losses, right = DIVERGENCES[self.loss](student, teacher), likeliest(teacher)
        else:
            losses, right = functional.cross_entropy(student, tokens, reduction="none"), tokens
        hit = (likeliest(student) == right).float().sum().detach() / asked
        return losses.sum(), losses.new_tensor(float(len(losses))), {"hit": hit}

    def _head(self, features: Float[Tensor, "k h"]) -> Float[Tensor, "k v"]:
        """Logits over the draft vocabulary."""
        if self.ids is None:
            return self.net.lm_head(features)[:, : self.target.vocab]
        return functional.linear(features, self.net.lm_head.weight[self.ids])

    def save(self, folder: str | Path) -> None:
        self.net.config.outrider_stages = [*self.before, self.stage if self.stage != "distil" else self.loss]
        save_pretrained(self.net, folder)
        save_tokenizer(self.target.model, folder)


def special_tokens(target: HFTarget) -> dict[str, Any]:
    """The target's vocabulary and special tokens, for the config of a language model."""
    ends = {name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"vocab_size": target.vocab, **ends}


def unusual(build: Callable[..., Any], fields: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `build` that are not its defaults: field of the config, as in `fields`, -> option and value."""
    usual = inspect.signature(build).parameters
    return {fields[name]: (name, value) for name, value in given.items() if value != usual[name].default}


def objective(
    target: HFTarget,
    fresh: Callable[[], Any],
    stage: str,
    loss: str,
    init: str,
    kinds: tuple[str, ...],
    few: Int[Tensor, " vd"] | None,
    shape: Mapping[str, tuple[str, Any]],
) -> LanguageObjective:
    """A language model in one stage of its training. few: the tokens of its draft vocabulary; that of `init` is kept.
    shape: fields of the config -> option and what was given for it, where that is not the default.
    Raises InputError for an unknown stage, loss or model, another draft vocabulary, or an `init` of another shape."""
    if stage not in STAGES or loss not in DIVERGENCES:
        raise InputError(f"a stage is {', '.join(STAGES)}, and the loss of distil {', '.join(DIVERGENCES)}")
    net: Any = from_pretrained(init, "float32", str(target.device), False, {}) if init else fresh()
    if net.config.model_type not in kinds:
        raise InputError(f"{init} is a {net.config.model_type}, and this method trains {' or '.join(kinds)}")
    for field, (option, given) in shape.items() if init else ():
        if given != (theirs := getattr(net.config, field, given)):
            raise InputError(f"{init} has {option}={theirs}, not {given}; leave {option} out")
    if net.config.vocab_size < target.vocab:
        raise InputError(
            f"{init} has {net.config.vocab_size} tokens and the target {target.vocab}; use its own target's"
        )
    has = vocabulary.ids_named(net)
    if few is not None and has is not None and len(has) != len(few):
        raise InputError(f"{init} drafts {len(has)} tokens, not {len(few)}; leave draft_vocab out")
    if few is not None and has is None:
        setattr(net.config, DRAFT_VOCAB, few.tolist())
    return LanguageObjective(target, net.to(learned(target.dtype)), stage, loss)
