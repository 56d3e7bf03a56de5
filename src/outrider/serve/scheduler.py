"""The thread that owns the model: admission, prefill interleaved with rounds, and the end of rows.

    while there is work:  sweep -> admit -> (one chunk of a prompt | one round)

A new row is prefilled alone, chunk by chunk, and then joins the running batch. While rows decode, prefill gets the
share `prefill_share` of the time. Scheduling does not affect texts: under the coupled rule they depend on prompt, seed
and parameters alone.
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

from ..engine import Batch, Engine, Piece
from ..engine.request import Row
from ..params import NOT_FINITE, InputError
from .fleet import Fleet, FleetDrafter
from .job import End, Event, Heading, Job, Part, shown
from .metrics import Metrics

log = logging.getLogger("outrider.serve")

SPACING = 16  # rows of other requests that may start between two texts of one request


@dataclass
class Reading:
    """A prompt in prefill, and in scoring if requested; `steps` yields after each chunk what it has read of the prompt.
    resumed: whether its text continues after a pause."""

    job: Job
    steps: Iterator[Batch | None]
    resumed: bool = False
    partial: Batch | None = None  # what is read so far
    newcomer: Batch | None = None
    pieces: list[Piece] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine, job: Job, row: Row) -> Reading:
        def steps() -> Iterator[Batch | None]:
            if job.scoring is not None:
                yield from job.scoring.read(engine.target)
            if job.request.max_new_tokens:
                made.newcomer, made.pieces = yield from Batch.read(engine, [row])

        made = cls(job, iter(()), bool(row.output))
        made.steps = steps()
        return made


def give_back() -> None:
    """Return freed memory to the system, which glibc would keep otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class Full(Exception):
    """The queue is full; retry in `seconds`."""

    def __init__(self, seconds: int):
        super().__init__("too many requests are waiting; try again later")
        self.seconds = seconds


class Closed(Exception):
    """The server accepts no more requests."""


