"""The demo's own drafters: `python -m recipes.demo.drafters [NAME ...]` (after `recipes.demo.build`; it resumes).

`--ship` copies the trained ones into the package, in bf16, each with a card. All learn from the same documents, for the
same number of tokens, from the same cached features. The budget, stated beforehand: STEPS steps of 4 rows of 512
tokens, 6.1 million tokens, some two epochs of 3 million.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from outrider.backends.torch import HFTarget, load_target, load_tokenizer
from outrider.backends.torch.load import multiplies_halves
from outrider.training import data
from outrider.training.data import Document
from outrider.training.loop import train
from outrider.training.recipe import Recipe
from recipes.shipping import place

DOMAINS = ("gsm8k", "self_dialogue", "sgd", "stdlib", "algorithms", "tldr", "stories", "books", "oasst")
TOKENS = 3_000_000  # of documents, a ninth from each domain (fewer where a domain has fewer)
STEPS = 3000
SHARED: dict[str, Any] = {
    "steps": STEPS, "rows": 4, "length": 512, "bf16": multiplies_halves(), "warmup": 100,
    "save": 200,
}  # fmt: skip

RECIPES: dict[str, Recipe] = {
    "medusa": Recipe("medusa", lr=3e-3, options={"heads": 4}, **SHARED),
    "hydra": Recipe("hydra", lr=3e-3, options={"heads": 4}, **SHARED),
    "eagle": Recipe("eagle", lr=5e-3, options={"linear": False}, **SHARED),
    "hass": Recipe("hass", lr=5e-3, options={"linear": False}, **SHARED),
    "eagle3": Recipe("eagle3", lr=5e-3, options={"draft_vocab": 2048, "passes": 4}, **SHARED),
    "block": Recipe("block", lr=4e-3, options={"dpace": 0.5, "regress": 10.0}, **SHARED),
}
SHIPPED = tuple(RECIPES)
# Medusa-2 changes its target, so it is not shipped. Its passes go through the whole target: the ablations' budget.
RECIPES["medusa2"] = Recipe("medusa2", lr=1e-3, options={"heads": 4, "heads_only": 60, "ramp": 60},
                            **{**SHARED, "steps": 240, "warmup": 20})  # fmt: skip


def documents(work: Path, tokens: int = TOKENS, tokenizer: Any = None) -> list[Document]:
    """The first documents of every domain, in the order of the demo's own files."""
    tokenizer, results = tokenizer or load_tokenizer(demo()), []
    for domain in DOMAINS:
        left = tokens // len(DOMAINS)
        with (work / "documents" / "train" / f"{domain}.jsonl").open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if left <= 0:
                    break
                row = json.loads(line)
                if "messages" in row and row["messages"][-1]["role"] != "assistant":
                    row["messages"] = row["messages"][:-1]
                if any(not m["content"].strip() for m in row.get("messages", ())):
                    continue
                try:
                    document = data.document(row, f"{domain}:{number}", tokenizer)
                except ValueError:
                    continue
                results.append(document)
                left -= len(document.tokens)
    return results


def demo() -> str:
    return str(files("outrider") / "demo" / "target")


def target() -> HFTarget:
    target = load_target(demo(), dtype="float32")
    assert isinstance(target, HFTarget)
    return target


def ship(name: str, work: Path) -> None:
    """A trained drafter in the package: bf16, with a card."""
    folder = Path(demo()).parent / name
    size, steps = place(work / name, folder)
    recipe = RECIPES[name].complete()
    options = ", ".join(f"{k}={v}" for k, v in recipe.options.items()) or "the method's defaults"
    card = CARD.format(
        name=name, size=size, domains=", ".join(DOMAINS), tokens=TOKENS, steps=recipe.steps, rows=recipe.rows,
        length=recipe.length, lr=recipe.lr, clip=recipe.clip, warmup=recipe.warmup, seed=recipe.seed, options=options,
        precision="bf16 autocast" if recipe.bf16 else "float32",
        table=steps,
    )  # fmt: skip
    (folder / "README.md").write_text(card, encoding="utf-8")


CARD = """---
language: en
license: cc-by-sa-4.0
tags: [speculative-decoding, demo]
---

# Outrider demo drafter: {name}

Drafts for the demo target of this package, and for no other model. {size:,} parameters, stored in bf16; it writes
nothing by itself: what it guesses is kept only where the target agrees.

**Data.** The demo target's own training documents ({domains}): the first of every domain, {tokens:,} tokens together
where the domains have as many. Sources and licences: the NOTICE of this package and the target's card.

**Recipe.** `python -m recipes.demo.drafters {name}`: {steps} steps of {rows} rows of {length} tokens, AdamW, rate
{lr:g} with {warmup} steps of warm-up and a cosine down to a tenth, clip {clip:g}, {precision}, seed {seed};
{options}.

**Held out** (2 % of the documents; tau at T = 0 with 16 nodes on 16 prompts of 32 tokens, the target's token counted):

| step | loss | tau |
|--:|--:|--:|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"default: {', '.join(SHIPPED)}; and medusa2")
    parser.add_argument("--work", type=Path, default=Path("runs/demo"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ship", action="store_true", help="copy what is trained into the package instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.ship:
        for name in args.names or SHIPPED:
            ship(name, args.work)
        return
    text, model = documents(args.work), target()
    for name in args.names or SHIPPED:
        recipe = replace(RECIPES[name], cache="" if name == "medusa2" else str(args.work / "features"))
        result = train(model, text, args.work / name, recipe)
        print(f"{name}: held-out loss {result.best:.4f}, tau {result.tau:.2f} in {result.folder}", flush=True)


if __name__ == "__main__":
    main()
