"""The one training loop, on accelerate: every method, one process or several.

A step's rows, rate and noise follow from (recipe, step) alone, and a checkpoint holds weights and moments in full: a
run that was interrupted goes on with the same losses, bit for bit on a CPU. Losses are sums divided by what all
processes learn in the step, so that several processes give the losses of one.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from .. import drafters, files
from ..params import Interrupted
from ..targets import HFTarget
from ..targets.packed import PACKED
from ..types import InputError
from . import checkpoint, objectives, sharding
from .data import Batch, Document, order, pack, split
from .evaluate import acceptance, held_out_loss, prompts_of
from .features import FeatureCache, TargetFeatures, digest, fingerprint, see
from .foreign import ForeignFeatures
from .log import Log
from .recipe import Recipe

TENTH = 10  # of what a run reads is looked at beforehand, where an objective prepares itself
FeaturesOf = Callable[[Batch], TargetFeatures]


class TrainingError(RuntimeError):
    """A training that cannot go on; the last good checkpoint is kept. The command line exits with 1."""


@dataclass(frozen=True)
class Result:
    """`folder` holds the drafter that did best on held-out text."""

    folder: Path
    steps: int  # done
    loss: float  # of the last step
    best: float  # the lowest held-out loss
    tau: float  # that drafter's tokens a round on held-out prompts


def train(
    target: HFTarget,
    documents: Sequence[Document],
    out: str | Path,
    recipe: Recipe,
    stop: int | None = None,
    shard: bool = False,
    quiet: bool = False,
) -> Result:
    """Train a drafter for a frozen target; `out/best` is the drafter. The same call goes on after an interruption.

    Args:
        target: the model that it will draft for, frozen.
        documents: what is learned and held out (`data.read`).
        out: the folder of the run.
        recipe: method, sizes and rates. A run in `out` may be made longer, and is otherwise held to its recipe.
        stop: end after this many steps, as if interrupted.
        shard: FSDP2 over the processes there are.
        quiet: say nothing on stderr.

    Raises:
        InputError: recipe, documents and target do not go together, or `out` cannot be written or holds another run.
        TrainingError: a loss was not a number; the checkpoint before it is kept.
        Interrupted: Ctrl-C; the step that was reached is kept.
    """
    out = Path(out)
    recipe = recipe.continuing(out).complete()
    _check(target, documents, recipe, shard)
    accelerator = Accelerator(cpu=target.device.type == "cpu", mixed_precision="bf16" if recipe.bf16 else "no")
    main = accelerator.is_main_process
    target.model.requires_grad_(False)
    learned, held = split(documents)
    share = target.family.binding is None
    rows, test = pack(learned, recipe.length, recipe.seed, share), pack(held, recipe.length, 0, share)
    test = test.rows(range(min(len(test.keys), 8 * recipe.rows)))

    print_ = fingerprint(target, recipe.half_features)  # now: an objective may change the target

    def fresh() -> Any:
        torch.manual_seed(recipe.seed)
        made = objectives.build(recipe.method, target, learned, dict(recipe.options))
        assert isinstance(made, nn.Module)
        return made.to(target.device).train()

    objective, found = fresh(), checkpoint.read(out / "checkpoint.pt")
    of = {"target": print_, "rows": digest(rows), "held_out": digest(test)}
    if found is not None and found["of"] != of:
        raise InputError(f"{out} was trained on another target or other data; give another --out, or remove it")
    start, loss, best, tau = (0, math.nan, math.inf, 0.0) if found is None else _progress(found)
    log = Log(out, start, recipe.steps, main, quiet)
    features_of = _feature_source(target, objective.taps, recipe, rows, log.say, print_)
    log.say(f"{len(rows.keys)} rows of {recipe.length} tokens to learn from, {len(test.keys)} held out")
    if found is None and isinstance(objective, objectives.Prepared):
        first = range(0, min(len(rows.keys), -(-recipe.steps * recipe.rows // TENTH)), recipe.rows)
        some = (rows.rows(range(i, min(i + recipe.rows, len(rows.keys)))).to(target.device) for i in first)
        objective.prepare((part, features_of(part)) for part in some)
    state = _State(objective, recipe, accelerator, shard, of)
    if found is not None:
        state.resume(found)

    def see_test(batch: Batch) -> TargetFeatures:
        return see(target, batch.to(target.device), objective.taps, recipe.half_features)

    prompts = prompts_of(held, recipe.prompts, recipe.tokens, target.context)
    last = min(recipe.steps, stop or recipe.steps)
    keeping = files.clearing(out, "checkpoint.pt", "*.safetensors") if main else nullcontext()
    with _interruptible() as asked, keeping, files.writing(out), log:
        if main:
            recipe.keep(out)
            log.open()
        for step in range(start, last):
            began = time.perf_counter()
            loss, tokens, parts = state.step(step, rows, features_of)
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss of step {step} is {loss} (rows {_rows(recipe, len(rows.keys), step)[:8]} ...); "
                    f"the checkpoint before it is kept in {out}; lower --lr or look at these rows"
                )
            done = step + 1
            log.step(done, loss, recipe.lr * recipe.rate(step), tokens, time.perf_counter() - began, parts)
            if done % recipe.evaluate == 0 or done == recipe.steps:
                whole = state.whole(fresh)
                if main:
                    tau, best = _evaluate(whole, done, target, recipe, out, test, see_test, prompts, log, best, tau)
                accelerator.wait_for_everyone()
            if done % recipe.save == 0 or done == last or asked:
                state.keep(out, done, loss, best, tau)
            if asked:
                raise Interrupted(f"{out} keeps step {done} of {recipe.steps}, the same command goes on from there")
    return Result(out / "best", last, loss, best, tau)


def _evaluate(
    objective: Any,
    step: int,
    target: HFTarget,
    recipe: Recipe,
    out: Path,
    test: Batch,
    features_of: FeaturesOf,
    prompts: list[list[int]],
    log: Log,
    best: float,
    tau: float,
) -> tuple[float, float]:
    """Held-out loss and acceptance; the drafter is kept where its loss is the lowest so far."""
    loss, parts = held_out_loss(objective, test.to(target.device), features_of, recipe.rows)
    folder = out / ("best" if loss < best else "last")
    with files.folder(folder, replace=True) as made:
        objective.save(made)
    found = acceptance(target, drafters.load(f"{objective.drafter}:{folder}", target), prompts, recipe.tokens)
    log.evaluation(step, loss, parts, asdict(found))
    return (found.tau, loss) if loss < best else (tau, best)


class _State:
    """The module, its optimiser and how a step is taken."""

    def __init__(self, objective: Any, recipe: Recipe, accelerator: Accelerator, shard: bool, of: dict[str, str]):
        self.objective, self.recipe, self.accelerator, self.shard, self.of = objective, recipe, accelerator, shard, of
        betas = objectives.optimiser_of(recipe.method).betas
        if shard:
            sharding.sharded(objective)
        groups = [{"params": g["params"], "lr": recipe.lr, "scale": g["scale"]} for g in objective.groups()]
        self.optimiser: Any = torch.optim.AdamW(groups, lr=recipe.lr, betas=betas, weight_decay=recipe.decay)
        self.module = objective
        if not shard and accelerator.num_processes > 1:
            self.module = accelerator.prepare_model(objective)

    def step(self, step: int, rows: Batch, features_of: FeaturesOf) -> tuple[float, int, dict[str, float]]:
        """One optimiser step: the loss per learned position, the tokens read, and parts."""
        recipe, accelerator = self.recipe, self.accelerator
        index = _rows(recipe, len(rows.keys), step)
        mine = index[accelerator.process_index :: accelerator.num_processes]
        parts = [rows.rows(p) for p in _pieces(mine, recipe.accumulate)]
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.lr * recipe.rate(step) * group["scale"]
        total, count, hits, tokens = 0.0, 0.0, {}, 0
        for i, part in enumerate(parts):
            sync = self.module.no_sync if i + 1 < len(parts) and self.module is not self.objective else None
            seen = features_of(part)  # the frozen target's precision is its own matter
            with accelerator.autocast(), sync() if sync else nullcontext():
                loss, weight, shares = self.module(part.to(accelerator.device), seen, step)
            (loss * accelerator.num_processes).backward()
            total, count = total + float(loss.detach()), count + float(weight.detach())
            tokens += int((part.documents >= 0).sum())
            hits = {k: float(v) for k, v in shares.items()}
        sums = torch.tensor([total, count, float(tokens)], dtype=torch.float64, device=accelerator.device)
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums, "sum")
        total, count, tokens = float(sums[0]), max(float(sums[1]), 1.0), int(sums[2])
        if math.isfinite(total):
            self._descend(count)
        self.optimiser.zero_grad(set_to_none=True)
        return total / count, tokens, hits

    def _descend(self, count: float) -> None:
        parameters = [p for g in self.optimiser.param_groups for p in g["params"]]
        for p in parameters:
            if p.grad is not None:
                p.grad.div_(count)
        torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)
        self.optimiser.step()

    def resume(self, found: dict[str, Any]) -> None:
        """Module and optimiser as a checkpoint has them."""
        if self.shard:
            sharding.restore(self.objective, self.optimiser, found)
        else:
            self.objective.load_state_dict(found["module"])
            self.optimiser.load_state_dict(found["optimiser"])

    def keep(self, out: Path, step: int, loss: float, best: float, tau: float) -> None:
        if self.shard:
            module, optimiser = sharding.state(self.objective, self.optimiser)
        else:
            module, optimiser = self.objective.state_dict(), self.optimiser.state_dict()
        if self.accelerator.is_main_process:
            told = {"step": step, "loss": loss, "best": best, "tau": tau, "of": self.of}
            checkpoint.write(out / "checkpoint.pt", {"module": module, "optimiser": optimiser, **told})
        self.accelerator.wait_for_everyone()

    def whole(self, fresh: Callable[[], Any]) -> Any:
        """The objective as one process has it: to be evaluated and written. All processes take part."""
        if not self.shard:
            return self.objective
        module, _ = sharding.state(self.objective, self.optimiser)
        if not self.accelerator.is_main_process:
            return None
        copy = fresh()
        copy.load_state_dict(module)
        return copy


def _progress(found: dict[str, Any]) -> tuple[int, float, float, float]:
    """The step to go on with, the last loss, and the best held-out loss and its tau so far."""
    return int(found["step"]), float(found["loss"]), float(found["best"]), float(found["tau"])


def _rows(recipe: Recipe, count: int, step: int) -> list[int]:
    """The rows of a step: epochs in orders of their own, one behind the other."""
    wanted = recipe.rows * recipe.accumulate
    first = step * wanted
    found: list[int] = []
    while len(found) < wanted:
        epoch, at = divmod(first + len(found), count)
        found += order(count, recipe.seed, epoch)[at : at + wanted - len(found)]
    return found


def _pieces(index: list[int], count: int) -> list[list[int]]:
    size = math.ceil(len(index) / count)
    return [index[i : i + size] for i in range(0, len(index), size)]


def _feature_source(
    target: HFTarget, taps: tuple[int, ...], recipe: Recipe, rows: Batch, say: Callable[[str], None], of: str
) -> FeaturesOf:
    if recipe.features:
        foreign = ForeignFeatures(Path(recipe.features), target, rows, taps, say)
        return lambda batch: foreign.see(target, batch.to(target.device), recipe.half_features)
    if not recipe.cache:
        return lambda batch: see(target, batch.to(target.device), taps, recipe.half_features)
    width = int(target.config.hidden_size)
    cache = FeatureCache(Path(recipe.cache), rows, taps, width, recipe.cache_dtype, say, of)
    return lambda batch: cache.see(target, batch.to(target.device), recipe.half_features)


def _check(target: HFTarget, documents: Sequence[Document], recipe: Recipe, shard: bool) -> None:
    if not isinstance(target, HFTarget):
        raise InputError("drafters are trained for decoder-only targets")
    if shard and recipe.method == "medusa2":
        raise InputError("medusa2 changes the target inside, which cannot be sharded; leave --shard out")
    if recipe.length > target.context:
        raise InputError(f"rows of {recipe.length} tokens exceed the target's context of {target.context}; give fewer")
    if any(isinstance(module, PACKED) for module in target.model.modules()):
        raise InputError("drafters are trained for the full weights, and draft for packed ones too; leave weights out")
    worst = max((max(d.tokens, default=0) for d in documents), default=0)
    if worst >= target.vocab:
        raise InputError(
            f"the data has token {worst} and the target {target.vocab} tokens; tokenise it with the target's tokenizer"
        )


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted, so that the step under way is finished and kept; a second one ends it at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread
        yield asked
        return
    try:
        yield asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
