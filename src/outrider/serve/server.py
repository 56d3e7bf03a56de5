"""A listening server: its socket, its signals, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any, cast

import uvicorn

from ..types import InputError
from .app import application
from .gate import LOOPBACK
from .journal import Journal
from .service import Service

log = logging.getLogger("outrider.serve")

LAST = 5  # seconds for the last bytes of texts that were ended


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, before any model is loaded: a port that is taken is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot listen on {host} port {port} ({why}); choose another --port or --host") from None
    return sock


class Drained(uvicorn.Server):
    """The first signal drains: nothing new is taken, what was accepted is answered to the last byte. The second ends it
    at once."""

    def __init__(self, config: uvicorn.Config, service: Service, journal: Journal, patience: float):
        super().__init__(config)
        self.service, self.journal, self.patience = service, journal, patience
        self.draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # which alone may hear signals
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        if self.draining is None:
            self.service.scheduler.close()
            self.draining = asyncio.ensure_future(self.drain())
        else:
            self.service.scheduler.abort()
            # From Python 3.12 on a server waits for the readers of its connections, however it is told to end.
            for connection in list(self.server_state.connections):
                cast(Any, connection).transport.abort()
            self.should_exit = self.force_exit = True

    async def drain(self) -> None:
        """Wait until all that was accepted has been answered; then for what lies in the connections' own buffers."""
        scheduler, end = self.service.scheduler, monotonic() + self.patience
        log.info('{"event": "draining", "running": %d, "waiting": %d}', scheduler.active, len(scheduler.waiting))
        while self.journal.answering and monotonic() < end:
            await asyncio.sleep(0.05)
        scheduler.abort()
        self.config.timeout_graceful_shutdown = LAST + max(0, int(end - monotonic()))
        self.should_exit = True


def server_of(service: Service, key: str = "", local: bool = True, patience: float = 30.0) -> Drained:
    """A server that is not running yet; `patience`: seconds for what was accepted when it is told to end."""
    journal: Any = application(service, key, local)
    config = uvicorn.Config(
        journal, log_config=None, access_log=False, server_header=False, timeout_keep_alive=30,
        timeout_graceful_shutdown=LAST, h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip
    return Drained(config, service, journal, patience)


def run(service: Service, sock: socket.socket, host: str, key: str = "", patience: float = 30.0) -> None:
    """Serve until a signal comes."""
    server_of(service, key, host in LOOPBACK and not key, patience).run(sockets=[sock])
    service.scheduler.thread.join(10)
