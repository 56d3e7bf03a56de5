"""A listening server: its socket, signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, cast

import uvicorn

from ..params import InputError
from .app import application
from .connection import ACCEPTED, Connection, Listener, capacity
from .gate import LOOPBACK
from .journal import Journal
from .service import Service

log = logging.getLogger("outrider.serve")

LAST = 5  # seconds for the last bytes of texts after shutdown
WAITING = 1024  # connections in the kernel's queue
SENT = 256 << 10  # bytes of a response that the kernel may buffer
# Python's switch interval in seconds. Each system call of the event loop releases the GIL and must get it back: at the
# default 5 ms the response to a small request waits several times as long beside a decoding and a tokenising thread.
SWITCH = 0.001


def listen(host: str, port: int) -> Listener:
    """A bound socket, before any model is loaded, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = Listener(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT)
        sock.bind((host, port))
        sock.listen(WAITING)
    except (OSError, OverflowError) as error:
        sock.close()
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot listen on {host} port {port} ({why}); choose another --port or --host") from None
    return sock


class Drained(uvicorn.Server):
    """The first signal drains: no new requests, and accepted ones are answered to the last byte. The second ends it at
    once."""

    def __init__(self, config: uvicorn.Config, service: Service, journal: Journal, patience: float, capacity: int):
        super().__init__(config)
        self.service, self.journal, self.patience, self.capacity = service, journal, patience, capacity
        self.draining: asyncio.Task[None] | None = None
        self.cut = 0  # the signal that ended it before all was answered

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(WAITING)  # asyncio sets it to the number accepted per iteration
            if isinstance(sock, Listener):
                sock.full = lambda: len(self.server_state.connections) >= self.capacity

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # which skips the application's shutdown; asyncio then cancels it with a traceback
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.draining is None:
            self.service.scheduler.close()
            self.draining = asyncio.ensure_future(self.drain())
        elif not self.force_exit:
            self.cut = number
            self.draining.cancel()
            self.service.scheduler.abort()
            # From Python 3.12 on a server waits for the readers of its connections.
            self.drop(lambda connection: True)
            self.should_exit = self.force_exit = True

    def drop(self, condition: Callable[[Connection], bool]) -> None:
        """Close connections at once."""
        for connection in list(cast(Any, self.server_state.connections)):
            if condition(connection):
                connection.drop()

    async def drain(self) -> None:
        """Wait until all accepted requests are answered, then until the connections' buffers are empty."""
        scheduler, end = self.service.scheduler, monotonic() + self.patience
        log.info('{"event": "draining", "running": %d, "waiting": %d}', scheduler.active, len(scheduler.waiting))
        while self.journal.answering and monotonic() < end:
            await asyncio.sleep(0.05)
        scheduler.abort()
        self.drop(lambda connection: connection.incomplete)
        self.config.timeout_graceful_shutdown = LAST + max(0, int(end - monotonic()))
        self.should_exit = True


def server_of(service: Service, key: str = "", local: bool = True, patience: float = 30.0) -> Drained:
    """A server that is not running yet. patience: seconds for accepted requests at shutdown."""
    journal: Any = application(service, key, local)
    most = capacity(service.limits)
    protocol: Any = Connection.limited(service.limits, most)
    config = uvicorn.Config(
        journal, http=protocol, ws="none", loop="asyncio", log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=30, timeout_graceful_shutdown=LAST, h11_max_incomplete_event_size=64 << 10,
        backlog=ACCEPTED,
    )  # fmt: skip
    return Drained(config, service, journal, patience, most)


def run(service: Service, sock: socket.socket, host: str, key: str = "", patience: float = 30.0) -> int:
    """Serve until a signal. Returns the exit code: 0, or 128 + signal if it ended before all was answered."""
    server = server_of(service, key, host in LOOPBACK and not key, patience)
    sys.setswitchinterval(SWITCH)
    server.run(sockets=[sock])
    service.scheduler.thread.join(10)
    return 128 + server.cut if server.cut else 0
