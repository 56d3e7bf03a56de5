"""The thread that owns the model: admission, prompts and rounds in turn, and every row's end.

    while there is work:  sweep -> admit -> (one chunk of a prompt | one round)

A newcomer's prompt is read alone, chunk by chunk, and joins the running rows when it has been read. Chunks and rounds
take turns by the clock: where somebody decodes, reading gets the share `prefill_share` of the time. Nothing here says
what a text will be: under the coupled rule that is a matter of prompt, seed and parameters alone.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, Thread
from time import monotonic
from typing import Any

import torch

from ..core.protocols import Keeper, Kept
from ..engine import Batch, Engine, Piece
from ..engine.request import Row
from ..params import NOT_FINITE, InputError
from .fleet import Fleet, FleetDrafter, FleetDrafting
from .job import End, Event, Heading, Job, Part, shown
from .metrics import Metrics
from .prefixes import Prefixes

log = logging.getLogger("outrider.serve")

SPACING = 16  # rows that other requests may begin between two texts of one request


@dataclass
class Reading:
    """A prompt that is being scored, if that is wanted, and read; `steps` pauses after each chunk. `resumed`: a text
    goes on after a pause."""

    job: Job
    steps: Iterator[None]
    resumed: bool = False
    newcomer: Batch | None = None
    pieces: list[Piece] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine, job: Job, row: Row, known: tuple[Kept, int] | None) -> Reading:
        def steps() -> Iterator[None]:
            if job.scoring is not None:
                yield from job.scoring.read(engine.target)
            if job.request.max_new_tokens:
                made.newcomer, made.pieces = yield from Batch.read(engine, [row], known)

        made = cls(job, iter(()), bool(row.output))
        made.steps = steps()
        return made


def give_back() -> None:
    """Freed memory goes back to the system, where the C library (glibc) keeps it for itself otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class Full(Exception):
    """The waiting room is full; try again in `seconds`."""

    def __init__(self, seconds: int):
        super().__init__("too many requests are waiting; try again later")
        self.seconds = seconds


class Closed(Exception):
    """The server takes no more requests."""


