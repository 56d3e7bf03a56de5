"""What drawing the tokens costs, as a share of a round: by vocabulary, rows and settings.

    python benchmarks/sampling.py smollm2 --out runs/sampling.json

A round is here a pass over one node of every row and what the engine does with its logits (`Batch.judge`: penalties,
filters, noise, the draw). Both are timed in turn: a pass, then the logits are written, as a pass writes them, then the
draw, at another position each time. Medians and the middle half of the repeats, the pass in milliseconds and the draw
in microseconds.

Logits are the model's own, where it answers the demo's held-out questions. For a larger vocabulary each row of them is
continued by its own values in a random order (the same for all rows), every one moved by some hundredths so that none
are equal. So nuclei grow as the vocabulary does, which is more than in a model that learnt it, while the pass stays
that of the small model: shares of larger vocabularies are too high.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

import outrider
from outrider import encoding
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Session
from outrider.core.tree import chain, root_only
from outrider.core.types import Array, Question
from outrider.engine import Batch, Engine
from outrider.engine.request import Request, Row
from outrider.machine import threads
from outrider.params import InputError, Sampling
from outrider.proofs.logits import host

SETTINGS = {
    "T=0": Sampling(),
    "T=1": Sampling(1.0),
    "T=1, top-p 0.9": Sampling(1.0, top_p=0.9),
    "T=0.7, top-k 50": Sampling(0.7, top_k=50),
    "T=1, repetition penalty 1.1": Sampling(1.0, repetition_penalty=1.1),
    "T=1, min-p 0.05": Sampling(1.0, min_p=0.05),
}
BARRED = "T=1, top-p 0.9"
BARS = {1: 0.05, 32: 0.10}  # of a round, by rows
SEEN = 4  # tokens of each answer whose logits are kept
LONGEST = 300  # tokens of a prompt
WARM = 6  # calls that are not timed


@dataclass
class Found:
    """One setting, with so many rows and tokens."""

    vocabulary: int
    rows: int
    setting: str
    draw_us: list[float]  # sorted
    pass_ms: list[float]

    @property
    def share(self) -> float:
        """Of a round."""
        draw, whole = statistics.median(self.draw_us), 1e3 * statistics.median(self.pass_ms)
        return draw / (draw + whole)


def texts(llm: Any, count: int) -> list[list[int]]:
    """So many held-out questions, each with the model's own answer of a few tokens, as ids."""
    lines = (files("outrider") / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [row["messages"][:1] for row in map(json.loads, lines) if "messages" in row]
    coded = (encoding.encode(messages, llm.tokenizer, llm.name) for messages in asked)
    prompts = [ids for ids in coded if len(ids) < LONGEST][:count]
    if len(prompts) < count:
        raise InputError(f"there are {len(prompts)} questions for {count} rows")
    made = llm.generate(prompts, max_new_tokens=SEEN, temperature=1.0, seed=0, ignore_eos=True, batch_size=8)
    return [prompt + output.tokens for prompt, output in zip(prompts, made, strict=True)]


def opened(target: Any, prompts: Sequence[Sequence[int]], taken: int) -> Session:
    """A session that has read the prompts, with room for so many tokens more."""
    session = target.open(max(map(len, prompts)) + taken + 64)
    for _ in session.prefill(prompts):
        pass
    return session


def real(target: Any, answered: Sequence[list[int]]) -> Array:
    """float32 [places, v]: the logits with which the target wrote these answers."""
    session = opened(target, [ids[:-SEEN] for ids in answered], SEEN)
    output = session.forward(chain([ids[-SEEN:] for ids in answered]))
    return host(output.logits).reshape(-1, target.vocab).astype(np.float32)


def extended(logits: Array, vocabulary: int) -> Array:
    """The same distributions over a larger vocabulary, or a smaller one."""
    places, v = logits.shape
    dice = np.random.default_rng(0)
    order = [np.arange(v), *(dice.permutation(v) for _ in range(vocabulary // v))]
    moved: Array = logits[:, np.concatenate(order)[:vocabulary]]
    moved[:, v:] += 0.05 * dice.standard_normal((places, max(0, vocabulary - v)))
    return moved


def batch_of(target: Any, answered: Sequence[list[int]], sampling: Sampling, vocabulary: int) -> Batch:
    """Rows that have just written these answers, to judge alone: it has neither a real session nor a drafter."""
    engine = Engine.of(target, None, "none", gumbel=GumbelNoise(vocabulary))  # type: ignore[arg-type]
    rows = [
        Row(Request(ids[:-SEEN], i, 1000, sampling), i, output=list(ids[-SEEN:]), length=len(ids))
        for i, ids in enumerate(answered)
    ]
    session: Any = SimpleNamespace(lengths=[row.length for row in rows])
    drafting: Any = None
    return Batch(engine, rows, session, drafting, [ids[-1] for ids in answered])


def measure(
    target: Any, answered: Sequence[list[int]], real_logits: Array, settings: dict[str, Sampling], repeats: int
) -> list[Found]:
    """All settings in turn, in rows that have written these answers, with these logits [places, v]."""
    b, (places, v) = len(answered), real_logits.shape
    session = opened(target, answered, 1)
    tree = root_only([ids[-1] for ids in answered])
    batches = {name: batch_of(target, answered, sampling, v) for name, sampling in settings.items()}
    results = {name: Found(v, b, name, [], []) for name in settings}
    logits = np.empty((b, 1, v), np.float32)
    for turn in range(repeats + WARM):
        for name, batch in batches.items():
            began = perf_counter()
            session.forward(tree)
            passed = perf_counter() - began
            logits[:, 0] = real_logits[np.arange(turn * b, (turn + 1) * b) % places]
            for row in batch.rows:
                row.length += 1
            question = Question(batch.view(), tree, logits, [row.row_text() for row in batch.rows])
            began = perf_counter()
            batch.judge(question)
            drawn = perf_counter() - began
            if turn >= WARM:
                results[name].draw_us.append(1e6 * drawn)
                results[name].pass_ms.append(1e3 * passed)
    for row in results.values():
        row.draw_us.sort()
        row.pass_ms.sort()
    return list(results.values())


def cell(times: list[float], digits: int) -> str:
    low, high = times[len(times) // 4], times[-1 - len(times) // 4]
    return f"{statistics.median(times):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def bars(results: Sequence[Found]) -> list[str]:
    """Whether each bar holds."""
    return [
        f"{row.setting}, {row.vocabulary} tokens, {row.rows} row{'s' * (row.rows > 1)}: {row.share:.1%} of a round, "
        f"at most {BARS[row.rows]:.0%}: {'holds' if row.share <= BARS[row.rows] else 'DOES NOT HOLD'}"
        for row in results
        if row.setting == BARRED and row.rows in BARS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49152, 151936, 262144])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--out", type=Path, help="a JSON file, with every time")
    given = parser.parse_args()
    if min(*given.vocabularies, *given.rows, given.repeats) < 1:
        parser.error("vocabularies, rows and repeats are at least 1")
    try:
        llm = outrider.load(given.model, "none")
        answered = texts(llm, max(given.rows))
    except InputError as error:
        parser.error(str(error))
    if max(max(ids) for ids in answered) >= min(given.vocabularies):
        parser.error("the answers have tokens that the smallest vocabulary lacks")
    target, results = llm.target, []
    real_logits = real(target, answered)
    print(f"{threads()} threads, {given.model}, {target.arithmetic}", flush=True)
    print(
        "| vocabulary | rows | settings | a pass, ms | the draw, µs | of a round |",
        "|--:|--:|---|--:|--:|--:|",
        sep="\n",
    )
    for vocabulary in given.vocabularies:
        wide = extended(real_logits, vocabulary)
        for rows in given.rows:
            for row in measure(target, answered[:rows], wide, SETTINGS, given.repeats):
                cells = cell(row.pass_ms, 1), cell(row.draw_us, 0), f"{row.share:.1%}"
                print(f"| {vocabulary} | {rows} | {row.setting} | {' | '.join(cells)} |", flush=True)
                results.append(row)
    print("", *bars(results), sep="\n")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        made = [{**asdict(row), "share": row.share} for row in results]
        told = {"model": given.model, "dtype": target.precision, "threads": threads(), "found": made}
        given.out.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
