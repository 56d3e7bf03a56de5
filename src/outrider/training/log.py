"""The log of a training: a progress bar on stderr, lines of JSON, and TensorBoard if installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from datetime import timedelta
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import files

EVERY = 10  # steps between lines


class Log:
    """`log.jsonl` has a line every ten steps and one per evaluation.

    Args:
        folder: of the run.
        start, steps: the first step of this session, and the last of the run.
        evaluate: steps from one evaluation to the next.
        rate: operations per second of the machine's GEMMs.
        main: whether this process writes.
        quiet: no output on stderr.
    """

    def __init__(self, folder: Path, start: int, steps: int, evaluate: int, rate: float, main: bool, quiet: bool):
        self.path, self.main, self.quiet = folder / "log.jsonl", main, quiet
        self.start, self.steps, self.evaluate, self.rate = start, steps, evaluate, rate
        self.tokens, self.seconds, self.useful = 0, 0.0, 0.0
        self.losses: list[float] = []
        self.pause = 0.0  # seconds that the last evaluation took
        self.bar: Any = None
        self.board: Any = None

    def open(self) -> None:
        """Open the files in an existing folder."""
        self._forget(self.start)
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.path.parent / "tensorboard"))

    def __enter__(self) -> Log:
        if self.main and not self.quiet:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            console = Console(stderr=True)
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn(),
                console=console, disable=not console.is_terminal,
            )  # fmt: skip
            self.task = self.bar.add_task("training", total=self.steps, completed=self.start, note="")
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self.board.close()

    def say(self, words: str) -> None:
        if self.main and not self.quiet:
            from rich.console import Console

            console = self.bar.console if self.bar is not None else Console(stderr=True)
            console.print(words, highlight=False, soft_wrap=True)

    def step(
        self,
        step: int,
        loss: float,
        rate: float,
        tokens: int,
        seconds: float,
        useful: float,
        parts: Mapping[str, float],
    ) -> None:
        """Log a step."""
        self.tokens, self.seconds, self.useful = self.tokens + tokens, self.seconds + seconds, self.useful + useful
        self.losses.append(loss)
        speed, share = self.tokens / self.seconds, self.useful / self.seconds / self.rate
        mean = sum(self.losses) / len(self.losses)
        note = f"loss {mean:.4f}  {speed:,.0f} tokens/s ({share:.0%} of the machine's rate)"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, note=note)
        if step % EVERY == 0 or step == self.steps:
            if self.bar is not None and not self.bar.console.is_terminal:  # no bar is drawn
                pauses = (-(-self.steps // self.evaluate) - (step - 1) // self.evaluate) * self.pause
                left = timedelta(seconds=round((self.steps - step) * self.seconds / len(self.losses) + pauses))
                self.say(f"step {step} of {self.steps}: {note}, {left} left")
            line = {"step": step, "loss": mean, "lr": rate}
            self._write({**line, "tokens_per_second": speed, "rate_share": share, **parts})
            self.tokens, self.seconds, self.useful, self.losses = 0, 0.0, 0.0, []

    def evaluation(
        self, step: int, loss: float, parts: Mapping[str, float], result: Mapping[str, Any], seconds: float
    ) -> None:
        """Log an evaluation."""
        self.pause = seconds
        self._write({"step": step, "held_out_loss": loss, **{f"held_out_{k}": v for k, v in parts.items()}, **result})
        alpha = " ".join(f"{a:.2f}" for a in result["alpha"])
        self.say(f"step {step}: held-out loss {loss:.4f}, tau {result['tau']:.2f}, alpha by position {alpha}")

    def _write(self, line: dict[str, Any]) -> None:
        if not self.main:
            return
        files.append(self.path, json.dumps(line))
        if self.board is not None:
            for name, value in line.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, line["step"])

    def _forget(self, start: int) -> None:
        """Drop lines after the checkpoint that this run resumes from."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text(encoding="utf-8").splitlines() if step_of(line) <= start]
        files.write(self.path, "".join(line + "\n" for line in kept if start))


def step_of(line: str) -> float:
    """The step of a line of the log; infinite for one that was cut off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return inf
