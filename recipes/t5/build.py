"""Builds the T5 pair: `python -m recipes.t5.build` from the repository's root."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from recipes.demo.build import ROOT
from recipes.demo.data import write_split
from recipes.demo.tokenizer import build as build_tokenizer
from recipes.t5.pairs import DOMAINS, Pairs, heldout_pairs
from recipes.t5.train import LARGER, SMALLER, heldout_loss, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "train", help="training texts")
    parser.add_argument("--demo", type=Path, default=ROOT / "runs" / "demo", help="work folder of the demo recipe")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "t5", help="where the pair is written")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    write_split(a.data, a.demo)
    tokenizer = build_tokenizer(a.demo)
    pairs, results = Pairs(tokenizer, a.demo), {}
    for recipe in (LARGER, SMALLER):
        model = train(recipe, tokenizer, pairs, a.work, say=lambda line: print(line, flush=True))
        results[recipe.name] = {"parameters": model.num_parameters(), "steps": recipe.steps, "seed": recipe.seed}
        for domain in DOMAINS:
            rows = heldout_pairs(tokenizer, a.demo, domain, 200)
            results[recipe.name][domain] = heldout_loss(model, rows, tokenizer.pad_token_id)
        model.save_pretrained(a.work / recipe.name)
        tokenizer.save_pretrained(a.work / recipe.name)
        (a.work / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    asked = [{"text": tokenizer.decode(ids)} for d in DOMAINS for ids, _ in heldout_pairs(tokenizer, a.demo, d, 12)]
    (a.work / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
