"""A real server on a real port: the demo model with two drafters, in a thread of the tests' process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install 'outrider[serve]'")

from serve_world import Serve, Served

from outrider import drafters
from outrider.llm import LLM, load
from outrider.serve.server import Drained, listen, server_of
from outrider.serve.service import Service
from outrider.serve.start import service_of


@pytest.fixture(scope="session")
def llm() -> LLM:
    """It drafts in every round: how much pays on a busy machine is no matter of these tests."""
    return load("demo", "eagle:demo/hass", budget="16x6")


@pytest.fixture(scope="session")
def loaded(llm: LLM) -> dict[str, Any]:
    """Drafters by the names that requests use."""
    return {"eagle": llm.drafter, "lookup": drafters.load("lookup", llm.target, llm.tokenizer)}


Running = list[tuple[Drained, threading.Thread]]


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    """Servers that were started, and their threads."""
    made: Running = []
    yield made
    end(made)
    for _, thread in made:
        thread.join(20)


def end(servers: Running) -> None:
    for server, _ in servers:
        server.config.timeout_graceful_shutdown = 1
        server.should_exit = True


@pytest.fixture(autouse=True)
def ended(running: Running) -> Iterator[None]:
    """Servers that a test starts end with it: idle ones take the tests after it some of the processor's time."""
    before = len(running)
    yield
    end(running[before:])


@pytest.fixture(scope="session")
def start(running: Running) -> Serve:
    """Start a server."""

    def begin(service: Service, key: str = "", patience: float = 30.0, buffer: int = 0) -> Served:
        sock = listen("127.0.0.1", 0)
        if buffer:  # bytes that the kernel holds of what a client has not read
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        server = server_of(service, key, patience=patience)
        served = Served(service, sock.getsockname()[1], key, server)

        async def serve() -> None:
            served.loop = asyncio.get_running_loop()
            await server.serve(sockets=[sock])

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        running.append((server, thread))
        latest = time.monotonic() + 30
        while not server.started and time.monotonic() < latest:
            time.sleep(0.01)
        return served

    return begin


@pytest.fixture(scope="session")
def served(llm: LLM, loaded: dict[str, Any], start: Serve) -> Served:
    return start(service_of(llm, loaded, "demo", rows=4, queue=32))
