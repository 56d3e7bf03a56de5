"""How a server bears load: `python benchmarks/serving.py --url http://127.0.0.1:8000 --out runs/serving.json`.

Clients come with Poisson arrivals, each asks for streamed texts one after the other, and every piece is timed: time to
the first token, time per token after it, tokens per second of all. With --both each number of clients is measured with
speculation and without, in turn. Any OpenAI-compatible server can be measured (`--plain-body`: no fields of our own).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def prompts() -> list[str]:
    lines = (files("outrider") / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["text"][:400] for row in map(json.loads, lines) if "text" in row]


def ask(url: str, body: dict[str, Any]) -> dict[str, float]:
    """One streamed text: seconds to its first token, from that to the last, and tokens."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=600)
    began = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:200]!r}")
    first = last = 0.0
    tokens = 0
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        if event["choices"] and event["choices"][0]["text"]:
            last = time.monotonic()
            first = first or last
    connection.close()
    return {"ttft": first - began, "decode": last - first, "tokens": tokens, "e2e": last - began}


def load(url: str, clients: int, each: int, base: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """`clients` at a time, `each` texts per client; gaps are exponential, of the mean time that a text takes alone."""
    found: list[dict[str, float]] = []
    failures: list[str] = []
    lock = threading.Lock()
    gap = ask(url, {**base, "prompt": texts[0]})["e2e"] / 4

    def client(number: int) -> None:
        chance = random.Random(number)
        for k in range(each):
            time.sleep(chance.expovariate(1 / gap))
            body = {**base, "prompt": texts[(number * each + k) % len(texts)], "seed": number * 1000 + k}
            try:
                made = ask(url, body)
            except (RuntimeError, OSError) as error:
                with lock:
                    failures.append(str(error))
                continue
            with lock:
                found.append(made)

    began = time.monotonic()
    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    rates = [f["decode"] / (f["tokens"] - 1) for f in found if f["tokens"] > 1]
    return {
        "clients": clients,
        "texts": len(found),
        "failures": failures,
        "tokens_per_second": sum(f["tokens"] for f in found) / seconds,
        "ttft_ms": quantiles([f["ttft"] for f in found]),
        "tpot_ms": quantiles(rates),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {name: 1000 * sum(seconds) for name in ("p50", "p95", "p99")}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{p}": round(1000 * cuts[p - 1], 2) for p in (50, 95, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", default="1,2,4,8,16,32")
    parser.add_argument("--each", type=int, default=4, help="texts per client")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--both", action="store_true", help="with speculation and without, in turn")
    parser.add_argument("--plain-body", action="store_true", help="for other servers: OpenAI's fields alone")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    texts, rows = prompts(), []
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    base = {"max_tokens": given.tokens, "temperature": given.temperature, **usage}
    print("| clients | speculation | tokens/s | TTFT ms p50 / p95 / p99 | TPOT ms p50 / p95 / p99 | failed |")
    print("|---|---|---|---|---|---|")
    for clients in map(int, given.clients.split(",")):
        for speculate in (True, False) if given.both else (True,):
            ours = {} if given.plain_body else {"outrider": {"speculate": speculate}, "ignore_eos": True}
            row = {**load(given.url, clients, given.each, {**base, **ours}, texts), "speculate": speculate}
            rows.append(row)
            ttft, tpot = (" / ".join(f"{row[k][p]:.1f}" for p in ("p50", "p95", "p99")) for k in ("ttft_ms", "tpot_ms"))
            said = "yes" if speculate else "no"
            rate, failed = row["tokens_per_second"], len(row["failures"])
            print(f"| {clients} | {said} | {rate:.1f} | {ttft} | {tpot} | {failed} |", flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"settings": vars(given) | {"out": str(given.out)}, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
