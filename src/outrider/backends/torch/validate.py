"""Proof, on this machine, that tree passes equal sequential decoding for a model; with a negative control.

Three ragged prompts, two rounds of tree -> commit -> tree with a different acceptance in every row. The reference is
the stock model with a stock cache, one token at a time along every path. The control lets every node see its siblings,
and must be further off than what is allowed: else agreement would prove nothing.

Where activations are rounded to int8 (`c/gemm/int8.h`), the least difference grows with every layer, until it says
nothing. There the reference is the target's own pass over one token; the full weights' proof covers the code but for
these products, which tests hold to an exact reference.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from ... import __version__, kept, machine
from ...core.protocols import Target
from ...core.tree import chain, from_paths
from ...core.types import DraftTree
from ...params import InputError, first_line
from ..native.target import NativeTarget
from . import attention, families, spread
from .carrier import carried, carrying
from .hf import HFTarget
from .seq2seq import SeqTarget
from .tensors import dtype_of, tensor

logger = logging.getLogger(__name__)
PROVED: set[str] = set()  # by this process, whose cache folder may not be writable
PROMPTS = (9, 4, 14)  # lengths
PATHS = (((1, 2, 3), (1, 4), (5, 6)), ((7,), (8, 9, 10)), ((2, 3), (2, 5, 7), (6,)))
ACCEPTED = (2, 0, 1)  # nodes of the first path that each row accepts
LEAST = {torch.float64: 1e-5, torch.float32: 1e-4}  # allowed at least: some families take softmax in float32
LENGTH = 92  # of the text whose logits are compared bit for bit
MARGIN = 8  # times the measured rounding of this precision


@dataclass(frozen=True)
class Report:
    """The result. Differences are the largest ones of any log-probability."""

    model: str
    exact: bool  # did it pass?
    worst: float  # of a tree pass from sequential decoding
    noise: float  # of a stock pass over several tokens from stock passes over one: rounding alone
    allowed: float
    control: float  # of a tree pass with a wrong mask
    bits: bool | None  # are logits of trees, bit for bit, those of one token at a time? None: not promised here
    verdict: str  # PASS bits, PASS rounding or FAIL
    sentence: str


@torch.no_grad()
def validate(target: Target, seed: int = 0) -> Report:
    """Run the proof: about half a second for a small model, some 80 forward passes of a few tokens.

    Args:
        target: any that has a stock model. (That of a native target is made at first use.)
        seed: of the random prompts.
    """
    model, quantised = stock_of(target), target.integers
    dice = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, target.vocab, (n,), generator=dice).tolist() for n in PROMPTS]
    scale = max(1, (target.vocab - 1) // 12)
    paths = [[[x * scale % target.vocab for x in path] for path in row] for row in PATHS]
    worst, control = _compare(target, None if quantised else model, prompts, paths)
    noise = 0.0 if quantised else _noise(target, model, prompts[0], prompts[2][:8])
    allowed = max(LEAST.get(model.dtype, 1e-3), MARGIN * noise)
    exact = worst <= allowed < control / 2
    bits = same_bits(target, seed) if exact and target.exact == "bits" else None
    name = f"{type(model).__name__} in {str(model.dtype).removeprefix('torch.')}"
    name += ", integer products" if quantised else ""
    if exact:
        finding = (
            f"tree passes equal sequential decoding to {worst:.1e}; rounding {noise:.1e}, a wrong mask {control:.1e}"
        )
    elif not worst <= allowed:
        finding = f"a tree pass differs from sequential decoding by {worst:.1e}, more than rounding ({allowed:.1e})"
    else:
        finding = f"a wrong mask changes only {control:.1e} (rounding {allowed:.1e}), so the model ignores masks"
    if bits is not None:
        finding += "; every logit has the bits of plain decoding" if bits else "; but some logits have other bits"
    passed = exact and bits is not False
    verdict = f"PASS {target.exact}" if passed else "FAIL"
    return Report(name, passed, worst, noise, allowed, control, bits, verdict, f"{verdict}: {name}: {finding}")


def stock_of(target: Target) -> Any:
    """The stock model of a target, in its precision."""
    dtype = dtype_of(target)
    return target.model if target.model.dtype == dtype else target.model.to(dtype)


class Stock:
    """A text as the stock model reads it: its own attention, a stock cache, no mask."""

    def __init__(self, target: Target, model: Any, prompt: Sequence[int]):
        self.model, self.past = model, None
        self.more: dict[str, Any] = {}
        ids = torch.tensor([prompt], device=model.device)
        if isinstance(target, SeqTarget):
            self.more = {"encoder_outputs": model.get_encoder()(ids), "attention_mask": torch.ones_like(ids)}
            self.read(target.opening)
        else:
            self.read(prompt)

    def read(self, tokens: Sequence[int]) -> Float[Tensor, "n v"]:
        """Read tokens in one pass; the logits after each."""
        model = self.model
        ids = torch.tensor([tokens], device=model.device)
        name = "decoder_input_ids" if self.more else "input_ids"
        with attention.switched(families.text_config(model), None, families.experts_of(model)):
            out = model(**{name: ids}, **self.more, **carrying(model, self.past))
        self.past = carried(model, out)
        return out.logits[0]

    def fork(self) -> Stock:
        twin = copy.copy(self)
        twin.past = copy.deepcopy(self.past)
        return twin


class Own:
    """A text as the target reads it, one token at a time."""

    def __init__(self, target: Target, prompt: Sequence[int]):
        self.target, self.tokens = target, list(prompt)

    def read(self, tokens: Sequence[int]) -> Float[Tensor, "n v"]:
        """Read tokens; the logits after each."""
        session = self.target.open(64)
        for _ in session.prefill([self.tokens]):
            pass
        made = []
        for token in tokens:
            made.append(tensor(session.forward(chain([[token]])).logits[0, 0]))
            session.keep([[0]])
        self.tokens += tokens
        return torch.stack(made)

    def fork(self) -> Own:
        return Own(self.target, self.tokens)


def _compare(target: Target, model: Any, prompts: list[list[int]], paths: list[list[list[int]]]) -> tuple[float, float]:
    """Largest differences over two rounds, of the tree and of the control."""
    session = target.open(64)
    for _ in session.prefill(prompts):
        pass
    texts: list[Any] = [Own(target, p) if model is None else Stock(target, model, p) for p in prompts]
    worst = control = 0.0
    for turn in range(2):
        roots = [(3 + turn + b) % target.vocab for b in range(len(prompts))]
        tree, _ = from_paths(roots, paths)
        wrong = tensor(session.forward(_seeing_siblings(tree)).logits)
        looked = tensor(session.forward(tree).logits)  # second: the control wrote wrong keys
        for b, text in enumerate(texts):
            after = _read_tree(text, tree, b)
            for node, (reader, right) in after.items():
                worst = max(worst, _distance(looked[b, node], right))
                control = max(control, _distance(wrong[b, node], right))
                if node == ACCEPTED[b]:
                    texts[b] = reader
        session.keep([list(range(1 + accepted)) for accepted in ACCEPTED[: len(texts)]])
    return worst, control


def _read_tree(text: Stock | Own, tree: DraftTree, b: int) -> dict[int, tuple[Any, Tensor]]:
    """The reference's reading of every node of row b: its reader and its logits [v]."""
    tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
    after: dict[int, tuple[Any, Tensor]] = {}
    for node in range(int(tree.size[b])):
        reader = (text if node == 0 else after[parents[node]][0]).fork()
        after[node] = reader, reader.read([tokens[node]])[0]
    return after


