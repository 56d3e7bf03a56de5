"""The trainer of both demo models: resumable, deterministic by seed, one line of progress at a time.

Matrices are trained by Muon (momentum whose update is made orthogonal by five Newton-Schulz steps,
the whole stack of layers in one batched product), embeddings and norms by AdamW. A step's batch, rate and row
length follow from (recipe, step) alone and a checkpoint holds weights and moments in full, so a run
that was interrupted continues bit for bit (same machine, same thread count). The schedule is warm-up, constant,
decay: as long as the decay has not begun, `steps` may be changed between two starts, and the state at its
beginning stays in `plateau.pt`, so that a longer run can set out from there later (copy it to `checkpoint.pt`).
"""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor

from recipes.demo.config import BETA2, DECAY, MUON_MOMENTUM, RECIPES, Recipe
from recipes.demo.data import Schedule
from recipes.demo.net import MATRICES, Net


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """[L, m, n] -> the nearest matrices with singular values near one (Newton-Schulz, bf16)."""
    x = update.to(torch.bfloat16)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, gram, x, beta=3.4445)
    return (x if wide else x.mT).float()


class Optimiser:
    """Muon for the stacked matrices, AdamW for the rest."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.first = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
        self.second = {n: torch.zeros_like(p) for n, p in net.named_parameters() if n not in MATRICES}

    @torch.no_grad()
    def step(self, step: int) -> float:
        """One update at the recipe's rates; returns the gradient's norm before it was clipped."""
        r, factor = self.net.recipe, self.net.recipe.rate(step)
        parameters = dict(self.net.named_parameters())
        size = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters.values()))
        clip = min(1.0, 1.0 / (size + 1e-6))
        for name, p in parameters.items():
            grad, first = p.grad.mul_(clip), self.first[name]
            if name in MATRICES:
                first.lerp_(grad, 1 - MUON_MOMENTUM)
                update = orthogonal(grad.lerp(first, MUON_MOMENTUM))
                rate = r.matrix_rate * factor
                p.mul_(1 - rate * DECAY).sub_(update, alpha=rate * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)
            else:
                second, rate = self.second[name], r.other_rate * factor
                first.lerp_(grad, 0.1)
                second.lerp_(grad.square(), 1 - BETA2)
                bias = (1 - 0.9 ** (step + 1)) / math.sqrt(1 - BETA2 ** (step + 1))
                p.sub_(first / (second.sqrt() + 1e-10) * (rate / bias))
            p.grad = None
        return size


def save(path: Path, net: Net, optimiser: Optimiser, step: int, seen: float) -> None:
    """Writes beside the old checkpoint and then takes its place, so that one is always whole."""
    state = {"net": net.state_dict(), "first": optimiser.first, "second": optimiser.second, "step": step, "loss": seen}
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load(recipe: Recipe, work: Path, dtype: torch.dtype = torch.bfloat16) -> Net:
    """The net of a recipe, from its last checkpoint."""
    net = Net(recipe, dtype)
    net.load_state_dict(torch.load(work / recipe.name / "checkpoint.pt", weights_only=True)["net"])
    return net.requires_grad_(False)


def train(
    recipe: Recipe,
    work: Path,
    domains: tuple[str, ...] | None = None,
    stop: int | None = None,
    every: float = 300.0,
    say=print,
) -> Net:
    """Trains to `recipe.steps` (or to `stop`), from the last checkpoint if there is one."""
    folder = work / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "checkpoint.pt"
    net = Net(recipe)
    optimiser, start, mean = Optimiser(net), 0, 0.0
    if path.exists():
        state = torch.load(path, weights_only=True)
        net.load_state_dict(state["net"])
        optimiser.first, optimiser.second = state["first"], state["second"]
        start, mean = state["step"], state["loss"]
        say(f"{recipe.name}: continuing at step {start}")
    schedule = Schedule(work, recipe.seed, recipe.blocks, recipe.steps, *([domains] if domains else []))
    teacher = None
    per_step, end = recipe.blocks * Schedule.BLOCK, min(recipe.steps, stop or recipe.steps)
    asked: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    began = saved = time.monotonic()
    marks = [(began, start)]
    for step in range(start, end):
        length = recipe.length(step)
        batch = torch.from_numpy(schedule.batch(step, length))
        passes = batch.split(max(1, recipe.rows * 512 // length))
        total = 0.0
        if recipe.learns_distribution(step) and teacher is None:
            teacher = load(RECIPES[recipe.teacher], work)
            say(
                f"{recipe.name}: from step {step} on the loss is the cross-entropy with {recipe.teacher}'s distribution"
            )
        for rows in passes:
            loss = net.loss(rows, teacher.distribution(rows) if teacher else None) * (len(rows) / len(batch))
            loss.backward()
            total += loss.item()
        size = optimiser.step(step)
        mean = total if step == 0 else mean + (total - mean) * max(0.02, 1 / (step + 1))
        now, done = time.monotonic(), step + 1
        if done % 10 == 0 or done == end:
            marks = [*marks[-6:], (now, done)]
            pace = (done - marks[0][1]) / (now - marks[0][0])
            eta = (recipe.steps - done) / pace / 60
            say(
                f"{recipe.name} step {done}/{recipe.steps} loss {total:.4f} mean {mean:.4f} grad {size:.2f} "
                f"rate {recipe.rate(step):.3f} {pace * per_step:.0f} tokens/s eta {eta:.1f} min"
            )
        if done == recipe.plateau:
            save(folder / "plateau.pt", net, optimiser, done, mean)
        if asked or done == end or now - saved > every:
            save(path, net, optimiser, done, mean)
            saved = now
        if asked:
            raise SystemExit(f"{recipe.name}: stopped on request after step {done}; start again to continue.")
    signal.signal(signal.SIGTERM, previous)
    return net
