"""Small language models as drafters: a Mamba, and the Transformer of its size that it is compared with.

Three stages (Choi et al. 2025 have the first two), each a training of its own that begins from the last one's folder
(`init=DIR`):

    pretrain   next token, every token of every document
    sft        next token, the tokens that are to be learned: the assistant's answers
    distil     the target's law at those tokens, by forward KL, reverse KL or total variation

The folder is a stock model of transformers with the target's tokenizer; its config names the stages it went through.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from .. import ssm
from ..targets import HFTarget, load_tokenizer
from ..targets.load import from_pretrained
from ..types import InputError
from ._losses import soft_cross_entropy
from .data import Batch
from .features import Seen, hidden, learned

STAGES = ("pretrain", "sft", "distil")


def reverse_kl(student: Float[Tensor, "k v"], teacher: Float[Tensor, "k v"]) -> Float[Tensor, " k"]:
    """sum q (log q - log p): what the drafter says must be likely under the target."""
    q, p = student.log_softmax(-1), teacher.log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1)


def forward_kl(student: Float[Tensor, "k v"], teacher: Float[Tensor, "k v"]) -> Float[Tensor, " k"]:
    """sum p (log p - log q)."""
    p = teacher.log_softmax(-1)
    return soft_cross_entropy(student, teacher) + (p.exp() * p).sum(-1)


def total_variation(student: Float[Tensor, "k v"], teacher: Float[Tensor, "k v"]) -> Float[Tensor, " k"]:
    """sum |p - q| / 2 = 1 - the acceptance of speculative sampling (Leviathan et al. 2023, section 3.2)."""
    return (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) / 2


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tv": total_variation,
}


class LanguageObjective(nn.Module):
    """`net`: a causal language model of transformers, in the precision it learns in."""

    def __init__(self, target: HFTarget, net: Any, stage: str, loss: str):
        super().__init__()
        self.target, self.net, self.stage, self.loss = target, net, stage, loss
        self.taps: tuple[int, ...] = (-1,) if stage == "distil" else ()
        self.view = None if net.config.model_type in ssm.KINDS else HFTarget(net)
        self.before = list(getattr(net.config, "outrider_stages", ()))

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.net.parameters()), "scale": 1.0}]

    def features(self, batch: Batch) -> Float[Tensor, "b n h"]:
        """After the last norm, each document by itself."""
        if self.view is not None:
            return hidden(self.view, batch)[-1]
        fresh = (batch.positions == 0) & (batch.documents >= 0)
        return ssm.run(self.net, batch.tokens, ssm.empty(self.net, len(batch.tokens)), None, fresh)[0]

    def forward(self, batch: Batch, seen: Seen, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss summed over the positions learned, how many they are, and the share of right guesses."""
        places = batch.same(1) if self.stage == "pretrain" else batch.wanted(1)
        student = self.net.lm_head(self.features(batch)[places]).float()[:, : self.target.vocab]
        tokens = batch.ahead(1)[places]
        if self.stage == "distil":
            with torch.no_grad():
                teacher = self.target.head(seen.features[-1][places]).float()
            losses, right = LOSSES[self.loss](student, teacher), teacher.argmax(-1)
        else:
            losses, right = functional.cross_entropy(student, tokens, reduction="none"), tokens
        hit = (student.argmax(-1) == right).float().mean().detach()
        return losses.sum(), losses.new_tensor(float(len(losses))), {"hit": hit}

    def save(self, folder: str | Path) -> None:
        self.net.config.outrider_stages = [*self.before, self.stage if self.stage != "distil" else self.loss]
        self.net.save_pretrained(folder)
        where = self.target.model.name_or_path
        tokenizer = load_tokenizer(where) if where else None
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def mamba(
    target: HFTarget,
    kind: str = "mamba2",
    hidden: int = 192,
    layers: int = 4,
    state: int = 0,
    head: int = 32,
    stage: str = "pretrain",
    loss: str = "forward-kl",
    init: str = "",
) -> LanguageObjective:
    """A Mamba or Mamba-2 (`kind`). `state` 0: 16 and 64 numbers a channel; `head`: channels that share a decay."""
    from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

    if kind not in ssm.KINDS:
        raise InputError(f"the kind of a state-space drafter is {' or '.join(ssm.KINDS)}, not {kind!r}")
    shared = {**_words(target), "hidden_size": hidden, "num_hidden_layers": layers, "residual_in_fp32": True}

    def fresh() -> Any:
        if kind == "mamba":
            return MambaForCausalLM(MambaConfig(**shared, state_size=state or 16, initializer_range=0.02))
        if 2 * hidden % head:
            raise InputError(f"heads of {head} channels do not divide {2 * hidden} channels; give another head")
        config = Mamba2Config(
            **shared, state_size=state or 64, head_dim=head, num_heads=2 * hidden // head, n_groups=1,
            initializer_range=0.02, tie_word_embeddings=True,
        )  # fmt: skip
        return Mamba2ForCausalLM(config)

    return _objective(target, fresh, stage, loss, init, ssm.KINDS)


def draft_lm(
    target: HFTarget,
    hidden: int = 192,
    layers: int = 2,
    heads: int = 3,
    stage: str = "pretrain",
    loss: str = "forward-kl",
    init: str = "",
) -> LanguageObjective:
    """A Llama of this size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if hidden % heads or hidden // heads % 2:
        raise InputError(f"{heads} heads do not divide a width of {hidden} into even parts; give another number")
    config = LlamaConfig(
        **_words(target), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=8 * hidden // 3 // 8 * 8, max_position_embeddings=target.context,
        tie_word_embeddings=True,
    )  # fmt: skip
    return _objective(target, lambda: LlamaForCausalLM(config), stage, loss, init, ("llama",))


def _words(target: HFTarget) -> dict[str, Any]:
    ends = {name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"vocab_size": target.vocab, **ends}


def _objective(
    target: HFTarget, fresh: Callable[[], Any], stage: str, loss: str, init: str, kinds: tuple[str, ...]
) -> LanguageObjective:
    if stage not in STAGES or loss not in LOSSES:
        raise InputError(f"a stage is {', '.join(STAGES)}, and the loss of distil {', '.join(LOSSES)}")
    net: Any = from_pretrained(init, "float32", str(target.device), False, {}) if init else fresh()
    if net.config.model_type not in kinds:
        raise InputError(f"{init} is a {net.config.model_type}, and this method trains {' or '.join(kinds)}")
    if net.config.vocab_size < target.vocab:
        raise InputError(
            f"{init} has {net.config.vocab_size} tokens and the target {target.vocab}; use its own target's"
        )
    return LanguageObjective(target, net.to(learned(target.dtype)), stage, loss)
