"""The logits that texts are checked against: of the stock model if there is one, else of the target's passes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.protocols import Target
from ..core.tree import chain

if TYPE_CHECKING:
    from ..llm import LLM


def perturbed(llm: LLM, ids: Sequence[int], new: Sequence[int], temperature: float, seed: int) -> np.ndarray:
    """[new, v]: the scores whose argmax plain decoding takes: logits, with Gumbel noise of their positions at T > 0."""
    scores = logits(llm, ids, new)
    if temperature > 0:
        from ..core.noise import GumbelNoise

        first = 1 if llm.target.separate else len(ids)
        noise = GumbelNoise(llm.target.vocab).at([seed] * len(new), range(first, first + len(new)))
        scores = scores + temperature * np.asarray(noise, dtype=np.float64)
    return scores


def logits(llm: LLM, ids: Sequence[int], new: Sequence[int]) -> np.ndarray:
    """[new, v], float64: the logits for each new token, by the stock model's forward over prompt and text.

    A target that has no stock model here, or other weights (quantised ones), computes them itself.
    """
    if find_spec("torch") is None or llm.target.integers or (model := llm.target.model) is None:
        return own_logits(llm.target, ids, new)
    import torch

    written = list(new[:-1])
    with torch.no_grad():
        if llm.target.separate:
            decoder = torch.tensor([[model.config.decoder_start_token_id, *written]], device=model.device)
            inputs = torch.tensor([list(ids)], device=model.device)
            out = model(input_ids=inputs, decoder_input_ids=decoder).logits[0]
        else:
            text = torch.tensor([[*ids, *written]], device=model.device)
            some = {"logits_to_keep": len(new)} if "logits_to_keep" in signature(model.forward).parameters else {}
            out = model(text, **some).logits[0, -len(new) :]
    return host(out)


def own_logits(target: Target, ids: Sequence[int], new: Sequence[int]) -> np.ndarray:
    """The same by the target's own passes: prefill, then the text as one chain."""
    session, written = target.open(len(ids) + len(new) + 1), list(new[:-1])
    with target.turn():
        for chunk in session.prefill([list(ids)]):
            rows = [host(chunk.output.logits[:, -1:])[0]]
        if written:
            rows.append(host(session.forward(chain([written])).logits)[0])
    return np.concatenate(rows)


def host(logits: Any) -> np.ndarray:
    """Logits, an array or a tensor of another device, as a float64 array."""
    if isinstance(logits, np.ndarray):
        return logits.astype(np.float64)
    return np.asarray(logits.double().cpu().numpy())
