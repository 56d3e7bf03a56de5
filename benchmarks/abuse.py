"""A server under abuse, beside one ordinary client: `python benchmarks/abuse.py --json runs/abuse.json`.

Each situation has a server of its own (the demo model), an attacker in a process of its own, and one client that asks
for one token after the other on fresh connections while another asks for `/health`. The table says how long the two
waited, how far the server's resident memory rose above its idle state and what of that was left ten seconds afterwards,
how many descriptors were left, and how many lines its log had in its busiest second. A second table says how the server
ends when it is told to while it works. The exit code is 1 where a bar does not hold. All traffic goes to 127.0.0.1.
Memory and descriptors are read from /proc: for Linux alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import resource
import select
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH = "/v1/completions"
HEAD = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ASKED = {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
LONG = {"prompt": "Once upon a time", "n": 8, "max_tokens": 1900, "ignore_eos": True, "stream": True}
BIG = {"prompt": "a b " * ((8 << 20) // 4 - 64), "max_tokens": 1}
RULES = "start: x0\n" + "".join(f"x{i}: x{i + 1} x{i + 1}\n" for i in range(2000)) + 'x2000: "a"\n'
BOMB = {"prompt": "x", "n": 64, "max_tokens": 64, "structured_outputs": {"grammar": RULES}}
BARS = {
    "neighbour_p99_ms": 1000, "health_p99_ms": 50, "above_idle_mb": 300, "left_mb": 100, "descriptors_left": 0,
    "log_lines_per_second": 10,
}  # fmt: skip


@dataclass
class Server:
    """A running `outrider serve`, and what its log has said."""

    process: subprocess.Popen[bytes]
    port: int = 0
    log: list[tuple[float, bytes]] = field(default_factory=list)  # when each line came, and its beginning

    @property
    def resident(self) -> float:
        """MB of memory that the process holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1000

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def busiest(self, since: float) -> int:
        """Lines of the log in its busiest second."""
        return max(Counter(int(at) for at, _ in self.log if at > since).values(), default=0)


@contextmanager
def serving(*options: str, descriptors: int = 0) -> Iterator[Server]:
    """`outrider serve demo` on a free port; `descriptors`: how many it may open (0: as many as this process)."""
    command = [sys.executable, "-m", "outrider", "serve", "demo", "--port", "0", *options]

    def limited() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=limited)
    server, started = Server(process), threading.Event()

    def hear() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.log.append((time.monotonic(), line[:400]))
            if result := re.search(rb" at http://127\.0\.0\.1:(\d+) ", line):
                server.port = int(result[1])
                started.set()
        started.set()

    listener = threading.Thread(target=hear, daemon=True)
    listener.start()
    try:
        started.wait(180)
        if not server.port:
            raise RuntimeError(f"the server did not start: {server.log}")
        while send(server.port, "GET", "/ready") != 200:
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()
        listener.join(5)
        assert process.stderr is not None
        process.stderr.close()


def send(port: int, method: str, path: str, body: Any = None) -> int:
    """The status of one request on a connection of its own, its answer read; 0: there was none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        raw = None if body is None else json.dumps(body)
        connection.request(method, path, raw, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    return 0


def post(body: Any) -> bytes:
    """A completion's bytes, on a connection that is closed after its answer."""
    raw = json.dumps(body).encode()
    return f"{HEAD}connection: close\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


def opened(port: int, data: bytes = b"", buffer: int = 0) -> socket.socket:
    """A connection on which some bytes have been sent; `buffer`: bytes that it takes without being read."""
    sock = socket.socket()
    sock.settimeout(60)
    if buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect(("127.0.0.1", port))
    sock.sendall(data)
    return sock


# Attackers: each goes on until its process is ended.


def repeatedly(clients: int, visit: Callable[[], None]) -> None:
    """So many clients, each of which visits over and over."""

    def forever() -> None:
        while True:
            with suppress(OSError):
                visit()
            time.sleep(0.01)

    for _ in range(clients):
        threading.Thread(target=forever, daemon=True).start()
    threading.Event().wait()


