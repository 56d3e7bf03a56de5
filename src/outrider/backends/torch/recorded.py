"""Steps of small networks, recorded once and replayed without the Python of their modules.

A draft step is many tiny kernels, and walking through the modules that call them takes longer than many of
them. As `targets/graphs.py` does it for targets, a step that is taken often is recorded, and the recording is proved:
where it is first used for calls of another shape, the step is taken both ways, and it is dropped for good where the
two differ by more than rounding.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from . import products

PATIENCE = 32  # calls of a kind before it is recorded: a recording takes as long as some forty steps of EAGLE
PROOFS = 4  # calls of different shape that a recording must equal the ordinary step in
ROUNDINGS = 64  # units in the last place that it may be off by,
COARSE = 2.0**-5  # but never by more than this share of the largest number
logger = logging.getLogger(__name__)


def replay(made: Any, *given: Any) -> Any:
    """Run a recording. torch would otherwise look for fusions in its second run, for half a second, and find none."""
    with torch.jit.optimized_execution(False):
        return made(*given)


class Recorded:
    """`body` as a function of tensors [b, m, ...] alone, to a tuple of tensors.

    Args:
        body: holds every module that it calls, so that their weights become constants of the recording. It may write
            into its arguments, if writing twice does what writing once does.
        patience: calls of a kind that are taken the ordinary way before one is recorded.
    """

    def __init__(self, body: nn.Module, patience: int = PATIENCE):
        self.body, self.patience = body.eval(), patience
        self.seen: Counter[Hashable] = Counter()
        self.made: dict[Hashable, Any] = {}  # a recording of each kind; None: it was dropped
        self.proofs: dict[Hashable, set[tuple[torch.Size, ...]]] = {}

    def __call__(self, kind: Hashable, *given: Tensor) -> tuple[Tensor, ...]:
        """`kind` names what the body does differently for some calls than for others, beyond sizes."""
        if kind not in self.made:
            self.seen[kind] += 1
            if self.seen[kind] <= self.patience:
                return self._stock(given)
            self.made[kind] = self._record(given)
            self.proofs[kind] = set()
        made, proofs = self.made[kind], self.proofs[kind]
        if made is None:
            return self._stock(given)
        try:
            found: tuple[Tensor, ...] = replay(made, *given)
        except RuntimeError as error:  # a size that became a constant of the recording
            logger.warning("a recorded step failed (%s); the network's own is used from now on", str(error)[-200:])
            self.made[kind] = None
            return self._stock(given)
        sizes = given[0].shape, *(t.shape for t in found)
        if len(proofs) < PROOFS and sizes not in proofs:
            true = self._stock(given)
            if not all(_close(a, b) for a, b in zip(found, true, strict=True)):
                logger.warning("a recorded step differs from the network's own; the network's own is used from now on")
                self.made[kind] = None
                return true
            proofs.add(sizes)
        return found

    def _stock(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.body(*given)
        return found

    def _record(self, given: tuple[Tensor, ...]) -> Any:
        products.pack(self.body)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # tracing is deprecated in favour of torch.compile (docs/log.md)
                return torch.jit.trace(self.body, given, check_trace=False)
        except (RuntimeError, TypeError, ValueError) as error:
            logger.warning("this network's step cannot be recorded (%s); its own is used", str(error)[:200])
            return None


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and near(a, b, ROUNDINGS)


def near(a: Tensor, b: Tensor, roundings: int) -> bool:
    """Is a recording's answer that of the ordinary way, up to so many units in the last place of its largest number?"""
    return float((a - b).abs().max()) <= min(roundings * torch.finfo(b.dtype).eps, COARSE) * float(b.abs().max())
