"""The demo's own drafters: `python -m recipes.demo.drafters [NAME ...]` (after `recipes.demo.build`; it resumes).

All learn from the same documents, for the same number of tokens, from the same cached features. The budget, stated
beforehand: STEPS steps of 8 rows of 512 tokens, some 3 million tokens, two epochs of 1.5 million.
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path

import torch

from outrider.targets import HFTarget, load_target, load_tokenizer
from outrider.training.data import Document, _document
from outrider.training.loop import train
from outrider.training.recipe import Recipe

DOMAINS = ("gsm8k", "self_dialogue", "sgd", "stdlib", "algorithms", "tldr", "stories", "books", "oasst")
TOKENS = 1_500_000  # of documents, a ninth from each domain (fewer where a domain has fewer)
STEPS = 730
SHARED = {"steps": STEPS, "rows": 8, "length": 512, "bf16": True, "half_features": True, "warmup": 40, "save": 100}

RECIPES: dict[str, Recipe] = {
    "medusa": Recipe("medusa", lr=1e-3, options={"heads": 4}, **SHARED),
    "hydra": Recipe("hydra", lr=1e-3, options={"heads": 4}, **SHARED),
    "eagle": Recipe("eagle", lr=2e-3, **SHARED),
    "hass": Recipe("hass", lr=2e-3, **SHARED),
    "eagle3": Recipe("eagle3", lr=2e-3, options={"draft_vocab": 2048}, **SHARED),
}


def documents(work: Path, tokens: int = TOKENS) -> list[Document]:
    """The first documents of every domain, in the order of the demo's own files."""
    tokenizer, found = load_tokenizer(demo()), []
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
                    document = _document(json.dumps(row), f"{domain}:{number}", tokenizer)
                except ValueError:
                    continue
                found.append(document)
                left -= len(document.tokens)
    return found


def demo() -> str:
    return str(files("outrider") / "demo" / "target")


def target() -> HFTarget:
    found = load_target(demo(), dtype="float32")
    assert isinstance(found, HFTarget)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(RECIPES)}")
    parser.add_argument("--work", type=Path, default=Path("runs/demo"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text, model = documents(args.work), target()
    for name in args.names or RECIPES:
        recipe = Recipe(**{**RECIPES[name].__dict__, "cache": str(args.work / "features")})
        result = train(model, text, args.work / name, recipe)
        print(f"{name}: held-out loss {result.best:.4f}, tau {result.tau:.2f} in {result.folder}", flush=True)


if __name__ == "__main__":
    main()