def asks(port: int, clients: int, body: Any) -> None:
    data = post(body)

    def visit() -> None:
        with opened(port, data) as sock:
            while sock.recv(1 << 16):
                pass

    repeatedly(clients, visit)


def hangs_up(port: int) -> None:
    data = post(BIG)
    repeatedly(8, lambda: opened(port, data).close())


def holds(port: int) -> None:
    """Half of the connections begin a header, half send nothing; whoever is cut comes again."""
    with selectors.DefaultSelector() as held:
        for number in range(1 << 30):
            while len(held.get_map()) < 500:
                try:
                    held.register(opened(port, HEAD.encode() if number % 2 else b""), selectors.EVENT_READ)
                except OSError:
                    break
            for key, _ in held.select(0.05):
                sock: Any = key.fileobj
                with suppress(OSError):
                    if sock.recv(4096):
                        continue
                held.unregister(sock)
                sock.close()


def reads_nothing(port: int) -> None:
    data = post({**LONG, "logprobs": 5})

    def visit() -> None:
        with opened(port, data, buffer=4096) as sock:
            gone = select.poll()
            gone.register(sock, select.POLLRDHUP)
            gone.poll()

    repeatedly(6, visit)


@dataclass(frozen=True)
class Situation:
    """What is done to a server, and how many descriptors it may open."""

    attack: Callable[[int], None]
    descriptors: int = 0


SITUATIONS = {
    "no attack": Situation(lambda port: threading.Event().wait() and None),
    "an 8 MB prompt after the other": Situation(lambda port: asks(port, 1, BIG)),
    "eight clients send 8 MB and hang up": Situation(hangs_up),
    "500 unfinished headers and idle connections": Situation(holds),
    "the same with 128 descriptors": Situation(holds, descriptors=128),
    "grammar bombs from four clients, n = 64": Situation(lambda port: asks(port, 4, BOMB)),
    "six streams with n = 8, never read": Situation(reads_nothing),
}


def under(name: str, seconds: float, settle: float = 10.0) -> dict[str, Any]:
    """One row of the table: a server in one situation for so long, and what is left `settle` seconds later."""
    situation = SITUATIONS[name]
    with serving(descriptors=situation.descriptors) as server:
        for _ in range(20):
            send(server.port, "POST", PATH, ASKED)
        time.sleep(1)
        idle, handles, began = server.resident, server.descriptors, time.monotonic()
        command = [sys.executable, __file__, "--attack", name, "--port", str(server.port)]
        attacker, over = subprocess.Popen(command), threading.Event()
        answers: list[tuple[int, float]] = []
        health: list[tuple[int, float]] = []

        def client(times: list[tuple[int, float]], pause: float, *request: Any) -> None:
            while not over.wait(pause):
                asked = time.monotonic()
                times.append((send(server.port, *request), time.monotonic() - asked))

        time.sleep(2)  # until the attacker is at work
        threads = [
            threading.Thread(target=client, args=(answers, 0.25, "POST", PATH, ASKED)),
            threading.Thread(target=client, args=(health, 0.05, "GET", "/health")),
        ]
        for thread in threads:
            thread.start()
        peak, end = idle, time.monotonic() + seconds
        while time.monotonic() < end:
            peak = max(peak, server.resident)
            time.sleep(0.05)
        over.set()
        for thread in threads:
            thread.join()
        attacker.kill()
        attacker.wait()
        end = time.monotonic() + settle
        while time.monotonic() < end and (server.descriptors > handles or server.resident > idle + BARS["left_mb"]):
            time.sleep(0.1)
        return {
            "situation": name, "seconds": seconds, "answers": len(answers),
            "failed": sum(status != 200 for status, _ in answers),
            **quantiles("neighbour", answers), **quantiles("health", health),
            "idle_mb": round(idle), "above_idle_mb": round(peak - idle), "left_mb": round(server.resident - idle),
            "descriptors_left": max(0, server.descriptors - handles), "log_lines_per_second": server.busiest(began),
        }  # fmt: skip


