"""Loads a model for serving: drafters, scheduler, service."""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import Any, TypeVar

from .. import drafters
from ..core.protocols import Drafter
from ..engine.prefixes import Prefixes
from ..llm import LLM, load
from .fleet import Fleet
from .metrics import MeasuredBudget, Metrics
from .scheduler import Scheduler
from .service import Limits, Service

log = logging.getLogger("outrider.serve")
Made = TypeVar("Made")
LIMITS = Limits()


def start(
    model: Any = None,
    specs: Sequence[str] | None = None,
    *,
    name: str | None = None,
    rows: int = 16,
    queue: int = 256,
    prefill_share: float = 0.5,
    prefix_cache: int = 512,
    limits: Limits = LIMITS,
    **options: Any,
) -> Service:
    """Load a model and its drafters. The first drafter is the default (without any: the model's own); `none` serves
    without drafts.

    This runs in a temporary thread, because the decoding thread must be the only one with OpenMP workers: once there
    are more workers than cores, GNU's OpenMP lets them sleep instead of spin between operations, and a pass over one
    token takes more than twice as long.
    """

    def loaded() -> Service:
        made = _loaded(model, list(dict.fromkeys(specs or [])), options)
        service = service_of(*made, name or made[0].name, rows, queue, prefill_share, prefix_cache, limits)
        return service

    return elsewhere(loaded)


def elsewhere(function: Callable[[], Made]) -> Made:
    """Call a function in a thread of its own; returns or raises what it does. Ctrl-C ends the thread too."""
    future: Future[Made] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=call, name="loading", daemon=True)
    try:
        thread.start()
        return future.result()
    except KeyboardInterrupt:  # a thread inside torch at exit would abort the process
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )
        raise
    finally:
        if thread.is_alive():
            thread.join()


def _loaded(model: Any, chosen: Sequence[str], options: dict[str, Any]) -> tuple[LLM, dict[str, Drafter]]:
    llm = load(model, chosen[0] if chosen else None, **options)
    loaded: dict[str, Drafter] = {llm.drafter_name: llm.drafter}
    for spec in chosen[1:]:
        loaded[spec] = drafters.load(spec, llm.target, llm.tokenizer)
    return llm, loaded


def service_of(
    llm: LLM,
    loaded: dict[str, Drafter],
    name: str = "",
    rows: int = 16,
    queue: int = 256,
    prefill_share: float = 0.5,
    prefix_cache: int = 512,
    limits: Limits = LIMITS,
) -> Service:
    """A service for a loaded model. prefix_cache: MiB for the KV cache of finished rows."""
    metrics = Metrics(name or llm.name)

    def tell(drafter: str, error: Exception) -> None:
        metrics.failed_drafters.inc()
        log.error(json.dumps({"event": "drafter disabled", "drafter": drafter, "why": type(error).__name__}))

    drafts = next(iter(loaded), "none") != "none"
    fleet = Fleet({spec: drafter for spec, drafter in loaded.items() if spec != "none"}, drafts, tell=tell)
    prefixes = Prefixes(rows, prefix_cache << 20) if prefix_cache else None
    engine = llm.engine()
    engine = replace(engine, budget=MeasuredBudget(engine.budget, metrics, llm.remember), prefixes=prefixes)
    scheduler = Scheduler(engine, fleet, metrics, rows, queue, prefill_share)
    service = Service(llm, scheduler, name or llm.name, limits.fitted(llm.target.context, rows + queue))
    _ = service.fingerprint, llm.detokenizer  # computed now, since they take a while
    return service
