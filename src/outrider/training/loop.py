"""The one training loop, on accelerate: every method, one process or several.

A step's rows, rate and noise follow from (recipe, step) alone, and a checkpoint holds weights and moments in full: a
run that was interrupted goes on with the same losses, bit for bit on a CPU. Losses are sums divided by what all
processes learn in the step, so that several processes give the losses of one.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from .. import drafters, files
from ..backends.torch import HFTarget
from ..backends.torch.tensors import dtype_of
from ..core.protocols import Target
from ..params import InputError, Interrupted
from . import checkpoint, objectives
from .data import Batch, Document, draft_size, pack, split
from .evaluate import acceptance, held_out_loss, prompts_of
from .features import FeatureCache, digest, fingerprint, see
from .foreign import ForeignFeatures
from .log import Log
from .rate import product_rate
from .recipe import Recipe
from .state import FeaturesOf, State, rows_of

CACHE = "features"  # folder of the run's own cache, removed when it ends
SAVE = 300  # seconds between checkpoints
SHOWN = {"passes": "training passes", "draft_vocab": "tokens that can be drafted"}  # options that a run shows
TENTH = 10  # of what a run reads is looked at beforehand, where an objective prepares itself


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
    target: Target,
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
        recipe: method, sizes and rates. A run in `out` may be made longer, and is otherwise held to its recipe; only
            when it is evaluated and kept may change.
        stop: end after this many steps, as if interrupted.
        shard: FSDP2 over the processes there are.
        quiet: say nothing on stderr.

    Raises:
        InputError: recipe, documents and target do not go together, or `out` cannot be written or holds another run.
        TrainingError: a loss was not a number; the checkpoint before it is kept.
        Interrupted: Ctrl-C; the step that was reached is kept.
    """
    out = Path(out)
    _check(target, documents, recipe, shard)
    stock = target if isinstance(target, HFTarget) else None
    learned, held = split(documents)
    share = stock is None or stock.family.binding is None
    rows, test = pack(learned, recipe.length, recipe.seed, share), pack(held, recipe.length, 0, share)
    test = test.rows(range(min(len(test.keys), 8 * recipe.rows)))
    recipe = _vocabulary(recipe.over(len(rows.keys)).continuing(out).complete(), learned, target.vocab)
    recipe = precision(recipe, torch.device(target.device), dtype_of(target))
    accelerator = Accelerator(cpu=target.device == "cpu")
    main = accelerator.is_main_process
    if stock is not None:
        stock.model.requires_grad_(False)

    print_ = fingerprint(target, bool(recipe.bf16))  # now: an objective may change the target

    def fresh() -> Any:
        torch.manual_seed(recipe.seed)
        made = objectives.build(recipe.method, target, learned, dict(recipe.options))
        assert isinstance(made, nn.Module)
        if recipe.init:
            if not isinstance(made, objectives.Begun):
                raise InputError(f"{recipe.method} cannot begin with a drafter's weights; leave --init out")
            made.begin(recipe.init)
        made = made.double() if dtype_of(target) == torch.float64 else made  # networks begin in float32
        return made.to(target.device).train()

    objective, saved = fresh(), checkpoint.read(out / "checkpoint.pt")
    of = {"target": print_, "rows": digest(rows), "held_out": digest(test)}
    if saved is not None and saved["of"]["target"] != print_:
        raise InputError(f"{out} was trained for another target; give another --out, or remove it")
    start, loss, best, tau = (0, math.nan, math.inf, 0.0) if saved is None else _progress(saved)
    rate = product_rate(torch.device(target.device), bool(recipe.bf16))
    log = Log(out, start, recipe.steps, rate, main, quiet)
    with accelerator.main_process_first() if recipe.cache else nullcontext():  # which makes the files of a cache
        features_of = _feature_source(target, objective.taps, recipe, rows, out, log.say, print_)
    log.say(f"{_chosen(recipe, target)}; large products here: {rate / 1e9:,.0f} GFLOPS")
    if saved is not None and saved["of"] != of:
        log.say("the data is another than before: it goes on with this one, and the best drafter is looked for anew")
        best = math.inf
    log.say(f"{len(rows.keys)} rows of {recipe.length} tokens to learn from, {len(test.keys)} held out")
    if saved is None and not recipe.init and isinstance(objective, objectives.Prepared):
        first = range(0, min(len(rows.keys), -(-recipe.steps * recipe.rows // TENTH)), recipe.rows)
        some = (rows.rows(range(i, min(i + recipe.rows, len(rows.keys)))).to(target.device) for i in first)
        objective.prepare((part, features_of(part)) for part in some)
    state = State(objective, recipe, accelerator, of, shard, 1 if stock is None else stock.processes)
    if saved is not None:
        state.resume(saved)

    prompts = prompts_of(held, recipe.prompts, recipe.tokens, target.context)
    last = min(recipe.steps, stop or recipe.steps)
    keeping = files.clearing(out, "checkpoint.pt", "*.safetensors") if main else nullcontext()
    with _interruptible() as asked, keeping, files.writing(out), log:
        if main:
            recipe.keep(out)
            log.open()
        kept = time.perf_counter()
        for step in range(start, last):
            began = time.perf_counter()
            loss, tokens, parts = state.step(step, rows, features_of)
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss of step {step} is {loss} (rows {rows_of(recipe, len(rows.keys), step)[:8]} ...); "
                    f"the checkpoint before it is kept in {out}; lower --lr or look at these rows"
                )
            done = step + 1
            log.step(
                done, loss, recipe.lr * recipe.rate(step), tokens, time.perf_counter() - began, state.useful, parts
            )
            if done % recipe.evaluate == 0 or done == recipe.steps:
                tau, best = _evaluate(state, fresh, done, target, out, test, features_of, prompts, log, best, tau)
            halt = state.any(bool(asked))  # one process's signal is for all of them
            due = done % recipe.save == 0 if recipe.save else state.any(time.perf_counter() - kept > SAVE)
            if due or done == last or halt:
                state.keep(out, done, loss, best, tau)
                kept = time.perf_counter()
            if halt:
                raise Interrupted(f"{out} keeps step {done} of {recipe.steps}, the same command goes on from there")
    if last == recipe.steps and main:
        shutil.rmtree(out / CACHE, ignore_errors=True)
    return Result(out / "best", last, loss, best, tau)


def _chosen(recipe: Recipe, target: Target) -> str:
    """What a run computes in, and its options, in one line."""
    kind = "bfloat16 products, float32 weights" if recipe.bf16 else "full precision"
    passes = "compiled" if target.code is not None else "stock"
    options = {**objectives.options_of(recipe.method), **recipe.options}
    shown = [f"{options[name]} {words}" for name, words in SHOWN.items() if options.get(name)]
    return ", ".join([kind, f"the target's {passes} passes in {target.precision}", *shown])


def _vocabulary(recipe: Recipe, documents: Sequence[Document], vocab: int) -> Recipe:
    """The recipe with the size of the draft vocabulary, where that is left to the data: a run keeps it."""
    left = {**objectives.options_of(recipe.method), **recipe.options}.get("draft_vocab") == -1
    size = draft_size(documents, vocab) if left else 0
    return replace(recipe, options={**recipe.options, "draft_vocab": size}) if left else recipe


def precision(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Recipe:
    """The recipe with the precision that it leaves open: bfloat16 where the device multiplies it and the target, which
    computes in `dtype`, is not of float64. Weights and moments are float32 in any case."""
    fast = dtype != torch.float64 and multiplies_bf16(device)
    return replace(recipe, bf16=fast if recipe.bf16 is None else recipe.bf16)


def multiplies_bf16(device: torch.device) -> bool:
    """Does the device have instructions for products of bfloat16: a GPU's, or AVX512_BF16 or AMX?"""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _progress(kept: dict[str, Any]) -> tuple[int, float, float, float]:
    """The step to go on with, the last loss, and the best held-out loss and its tau so far."""
    return int(kept["step"]), float(kept["loss"]), float(kept["best"]), float(kept["tau"])


def _evaluate(
    state: State,
    fresh: Callable[[], Any],
    step: int,
    target: Target,
    out: Path,
    test: Batch,
    features_of: FeaturesOf,
    prompts: list[list[int]],
    log: Log,
    best: float,
    tau: float,
) -> tuple[float, float]:
    """Held-out loss and acceptance; the drafter is kept where its loss is the lowest so far.

    Every process calls it. The first one evaluates, and those that hold its target with it do the same.
    """
    recipe, accelerator, objective = state.recipe, state.accelerator, state.whole(fresh)
    if objective is not None:
        loss, parts = held_out_loss(objective, test.to(target.device), features_of, recipe.rows)
        folder = out / ("best" if loss < best else "last")
        if accelerator.is_main_process:
            with files.folder(folder, replace=True) as made:
                objective.save(made)
    accelerator.wait_for_everyone()
    if objective is not None:
        measured = acceptance(target, drafters.load(f"{objective.drafter}:{folder}", target), prompts, recipe.tokens)
        log.evaluation(step, loss, parts, asdict(measured))
        tau, best = (measured.tau, loss) if loss < best else (tau, best)
    accelerator.wait_for_everyone()
    return tau, best


def _feature_source(
    target: Target, taps: tuple[int, ...], recipe: Recipe, rows: Batch, out: Path, say: Callable[[str], None], of: str
) -> FeaturesOf:
    """Where a batch's features come from: another engine's files, a cache on disk, or the target each time."""
    half = bool(recipe.bf16)
    if recipe.features:
        assert isinstance(target, HFTarget), "such features are held against the stock model's"
        foreign = ForeignFeatures(Path(recipe.features), target, rows, taps, say)
        return lambda batch: foreign.see(target, batch.to(target.device), half)
    again = recipe.steps * recipe.rows * recipe.accumulate > len(rows.keys)
    if not taps or not (recipe.cache or (target.device == "cpu" and again)):
        return lambda batch: see(target, batch.to(target.device), taps, half)
    cache = FeatureCache(Path(recipe.cache) if recipe.cache else out / CACHE, taps, half, of)
    say(f"features are kept in {cache.folder} for later epochs: {cache.room / 1e9:.0f} GB more at most")
    return lambda batch: cache.see(target, batch.to(target.device))


def _check(target: Target, documents: Sequence[Document], recipe: Recipe, shard: bool) -> None:
    if target.separate:
        raise InputError("drafters are trained for decoder-only targets")
    if target.integers:
        raise InputError("drafters are trained for full weights, and draft for quantised ones too; leave weights out")
    if recipe.length > target.context:
        raise InputError(f"rows of {recipe.length} tokens exceed the target's context of {target.context}; give fewer")
    worst = max((max(d.tokens, default=0) for d in documents), default=0)
    if worst >= target.vocab:
        raise InputError(
            f"the data has token {worst} and the target {target.vocab} tokens; tokenise it with the target's tokenizer"
        )
    if isinstance(target, HFTarget):
        _check_stock(target, recipe, shard)


def _check_stock(target: HFTarget, recipe: Recipe, shard: bool) -> None:
    if recipe.method == "medusa2" and (shard or target.processes > 1):
        option = "--shard" if shard else "--target-parallel"
        raise InputError(f"medusa2 changes the target inside, which cannot be sharded; leave {option} out")


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
