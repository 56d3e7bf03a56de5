"""What drives the simulated farm (`farm.py`), and what it shows. Each step is a command:

    python -m papers.farm_runs record eagle     traces of the demo model
    python -m papers.farm_runs check            the simulation beside the real server
    python -m papers.farm_runs sweep llama-3.1-8b     every load and policy, one copy of a target
    python -m papers.farm_runs size 1000        a farm of so many GPUs
    python -m papers.farm_runs plot             docs/scaling.svg

Results go to papers/results; `python -m tools.pages` writes docs/scaling.md from them. All times of `check` are CPU
seconds of one thread, so that other processes of the machine do not count: set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from benchmarks.servers import Stream, ask, prompts, started

from outrider.bench.document import Estimate
from outrider.bench.metrics import LOOP_SHARE, loops
from outrider.bench.plots import COLOURS, curves
from outrider.budgets.adaptive import AdaptiveBudget
from outrider.budgets.budgeter import Budgeter, FixedBudget
from outrider.core.types import Question, Verdict
from outrider.engine import Batch, Row
from outrider.llm import LLM, load

from . import plan, scaling
from .cost import Cost, speeds
from .farm import DEPTH, Gpu, Server, Text, farm, servers

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "papers" / "results" / "farm"  # not of the bench's format
DRAFTERS = {"eagle": "eagle:demo/hass", "lookup": "lookup"}
TEXTS, TOKENS, GROUP = 32, 48, 8


class Everywhere(Batch):
    """A batch that notes what of each draft is right, and commits one token a round: so it drafts at every position."""

    right: ClassVar[dict[int, list[int]]] = {}

    def judge(self, question: Question) -> Verdict:
        made, first = super().judge(question), []
        for row, (tokens, _, _), path, following in zip(
            self.rows, question.tree.host, made.paths, made.next, strict=True
        ):
            if row.output:  # in a round, not for the first token
                self.right.setdefault(row.index, []).append(len(path) - 1)
            first.append(tokens[path[1]] if len(path) > 1 else following)
        return Verdict([path[:1] for path in made.paths], first, made.finite)


def traces(llm: LLM, said: Sequence[str], tokens: int) -> list[tuple[Text, bool]]:
    """The traces of a model and its drafter at temperature 0, and whether each text loops."""
    budget = FixedBudget(DEPTH + 1, DEPTH, (1,) * DEPTH)
    requests, _ = llm.requests(list(said), max_new_tokens=tokens, temperature=0.0)
    Everywhere.right.clear()
    rows = [Row(request, i) for i, request in enumerate(requests)]
    batch, _ = Everywhere.start(llm.engine(budget=budget), rows)
    while batch:
        batch.round()
        batch = batch.leave()
    made = [Text(len(row.request.prompt), tuple(Everywhere.right.get(row.index, ()))) for row in rows]
    return [(text, loops(row.output) > LOOP_SHARE) for text, row in zip(made, rows, strict=True)]


def record(name: str) -> None:
    """Traces of the demo model with a drafter, of texts that do not loop; written after each group of prompts."""
    llm, results = load("demo", DRAFTERS[name], compile=False), list[tuple[int, int, tuple[int, ...]]]()
    for first in range(0, TEXTS, GROUP):
        made = traces(llm, prompts()[first : first + GROUP], TOKENS)
        results += [(first + i, text.prompt, text.accepts) for i, (text, looping) in enumerate(made) if not looping]
        print(name, first + GROUP, len(results), fmean(a for _, _, accepts in results for a in accepts), flush=True)
        write(f"traces_{name}", results)


def write(name: str, results: Any) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(results, separators=(",", ":")) + "\n", encoding="utf-8")


def recorded(name: str) -> dict[int, Text]:
    results = json.loads((RESULTS / f"traces_{name}.json").read_text(encoding="utf-8"))
    return {number: Text(prompt, tuple(accepts)) for number, prompt, accepts in results}


# ------------------------------------------------------------------------------------------------ the check

DRAFTED = 4  # tokens of a chain
LOADS = (1, 4)  # clients


@dataclass(frozen=True)
class Measured:
    """This machine's CPU seconds: of a prompt, and of rounds by (rows, depth)."""

    prompt: float
    rounds: dict[tuple[int, int], float]

    def read(self, tokens: int) -> float:
        return self.prompt

    def round(self, rows: int, context: int, depth: int) -> tuple[float, float]:
        seconds = []
        for kind in (0, DRAFTED):
            sizes = sorted(r for r, d in self.rounds if d == kind)
            seconds.append(float(np.interp(rows, sizes, [self.rounds[r, kind] for r in sizes])))
        return 0.0, seconds[0] if depth == 0 else seconds[1]


