"""Any stock causal language model as a target: trees through its own forward pass.

No modelling code is copied. Four families take slots for positions (`positions.py`); while one of our passes over a
tree runs on them, a function or attribute of theirs is replaced, and put back after it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from threading import RLock
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.protocols import Prefill, Target, TargetOutput
from ...core.tree import chain
from ...core.types import Array, Question, Verdict
from ...params import InputError
from . import aligned, attention, exact, families, products
from .cache import TreeCache
from .carrier import carrying
from .compiled import Forward
from .graphs import PROOFS, Graphs
from .padding import padded
from .session import CHUNK, Pass, TreeSession, out
from .tensors import array
from .turns import turn, without_cudnn
from .verify import judge

SLACK = 256  # slots beyond the context that a tree may use


class HFTarget(Target):
    """A stock model with a language-modelling head.

    The model is put into `eval` mode; its config is another only while one of our passes runs, so that the user's own
    `model.generate` keeps its attention. `load_target` lets a family that is not in `families.py` prove itself first.
    """

    def __init__(self, model: Any):
        self.family, self.tensors = families.of(model), True
        self.model, self.lock = model.eval(), RLock()
        self.config = families.text_config(model)
        self.vocab = int(model.get_output_embeddings().weight.shape[0])
        self.context = families.context_of(model, self.family)
        self.hidden, self.layers = families.width_of(model), int(self.config.num_hidden_layers)
        self.dtype: torch.dtype = model.dtype
        self.precision, self.device = str(model.dtype).removeprefix("torch."), str(model.device)
        self.experts = families.experts_of(model)
        self.windows = families.windows(self.config, self.family)
        self.mark = ""  # of the weights as they were loaded (`mark.py`)
        self.native: Forward | None = None  # passes in compiled code of our own
        self.graphs: Graphs | None = None
        self.exactness: exact.Exactness | None = None
        self.blocks: list[tuple[Any, int]] = []  # layers that read no more rows at a time than this
        self.accepts = frozenset(inspect.signature(model.forward).parameters)

    @property
    def processes(self) -> int:
        """How many processes hold the model together, a part each (`spread.py`). They must run it together."""
        return int(getattr(self.model, "_tp_size", None) or 1)

    @cached_property
    def config_dict(self) -> dict[str, Any]:
        """The config of the layers that write text."""
        return self.config.to_dict()

    @property
    def exact(self) -> Literal["bits", "rounding"]:  # type: ignore[override]
        """What texts with drafts are equal to: "bits", those without, or "rounding", those up to rounding."""
        return "rounding" if self.exactness is None and self.native is None else "bits"

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        """Does the time of a pass follow from the nodes of all rows together?"""
        return self.native is not None

    @property
    def code(self) -> Any:
        """The compiled code that its passes run in; None where they do not."""
        return None if self.native is None else self.native.code

    @property
    def kernels(self) -> str:  # type: ignore[override]
        """Which compiled code computes its passes."""
        return "" if self.native is None else self.native.library_name

    @property
    def arithmetic(self) -> str:
        """Its precision, and how its weights are kept where that is another one."""
        if self.native is not None and self.native.weights.whole:
            return f"{self.precision} with integer products ({' and '.join(sorted(self.native.weights.kinds))})"
        return f"{self.precision} with 16-bit weights" if products.has_halves(self.model) else self.precision

    @property
    def signature(self) -> str:
        """A fingerprint of its weights."""
        seen = hashlib.sha256()
        for name, value in self.model.state_dict().items():
            seen.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            seen.update(value.flatten()[:64].float().cpu().numpy().tobytes())
        return seen.hexdigest()

    def turn(self) -> AbstractContextManager[None]:
        """One step of a batch, alone over this target (`turns.py`)."""
        return turn(self.lock, self.device)

    def release(self) -> None:
        """Give memory back that torch keeps for later."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device != "cpu":
            torch.accelerator.synchronize(self.device)

    def judge(self, question: Question) -> Verdict | None:
        """Apply a rule in compiled code, or on the device; None on a CPU without such code."""
        if self.device == "cpu":
            return None if self.native is None else self.native.walk(question)
        return judge(question)

    @property
    def whole(self) -> bool:
        """Does it multiply whole numbers (`c/gemm/int8.h`)? Its law is then not quite the stock model's."""
        return self.native is not None and bool(self.native.weights.whole)

    def embed(self, tokens: Int[Tensor, "*s"]) -> Float[Tensor, "*s h"]:
        """Token embeddings, with the family's scaling (Gemma scales inside its embedding, Granite after it)."""
        embeds = self.model.get_input_embeddings()(tokens)
        return embeds if self.scale == 1.0 else embeds * self.scale

    @cached_property
    def scale(self) -> float:
        """What embeddings are multiplied by."""
        return float(getattr(self.config, "embedding_multiplier", None) or 1.0)

    def head(self, features: Float[Tensor, "*s h"]) -> Float[Tensor, "*s v"]:
        """Logits of features taken after the final norm (tap -1), with the family's scale and soft cap."""
        lm_head = self.model.get_output_embeddings()
        kind = lm_head.weight.dtype  # a drafter in training is more precise than half a target
        logits = lm_head(features.to(kind if kind.is_floating_point else self.dtype))
        scale, divisor, cap = self._head
        logits = logits * scale if scale else logits
        logits = logits / divisor if divisor else logits
        return torch.tanh(logits / cap) * cap if cap else logits

    def head_rows(self, tokens: Array | None) -> Array | None:
        """See `Target.head_rows`."""
        lm_head = self.model.get_output_embeddings()
        plain = getattr(lm_head, "bias", None) is None and not any(self._head)
        return self._rows(lm_head.weight, tokens) if plain else None

    @property
    def embeddings(self) -> Array | None:
        """See `Target.embeddings`."""
        table = self.model.get_input_embeddings()
        return self._rows(table.weight, None) if type(table) is torch.nn.Embedding and self.scale == 1.0 else None

    def _rows(self, weight: Tensor, rows: Array | None) -> Array | None:
        """Rows of a matrix where passes are compiled and it is in this precision; all of them share its memory."""
        if self.native is None or weight.dtype != self.dtype or not weight.is_contiguous():
            return None
        return array(weight) if rows is None else array(weight)[rows]

    @cached_property
    def _head(self) -> tuple[float | None, ...]:
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return tuple(getattr(self.config, name, None) for name in names)  # looking a config up costs microseconds

    def open(self, capacity: int) -> TreeSession:
        """A session whose rows have room for `capacity` tokens, those of the tree included; it grows if they must."""
        limit = max(capacity, self.context + SLACK)
        return TreeSession(self, TreeCache(int(self.config.num_hidden_layers), capacity, limit))

    def read(self, session: TreeSession, prompts: Sequence[Sequence[int]], taps: tuple[int, ...]) -> Iterator[Prefill]:
        """Prompts, right-padded, CHUNK tokens at a time, from where a lone row already is. Pads lie beyond a row's
        length and are overwritten.

        A chunk's logits are computed at the rows' last tokens alone.
        """
        sizes, device = [len(p) for p in prompts], self.device
        b, n = len(sizes), max(sizes)
        if n > session.cache.limit:
            raise InputError(f"a prompt has {n} tokens and the cache is limited to {session.cache.limit}; shorten it")
        tokens = padded(prompts, device)
        for first in range(max(session.lengths), n, CHUNK):
            end = min(first + CHUNK, n)
            counts = [min(max(size - first, 0), end - first) for size in sizes]
            count = torch.tensor(counts, dtype=torch.long, device=device)
            ends = [max(c, 1) - 1 for c in counts]
            asked = sorted(set(ends))
            output = session.pass_over(
                _chunk(tokens[:, first:end], first, taps, torch.tensor(asked, device=device), count)
            )
            rows = torch.tensor([asked.index(e) for e in ends], device=device)
            output = TargetOutput(output.logits[torch.arange(b, device=device), rows][:, None], output.features)
            session.advance(counts)
            tree = chain([prompt[first:end] for prompt in prompts], matrix=False)
            upcoming = [p[end] if end < len(p) else -1 for p in prompts]
            yield Prefill(tree, out(output), tuple(first < size <= end for size in sizes), upcoming)

    def use(self, exactness: exact.Exactness | None, layers: Sequence[tuple[Any, int]] = ()) -> None:
        """From now on, passes whose bits are the same with and without drafts; None: equal up to rounding.

        `layers` read no more rows at a time than given. The weights must not change any more.
        """
        self.exactness, self.blocks = exactness, list(layers)
        products.in_threes(self.model, exactness is not None)
        self.graphs = None if self.graphs is None else Graphs(self, self.graphs.patience)

    def compile(self, patience: int = 0) -> None:
        """Record passes over trees and replay them (`graphs.py`), after the first `patience` passes.

        The weights must not change any more. Raises InputError for a family that cannot be recorded; with patience,
        its own forward is used without a word.
        """
        try:
            self.graphs = self.graphs or Graphs(self, patience)
            self.graphs.patience = min(self.graphs.patience, patience)
        except InputError:
            if not patience:
                raise

    def warm(self, taps: tuple[int, ...] = ()) -> None:
        """Make the recordings now and prove them, or the first rounds would. One takes as long as fifty passes."""
        for prompts in ([[0] * 3], [[0] * 3, [0] * 5]):  # rows of equal length, and of unequal: two kinds of pass
            session = self.open(64)
            for _ in session.prefill(prompts, taps):
                pass
            for n in (1, 1, 2, 3, 8, 16, 16) + (1,) * PROOFS:
                session.forward(chain([[token % self.vocab for token in range(n)]] * len(prompts)), taps)
                session.keep([[0]] * len(prompts))

    def record(self, taps: tuple[int, ...] = ()) -> None:
        """Make the recordings now and none later, as a server wants it: all texts wait while one is made.

        Where bits are promised, passes that are cut into blocks are of more kinds than can be met beforehand.
        """
        if self.graphs is not None:
            patience, self.graphs.patience = self.graphs.patience, 0
            self.warm(taps)
            if self.exactness is None:
                self.graphs.closed = True
            else:
                self.graphs.patience = patience

    def run(self, session: TreeSession, given: Pass) -> TargetOutput:
        """One forward pass of the model over the tree cache: compiled, or else those over trees may be recorded."""
        if self.native is not None:
            return self.native.run(session, given)
        with attention.passing, without_cudnn(self.device):
            if self.graphs is not None and given.ancestors is not None and given.asked is None:
                return self.graphs.run(session, given, self.stock)
            return self.stock(session, given)

    def stock(self, session: TreeSession, given: Pass) -> TargetOutput:
        """The same by the stock model's own forward."""
        with ExitStack() as stack:
            if self.family.binding is not None and given.ancestors is not None:
                stack.enter_context(self.family.binding(self.model, given))
            logits, features = self.call(self.inputs(given), session.cache, given.taps, given.places.numel())
        if given.asked is not None and "logits_to_keep" not in self.accepts:
            logits = logits[:, given.asked]
        return TargetOutput(logits, dict(zip(given.taps, features, strict=True)))

    def call(self, inputs: dict[str, Any], cache: Any, taps: tuple[int, ...], rows: int) -> tuple[Tensor, list[Tensor]]:
        """Logits and tapped hidden states of the stock forward with our attention; `rows`: tokens of the pass."""
        if taps:
            inputs = {**inputs, "output_hidden_states": True}
        own = self.family.attention if self.exactness is None else attention.NAME
        with attention.switched(self.config, own, self.experts), exact.in_blocks(self.blocks, rows):
            out = self.model(**inputs, **carrying(self.model, cache), return_dict=True)
        return out.logits, [out.hidden_states[tap] for tap in taps]

    def inputs(self, given: Pass) -> dict[str, Any]:
        """A pass in the words of the model's forward."""
        inputs: dict[str, Any] = {"attention_mask": self._mask(given)}
        if given.embeds is None:
            inputs["input_ids"] = given.tokens
        else:  # a model that scales after its embedding would scale these again
            inputs["inputs_embeds"] = given.embeds if self.scale == 1.0 else given.embeds / self.scale
        if "position_ids" in self.accepts:
            inside = given.bound < self.context  # a tree may reach beyond the last position; nobody reads it there
            inputs["position_ids"] = given.places if inside else given.places.clamp(max=self.context - 1)
        if given.asked is not None and "logits_to_keep" in self.accepts:
            inputs["logits_to_keep"] = given.asked
        return inputs

    def _mask(self, given: Pass) -> Any:
        """None for a prompt's first chunk (its slots are its positions: the model's own causal masks are right)."""
        if given.ancestors is None and self.exactness is None:
            return None
        made = {window: self._mask_of(given, window) for window in set(self.windows.values())}
        masks = {kind: made[window] for kind, window in self.windows.items()}
        return masks if self.family.typed else masks[""]

    def _mask_of(self, given: Pass, window: int | None) -> Tensor:
        if self.exactness is None:
            return given.mask(self.dtype, window)
        return aligned.carry(exact.plan(given, given.capacity, self.dtype, self.exactness, window))


def _chunk(
    tokens: Int[Tensor, "b n"], first: int, taps: tuple[int, ...], asked: Int[Tensor, " k"], sizes: Int[Tensor, " b"]
) -> Pass:
    """A chunk of right-padded prompts that all begin at slot `first`: slots are positions."""
    (b, n), device = tokens.shape, tokens.device
    lower = torch.ones(1, n, n, dtype=torch.bool, device=device).tril_() if first else None
    return Pass(
        tokens=tokens,
        embeds=None,
        spots=torch.arange(first, first + n, device=device).expand(b, n),
        since=0,
        lengths=torch.full((b,), first, device=device),
        prefix=first,
        level=True,
        least=first,
        bound=first + n - 1,
        ancestors=lower,
        taps=taps,
        asked=asked,
        sizes=sizes,
    )
