"""Do this machine's kernels give a row the same bits whatever stands beside it? Tried out, not believed.

Four questions (`kernels.py` asks the first three):

 1. Every kind of product (linear layer, experts): between which numbers of rows does no row's result change?
 2. Activations: do the last elements of a tensor come out as the others do?
 3. Attention: from how many rows on does no row change, and do keys that are hidden at the end change nothing?
 4. The whole model: are the logits of trees in a batch of unequal rows, bit for bit, those of one token at a time?

The answer is kept in the user's cache folder by model shapes, precision, processor, threads and versions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
import transformers

from ... import kept, machine
from ...params import InputError, check_exact
from ...schema import from_dict
from . import kernels, products
from .exact import Exactness
from .hf import HFTarget
from .packed import PACKED
from .validate import same_bits

CHEAP = 4  # rows that cost what one costs; beyond them "auto" keeps to rounding
HALF = (torch.bfloat16, torch.float16)
KERNELS = "ONEDNN_", "DNNL_", "ATEN_", "MKL_"  # variables that choose kernels
MOST = 1 << 20  # that a number of an answer may be
QUESTIONS = 5  # what is asked: with another number, answers that were kept no longer count


@dataclass(frozen=True)
class Found:
    """The answer: what passes need, or why no bits can be promised."""

    exactness: Exactness | None
    reason: str = ""
    seconds: float = 0.0


def settle(target: HFTarget, exact: str) -> None:
    """Give the target the exactness that was asked for: "auto", "bits" or "rounding".

    "auto" is bits where they cost next to nothing: in 16 bits, on kernels that need few rows. What would decide
    by the clock might decide otherwise tomorrow, and change texts.
    """
    if check_exact(exact) == "rounding" or (exact == "auto" and target.dtype not in HALF):
        return
    found = find(target)
    if found.exactness is not None and (exact == "bits" or found.exactness.rows <= CHEAP):
        target.use(found.exactness, kernels.layers_of(target, found.exactness.blocks))
    elif exact == "bits":
        raise InputError(f"the same bits cannot be had here: {found.reason}; use exact=rounding, or another dtype")


def find(target: HFTarget) -> Found:
    """What was found before on this machine for a model of these shapes, or else the probe's answer."""
    if reason := lacking(target):
        return Found(None, reason)
    file = kept.folder("exact") / f"{_key(target)}.json"
    if known := _known(file):
        return known
    found = probe(target)
    with kept.keeping():
        kept.write(file, asdict(found))
    return found


def _known(file: Path) -> Found | None:
    """What a file of `find` holds; None where there is none, or none that it can have written."""
    try:
        found: Found = from_dict(Found, kept.read(file))
    except (TypeError, ValueError):
        return None
    numbers = [] if found.exactness is None else found.exactness.numbers()
    return found if all(1 <= n <= MOST for n in numbers) else None


def lacking(target: HFTarget) -> str:
    """Why this model cannot be exact on any machine; empty where it can."""
    if target.device != "cpu":
        return f"the kernels of {target.device.partition(':')[0]} have not been made to sum by position"
    if target.family.uneven:
        return "trees were seen to change a bit of this family's logits"
    if not target.family.bits:
        return f"{target.config.model_type} computes its attention in code of its own"
    if any("int" in (kernels.kind_of(m) or "") for m in target.model.modules() if not isinstance(m, PACKED)):
        return "the sums of quantised layers cannot be probed"
    if target.dtype not in (*HALF, torch.float32):
        return f"torch's fused attention for CPUs knows no {str(target.dtype).removeprefix('torch.')}"
    return ""


@torch.no_grad()
def probe(target: HFTarget) -> Found:
    """Ask the four questions."""
    began = perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = _ask(target)
    return (
        Found(found, "", perf_counter() - began)
        if isinstance(found, Exactness)
        else Found(None, found, perf_counter() - began)
    )


def _ask(target: HFTarget) -> Exactness | str:
    ranges = {kind: kernels.classes(run) for kind, run in kernels.products(target)}
    rows = next(
        (m for m in kernels.SIZES if m <= kernels.FEWEST and all(kernels.reach(r, m) for r in ranges.values())), None
    )
    if rows is None:
        worst = min(ranges, key=lambda kind: max(last - first for first, last in ranges[kind]))
        return f"the results of {worst} depend on how many rows are computed together"
    blocks = {kind: kernels.reach(r, rows) for kind, r in ranges.items()}
    needs = kernels.attention(target)
    if needs is None:
        return "the fused attention's results depend on how many rows or keys are computed together"
    queries, lengths = needs
    step = 1 if all(map(kernels.even, kernels.activations(target))) else kernels.step_of(target)
    if products.has_halves(target.model):
        step = math.lcm(step, products.THREES)  # so that its layers need not fill up, each for itself
    exactness = Exactness(rows, step, queries.least, lengths, blocks, queries.multiple)
    if not holds(target, exactness):
        return "logits of a tree differ from those of one token at a time, though the single kernels agree"
    return exactness


def holds(target: HFTarget, exactness: Exactness) -> bool:
    """Does the whole model keep its bits with this?"""
    before = target.exactness, target.blocks, target.graphs
    target.graphs = None
    target.use(exactness, kernels.layers_of(target, exactness.blocks))
    try:
        return same_bits(target)
    finally:
        target.exactness, target.blocks, target.graphs = before
        products.in_threes(target.model, target.exactness is not None)


def _key(target: HFTarget) -> str:
    kinds = sorted({kind for kind in map(kernels.kind_of, target.model.modules()) if kind})
    config = target.config
    names = "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "num_hidden_layers"
    variables = {k: v for k, v in os.environ.items() if k.startswith(KERNELS)}
    threads = torch.get_num_threads(), variables
    versions = torch.__version__, transformers.__version__, QUESTIONS
    facts = [
        kinds,
        [getattr(config, n, None) for n in names],
        str(target.dtype),
        machine.processor(),
        threads,
        versions,
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:24]
