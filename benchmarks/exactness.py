"""Texts with drafts against texts without, token for token, in the precision that the model runs in.

    python benchmarks/exactness.py smollm2 --prompts prompts.jsonl --texts 200 --tokens 128 --out build/exactness.jsonl

Every text is decoded plainly in batches of 8, and once more with a drafter, a temperature and a batch size that go
round from group to group. One line of JSON is written for each group; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import outrider
from outrider import prompts

DRAFTERS = ("lookup", "suffix", "lookahead", "lookup+suffix+ngram")
TEMPERATURES = (0.0, 0.7, 1.0)
BATCHES = (1, 4, 8)
GROUP = 8  # texts decoded together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, help="a JSONL file")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), help="SPECs; several joined by + are mixed")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--exact", default="bits", choices=("auto", "bits", "rounding"))
    parser.add_argument("--compile", action="store_true", help="record the target's passes")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    engines: dict[str, Any] = {}

    def load(drafter: str) -> Any:
        if drafter not in engines:
            spec = drafter.split("+") if "+" in drafter else drafter
            engines[drafter] = outrider.load(
                given.model, spec, dtype=given.dtype, exact=given.exact, budget="16x6", compile=given.compile
            )
        return engines[drafter]

    asked = prompts.read(given.prompts, given.texts)
    for group in range(len(done), -(-len(asked) // GROUP)):
        texts = asked[group * GROUP : (group + 1) * GROUP]
        drafter = given.drafters[group % len(given.drafters)]
        temperature, batch = TEMPERATURES[group % 3], BATCHES[(group // 3) % 3]
        law = {"temperature": temperature, "seed": group, "max_new_tokens": given.tokens, "ignore_eos": True}
        began = time.time()
        plain = load("none").generate(texts, batch_size=GROUP, **law)
        drafted = load(drafter).generate(texts, batch_size=batch, **law)
        same = sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True))
        line = {
            "group": group, "drafter": drafter, "temperature": temperature, "batch": batch, "texts": len(texts),
            "equal": same, "exact": drafted[0].exact, "tau": sum(o.usage.tau for o in drafted) / len(drafted),
            "seconds": round(time.time() - began, 1),
        }  # fmt: skip
        with given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        done.append(line)
        print(json.dumps(line), flush=True)
    print(f"{sum(d['equal'] for d in done)} of {sum(d['texts'] for d in done)} texts equal, token for token")


if __name__ == "__main__":
    main()