def calibrate(llm: LLM, texts: Sequence[str], rows: Sequence[int], rounds: int) -> Measured:
    """Drive batches of the demo model by hand, without a server."""
    results, read = {}, []
    for depth, b in ((d, b) for b in rows for d in (0, DRAFTED)):
        budget = FixedBudget(depth + 1, depth, (1,) * depth or None)
        requests, _ = llm.requests(list(texts[:b]), max_new_tokens=rounds * (depth + 1) + 2, temperature=0.0)
        engine, batch = llm.engine(budget=budget), None
        for i, request in enumerate(requests):
            began = time.thread_time()
            newcomer, _ = Batch.start(engine, [Row(request, i)])
            batch = newcomer if batch is None else batch.join(newcomer)
            read.append(time.thread_time() - began)
        assert batch is not None
        seconds = []
        for _ in range(rounds):
            began = time.thread_time()
            batch.round()
            seconds.append(time.thread_time() - began)
        results[b, depth] = fmean(seconds[1:])
    return Measured(fmean(read), results)


def cpu(process: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def real(url: str, process: int, texts: Sequence[str], clients: int, depth: int, salt: str) -> dict[str, float]:
    """Clients without pauses at the real server: tokens per CPU second of the server, of all and of a user."""
    made, line, lock = list[tuple[float, Stream]](), iter(texts), threading.Lock()
    body: dict[str, Any] = {
        "temperature": 0, "max_tokens": TOKENS, "stream_options": {"include_usage": True}, "cache_salt": salt,
        "outrider": {"speculate": depth > 0},
    }  # fmt: skip

    def client() -> None:
        while True:
            with lock:
                text = next(line, None)
            if text is None:
                return
            began = time.monotonic()
            stream = ask(url, {**body, "prompt": text})
            with lock:
                made.append((began, stream))

    threads, times = [threading.Thread(target=client) for _ in range(clients)], [(time.monotonic(), cpu(process))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.01)
        times.append((time.monotonic(), cpu(process)))

    def spent(when: float) -> float:
        return float(np.interp(when, [at for at, _ in times], [seconds for _, seconds in times]))

    speeds = [(s.tokens - 1) / (spent(at + s.end) - spent(at + s.first)) for at, s in made]
    return {"tokens_per_second": sum(s.tokens for _, s in made) / (times[-1][1] - times[0][1]), "speed": fmean(speeds)}


def check(turns: int = 2, texts: int = 4) -> None:
    """Calibration and real runs in turn, at two loads, with drafts and without; written after each turn."""
    traced = dict(list(recorded("eagle").items())[:texts])
    said, results, llm = [prompts()[number] for number in traced], [], load("demo", DRAFTERS["eagle"], compile=False)
    options = ["--budget", ",".join("1" * DRAFTED), "--no-compile", "--rows", "8", "--prefix-cache", "0"]
    with started("demo", [DRAFTERS["eagle"]], *options) as (url, process):
        after = calibrate(llm, said, range(1, max(LOADS) + 1), 6)
        for turn in range(turns):
            kinds = [(clients, depth) for clients in LOADS for depth in (0, DRAFTED)]
            measured = [real(url, process, said * 2, c, d, f"{turn} {c} {d}") for c, d in kinds]
            before, after = after, calibrate(llm, said, range(1, max(LOADS) + 1), 6)
            for (clients, depth), seen in zip(kinds, measured, strict=True):
                copy = Server(between(before, after), FixedBudget(depth + 1, depth), 8)
                guess = farm([copy], list(traced.values()) * 2, math.inf, clients=clients)
                made = {"tokens_per_second": guess.tokens_per_second, "speed": guess.speed}
                results.append({"clients": clients, "depth": depth, "real": seen, "simulated": made})
                print(json.dumps(results[-1]), flush=True)
            write("check", results)


def between(before: Measured, after: Measured) -> Measured:
    """The mean of two calibrations."""
    rounds = {key: (seconds + after.rounds[key]) / 2 for key, seconds in before.rounds.items()}
    return Measured((before.prompt + after.prompt) / 2, rounds)


# ------------------------------------------------------------------------------------------------ the sweep

COPIES = {"llama-3.1-8b": ("h100", 1), "llama-3.1-70b": ("h100", 4)}  # target -> the GPUs of a copy
BUSY = (1, 4, 16, 64, 256)  # texts that plain decoding writes at a time: the load
SIZES = (1, 10, 100, 1000)  # GPUs of a farm
STEP = 1e-4  # seconds of overhead of a drafter's step, a guess like the target's
PROMPT, JOINED, ROWS = 500, 4, 700  # tokens of a prompt; traces that make one text; texts that a copy holds


def policies() -> dict[str, tuple[str, Callable[[], Budgeter]]]:
    """Name -> (traces, budget)."""
    results: dict[str, tuple[str, Callable[[], Budgeter]]] = {"plain": ("eagle", lambda: FixedBudget(1, 0))}
    for drafter in DRAFTERS:
        for depth in (2, 4, 8) if drafter == "eagle" else (4,):
            results[f"{drafter}, {depth} tokens"] = (drafter, partial(FixedBudget, depth + 1, depth))
        results[f"{drafter}, automatic"] = (drafter, partial(AdaptiveBudget, DEPTH + 1, DEPTH))
    return results


def machine(name: str, drafter: str) -> Gpu:
    """A copy of a target with a drafter: EAGLE-3's layer and head, or lookup's search, which is free."""
    target, (gpu, count) = scaling.target(name), COPIES[name]
    kind = plan.KINDS["eagle3"]
    read = kind.layer(target) + kind.head * target.hidden
    kv = 4.0 * target.keys  # keys and values of one layer in 16 bits
    step = Cost("step", parameters=read, bytes=2, kv=kv, **{**speeds(gpu, count), "overhead": STEP})
    return Gpu(target.cost(gpu, count), step if drafter == "eagle" else None)


def joined(texts: Sequence[Text], each: int) -> list[Text]:
    """Texts as long as several traces, one after the other."""
    groups = [[texts[(i + k) % len(texts)] for k in range(each)] for i in range(len(texts))]
    return [Text(PROMPT, sum((t.accepts for t in group), ())) for group in groups]


def rate_of(gpu: Gpu, texts: Sequence[Text], rows: int) -> float:
    """Texts per second that keep `rows` texts in writing without drafts (Little's law)."""
    tokens = fmean(t.tokens for t in texts)
    each = gpu.read(PROMPT) + tokens * gpu.round(rows, int(rows * (PROMPT + tokens / 2)), 0)[1] / rows
    return 1 / each


def sweep(name: str) -> None:
    """One copy of a target under every load, with every policy."""
    traced, results = {n: joined(list(recorded(n).values()), JOINED) for n in DRAFTERS}, []
    for busy in BUSY:
        rate = rate_of(machine(name, "lookup"), traced["eagle"], busy)
        for policy, (drafter, budget) in policies().items():
            copy = servers(1, machine(name, drafter), budget, ROWS)
            made = farm(copy, traced[drafter], max(24.0, 60 / rate), rate)
            results.append({"busy": busy, "rate": rate, "policy": policy, **asdict(made)})
            print(json.dumps(results[-1]), flush=True)
    write(name, results)


def size(count: int) -> None:
    """Farms of `count` GPUs under the same load for each, plain and with drafts of 4 tokens; short texts."""
    name, results, traced = "llama-3.1-8b", [], {n: joined(list(recorded(n).values()), 1) for n in DRAFTERS}
    for policy in ("plain", "eagle, 4 tokens"):
        drafter, budget = policies()[policy]
        rate = count * rate_of(machine(name, "lookup"), traced["eagle"], 16)
        made = farm(servers(count, machine(name, drafter), budget, ROWS), traced[drafter], 400 / rate + 1.5, rate)
        results.append({"gpus": count, "rate": rate, "policy": policy, **asdict(made)})
        print(json.dumps(results[-1]), flush=True)
    write(f"{count}_gpus", results)


def plot() -> None:
    """docs/scaling.svg: how fast a user's text comes, beside plain decoding, over the load."""
    panels = {}
    for name in COPIES:
        rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        plain = {row["busy"]: row["pace"] for row in rows if row["policy"] == "plain"}
        panels[name] = {
            policy: [(r["busy"], Estimate(r["pace"] / plain[r["busy"]])) for r in rows if r["policy"] == policy]
            for policy in policies()
        }
    colours = dict(zip(policies(), COLOURS, strict=False))
    made = curves("When to speculate", "texts at a time, if decoded plainly", panels, colours, log=True)
    (ROOT / "docs" / "scaling.svg").write_text(made.svg, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("record").add_argument("name", choices=DRAFTERS)
    steps.add_parser("check")
    steps.add_parser("sweep").add_argument("name", choices=COPIES)
    steps.add_parser("size").add_argument("count", type=int)
    steps.add_parser("plot")
    given = vars(parser.parse_args())
    functions: dict[str, Callable[..., None]] = {f.__name__: f for f in (record, check, sweep, size, plot)}
    functions[given.pop("step")](**given)


if __name__ == "__main__":
    main()
