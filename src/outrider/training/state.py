"""Trainable state and optimiser steps, in one process or several.

Several processes give the losses and weights of one: each computes its share of a step's rows; gradients are summed and
divided by the number of positions of all. Every process takes part in every exchange, also without rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode

from ..params import InputError
from . import checkpoint, objectives, sharding
from .data import Batch, order
from .evaluate import mean
from .features import TargetFeatures
from .rate import operations_of
from .recipe import Recipe
from .sizes import FewSizes

FeaturesOf = Callable[[Batch], TargetFeatures]
Piece = list[list[int]]  # rows by process


class State:
    """The module with its optimiser.

    Args:
        objective: the trainable module.
        recipe: sizes and rates.
        accelerator: of all processes.
        of: fingerprint of the target that checkpoints must match.
        held_out: names of the held-out documents, for the run's later parts.
        shard: FSDP2 instead of replicas.
        group: processes that share the target by tensor parallelism.
    """

    def __init__(
        self,
        objective: Any,
        recipe: Recipe,
        accelerator: Accelerator,
        of: dict[str, str],
        held_out: Sequence[str],
        shard: bool = False,
        group: int = 1,
    ):
        self.objective, self.recipe, self.accelerator, self.of = objective, recipe, accelerator, of
        self.held_out = list(held_out)
        self.shard, self.group = shard, group
        self.device = next(objective.parameters()).device
        self.operations, self.useful = 0.0, 0.0  # per token; of the last step, with the target's
        self.reading = operations_of(objective.target)
        betas = objectives.optimiser_of(recipe.method).betas
        if shard:
            sharding.sharded(objective)
        groups = [{"params": g["params"], "lr": recipe.lr, "scale": g["scale"]} for g in objective.groups()]
        self.one_call = self.device.type in ("cpu", "cuda") and not shard  # fused optimiser: a fifth of the time
        made = torch.optim.AdamW(groups, recipe.lr, betas, weight_decay=recipe.decay, fused=self.one_call)
        self.optimiser: Any = made
        self.module = objective
        if not shard and accelerator.num_processes > 1:
            self.module = accelerator.prepare_model(objective)

    @property
    def evaluates(self) -> bool:
        """Whether this process evaluates: the first one, and those that share its target."""
        return self.accelerator.process_index < self.group

    def step(self, step: int, rows: Batch, features_of: FeaturesOf) -> tuple[float, int, dict[str, float]]:
        """One optimiser step: the loss per position, the number of tokens, and the loss's parts."""
        recipe, accelerator = self.recipe, self.accelerator
        pieces = shares(rows_of(recipe, len(rows.keys), step), accelerator.num_processes, recipe.accumulate)
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.lr * recipe.rate(step) * group["scale"]
        total, count, tokens, self.useful = 0.0, 0.0, 0, 0.0
        hits: dict[str, list[tuple[float, float]]] = {}
        for i, piece in enumerate(pieces):
            sync = self.module.no_sync if i + 1 < len(pieces) and self.module is not self.objective else None
            part, seen = self._read(
                rows, piece, features_of
            )  # outside autocast, since the frozen target has its own precision
            if i == 0:
                self._count(part, seen, step)
            here = int((part.documents >= 0).sum())
            with self._few(), self._cast(), sync() if sync else nullcontext():
                loss, weight, parts = self.module(part.to(self.device), seen, step)
            (loss * accelerator.num_processes).backward()  # compensates the mean over processes
            total, count = total + float(loss.detach()), count + float(weight.detach())
            tokens, self.useful = tokens + here, self.useful + here * self.operations + seen.read * self.reading
            for name, value in parts.items():
                if value == value:  # NaN for rows without tests
                    hits.setdefault(name, []).append((float(value), float(weight.detach())))
        total, count, read = self._sums(total, count, float(tokens))
        count = max(count, 1.0)
        if math.isfinite(total):
            self._descend(count)
        self.optimiser.zero_grad(set_to_none=True)
        return total / count, int(read), {name: mean(values) for name, values in hits.items()}

    def _count(self, part: Batch, seen: TargetFeatures, step: int) -> None:
        """Count the operations per token of a drafter's step on one extra row, once, since counting changes
        rounding."""
        row = part.rows([0])
        tokens = int((row.documents >= 0).sum())
        if self.operations or not tokens or self.accelerator.num_processes > 1:
            return
        first = TargetFeatures({tap: x[:1, : row.tokens.shape[1]] for tap, x in seen.features.items()})
        with FlopCounterMode(display=False) as counter:
            with self._few(), self._cast():
                loss = self.module(row.to(self.device), first, step)[0]
            loss.backward()
        self.optimiser.zero_grad(set_to_none=True)
        self.operations = counter.get_total_flops() / tokens

    def _cast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.recipe.bf16 else nullcontext()

    def _few(self) -> Any:
        """`sizes.few` for oneDNN's bfloat16 GEMMs, the only ones compiled per size."""
        return FewSizes() if self.device.type == "cpu" and self.recipe.bf16 else nullcontext()

    def any(self, here: bool) -> bool:
        """Whether it is true in any process. Called by all."""
        return self._sums(float(here))[0] > 0

    def _sums(self, *values: float) -> list[float]:
        """Sums over all processes."""
        if self.accelerator.num_processes == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        sums: list[float] = self.accelerator.reduce(mine, "sum").tolist()
        return sums

    def _read(self, rows: Batch, piece: Piece, features_of: FeaturesOf) -> tuple[Batch, TargetFeatures]:
        """This process's rows of a piece, and their features. A process without rows computes the first of all without
        loss. Processes that share the target compute the rows of all of them."""
        me = self.accelerator.process_index
        first = me - me % self.group
        near = [of or piece[0][:1] for of in piece[first : first + self.group]]
        part = rows.rows(near[me - first])
        seen = features_of(rows.rows([row for of in near for row in of]))
        if self.group > 1:
            at = sum(len(of) for of in near[: me - first])
            (b, n), features = part.tokens.shape, seen.features
            seen = TargetFeatures({tap: x[at : at + b, :n] for tap, x in features.items()})
        return (part if piece[me] else part.silent()), seen

    def _descend(self, count: float) -> None:
        parameters = [p for g in self.optimiser.param_groups for p in g["params"]]
        for p in parameters:
            if p.grad is not None:
                p.grad.div_(count)
        torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)
        self.optimiser.step()

    def resume(self, state: dict[str, Any]) -> None:
        """Load module and optimiser from a checkpoint. Raises InputError for another network."""
        try:
            if self.shard:
                sharding.restore(self.objective, self.optimiser, state["module"], state["optimiser"])
            else:
                for group in state["optimiser"]["param_groups"]:
                    group["fused"] = self.one_call  # before loading: it decides where step counts live
                self.objective.load_state_dict(state["module"])
                self.optimiser.load_state_dict(state["optimiser"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:160]
            raise InputError(
                f"this run was started with another network than this version's ({reason}); give another --out"
            ) from None
        for group in self.optimiser.param_groups:  # not from the checkpoint, since it depends on the machine
            group["fused"] = self.one_call

    def keep(self, out: Path, step: int, loss: float, best: float, tau: float) -> None:
        """Write the checkpoint. Called by all processes."""
        main = self.accelerator.is_main_process
        module = sharding.full(self.objective.state_dict(), main)
        optimiser = sharding.full(self.optimiser.state_dict(), main)
        if main:
            progress = {"step": step, "loss": loss, "best": best, "tau": tau, "of": self.of, "held_out": self.held_out}
            checkpoint.write(out / "checkpoint.pt", {"module": module, "optimiser": optimiser, **progress})
        self.accelerator.wait_for_everyone()

    def full(self, fresh: Callable[[], Any]) -> Any:
        """The unsharded objective where it is evaluated, else None. Called by all processes."""
        if not self.shard:
            return self.objective if self.evaluates else None
        module = sharding.full(self.objective.state_dict(), self.evaluates)
        if not self.evaluates:
            return None
        copy = fresh()
        copy.load_state_dict(module)
        return copy


def rows_of(recipe: Recipe, count: int, step: int) -> list[int]:
    """The rows of a step: shuffled epochs, concatenated."""
    size = recipe.rows * recipe.accumulate
    first = step * size
    rows: list[int] = []
    while len(rows) < size:
        epoch, at = divmod(first + len(rows), count)
        rows += order(count, recipe.seed, epoch)[at : at + size - len(rows)]
    return rows


def shares(index: list[int], processes: int, accumulate: int) -> list[Piece]:
    """A step's rows as pieces, each with the rows of every process. All processes have the same number of pieces, since
    each piece is an exchange; some may have no rows in the last one.

        shares([7, 3, 9, 4, 1], processes=2, accumulate=2)  ->  [[[7, 9], [3, 4]], [[1], []]]
    """
    each = math.ceil(len(index) / processes)
    size = math.ceil(each / accumulate)
    return [[index[p::processes][i : i + size] for p in range(processes)] for i in range(0, each, size)]
