"""Connections of clients: deadlines for headers and for reading responses, and eviction of idle ones."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .service import Limits

ACCEPTED = 4  # connections accepted per iteration of the event loop
LOOKED_AT = 64  # connections closed per iteration, at most, while the server is full
HEADER = 16 << 10  # bytes within which a header must end to be served then
UNSENT = 16 << 10  # bytes buffered in a connection, and as many in the kernel, before its response pauses
RESERVE = 32 + 8 * ACCEPTED  # file descriptors for everything but connections
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: text/plain\r\n"
    b"content-length: 21\r\n\r\ntoo many connections\n"
)


def capacity(limits: Limits) -> int:
    """The maximum number of connections: the limit, or less if the process may open fewer files."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    folder = Path("/proc/self/fd")
    used = len(list(folder.iterdir())) if folder.exists() else 32
    return max(1, min(limits.connections, allowed - used - RESERVE))


class Listener(socket.socket):
    """A listening socket. While the server is full, connections with an incomplete header are closed at once, and Linux
    defers those that have sent nothing for a second: floods of either would keep complete requests in the kernel's
    queue."""

    full: Callable[[], bool] = staticmethod(lambda: False)
    deferred = False  # whether Linux defers connections that have sent nothing

    def accept(self) -> tuple[socket.socket, Any]:
        full = self.full()
        if full != self.deferred and hasattr(socket, "TCP_DEFER_ACCEPT"):
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(full))
            self.deferred = full
        for _ in range(LOOKED_AT):
            own, address = super().accept()
            if not full or promising(own):
                return own, address
            own.close()
        raise BlockingIOError  # the event loop tries again after other work


def promising(own: socket.socket) -> bool:
    """Whether a new connection has sent nothing yet, or a complete header."""
    try:
        sent = own.recv(HEADER, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return b"\r\n\r\n" in sent


class Connection(H11Protocol):
    """uvicorn's protocol with deadlines: for a request's header, from its first byte (or from when the connection was
    opened), and for a client that reads nothing. The connection that has been idle longest is closed for a new one."""

    def __init__(self, limits: Limits, capacity: int, line: OrderedDict[Connection, None], *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.limits, self.capacity = limits, capacity
        self.line = line  # of connections that may be idle; the one idle longest comes first
        self.header: asyncio.TimerHandle | None = None
        self.unread: asyncio.TimerHandle | None = None
        self.left: int | None = None  # unsent bytes at the last check

    @classmethod
    def limited(cls, limits: Limits, capacity: int) -> Callable[..., Connection]:
        """The protocol class for uvicorn under these limits, for at most `capacity` connections."""
        return partial(cls, limits, capacity, OrderedDict())

    @property
    def idle(self) -> bool:
        """Whether it is open without a request in progress."""
        if self.transport.is_closing():
            return False
        return self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)

    @property
    def incomplete(self) -> bool:
        """Whether a request's body is still being received."""
        return self.cycle is not None and self.cycle.more_body and not self.cycle.response_started

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNSENT, low=UNSENT * 3 // 4)
        own = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # else the kernel buffers thousands of tokens
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        if len(self.connections) > self.capacity and not self.evict():
            transport.write(BUSY)
            transport.close()
            return
        self.line[self] = None
        self.expect()

    def evict(self) -> bool:
        """Close the connection that has been idle longest; False if none is idle. Connections with a request leave the
        line here, and return to its end after the response; those whose response is still being sent stay in it."""
        sending: list[Connection] = []
        evicted = False
        while self.line and not evicted:
            other, _ = self.line.popitem(last=False)
            if other.idle and other.transport.get_write_buffer_size():
                sending.append(other)
            elif other.idle:
                other.drop()
                evicted = True
        for other in reversed(sending):
            self.line[other] = None
            self.line.move_to_end(other, last=False)
        return evicted

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop("header", "unread")
        self.line.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.expect()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self.line[self] = None
            self.line.move_to_end(self)
        self.watch()
        super().on_response_complete()
        if self.idle and not self.conn.trailing_data[0]:
            self.stop("header")  # what is idle after a response is uvicorn's to close
        else:
            self.expect()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch()

    def resume_writing(self) -> None:
        self.left = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.unread is None:
            self.drop()
        else:  # its last response is still being read
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def overdue(self) -> bool:
        """Whether its request goes on although it is answered: its body was not waited for."""
        return self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete

    def expect(self) -> None:
        """An incomplete header, and a body after its response, have a deadline that further bytes do not extend."""
        if not self.idle and not self.overdue:
            self.stop("header")
        elif self.header is None:
            self.header = self.loop.call_later(self.limits.header, self.drop)

    def watch(self) -> None:
        """While bytes are unsent: check periodically whether the client has read some."""
        if self.unread is None and self.transport.get_write_buffer_size():
            self.left = None
            self.look()

    def look(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left and self.left is not None and left >= self.left:
            self.drop()
        else:
            self.left = left
            self.unread = self.loop.call_later(self.limits.send, self.look) if left else None

    def stop(self, *timers: str) -> None:
        for name in timers:
            if (timer := getattr(self, name)) is not None:
                timer.cancel()
                setattr(self, name, None)

    def drop(self) -> None:
        self.transport.abort()
