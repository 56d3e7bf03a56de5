"""How servers bear load: `python benchmarks/serving.py smollm2 --drafter lookup --out runs/serving.json`.

It starts `outrider serve` and measures it with speculation and without; every `--peer NAME=URL` is a running server of
another kind, asked with OpenAI's fields alone, as in

    transformers serve FOLDER --port 9000      (the folder that `outrider info smollm2` names)
    python benchmarks/serving.py smollm2 --peer transformers=http://127.0.0.1:9000 --peer-model FOLDER

For each number of clients all of them are measured in turn, with the same prompts, seeds and pauses, `--turns` times,
every other time in the opposite order: tokens per second are medians, and ratios those of single turns. A client asks
for one streamed text after the other, and pauses between two of them for an exponential time: a client that waits asks
at Poisson's random times. Every piece is timed: time to the first token, time per token after it, tokens per second of
all clients. The last lines say whether the bars hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import outrider
from servers import Stream, ask, ours, post, prompts

BARS = {"throughput": 0.97, "speed": 1.8}  # speculation beside plain: at every load; per user, of one client


@dataclass
class Server:
    """What is measured under one name."""

    name: str
    url: str
    body: dict[str, Any] = field(default_factory=dict)  # fields beside prompt and length
    ours: bool = False


@dataclass
class Turn:
    """What one server gave to so many clients, once."""

    texts: list[Stream]
    failures: list[str]
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second, of all clients."""
        return sum(made.tokens for made in self.texts) / self.seconds


def load(server: Server, clients: int, each: int, gap: float, tokens: int, counter: str, turn: int) -> Turn:
    """`clients` at a time, `each` texts per client; `gap`: seconds between two texts of a client, on average."""
    results: list[Stream] = []
    failures: list[str] = []
    lock, texts = threading.Lock(), prompts()

    def client(number: int) -> None:
        chance = random.Random(number)
        for k in range(each):
            time.sleep(chance.expovariate(1 / gap))
            own = {"prompt": texts[(number * each + k) % len(texts)], "seed": number * 1000 + k, "max_tokens": tokens}
            if server.ours:  # or it would copy prompts that it has read before
                own["cache_salt"] = f"{server.name} {clients} {turn}"
            try:
                made = ask(server.url, {**server.body, **own})
            except (RuntimeError, OSError) as error:
                with lock:
                    failures.append(str(error))
                continue
            with lock:
                results.append(made)

    began = time.monotonic()
    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    for made in results:  # servers that do not say how many tokens they wrote: ours counts them
        made.tokens = made.tokens or post(counter, "/tokenize", {"prompt": made.text})["count"]
    return Turn(results, failures, seconds)


def summary(name: str, clients: int, turns: Sequence[Turn]) -> dict[str, Any]:
    """All turns of a server and a load in one row."""
    texts = [made for turn in turns for made in turn.texts]
    return {
        "server": name,
        "clients": clients,
        "texts": len(texts),
        "tokens": sum(made.tokens for made in texts),
        "failures": [failure for turn in turns for failure in turn.failures],
        "turns": [round(turn.speed, 2) for turn in turns],
        "tokens_per_second": statistics.median(turn.speed for turn in turns),
        "ttft_ms": quantiles([made.first for made in texts]),
        "tpot_ms": quantiles([made.decode / (made.tokens - 1) for made in texts if made.tokens > 1]),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {name: 1000 * sum(seconds) for name in ("p50", "p95", "p99")}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{p}": round(1000 * cuts[p - 1], 2) for p in (50, 95, 99)}


def line(row: dict[str, Any]) -> str:
    ttft, tpot = (" / ".join(f"{row[k][p]:.1f}" for p in ("p50", "p95", "p99")) for k in ("ttft_ms", "tpot_ms"))
    rate = f"{row['tokens_per_second']:.1f}"
    return f"| {row['clients']} | {row['server']} | {rate} | {ttft} | {tpot} | {len(row['failures'])} |"


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The bars, one sentence each."""
    by = {(row["clients"], row["server"]): row for row in rows}
    loads, said = sorted({row["clients"] for row in rows}), []
    peers = [name for name in dict.fromkeys(row["server"] for row in rows) if name not in ("plain", "speculating")]

    def ratios(clients: int, above: str, below: str) -> list[float]:
        pairs = zip(by[clients, above]["turns"], by[clients, below]["turns"], strict=True)
        return sorted(high / low if low else float("inf") for high, low in pairs)

    def ratio(clients: int, above: str, below: str) -> float:
        return statistics.median(ratios(clients, above, below))

    for clients in loads:
        every = ratios(clients, "speculating", "plain")
        middle = statistics.median(every)
        said.append(
            f"{held(middle >= BARS['throughput'])}: with {clients} clients speculation has {middle:.2f} of plain's "
            f"throughput ({every[0]:.2f}-{every[-1]:.2f})"
        )
    if 1 in loads:
        speed = by[1, "plain"]["tpot_ms"]["p50"] / max(by[1, "speculating"]["tpot_ms"]["p50"], 1e-9)
        said.append(f"{held(speed >= BARS['speed'])}: per-user speed of one client {speed:.2f} times plain")
    for peer in peers:
        least = min((ratio(c, "speculating", peer), c) for c in loads)
        said.append(f"{held(least[0] > 1)}: throughput beside {peer} at least {least[0]:.2f} ({least[1]} clients)")
    return said


def held(yes: bool) -> str:
    return "held" if yes else "NOT held"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--drafter", action="append", help="SPEC; of several the first is measured")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="another server that runs")
    parser.add_argument("--peer-model", help="what peers are asked for as `model`")
    parser.add_argument("--clients", default="1,2,4,8,16,32")
    parser.add_argument("--texts", type=int, default=16, help="texts of each load, but at least two of a client")
    parser.add_argument("--turns", type=int, default=3, help="how often each load is measured")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rows", type=int, default=16, help="rows of `outrider serve`")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.turns < 1:
        parser.error(f"--turns is at least 1, not {given.turns}")
    rows, gap = [], 0.0
    with ours(given.model, given.drafter or [], given.rows) as url:
        sampling, counted = {"temperature": given.temperature}, {"stream_options": {"include_usage": True}}
        servers = [
            Server("plain", url, {**sampling, **counted, "outrider": {"speculate": False}}, ours=True),
            Server("speculating", url, {**sampling, **counted}, ours=True),
            *(Server(n, u, {**sampling, "model": given.peer_model} if given.peer_model else sampling)
              for n, u in (peer.split("=", 1) for peer in given.peer)),
        ]  # fmt: skip
        for server in servers:  # the first texts load, record and learn
            for _ in range(3):
                made = ask(server.url, {**server.body, "prompt": prompts()[0], "max_tokens": given.tokens})
            gap = made.end / 4 if server.name == "plain" else gap
        print("| clients | server | tokens/s | TTFT ms p50 / p95 / p99 | TPOT ms p50 / p95 / p99 | failed |")
        print("|---|---|---|---|---|---|")
        for clients in map(int, given.clients.split(",")):
            each, turns = max(2, -(-given.texts // clients)), {server.name: list[Turn]() for server in servers}
            for turn in range(given.turns):
                for server in servers if turn % 2 == 0 else servers[::-1]:
                    turns[server.name].append(load(server, clients, each, gap, given.tokens, url, turn))
            for name, results in turns.items():
                rows.append(summary(name, clients, results))
                print(line(rows[-1]), flush=True)
    print("", *verdicts(rows), sep="\n")
    if given.out:
        made_by = {"outrider": outrider.__version__, "machine": platform.platform(), "gap_seconds": gap}
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"settings": settings, **made_by, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
