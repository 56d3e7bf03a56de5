"""Texts with drafts against texts without, token for token, in the precision that the model runs in.

    python benchmarks/exactness.py smollm2 --prompts prompts.jsonl --texts 200 --tokens 128 --out build/exactness.jsonl

Every text is decoded plainly in batches of 8, and once more with a drafter, a temperature and a batch size that go
round from group to group: prompt lookup and its like, a Mamba whose tokenizer is another, the network that ships for
the model (EAGLE-3 for smollm2), and mixes. Passes are the default ones; `--stock` takes the model's own forward. One
line of JSON is written for each group; a run that was stopped goes on where it was. The last lines count drafter by
drafter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import outrider
from outrider import names, prompts
from outrider.params import InputError

DRAFTERS = ("lookup", "suffix", "lookahead", "lookup+suffix+ngram", "mamba:demo?vocab=text")
TEMPERATURES = (0.0, 0.7, 1.0)
BATCHES = (1, 4, 8)
GROUP = 8  # texts decoded together


def drafters(model: str) -> list[str]:
    """Those of every model, and the network that ships for this one: alone, and with a drafter of text beside it."""
    network = names.find(model).drafter.rpartition("+")[2].strip()
    return [*DRAFTERS, network, f"suffix+{network}"] if ":" in network else [*DRAFTERS]


def plan(group: int, drafters: list[str]) -> tuple[str, float, int]:
    """A group's drafter, temperature and batch size: each drafter meets every temperature and batch in turn."""
    turn, number = divmod(group, len(drafters))
    temperature, batch = (number + turn) % len(TEMPERATURES), (number // 3 + turn + turn // 3) % len(BATCHES)
    return drafters[number], TEMPERATURES[temperature], BATCHES[batch]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, help="a JSONL file")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--drafters", nargs="+", help="SPECs; several joined by + are mixed; left out: all of the above"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--exact", default="bits", choices=("auto", "bits", "rounding"))
    parser.add_argument(
        "--stock",
        action="store_true",
        help="the model's own forward, not the compiled or recorded passes that are default",
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    specs = given.drafters or drafters(given.model)
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    engines: dict[str, Any] = {}

    def load(drafter: str) -> Any:
        if drafter not in engines:
            spec = [part.strip() for part in drafter.split("+")] if "+" in drafter else drafter
            engines[drafter] = outrider.load(
                given.model,
                spec,
                dtype=given.dtype,
                weights=given.weights,
                exact=given.exact,
                budget="16x6",
                compile=False if given.stock else None,
            )
        return engines[drafter]

    asked = prompts.read(given.prompts, given.texts)
    how = {
        "model": given.model,
        "dtype": given.dtype,
        "weights": given.weights,
        "exact": given.exact,
        "stock": given.stock,
        "tokens": given.tokens,
    }
    if any(line["asked"] != how for line in done):
        raise InputError(f"{given.out} was written with other settings; give another --out")
    for group in range(len(done), -(-len(asked) // GROUP)):
        texts = asked[group * GROUP : (group + 1) * GROUP]
        drafter, temperature, batch = plan(group, specs)
        options = {"temperature": temperature, "seed": group, "max_new_tokens": given.tokens, "ignore_eos": True}
        began = time.time()
        plain = load("none").generate(texts, batch_size=GROUP, **options)
        drafted = load(drafter).generate(texts, batch_size=batch, **options)
        same = sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True))
        line = {
            "asked": how, "group": group, "drafter": drafter, "temperature": temperature, "batch": batch,
            "texts": len(texts), "equal": same, "exact": drafted[0].exact,
            "tau": sum(o.usage.tau for o in drafted) / len(drafted),
            "seconds": round(time.time() - began, 1),
        }  # fmt: skip
        with given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        done.append(line)
        print(json.dumps(line), flush=True)
    for drafter in dict.fromkeys(line["drafter"] for line in done):
        lines = [line for line in done if line["drafter"] == drafter]
        print(f"{drafter}: {sum(d['equal'] for d in lines)} of {sum(d['texts'] for d in lines)}")
    print(f"{sum(d['equal'] for d in done)} of {sum(d['texts'] for d in done)} texts equal, token for token")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"exactness.py: error: {error}", file=sys.stderr)
        sys.exit(2)
