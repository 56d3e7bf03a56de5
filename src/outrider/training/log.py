"""What a training says: a progress bar on stderr, lines of JSON, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

EVERY = 10  # steps between lines


class Log:
    """`log.jsonl` has a line every tenth step and one for every evaluation."""

    def __init__(self, folder: Path, start: int, steps: int, main: bool, quiet: bool):
        self.path, self.main, self.quiet = folder / "log.jsonl", main, quiet
        self.start, self.steps = start, steps
        self.tokens, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self.bar: Any = None
        self.board: Any = None

    def open(self) -> None:
        """Begin to write, in a folder that is there."""
        self._forget(self.start)
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.path.parent / "tensorboard"))

    def __enter__(self) -> Log:
        if self.main and not self.quiet:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn(),
                console=Console(stderr=True),
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

            (self.bar.console if self.bar is not None else Console(stderr=True)).print(words, highlight=False)

    def step(
        self, step: int, loss: float, rate: float, tokens: int, seconds: float, parts: Mapping[str, float]
    ) -> None:
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.losses.append(loss)
        if self.bar is not None:
            self.bar.update(self.task, completed=step, note=f"loss {loss:.4f}  {tokens / seconds:,.0f} tokens/s")
        if step % EVERY == 0 or step == self.steps:
            line = {"step": step, "loss": sum(self.losses) / len(self.losses), "lr": rate}
            self._write({**line, "tokens_per_second": self.tokens / self.seconds, **parts})
            self.tokens, self.seconds, self.losses = 0, 0.0, []

    def evaluation(self, step: int, loss: float, parts: Mapping[str, float], found: Mapping[str, Any]) -> None:
        self._write({"step": step, "held_out_loss": loss, **{f"held_out_{k}": v for k, v in parts.items()}, **found})
        alpha = " ".join(f"{a:.2f}" for a in found["alpha"])
        self.say(f"step {step}: held-out loss {loss:.4f}, tau {found['tau']:.2f}, alpha by position {alpha}")

    def _write(self, line: dict[str, Any]) -> None:
        if not self.main:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.board is not None:
            for name, value in line.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, line["step"])

    def _forget(self, start: int) -> None:
        """Drop what was logged after the checkpoint that this run goes on from."""
        if not self.path.exists():
            return
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        kept = [line for line in lines if json.loads(line)["step"] <= start]
        self.path.write_text("".join(line + "\n" for line in kept if start), encoding="utf-8")
