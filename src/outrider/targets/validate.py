"""Proof, on this machine, that tree passes equal sequential decoding for a model; with a negative control.

Three ragged prompts, two rounds of tree -> commit -> tree with a different acceptance in every row. The reference is the
stock model with a stock cache, one token at a time along every path. The control gives every node a mask that lets it
see its siblings, and must be far off: else the model ignores masks, and agreement proves nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from ..tree import from_paths
from ..types import DraftTree, InputError
from .hf import HFSession, HFTarget

PROMPTS = (9, 4, 14)  # lengths
PATHS = (((1, 2, 3), (1, 4), (5, 6)), ((7,), (8, 9, 10)), ((2, 3), (2, 5, 7), (6,)))
ACCEPTED = (2, 0, 1)  # nodes of the first path that each row accepts
CLEAR = 20.0  # the control must be this many times further off than the tree


@dataclass(frozen=True)
class Report:
    """What was found. Differences are of log-probabilities."""

    model: str
    exact: bool
    worst: float  # largest difference of a tree pass from sequential decoding
    noise: float  # what is allowed: the rounding of this precision, measured on a pass over several tokens
    control: float  # the same with a wrong mask
    sentence: str


@torch.no_grad()
def validate(target: HFTarget, seed: int = 0) -> Report:
    """Run the proof: about a second for a small model."""
    dice = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, target.vocab, (n,), generator=dice).tolist() for n in PROMPTS]
    scale = max(1, (target.vocab - 1) // 12)
    paths = [[[x * scale % target.vocab for x in path] for path in row] for row in PATHS]
    worst, control = _compare(target, prompts, paths)
    noise = _noise(target, prompts[2])
    exact = worst <= noise and control > CLEAR * max(worst, 1e-12)
    name = f"{type(target.model).__name__} ({target.dtype})".replace("torch.", "")
    if exact:
        sentence = f"{name}: tree passes equal sequential decoding to {worst:.1e} (allowed {noise:.1e}); the control is off by {control:.1e}"
    elif worst > noise:
        sentence = f"{name}: a tree pass differs from sequential decoding by {worst:.1e}, more than rounding ({noise:.1e})"
    else:
        sentence = f"{name}: a wrong mask changes nothing ({control:.1e}), so that the model must be ignoring masks"
    return Report(name, exact, worst, noise, control, sentence)


def _compare(target: HFTarget, prompts: list[list[int]], paths: list[list[list[int]]]) -> tuple[float, float]:
    """Largest differences over two rounds: of the tree, and of the control."""
    session = target.open(64)
    for _ in session.prefill(prompts):
        pass
    texts, worst, control = [list(p) for p in prompts], 0.0, 0.0
    for turn in range(2):
        roots = [(3 + turn + b) % target.vocab for b in range(len(prompts))]
        tree, _ = from_paths(roots, paths, device=target.device)
        looked = session.forward(tree).logits
        wrong = session.forward(_seeing_siblings(tree)).logits
        looked = session.forward(tree).logits  # the control wrote keys of its own
        for b, text in enumerate(texts):
            for node in range(int(tree.size[b])):
                line = _line(tree, b, node)
                right = _sequential(target, [*text, *line])
                worst = max(worst, _distance(looked[b, node], right))
                control = max(control, _distance(wrong[b, node], right)) if node else control
        path = torch.tensor([[0, *range(1, 3)]] * len(texts), device=target.device)
        count = torch.tensor([1 + a for a in ACCEPTED], device=target.device)
        session.keep(path, count)
        for b, text in enumerate(texts):
            text += _line(tree, b, ACCEPTED[b])
    return worst, control


def _line(tree: DraftTree, b: int, node: int) -> list[int]:
    """The tokens from the root to a node."""
    assert tree.ancestors is not None
    return tree.tokens[b][tree.ancestors[b, node]].tolist()


def _seeing_siblings(tree: DraftTree) -> DraftTree:
    assert tree.ancestors is not None
    index = torch.arange(tree.nodes, device=tree.tokens.device)
    real = (index < tree.size[:, None])[:, None]
    return replace(tree, ancestors=tree.ancestors | (real & real.transpose(1, 2)))


def _sequential(target: HFTarget, text: list[int], together: int = 1) -> Float[Tensor, " v"]:
    """Stock decoding: the prompt but its tail in one pass, then `together` tokens at a time."""
    ids = torch.tensor([text], device=target.device)
    tail = min(8, len(text) - 1)
    out = target.model(ids[:, : len(text) - tail], use_cache=True)
    for i in range(len(text) - tail, len(text), together):
        out = target.model(ids[:, i : i + together], past_key_values=out.past_key_values, use_cache=True)
    return out.logits[0, -1]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double().log_softmax(-1) - b.double().log_softmax(-1)).abs().max())


def _noise(target: HFTarget, text: list[int]) -> float:
    """What rounding alone does: passes over one and over several tokens, in stock code; never below the precision."""
    measured = max(_distance(_sequential(target, text[:n], 4), _sequential(target, text[:n])) for n in (9, 13, 14))
    least = {torch.float64: 1e-5, torch.float32: 1e-3}.get(target.dtype, 0.1)
    return max(least, 8 * measured) if target.dtype not in (torch.float32, torch.float64) else least


def ensure(target: HFTarget) -> None:
    """Refuse a model that fails the proof. What passed is remembered by its configuration, per user."""
    file = _folder() / f"{_key(target)}.json"
    if file.is_file():
        return
    try:
        report = validate(target)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{target.model.config.model_type} cannot take a tree: {str(error).splitlines()[0]}") from error
    if not report.exact:
        raise InputError(f"{report.sentence}; it would not be served correctly, so it is refused")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(report)), encoding="utf-8")
    partial.replace(file)


def _folder() -> Path:
    home = os.environ.get("OUTRIDER_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / ("validated" if os.environ.get("OUTRIDER_CACHE") else "outrider/validated")


def _key(target: HFTarget) -> str:
    config: dict[str, Any] = target.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    text = json.dumps([config, str(target.dtype), target.device.type, transformers.__version__], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


__all__ = ["HFSession", "Report", "ensure", "validate"]
