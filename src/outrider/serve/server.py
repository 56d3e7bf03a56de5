"""A listening server: its socket, its signals, and how it ends."""

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
from .connection import ACCEPTED, Connection, Listener, room
from .gate import LOOPBACK
from .journal import Journal
from .service import Service

log = logging.getLogger("outrider.serve")

LAST = 5  # seconds for the last bytes of texts that were ended
WAITING = 1024  # connections that the system may hold for us
SENT = 256 << 10  # bytes that the system may hold of what a client has not read
# Seconds that a thread runs Python while another waits to. Each system call of the event loop gives its turn away and
# must get it back: at Python's own 5 ms the answer to one small request waits several times so long beside a thread
# that is decoding and one that is tokenizing.
SWITCH = 0.001


def listen(host: str, port: int) -> Listener:
    """A bound socket, before any model is loaded: a port that is taken is told at once."""
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
    """The first signal drains: nothing new is taken, what was accepted is answered to the last byte. The second ends it
    at once."""

    def __init__(self, config: uvicorn.Config, service: Service, journal: Journal, patience: float, room: int):
        super().__init__(config)
        self.service, self.journal, self.patience, self.room = service, journal, patience, room
        self.draining: asyncio.Task[None] | None = None
        self.cut = 0  # the signal that ended it before everything was answered

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(WAITING)  # asyncio has made it the number that are accepted in one turn
            if isinstance(sock, Listener):
                sock.full = lambda: len(self.server_state.connections) >= self.room

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # which leaves the application's end out, and asyncio then cancels it with a traceback
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # which alone may hear signals
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
            # From Python 3.12 on a server waits for the readers of its connections, however it is told to end.
            self.drop(lambda connection: True)
            self.should_exit = self.force_exit = True

    def drop(self, wanted: Callable[[Connection], bool]) -> None:
        """Close connections at once."""
        for connection in list(cast(Any, self.server_state.connections)):
            if wanted(connection):
                connection.drop()

    async def drain(self) -> None:
        """Wait until all that was accepted has been answered; then for what lies in the connections' own buffers."""
        scheduler, end = self.service.scheduler, monotonic() + self.patience
        log.info('{"event": "draining", "running": %d, "waiting": %d}', scheduler.active, len(scheduler.waiting))
        while self.journal.answering and monotonic() < end:
            await asyncio.sleep(0.05)
        scheduler.abort()
        self.drop(lambda connection: connection.incomplete)
        self.config.timeout_graceful_shutdown = LAST + max(0, int(end - monotonic()))
        self.should_exit = True


def server_of(service: Service, key: str = "", local: bool = True, patience: float = 30.0) -> Drained:
    """A server that is not running yet; `patience`: seconds for what was accepted when it is told to end."""
    journal: Any = application(service, key, local)
    most = room(service.limits)
    protocol: Any = Connection.limited(service.limits, most)
    config = uvicorn.Config(
        journal, http=protocol, loop="asyncio", log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=30, timeout_graceful_shutdown=LAST, h11_max_incomplete_event_size=64 << 10,
        backlog=ACCEPTED,
    )  # fmt: skip
    return Drained(config, service, journal, patience, most)


def run(service: Service, sock: socket.socket, host: str, key: str = "", patience: float = 30.0) -> int:
    """Serve until a signal comes; the exit code: 0, or 128 and the signal that ended it before all was answered."""
    server = server_of(service, key, host in LOOPBACK and not key, patience)
    sys.setswitchinterval(SWITCH)
    server.run(sockets=[sock])
    service.scheduler.thread.join(10)
    return 128 + server.cut if server.cut else 0