def quantiles(name: str, times: Sequence[tuple[int, float]]) -> dict[str, float]:
    waits = [1000 * seconds for _, seconds in times] * (2 if len(times) == 1 else 1)
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    return {f"{name}_p50_ms": round(cuts[49], 1), f"{name}_p99_ms": round(cuts[98], 1)}


# How it ends.


def ends(server: Server, *signals: int, pause: float = 1.0) -> dict[str, Any]:
    """Send signals, one second between two; how and when the process ends after the last one."""
    for number in signals[:-1]:
        server.process.send_signal(number)
        time.sleep(pause)
    server.process.send_signal(signals[-1])
    began = time.monotonic()
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(60)
    seconds = time.monotonic() - began
    time.sleep(0.5)
    traceback = any(b"Traceback" in line for _, line in server.log)
    return {"rc": server.process.poll(), "seconds": round(seconds, 1), "traceback": traceback}


def second_signal() -> dict[str, Any]:
    with serving("--shutdown-timeout", "300") as server:
        readers = [opened(server.port, post(LONG), buffer=4096) for _ in range(4)]
        time.sleep(2)
        result = ends(server, signal.SIGTERM, signal.SIGTERM)
        for reader in readers:
            reader.close()
        return {"situation": "a second SIGTERM while streams run", **result}


def bodies_at_sigterm() -> dict[str, Any]:
    with serving() as server:
        senders = [opened(server.port, post(BIG)[: 1 << 20]) for _ in range(8)]
        time.sleep(1)
        result = ends(server, signal.SIGTERM)
        for sender in senders:
            sender.close()
        return {"situation": "SIGTERM while eight bodies are being read", **result}


def two_lengths() -> dict[str, Any]:
    with serving() as server:
        raw = json.dumps(ASKED).encode()
        chunked = f"{HEAD}content-length: {len(raw)}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        with opened(server.port, chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(raw), raw)) as sock:
            status = int(sock.recv(4096).split()[1])
        return {"situation": "Content-Length with Transfer-Encoding", "status": status}


End = Callable[[], dict[str, Any]]


def short(row: dict[str, Any]) -> list[str]:
    """The bars that a row of the first table does not hold."""
    return [
        f"{row['situation']}: {name} is {row[name]}, more than {bar}" for name, bar in BARS.items() if row[name] > bar
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The first table in Markdown."""
    head = (
        "| situation | neighbour, p50 / p99 ms | not answered | `/health`, p50 / p99 ms | MB above idle | MB left "
        "| descriptors left | log lines/s |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    lines = (
        f"| {r['situation']} | {r['neighbour_p50_ms']:g} / {r['neighbour_p99_ms']:g} | {r['failed']} of {r['answers']} "
        f"| {r['health_p50_ms']:g} / {r['health_p99_ms']:g} | {r['above_idle_mb']} | {r['left_mb']} "
        f"| {r['descriptors_left']} | {r['log_lines_per_second']} |"
        for r in rows
    )
    return "\n".join([head, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="how long each attack lasts")
    parser.add_argument("--only", default="", help="situations whose name has this in it")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--attack", choices=SITUATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        SITUATIONS[options.attack].attack(options.port)
    rows = []
    for name in SITUATIONS:
        if options.only in name:
            rows.append(under(name, options.seconds))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    endings = [end() for end in (second_signal, bodies_at_sigterm, two_lengths)] if not options.only else []
    print(table(rows))
    for ending in endings:
        print("- " + ", ".join(f"{name} {value}" for name, value in ending.items()))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"rows": rows, "endings": endings}, indent=1) + "\n", encoding="utf-8")
    missed = [sentence for row in rows for sentence in short(row)]
    missed += [f"{e['situation']}: {e}" for e in endings if e.get("traceback") or e.get("status", 400) != 400]
    print("\n".join(missed) or "every bar holds")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