@dataclass
class Scheduler:
    """Rows come by `submit` from any thread; all else happens in its own."""

    engine: Engine
    fleet: Fleet
    metrics: Metrics
    rows: int = 8  # that decode at a time
    queue: int = 256  # that may wait
    prefill_share: float = 0.5
    prefixes: Prefixes = field(default_factory=Prefixes)
    waiting: deque[Job] = field(default_factory=deque)
    jobs: dict[int, Job] = field(default_factory=dict)  # by the index of their rows: those being read or decoded
    batch: Batch | None = None
    reading: Reading | None = None
    owed: float = 0.0  # seconds of rounds before the next chunk may be read
    beat: float = field(default_factory=monotonic)  # when the loop last came round
    closing: bool = False
    dead: str = ""  # why the loop has ended, if it should not have
    pace: float = 1.0  # seconds from a row's start to its end, a running mean
    count: int = 0
    trimmed: bool = False  # has memory been given back since there was work?
    parties: int = 0  # requests that have been taken; each may have several texts

    def __post_init__(self) -> None:
        self.change = Condition()
        self.thread = Thread(target=self._run, name="engine", daemon=True)

    # What other threads call.

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take all of these, or raise Full or Closed and take none."""
        with self.change:
            if self.closing or self.dead:
                raise Closed(self.dead or "the server is shutting down")
            if self.active + len(self.waiting) + len(jobs) > self.rows + self.queue:
                turns = (len(self.waiting) + self.active) / self.rows
                raise Full(max(1, min(60, round(turns * self.pace))))
            self.parties += 1
            for i, job in enumerate(jobs):
                job.party, job.turn = self.parties, self.count + SPACING * i
            self.waiting.extend(jobs)
            self.change.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        with self.change:
            for job in jobs:
                job.cancelled = True
            self.change.notify()

    def wake(self) -> None:
        """Look again at those that wait: a reader has caught up."""
        with self.change:
            self.change.notify()

    def close(self) -> None:
        """Take nothing more, finish what there is."""
        with self.change:
            self.closing = True
            self.change.notify()

    def abort(self) -> None:
        """End all that is left, now."""
        self.close()
        self.cancel([*self.waiting, *self.jobs.values()])

    @property
    def active(self) -> int:
        return len(self.jobs)

    def stuck(self, seconds: float) -> bool:
        """Is there work, and has the loop not come round for so long?"""
        return bool(self.jobs) and monotonic() - self.beat > seconds

    # The engine's thread.

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._turn():
                    pass
        except BaseException as error:  # nobody else would hear of it
            log.exception("the engine's loop has ended")
            self.dead = f"the engine's loop has ended: {type(error).__name__}: {error}"
        finally:
            with self.change:
                self.closing, left = True, [*self.waiting, *self.jobs.values()]
                self.waiting.clear()
            for job in left:
                self._end(job, "error", self.dead or "the server has shut down")

    def _turn(self) -> bool:
        """One step; False when there will be no more."""
        self.beat = monotonic()
        self._sweep()
        self._admit()
        self.metrics.load(len(self.jobs), len(self.waiting), self._filled())
        if self.reading is not None and (self.batch is None or self.owed <= 0):
            self._read()
        elif self.batch is not None:
            self._round()
        else:
            with self.change:
                if self.closing and not self.waiting:
                    return False
                if self._next() is not None or self.change.wait(1.0):
                    self.trimmed = False
                    return True
            if not self.trimmed:
                give_back()
                self.trimmed = True
        return True

    def _filled(self) -> float:
        """The share of what `rows` rows of the longest context would hold that is held."""
        held = 0 if self.batch is None else sum(row.length for row in self.batch.rows)
        return held / (self.rows * self.engine.target.context)

    def _sweep(self) -> None:
        """Drop what nobody waits for any more, and what is late."""
        now = monotonic()
        with self.change:
            gone = [job for job in self.waiting if job.cancelled or now > job.deadline]
            for job in gone:
                self.waiting.remove(job)
        for job in gone:
            self._end(job, "abort")
        for job in list(self.jobs.values()):
            if (job.cancelled or now > job.deadline) and job.row is not None and job.row.finish is None:
                job.row.finish = "abort"
                self._end(job, "abort")
                if self.reading is not None and self.reading.job is job:
                    self.reading = None
        if self.batch is not None:
            self._leave(self._paused(self.batch))

    def _paused(self, batch: Batch) -> set[int]:
        """Rows whose reader is behind go back to those that wait, and what they have read is kept like that of others;
        their indices."""
        paused: list[Job] = []
        for i, row in enumerate(batch.rows):
            job = self.jobs.get(row.index)
            if job is not None and row.finish is None and job.behind():
                self._keep(batch, i)
                paused.append(job)
        if not paused:
            return set()
        found = {index for index, job in self.jobs.items() if job in paused}
        self.metrics.preempted.inc(len(paused))
        with self.change:
            for index in found:
                del self.jobs[index]
            self.waiting.extend(paused)
        return found

    def _admit(self) -> None:
        """The next in line begins to be read, if a slot is free for it."""
        if self.reading is not None or len(self.jobs) >= self.rows:
            return
        with self.change:
            job = self._next()
            if job is None:
                return
            self.waiting.remove(job)
            if job.row is None:
                self.count += 1
                job.row, job.started = Row(job.request, self.count), monotonic()
            self.jobs[job.row.index] = job
        engine = replace(self.engine, drafter=FleetDrafter(self.fleet, job.choice))
        known = None
        if job.request.max_new_tokens:
            known = self.prefixes.find(job.row.text, job.salt)
            if not job.row.output:
                job.cached = 0 if known is None else known[1]
                self.metrics.prefix(len(job.request.prompt), job.cached)
        self.reading = Reading.of(engine, job, job.row, known)

    def _next(self) -> Job | None:
        """Whose turn it is of those that wait and whose reader is not behind. The last quarter of the rows is for
        requests that have none, so that nobody waits for the many texts of another."""
        running = {job.party for job in self.jobs.values()}
        full = len(self.jobs) >= self.rows - self.rows // 4
        allowed = (job for job in self.waiting if not job.behind() and (not full or job.party not in running))
        return min(allowed, key=lambda job: job.turn, default=None)

    def _read(self) -> None:
        """One chunk of the newcomer's prompt; after the last it joins the others."""
        assert self.reading is not None
        reading, began = self.reading, monotonic()
        try:
            done = next(reading.steps, reading) is reading
        except Exception as error:
            self.reading = None
            self._blame(reading.job, error)
            return
        if done:
            self.reading = None
            if not reading.resumed:
                self._head(reading.job)
            if reading.newcomer is not None:
                self._keep(reading.newcomer, 0)  # samples of one prompt come one after the other
            self._join(reading.newcomer)
            self._emit(reading.pieces)
        spent = monotonic() - began
        self.metrics.chunk(spent)
        if self.batch is not None:
            self.owed += spent * (1 - self.prefill_share) / self.prefill_share

    def _head(self, job: Job) -> None:
        """What is known of a prompt that has been read; a text of no tokens ends there."""
        if job.scoring is not None and job.scoring.scores is not None:
            self._deliver(job, Heading(job.scoring.scores))
        if not job.request.max_new_tokens:
            if job.scoring is not None:
                self.metrics.prompt.inc(len(job.request.prompt))
            self._end(job, "length")

    def _join(self, newcomer: Batch | None) -> None:
        if newcomer is None or self.batch is None:
            self.batch = self.batch or newcomer
            return
        try:
            self.batch.join(newcomer)
        except Exception as error:
            self._fail(error, newcomer.rows)  # which of the two is whole nobody knows

    def _round(self) -> None:
        assert self.batch is not None
        began = monotonic()
        try:
            pieces = self.batch.round()
        except Exception as error:
            self._fail(error)
            return
        self.owed = max(0.0, self.owed - (monotonic() - began))
        for i, row in enumerate(self.batch.rows):
            if row.finish in ("eos", "stop", "length"):
                self._keep(self.batch, i)
        last = getattr(self.batch.drafting, "last", None)
        self.metrics.round(last, pieces)
        self._emit(pieces, last)
        self._leave()

    def _keep(self, batch: Batch, i: int) -> None:
        """What row i has read stays, for prompts that begin like it."""
        row, session, drafting = batch.rows[i], batch.session, batch.drafting
        if not isinstance(session, Keeper) or row.index not in self.jobs:
            return
        assert isinstance(drafting, FleetDrafting)
        tokens = [*row.request.prompt, *row.output][: row.length]
        try:
            self.prefixes.add(
                tokens, lambda: session.taken(i, tokens, drafting.seen.of(i, len(tokens))), self.jobs[row.index].salt
            )
        except (RuntimeError, MemoryError):  # no memory for copies
            self.prefixes.clear()

    def _leave(self, paused: Collection[int] = ()) -> None:
        assert self.batch is not None
        try:
            self.batch = self.batch.leave(paused)
        except Exception as error:
            self._fail(error)
        if self.batch is None:
            self.owed = 0.0

    def _emit(self, pieces: Sequence[Piece], last: Any = None) -> None:
        now = monotonic()
        for i, piece in enumerate(pieces):
            row, job = piece.row, self.jobs.get(piece.row.index)
            if job is None:
                continue  # it has ended by other means
            scores = None
            if job.watch is not None:
                scores = job.watch.scores(len(row.output) - len(piece.tokens), piece.tokens)
            self.metrics.tokens(job, len(piece.tokens), now)
            tree = shown(last, i) if job.show and last is not None else None
            if piece.tokens:
                self._deliver(job, Part(piece.tokens, piece.drafted, scores, tree))
            if row.finish is not None:
                self._end(job, row.finish, NOT_FINITE if row.finish == "error" else "")

    def _blame(self, job: Job, error: Exception) -> None:
        """End one job by its own fault, or by what went wrong while it was read."""
        if not isinstance(error, InputError):
            log.error("a prompt could not be read", exc_info=error)
        self._end(job, "error", str(error) or type(error).__name__)
        self._recover()

    def _fail(self, error: Exception, newcomers: Sequence[Row] = ()) -> None:
        """A round has failed: its rows end, and nobody else."""
        log.error("a round has failed", exc_info=error)
        assert self.batch is not None
        rows, self.batch, self.owed = [*self.batch.rows, *newcomers], None, 0.0
        for row in rows:
            if row.index in self.jobs:
                self._end(self.jobs[row.index], "error", f"the round failed: {str(error) or type(error).__name__}")
        self.metrics.failed_rounds.inc()
        self._recover()

    def _recover(self) -> None:
        self.prefixes.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _end(self, job: Job, finish: str, error: str = "") -> None:
        if job.watch is not None and job.watch.guide is not None:
            job.watch.guide.close()
        if job.row is not None:
            self.jobs.pop(job.row.index, None)
            if finish in ("eos", "stop", "length"):
                self.pace += 0.1 * (monotonic() - job.started - self.pace)
        usage = Row(job.request, 0).usage if job.row is None else job.row.usage
        usage.prompt_tokens = len(job.request.prompt)
        self.metrics.done(job, finish, usage)
        self._deliver(job, End(finish, usage, error))

    @staticmethod
    def _deliver(job: Job, event: Event) -> None:
        try:
            job.deliver(event)
        except RuntimeError:  # whoever waited does not read, or is gone, and its event loop too
            job.cancelled = True
