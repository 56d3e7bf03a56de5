"""A listening server: its socket, its signals, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any

import anyio
import uvicorn

from ..types import InputError
from .app import application
from .gate import LOOPBACK
from .service import Service

log = logging.getLogger("outrider.serve")


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
    """The first signal drains: nothing new is taken, what was accepted is finished. The second ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service, patience: float):
        super().__init__(config)
        self.service, self.patience = service, patience
        self.draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
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
            self.should_exit = self.force_exit = True

    async def drain(self) -> None:
        """Wait for the last text, then for its last byte."""
        scheduler = self.service.scheduler
        log.info('{"event": "draining", "running": %d, "waiting": %d}', scheduler.active, len(scheduler.waiting))
        with anyio.move_on_after(self.patience):
            while scheduler.active or scheduler.waiting:
                await asyncio.sleep(0.05)
        scheduler.abort()
        self.should_exit = True


def run(service: Service, sock: socket.socket, host: str, key: str = "", patience: float = 30.0) -> None:
    """Serve until a signal comes."""
    app: Any = application(service, key, local=host in LOOPBACK and not key)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_keep_alive=30,
        timeout_graceful_shutdown=5, h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip
    Drained(config, service, patience).run(sockets=[sock])
    service.scheduler.thread.join(10)
