"""Plain decoding and reading of prompts beside llama.cpp's own `llama-bench`, on the same .gguf files.

    python benchmarks/plain.py CODER.gguf --llama llama/bin --prompts 512 6000 --out runs/plain.json

Everything is measured in turn, with as many threads, and given in tokens per second: the median of the repeats with the
lowest and the highest. Prompts are random tokens, and decoding begins after a single token, as in `llama-bench`.
A last line has what the machine's memory allows: a text cannot be written faster than the file is read once a token.
`--avx2` measures our passes as processors without AVX-512 have them; --llama is then the folder of such a build
(docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from outrider import LLM, load, machine
from outrider.backends.native import library
from outrider.files import replace
from outrider.params import InputError


def prefill(llm: LLM, tokens: int) -> float:
    """Tokens per second of one prompt."""
    dice = random.Random(tokens)
    prompt = [dice.randrange(llm.target.vocab) for _ in range(tokens)]
    began = perf_counter()
    for _ in llm.target.open(tokens + 1).prefill([prompt]):
        pass
    return tokens / (perf_counter() - began)


def decoding(llm: LLM, tokens: int) -> float:
    """Tokens per second of a text."""
    (output,) = llm.generate([[1]], max_new_tokens=tokens, ignore_eos=True)
    return (output.usage.new_tokens - 1) / output.usage.decode_seconds


def peer(program: Path, model: Path, *work: object) -> float:
    """What llama-bench measures in one run of this work."""
    command = [program, "-m", model, "-t", machine.threads(), "-r", 1, "-o", "json", *work]
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    (result,) = json.loads(done.stdout)
    return float(result["avg_ts"])


def memory() -> float:
    """Bytes that all threads read in a second from 1 GB of numbers: the median of seven times."""
    parts, seconds = np.array_split(np.ones(1 << 28, np.float32), machine.threads()), []
    with ThreadPoolExecutor(machine.threads()) as pool:
        for _ in range(7):
            began = perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(perf_counter() - began)
    return sum(part.nbytes for part in parts) / statistics.median(seconds)


def measured(model: Path, given: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Tokens per second [engine][work], a figure for each repeat."""
    ours = {f"ours, {weights}": load(str(model), "none", weights=weights) for weights in given.weights}
    program = given.llama / "llama-bench" if given.llama else None
    calls: dict[tuple[str, str], Callable[[], float]] = {}
    for work, count in [*((f"prompt of {n}", n) for n in given.prompts), (f"{given.tokens} tokens", given.tokens)]:
        for name, llm in ours.items():
            calls[name, work] = partial(prefill if work.startswith("prompt") else decoding, llm, count)
        if program:
            asked = ("-p", count, "-n", 0) if work.startswith("prompt") else ("-p", 0, "-n", count)
            calls["llama.cpp", work] = partial(peer, program, model, *asked)
    figures: dict[str, dict[str, list[float]]] = {}
    for _ in range(given.repeats):
        for (name, work), call in calls.items():
            figures.setdefault(name, {}).setdefault(work, []).append(call())
        rate = memory() / model.stat().st_size
        figures.setdefault("memory", {}).setdefault(f"{given.tokens} tokens", []).append(rate)
    return figures


def cell(figures: list[float]) -> str:
    return f"{statistics.median(figures):.1f} ({min(figures):.1f}-{max(figures):.1f})"


def stored(file: Path) -> dict[str, Any]:
    """What `store` wrote; ValueError for another file."""
    document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not isinstance(document, dict) or not all(isinstance(d, dict) and "figures" in d for d in document.values()):
        raise ValueError
    return document


def store(file: Path, runs: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    """Write these figures [model][engine][work], with the machine, beside those that the file has."""
    document = stored(file)
    for name, engines in runs.items():
        known = document.setdefault(name, {"figures": {}})
        known |= machine.environment()
        for engine, works in engines.items():
            known["figures"].setdefault(engine, {}).update(works)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace(file, lambda place: place.write_text(json.dumps(document, indent=1), encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help=".gguf files")
    parser.add_argument("--llama", type=Path, help="the folder of llama.cpp's programs")
    parser.add_argument("--weights", nargs="+", choices=["full", "native", "int8"], default=["full", "native"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[512], help="tokens of prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--avx2", action="store_true", help="our passes for processors without AVX-512")
    parser.add_argument("--out", type=Path, help="a JSON file; what it has of other models and work stays")
    given = parser.parse_args()
    if given.avx2:
        library.FLAGS = tuple("-march=x86-64-v3" if flag == "-march=native" else flag for flag in library.FLAGS)
    if min(given.repeats, given.tokens - 1, *given.prompts) < 1:
        parser.error("--repeats and --prompts are at least 1, --tokens at least 2")
    for model in given.models:
        if not model.is_file():
            parser.error(f"{model} is no file; name .gguf files")
    if given.llama and not os.access(given.llama / "llama-bench", os.X_OK):
        parser.error(f"there is no program llama-bench in {given.llama}")
    try:
        if given.out:
            stored(given.out)
    except (ValueError, OSError):
        parser.error(f"--out {given.out} is no file that this program wrote; name another one")
    try:
        runs = {model.name: measured(model, given) for model in given.models}
    except InputError as error:
        parser.error(str(error))
    for name, engines in runs.items():
        works = list(next(iter(engines.values())))
        print(f"| {name} | {' | '.join(works)} |", "|---" + "|--:" * len(works) + "|", sep="\n")
        for engine, figures in engines.items():
            print(f"| {engine} | {' | '.join(cell(figures[work]) if work in figures else '' for work in works)} |")
    if given.out:
        store(given.out, {f"{name}, AVX2" if given.avx2 else name: figures for name, figures in runs.items()})


if __name__ == "__main__":
    main()