def _seeing_siblings(tree: DraftTree) -> DraftTree:
    assert tree.ancestors is not None
    real = (np.arange(tree.nodes) < tree.size[:, None])[:, None]
    return replace(tree, ancestors=tree.ancestors | (real & real.transpose(0, 2, 1)))


def _noise(target: Target, model: Any, prompt: list[int], tokens: list[int]) -> float:
    """What rounding alone does, in stock code: one pass over several tokens against one pass for each.

    Eight tokens may agree by luck, so it is at least what rounding the logits themselves does.
    """
    text = Stock(target, model, prompt)
    together, one = text.fork().read(tokens), text.fork()
    least = float(together.abs().max()) * torch.finfo(together.dtype).eps / 2
    return max(least, *(_distance(both, one.read([token])[0]) for token, both in zip(tokens, together, strict=True)))


def _distance(a: Float[Tensor, " v"], b: Float[Tensor, " v"]) -> float:
    a, b = (x.double().cpu().log_softmax(-1) for x in (a, b))
    worst = float((a - b).abs().max())
    return worst if worst == worst else float("inf")  # a NaN is as far off as can be


@torch.no_grad()
def same_bits(target: Target, seed: int = 0) -> bool:
    """Two ragged rows with trees, side by side, against one of them alone, one token at a time."""
    vocab, length = target.vocab, min(LENGTH, target.context // 2)
    dice = torch.Generator().manual_seed(seed)
    text = torch.randint(vocab, (length + 12,), generator=dice).tolist()
    alone, beside = target.open(length + 64), target.open(length + 64)
    (*_, chunk) = alone.prefill([text[:length]])
    right = [chunk.output.logits[0, -1]]
    for token in text[length:]:
        right.append(alone.forward(chain([[token]])).logits[0, 0])
        alone.keep([[0]])
    (*_, chunk) = beside.prefill([text[:length], text[: length // 2]])
    if not np.array_equal(chunk.output.logits[0, -1], right[0]):
        return False
    for turn in range(2):
        at = length + 6 * turn
        path = text[at + 1 : at + 6]
        others = [[text[0], text[1]], [*path[:2], text[2]], [text[3]] * 4]
        tree, _ = from_paths([text[at], text[5]], [[*others[: 2 - turn], path, *others[2 - turn :]], [path, *others]])
        looked = beside.forward(tree).logits
        nodes = _path_of(tree, path)
        if not all(np.array_equal(looked[0, node], right[at - length + 1 + i]) for i, node in enumerate(nodes)):
            return False
        beside.keep([nodes, [0]])
    return True


def _path_of(tree: DraftTree, tokens: list[int]) -> list[int]:
    """The nodes that spell these tokens from the root on."""
    nodes = [0]
    for token in tokens:
        children = [i for i in range(1, int(tree.size[0])) if int(tree.parents[0, i]) == nodes[-1]]
        nodes.append(next(i for i in children if int(tree.tokens[0, i]) == token))
    return nodes


def ensure(target: HFTarget | SeqTarget) -> None:
    """Refuse a model that fails the proof. What passed is remembered by its configuration, per user.

    A proof in float32 or float64 holds in any precision: masks and positions are the same, only rounding is not.
    """
    fine = torch.float32, torch.float64
    proofs = kept.folder("validated")
    known = any(_is_proof(proofs / f"{_key(target, dtype)}.json") for dtype in {target.dtype, *fine})
    if isinstance(target, HFTarget) and target.processes > 1:  # they run the proof together or not at all
        known = spread.agreed(target.model, known)
    if known:
        return
    kind = target.config.model_type
    try:
        report = validate(target)
    except InputError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError) as error:
        raise InputError(f"{kind} is a family that cannot take a tree ({first_line(error)})") from error
    if not report.exact:
        hint = "" if target.dtype in fine else "; loading it once with dtype float32 tells rounding from a wrong mask"
        raise InputError(f"{report.sentence}; its texts would not be its own, so it is refused{hint}")
    with kept.keeping():
        kept.write(proofs / f"{_key(target, target.dtype)}.json", asdict(report))


def ensure_native(target: NativeTarget) -> bool:
    """Do native passes equal the stock model's own forward, and have the same bits with drafts as without? What passed
    is remembered for the configuration; what fails is logged."""
    proof = _proof(target)
    if proof.name in PROVED or _is_proof(proof):
        return True
    return _passed(validate(target), proof)


def _proof(target: NativeTarget) -> Path:
    """Where it is remembered that native passes are proved for this configuration."""
    kinds = target.forward.weights.integers
    ways = "-".join([_key(target, dtype_of(target)), target.kernels, *kinds])
    return kept.folder("validated") / f"{ways}.json"


def _is_proof(file: Path) -> bool:
    """Is this the report of a proof that passed?"""
    return kept.read(file).get("exact") is True


def _passed(report: Report, proof: Path) -> bool:
    if not report.exact:
        logger.warning("native passes are not used for this model: %s", report.sentence)
        return False
    PROVED.add(proof.name)
    with kept.keeping():
        kept.write(proof, asdict(report))
    return True


def own_code(model: Any) -> list[str]:
    """The sources of all classes of a model that are neither torch's nor transformers'; a random text for one that was
    typed into an interpreter, so that its proof is made anew."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if kind is not object}
    strange = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "transformers")]
    sources = []
    for kind in strange:
        try:
            sources.append(f"{kind.__qualname__} {inspect.getsource(kind)}")
        except (OSError, TypeError):
            sources.append(secrets.token_hex())
    return sorted(sources)


def _key(target: Target, dtype: torch.dtype) -> str:
    config: dict[str, Any] = target.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype"):
        config.pop(name, None)
    facts = [
        config, str(dtype), machine.device(target.device), transformers.__version__, torch.__version__, __version__,
        own_code(target.model),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]
