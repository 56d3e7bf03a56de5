"""Fewer tokens that a trained drafter can draft: `python -m recipes.smollm2.trim --size 4096 FROM TO`.

A draft vocabulary is rows of the target's head, so it can be cut without another training: of the tokens that the
drafter knows, those stay that the answers have most often. A smaller head is read in less time, and misses more.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outrider.nets import vocabulary
from outrider.targets import load_tokenizer
from outrider.training import data
from recipes.smollm2.questions import places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of a drafter with a draft vocabulary")
    parser.add_argument("out", type=Path, help="folder of the new one")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--target", default="smollm2")
    places(parser)
    a = parser.parse_args()
    answers = sorted(a.work.glob("answers-*.jsonl"))
    if not (a.source / "model.safetensors").is_file():
        parser.error(f"there is no drafter in {a.source}")
    if not answers:
        parser.error(f"there are no answers in {a.work}; run python -m recipes.smollm2.answers --unpack first")
    tensors = load_file(a.source / "model.safetensors")
    config = json.loads((a.source / "config.json").read_text(encoding="utf-8"))
    if not 0 < a.size < config.get("draft_vocab", 0):
        parser.error(f"this drafter drafts {config.get('draft_vocab') or 'all'} tokens; give a size below that")
    known, counts = vocabulary.ids_of(tensors["d2t"]), torch.zeros(config["vocab"], dtype=torch.long)
    for document in data.read(answers, load_tokenizer(a.target)):
        learned = torch.tensor(document.tokens)[torch.tensor(document.learn)]
        counts.index_add_(0, learned, torch.ones_like(learned))
    kept = known[counts[known].sort(descending=True, stable=True).indices[: a.size].sort().values]
    vocabulary.keep(tensors["d2t"].resize_(len(kept)), kept)
    a.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, a.out / "model.safetensors", metadata={"format": "pt"})
    (a.out / "config.json").write_text(json.dumps({**config, "draft_vocab": a.size}, indent=2) + "\n", encoding="utf-8")
    shares = [f"{len(ids)}: {float(counts[ids].sum() / counts.sum()):.1%}" for ids in (known, kept)]
    print(f"answers' tokens that can be drafted, {', '.join(shares)}")


if __name__ == "__main__":
    main()
