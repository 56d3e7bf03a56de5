"""One client's connection: it has a request in time, takes what is sent to it, and makes room for others."""

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

ACCEPTED = 4  # connections that are accepted in one turn of the event loop; it looks at them some turns later
LOOKED_AT = 64  # connections that may be closed in one turn while the server is full
HEADER = 16 << 10  # bytes in which a header must end to be served then
UNSENT = 16 << 10  # bytes that wait in a connection, and as many in the system, before its answer is held back
RESERVE = 32 + 8 * ACCEPTED  # descriptors that connections leave to everything else
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: text/plain\r\n"
    b"content-length: 21\r\n\r\ntoo many connections\n"
)


def room(limits: Limits) -> int:
    """Connections that may be open: as many as the limits say, and fewer where the process may open fewer files."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    folder = Path("/proc/self/fd")
    used = len(list(folder.iterdir())) if folder.exists() else 32
    return max(1, min(limits.connections, allowed - used - RESERVE))


class Listener(socket.socket):
    """A socket that listens. While the server is full, a connection that begins a request and does not end its header
    is closed before it costs anything, and Linux holds back for a second those that have sent nothing: a flood of
    either would keep whole requests waiting in the line of the system."""

    full: Callable[[], bool] = staticmethod(lambda: False)
    held_back = False  # does Linux hold connections back that have sent nothing?

    def accept(self) -> tuple[socket.socket, Any]:
        full = self.full()
        if full != self.held_back and hasattr(socket, "TCP_DEFER_ACCEPT"):
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(full))
            self.held_back = full
        for _ in range(LOOKED_AT):
            own, address = super().accept()
            if not full or promising(own):
                return own, address
            own.close()
        raise BlockingIOError  # the event loop has other work, and comes back


def promising(own: socket.socket) -> bool:
    """Has a new connection sent nothing yet, or a whole header?"""
    try:
        sent = own.recv(HEADER, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return b"\r\n\r\n" in sent


class Connection(H11Protocol):
    """uvicorn's protocol with the deadlines that it lacks: for a request's header from its first byte on (or from when
    the connection was opened), and for a client that takes nothing of what is sent to it. The connection that has been
    without a request for the longest time makes room for a new one."""

    def __init__(self, limits: Limits, room: int, line: OrderedDict[Connection, None], *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.limits, self.room = limits, room
        self.line = line  # of all connections that may be without a request; the longest without one comes first
        self.header: asyncio.TimerHandle | None = None
        self.unread: asyncio.TimerHandle | None = None
        self.left: int | None = None  # bytes that waited to be sent when that was last looked at

    @classmethod
    def limited(cls, limits: Limits, room: int) -> Callable[..., Connection]:
        """The protocol under these limits, as uvicorn makes one for each of at most `room` connections."""
        return partial(cls, limits, room, OrderedDict())

    @property
    def idle(self) -> bool:
        """Is it open, and is there no request that is read or answered?"""
        if self.transport.is_closing():
            return False
        return self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)

    @property
    def incomplete(self) -> bool:
        """Is a request's body still being read?"""
        return self.cycle is not None and self.cycle.more_body and not self.cycle.response_started

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNSENT, low=UNSENT * 3 // 4)
        own = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # else the system takes thousands of tokens that nobody reads
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        if len(self.connections) > self.room and not self.make_room():
            transport.write(BUSY)
            transport.close()
            return
        self.line[self] = None
        self.expect()

    def make_room(self) -> bool:
        """Drop the connection that has been without a request for the longest time; False where all have one. Whoever
        has a request leaves the line here, and comes back to its end when that is answered."""
        while self.line:
            other, _ = self.line.popitem(last=False)
            if other.idle:
                other.drop()
                return True
        return False

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

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch()

    def resume_writing(self) -> None:
        self.left = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.unread is None:
            self.drop()

    def expect(self) -> None:
        """A header that is not complete has a deadline, which more bytes do not move."""
        if not self.idle:
            self.stop("header")
        elif self.header is None:
            self.header = self.loop.call_later(self.limits.header, self.drop)

    def watch(self) -> None:
        """While bytes wait to be sent: look again and again whether some were taken."""
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