@dataclass
class Scheduler:
    """Schedules rows, which any thread may `submit`, in a thread of its own."""

    engine: Engine
    fleet: Fleet
    metrics: Metrics
    rows: int = 8  # maximum batch size
    queue: int = 256  # maximum number of waiting jobs
    prefill_share: float = 0.5
    waiting: deque[Job] = field(default_factory=deque)
    jobs: dict[int, Job] = field(default_factory=dict)  # in prefill or decoding, by the index of their rows
    batch: Batch | None = None
    reading: Reading | None = None
    owed: float = 0.0  # seconds of rounds due before the next prefill chunk
    beat: float = field(default_factory=monotonic)  # time of the loop's last iteration
    closing: bool = False
    dead: str = ""  # why the loop ended unexpectedly
    pace: float = 1.0  # running mean of the seconds from a row's start to its end
    count: int = 0
    trimmed: bool = False  # whether memory was returned since the last work
    parties: int = 0  # number of requests so far; each may have several texts

    def __post_init__(self) -> None:
        self.change = Condition()
        self.thread = Thread(target=self._run, name="engine", daemon=True)

    # Called by other threads.

    def submit(self, jobs: Sequence[Job]) -> None:
        """Accept all of these jobs. Raises Full or Closed, and then accepts none."""
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
        """Reconsider waiting jobs after a reader has caught up."""
        with self.change:
            self.change.notify()

    def close(self) -> None:
        """Accept no more jobs, and finish the accepted ones."""
        with self.change:
            self.closing = True
            self.change.notify()

    def abort(self) -> None:
        """End all remaining jobs now."""
        self.close()
        self.cancel([*self.waiting, *self.jobs.values()])

    @property
    def active(self) -> int:
        return len(self.jobs)

    def stuck(self, seconds: float) -> bool:
        """Whether there is work and the loop has made no progress for this long."""
        return bool(self.jobs) and monotonic() - self.beat > seconds

    # The engine's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # log it, since nothing else would
            log.exception("the engine's loop has ended")
            self.dead = f"the engine's loop has ended: {type(error).__name__}: {error}"
        finally:
            with self.change:
                self.closing, left = True, [*self.waiting, *self.jobs.values()]
                self.waiting.clear()
            for job in left:
                self._end(job, "error", self.dead or "the server has shut down")

    def _turn(self) -> bool:
        """One iteration; False after the last."""
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
        """The share of the KV cache in use, of `rows` rows with the longest context."""
        tokens = 0 if self.batch is None else sum(row.length for row in self.batch.rows)
        return tokens / (self.rows * self.engine.target.context)

    def _sweep(self) -> None:
        """Drop jobs that are cancelled or past their deadline."""
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
                    if self.reading.partial is not None:
                        self.reading.partial.keep(0)  # clients often ask the same again, or a little more
                    self.reading = None
        if self.batch is not None:
            self._leave(self._paused(self.batch))

    def _paused(self, batch: Batch) -> set[int]:
        """Return rows with a slow reader to the queue and keep their KV cache as that of finished rows; returns their
        indices."""
        paused: list[Job] = []
        for i, row in enumerate(batch.rows):
            job = self.jobs.get(row.index)
            if job is not None and row.finish is None and job.behind():
                batch.keep(i)
                paused.append(job)
        if not paused:
            return set()
        indices = {index for index, job in self.jobs.items() if job in paused}
        self.metrics.preempted.inc(len(paused))
        with self.change:
            for index in indices:
                del self.jobs[index]
            self.waiting.extend(paused)
        return indices

    def _admit(self) -> None:
        """Start the prefill of the next job if a slot is free."""
        if self.reading is not None or len(self.jobs) >= self.rows:
            return
        with self.change:
            job = self._next()
            if job is None:
                return
            self.waiting.remove(job)
            if job.row is None:
                self.count += 1
                job.row, job.started = Row(job.request, self.count, salt=job.salt), monotonic()
            self.jobs[job.row.index] = job
        engine = replace(self.engine, drafter=FleetDrafter(self.fleet, job.choice))
        self.reading = Reading.of(engine, job, job.row)

    def _next(self) -> Job | None:
        """The next waiting job whose reader is not behind. The last quarter of the rows is reserved for requests
        without a running row, so that they do not wait for the many texts of another."""
        running = {job.party for job in self.jobs.values()}
        full = len(self.jobs) >= self.rows - self.rows // 4
        allowed = (job for job in self.waiting if not job.behind() and (not full or job.party not in running))
        return min(allowed, key=lambda job: job.turn, default=None)

    def _read(self) -> None:
        """One prefill chunk of the new row; after the last it joins the batch."""
        assert self.reading is not None
        reading, began = self.reading, monotonic()
        try:
            step = next(reading.steps, reading)
        except Exception as error:
            self.reading = None
            self._blame(reading.job, error)
            return
        if not isinstance(step, Reading):
            reading.partial = step or reading.partial
        else:
            self.reading = None
            if not reading.resumed:
                if reading.job.row is not None and reading.job.request.max_new_tokens:
                    self.metrics.prefix(len(reading.job.request.prompt), reading.job.row.usage.cached_tokens)
                self._head(reading.job)
            if reading.newcomer is not None:
                reading.newcomer.keep(0)  # samples of one prompt follow each other
            self._join(reading.newcomer)
            self._emit(reading.pieces)
        spent = monotonic() - began
        self.metrics.chunk(spent)
        if self.batch is not None:
            self.owed += spent * (1 - self.prefill_share) / self.prefill_share

    def _head(self, job: Job) -> None:
        """Deliver the scores of a prompt after its prefill; a text of no tokens ends there."""
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
            self._fail(error, newcomer.rows)  # either batch may be inconsistent

    def _round(self) -> None:
        assert self.batch is not None
        began = monotonic()
        try:
            pieces = self.batch.round()
        except Exception as error:
            self._fail(error)
            return
        self.owed = max(0.0, self.owed - (monotonic() - began))
        last = getattr(self.batch.drafting, "last", None)
        self.metrics.round(last, pieces)
        self._emit(pieces, last)
        self._leave()

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
                continue  # it has ended already
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
        """End one job by its own error, or by an error in its prefill."""
        if not isinstance(error, InputError):
            log.error("prefill failed", exc_info=error)
        self._end(job, "error", str(error) or type(error).__name__)
        self._recover()

    def _fail(self, error: Exception, newcomers: Sequence[Row] = ()) -> None:
        """End the rows of a failed round, and no others."""
        log.error("a round has failed", exc_info=error)
        assert self.batch is not None
        rows, self.batch, self.owed = [*self.batch.rows, *newcomers], None, 0.0
        for row in rows:
            if row.index in self.jobs:
                self._end(self.jobs[row.index], "error", f"the round failed: {str(error) or type(error).__name__}")
        self.metrics.failed_rounds.inc()
        self._recover()

    def _recover(self) -> None:
        if self.engine.prefixes is not None:
            self.engine.prefixes.clear()
        gc.collect()
        self.engine.target.release()

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
        except RuntimeError:  # the reader has gone, and its event loop too
            job.cancelled = True
