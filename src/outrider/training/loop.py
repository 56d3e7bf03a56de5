"""The one training loop, on accelerate: every method, one process or several.

A step's rows, rate and noise depend on (recipe, step) alone, and a checkpoint has full weights and moments: a resumed
run has the same losses, bit for bit on a CPU. Losses are sums divided by the positions of all processes in the step, so
that several processes give the losses of one.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from .. import drafters, files
from ..backends.torch import HFTarget
from ..backends.torch.tensors import dtype_of
from ..core.protocols import Target
from ..drafters._weights import placed
from ..params import InputError, Interrupted
from . import checkpoint, objectives
from .data import Batch, Document, draft_size, name_of, pack, split
from .evaluate import acceptance, held_out_loss, prompts_of
from .features import TARGET, FeatureCache, digest, fingerprint, see
from .foreign import ForeignFeatures
from .log import Log
from .rate import product_rate
from .recipe import NAME, Recipe
from .state import FeaturesOf, State, rows_of

CACHE = "features"  # folder of the run's own cache, removed when it ends
SAVE = 300  # seconds between checkpoints
SHOWN = {"passes": "training passes", "draft_vocab": "tokens that can be drafted"}  # options that a run shows
TENTH = 10  # one in TENTH rows is read beforehand by objectives that prepare themselves


class TrainingError(RuntimeError):
    """A training that cannot continue; the last good checkpoint is kept. The command line exits with 1."""


@dataclass(frozen=True)
class Result:
    """The result; `folder` has the drafter with the lowest held-out loss."""

    folder: Path
    steps: int  # done
    loss: float  # of the last step
    best: float  # the lowest held-out loss
    tau: float  # that drafter's tokens per round on held-out prompts


def train(
    target: Target,
    documents: Sequence[Document],
    out: str | Path,
    recipe: Recipe,
    stop: int | None = None,
    shard: bool = False,
    quiet: bool = False,
) -> Result:
    """Train a drafter for a frozen target; `out/best` is the drafter. The same call resumes after an interruption.

    Args:
        target: the model to draft for, frozen.
        documents: training and held-out data (`data.read`).
        out: the folder of the run.
        recipe: method, sizes and rates. A run in `out` may be made longer or shorter, and its evaluations and
            checkpoints may change; everything else must stay the same.
        stop: end after this many steps, as if interrupted.
        shard: FSDP2 over all processes.
        quiet: no output on stderr.

    Raises:
        InputError: recipe, documents and target do not fit, or `out` cannot be written or has another run.
        TrainingError: a loss was NaN or infinite; the checkpoint before it is kept.
        Interrupted: Ctrl-C; the current step is kept.
    """
    out = Path(out)
    recipe = replace(recipe, init=placed(recipe.init, recipe.method) if recipe.init else "")
    _check(target, documents, recipe, shard)
    _check_folder(out, recipe)
    accelerator = Accelerator(cpu=target.device == "cpu")
    accelerator.wait_for_everyone()  # no process writes before all have checked the folder
    with _alone(out) if accelerator.is_main_process else nullcontext():
        return _train(target, documents, out, recipe, stop, shard, quiet, accelerator)


def _train(
    target: Target,
    documents: Sequence[Document],
    out: Path,
    recipe: Recipe,
    stop: int | None,
    shard: bool,
    quiet: bool,
    accelerator: Accelerator,
) -> Result:
    """`train` in a folder that no other run writes."""
    stock, main = target if isinstance(target, HFTarget) else None, accelerator.is_main_process
    saved = checkpoint.read(out / "checkpoint.pt")
    if {**objectives.options_of(recipe.method), **recipe.options}.get("stage") == "pretrain":
        documents = [replace(document, learn=(True,) * len(document.tokens)) for document in documents]
    learned, held = split(documents, known=None if saved is None else saved.get("held_out"))
    share = stock is None or stock.family.binding is None
    rows, test = pack(learned, recipe.length, recipe.seed, share), pack(held, recipe.length, 0, share)
    test = test.rows(range(min(len(test.keys), 8 * recipe.rows)))
    start, loss, best, tau = (0, math.nan, math.inf, 0.0) if saved is None else _progress(saved)
    wanted = recipe.over(len(rows.keys)).continuing(out, start, default=not recipe.steps)
    recipe = _vocabulary(wanted.complete(), learned, target)
    recipe = precision(recipe, torch.device(target.device), dtype_of(target))
    if stock is not None:
        stock.model.requires_grad_(False)

    print_ = fingerprint(target, bool(recipe.bf16))  # before an objective changes the target

    fresh = partial(_fresh, target, learned, recipe)
    objective = fresh()
    of = {"target": print_, "rows": digest(rows), "held_out": digest(test)}
    if saved is not None and saved["of"]["target"] != print_:
        raise InputError(
            f"{out} was begun for another target, with another --dtype or --device, or by a version that took a .gguf "
            "file's full weights; give what it was begun with, or another --out"
        )
    rate = product_rate(torch.device(target.device), bool(recipe.bf16))
    log = Log(out, start, recipe.steps, recipe.evaluate, rate, main, quiet)
    with accelerator.main_process_first() if recipe.cache else nullcontext():  # which creates the files of a cache
        features_of = _feature_source(
            target, objective.taps, recipe, rows, out, log.say, print_, accelerator.num_processes
        )
    log.say(f"{_chosen(recipe, target)}; GEMMs on this machine: {rate / 1e9:,.0f} GFLOPS")
    if saved is not None and saved["of"] != of and start < recipe.steps:
        same = saved["of"]["held_out"] == of["held_out"]
        best = best if same else math.inf
        lost = "" if same else ", and the best drafter so far is discarded, since other texts are held out"
        log.say(f"the data has changed: the run continues with the new data{lost}")
    log.say(f"{len(rows.keys)} rows of {recipe.length} tokens for training, {len(test.keys)} held out")
    if saved is None and not recipe.init and isinstance(objective, objectives.Prepared):
        first = range(0, min(len(rows.keys), -(-recipe.steps * recipe.rows // TENTH)), recipe.rows)
        some = (rows.rows(range(i, min(i + recipe.rows, len(rows.keys)))).to(target.device) for i in first)
        objective.prepare((part, features_of(part)) for part in some)
    processes = 1 if stock is None else stock.processes
    state = State(objective, recipe, accelerator, of, [name_of(d) for d in held], shard, processes)
    if saved is not None:
        state.resume(saved)

    longest = min(recipe.length, target.context - recipe.tokens - 2)
    prompts = prompts_of(held, recipe.prompts, longest)
    last = min(recipe.steps, stop or recipe.steps)
    with _interruptible() as signals, files.writing(out), log:
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
            halt = state.any(bool(signals))  # a signal to one process stops all
            due = done % recipe.save == 0 if recipe.save else state.any(time.perf_counter() - kept > SAVE)
            if due or done == last or halt:
                state.keep(out, done, loss, best, tau)
                kept = time.perf_counter()
            if halt:
                raise Interrupted(f"{out} keeps step {done} of {recipe.steps}; the same command resumes from there")
    own = out / CACHE
    if last == recipe.steps and main and (own / TARGET).exists() and own.resolve() != Path(recipe.cache).resolve():
        shutil.rmtree(own, ignore_errors=True)
    return Result(out / "best", last, loss, best, tau)


def _fresh(target: Target, learned: Sequence[Document], recipe: Recipe) -> Any:
    """The objective before the first step."""
    torch.manual_seed(recipe.seed)
    made = objectives.build(recipe.method, target, learned, dict(recipe.options))
    assert isinstance(made, nn.Module)
    if recipe.init:
        if not isinstance(made, objectives.Begun):
            raise InputError(f"{recipe.method} cannot start from a drafter's weights; leave --init out")
        made.begin(recipe.init)
    made = made.double() if dtype_of(target) == torch.float64 else made  # networks are created in float32
    return made.to(target.device).train()


def _chosen(recipe: Recipe, target: Target) -> str:
    """The precision and options of a run in one line."""
    kind = "bfloat16 GEMMs, float32 weights" if recipe.bf16 else "full precision"
    passes = "compiled" if target.code is not None else "stock"
    options = {**objectives.options_of(recipe.method), **recipe.options}
    shown = [f"{options[name]} {words}" for name, words in SHOWN.items() if options.get(name)]
    return ", ".join([kind, f"the target's {passes} passes in {target.arithmetic}", *shown])


def _vocabulary(recipe: Recipe, documents: Sequence[Document], target: Target) -> Recipe:
    """The recipe with the size of the draft vocabulary, if it was left open: the size that the drafter has that the
    training begins with, else what the data determines. A resumed run keeps it."""
    given = {**objectives.options_of(recipe.method), **recipe.options}.get("draft_vocab")
    if recipe.init and given is not None and recipe.options.get("draft_vocab", -1) == -1:
        size = objectives.drafted(recipe.init, recipe.method, target)
    elif given == -1:
        size = draft_size(documents, target.vocab)
    else:
        return recipe
    return replace(recipe, options={**recipe.options, "draft_vocab": size})


def precision(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Recipe:
    """The recipe with its default precision: bfloat16 if the device supports it and the target's `dtype` is not
    float64. Weights and moments are always float32."""
    fast = dtype != torch.float64 and multiplies_bf16(device)
    return replace(recipe, bf16=fast if recipe.bf16 is None else recipe.bf16)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device has bfloat16 instructions: a GPU, or AVX512_BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _progress(kept: dict[str, Any]) -> tuple[int, float, float, float]:
    """The next step, the last loss, and the best held-out loss so far with its tau."""
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
    """Held-out loss and acceptance; the drafter is saved if its loss is the lowest so far.

    Called by every process. The first one evaluates, and so do those that share its target.
    """
    began = time.perf_counter()
    recipe, accelerator, objective = state.recipe, state.accelerator, state.full(fresh)
    if objective is not None:
        loss, parts = held_out_loss(objective, test.to(target.device), features_of, recipe.rows)
        folder = out / ("best" if loss < best else "last")
        if accelerator.is_main_process:
            with files.folder(folder, replace=True) as made:
                objective.save(made)
    accelerator.wait_for_everyone()
    if objective is not None:
        measured = acceptance(target, drafters.load(f"{objective.drafter}:{folder}", target), prompts, recipe.tokens)
        log.evaluation(step, loss, parts, asdict(measured), time.perf_counter() - began)
        tau, best = (measured.tau, loss) if loss < best else (tau, best)
    accelerator.wait_for_everyone()
    return tau, best


def _feature_source(
    target: Target,
    taps: tuple[int, ...],
    recipe: Recipe,
    rows: Batch,
    out: Path,
    say: Callable[[str], None],
    of: str,
    processes: int,
) -> FeaturesOf:
    """The source of features: another engine's files, a cache on disk, or the target each time."""
    half = bool(recipe.bf16)
    if recipe.features:
        assert isinstance(target, HFTarget), "such features are checked against the stock model's"
        foreign = ForeignFeatures(Path(recipe.features), target, rows, taps, say)
        return lambda batch: foreign.see(target, batch.to(target.device), half)
    again = recipe.steps * recipe.rows * recipe.accumulate > len(rows.keys)
    if not taps or not (recipe.cache or (target.device == "cpu" and again)):
        return lambda batch: see(target, batch.to(target.device), taps, half)
    sharing = processes // (target.processes if isinstance(target, HFTarget) else 1)  # others write the same files
    cache = FeatureCache(Path(recipe.cache) if recipe.cache else out / CACHE, taps, half, of, sharing=sharing)
    say(f"features are cached in {cache.folder} for later epochs, at most {cache.free * sharing / 1e9:.0f} GB more")
    return lambda batch: cache.see(target, batch.to(target.device))


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """A block in which no other run writes the folder; after a refusal it is as it was."""
    with files.alone_in(out), files.clearing(out, "checkpoint.pt", "*.safetensors"):
        yield


def _own_cache(recipe: Recipe) -> bool:
    """May the run keep features in its own folder?"""
    return not recipe.cache and not recipe.features


def _check_folder(out: Path, recipe: Recipe) -> None:
    """Refuse a folder that a SPEC cannot name, or whose contents a run would replace and no run has written."""
    if "?" in str(out) or " + " in str(out):
        raise InputError(f"a drafter in {out} could not be named, because of its '?' or ' + '; give another --out")
    strange = [] if (out / NAME).exists() else [n for n in ("best", "last", "log.jsonl") if (out / n).exists()]
    cache = out / CACHE
    if _own_cache(recipe) and cache.exists() and not (cache / TARGET).exists() and any(cache.iterdir()):
        strange.append(CACHE)
    if strange:
        raise InputError(f"{out / strange[0]} was not written by a training; give another --out")


def _check(target: Target, documents: Sequence[Document], recipe: Recipe, shard: bool) -> None:
    if target.separate:
        raise InputError("drafters are trained for decoder-only targets")
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
    """Record SIGINT and SIGTERM, so that the current step is finished and saved; a second signal ends it at once."""
    signals: list[int] = []

    def note(number: int, frame: Any) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    try:
        before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread
        yield signals
        return
    try:
        yield signals
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
