"""Mambas and Transformers as draft models for the demo target, two sizes each, from the same tokens.

    python -m recipes.mamba.drafters [NAME ...]     all stages of all four (it resumes; after `recipes.demo.build`)
    python -m recipes.mamba.drafters --rates        the small ones' held-out loss after 200 steps at several rates
    python -m recipes.mamba.drafters --ship         what ships, into the package

The stages of the paper, and distillation after them (Choi et al. 2025, section 4): pretrain on every domain's text,
sft and distil on the documents of `recipes.demo.drafters`, of whose dialogues they learn the answers alone. The budget:
8.2, 0.8 and 1.2 million tokens (4.1 was planned for the last; two cores had the time for a third).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.training.data import Document
from outrider.training.loop import train
from outrider.training.recipe import Recipe
from recipes.demo.drafters import DOMAINS, demo, documents, target

PRETRAIN = 8_000_000  # tokens of documents, a ninth from each domain (fewer where a domain has fewer)
SHARED: dict[str, Any] = {"rows": 8, "length": 512, "bf16": True, "warmup": 50, "save": 200}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba-0.5m": ("mamba", {"kind": "mamba2", "hidden": 96, "layers": 2}),
    "llama-0.5m": ("draft-lm", {"hidden": 96, "layers": 1, "heads": 3}),
    "mamba-1.5m": ("mamba", {"kind": "mamba2", "hidden": 192, "layers": 3}),
    "llama-1.5m": ("draft-lm", {"hidden": 192, "layers": 2, "heads": 3}),
}
SHIPPED = {"mamba": "mamba-0.5m", "llama": "llama-0.5m"}  # folder in the package
STAGES: dict[str, dict[str, Any]] = {  # steps of 8 rows of 512 tokens
    "pretrain": {"steps": 2000},
    "sft": {"steps": 200, "lr": 1e-3},
    "distil": {"steps": 300, "lr": 3e-3, "bf16": True},
}
RATES = (3e-3, 6e-3, 1.2e-2, 2.4e-2)  # tried for 200 steps; PRETRAIN_RATE has those that were best for the Transformers
PRETRAIN_RATE = {"mamba-0.5m": 1.2e-2, "llama-0.5m": 1.2e-2, "mamba-1.5m": 6e-3, "llama-1.5m": 6e-3}


def recipe(name: str, stage: str, work: Path, **changed: Any) -> Recipe:
    method, shape = SIZES[name]
    before = list(STAGES).index(stage) - 1
    options = dict(shape, stage=stage)
    if before >= 0:
        options["init"] = str(work / "mamba" / name / list(STAGES)[before] / "best")
    settings = {**SHARED, **STAGES[stage], **changed}
    settings.setdefault("lr", PRETRAIN_RATE[name])
    if stage == "distil":
        settings["cache"] = str(work / "features")  # the rows that the other drafters learnt from
    return Recipe(method, options=options, **{"evaluate": settings["steps"] // 4, **settings})


def texts(stage: str, work: Path) -> list[Document]:
    """Dialogues are in the target's chat template; what is learned of them after the first stage are the answers."""
    return documents(work, PRETRAIN) if stage == "pretrain" else documents(work)


def ship(name: str, place: Path, work: Path) -> None:
    """A trained drafter in the package: bf16, with a card."""
    source = work / "mamba" / name
    net = AutoModelForCausalLM.from_pretrained(source / "distil" / "best", dtype=torch.bfloat16)
    net.save_pretrained(place)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(Path(demo()) / file, place / file)
    lines = []
    for stage in STAGES:
        log = [json.loads(line) for line in (source / stage / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        last = [line for line in log if "held_out_loss" in line][-1]
        made = recipe(name, stage, work)
        tokens = made.steps * made.rows * made.length
        lines.append(f"| {stage} | {made.steps} | {tokens / 1e6:.1f}M | {made.lr:g} | {last['held_out_loss']:.4f} | "
                     f"{last['tau']:.2f} |")  # fmt: skip
    method, shape = SIZES[name]
    shaped = ", ".join(f"{k}={v}" for k, v in shape.items())
    size = sum(p.numel() for p in net.parameters())
    card = CARD.format(name=place.name, kind=type(net).__name__, size=size, method=method, shaped=shaped, of=name,
                       domains=", ".join(DOMAINS), seed=made.seed, table="\n".join(lines))  # fmt: skip
    (place / "README.md").write_text(card, encoding="utf-8")
    print(f"{place}: {(place / 'model.safetensors').stat().st_size / 1e6:.1f} MB")


CARD = """---
language: en
license: cc-by-sa-4.0
library_name: transformers
tags: [speculative-decoding, demo]
---

# Outrider demo drafter: {name}

A {kind} of {size:,} parameters with the demo target's tokenizer, stored in bf16. It drafts for the demo target of this
package. By itself it writes next to nothing of sense: do not rely on any fact, number or program it gives.

**Data.** The demo target's own training documents ({domains}). Sources and licences: the NOTICE of this package and the
target's card.

**Recipe.** `python -m recipes.mamba.drafters {of}` (`outrider train {method}`, {shaped}): AdamW with 50 steps of
warm-up and a cosine down to a tenth, clip 1, rows of 512 tokens, bf16 autocast, seed {seed}. The last stage learns the
target's distribution by forward KL.

**Held out** (2 % of the documents; each stage has a loss of its own: next token, the assistant's next token, forward
KL from the target; tau at T = 0 with 16 nodes on 16 prompts of 32 tokens, the target's token counted):

| stage | steps | tokens | rate | loss | tau |
|---|--:|--:|--:|--:|--:|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"default: {', '.join(SIZES)}")
    parser.add_argument("--work", type=Path, default=Path("runs/demo"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rates", action="store_true", help="try several rates on the small ones instead")
    parser.add_argument("--ship", action="store_true", help="copy what ships into the package instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.ship:
        for place, name in SHIPPED.items():
            ship(name, Path(demo()).parent / place, args.work)
        return
    model = target()
    if args.rates:
        read = texts("pretrain", args.work)
        for name in ("mamba-0.5m", "llama-0.5m"):
            for rate in RATES:
                short = recipe(name, "pretrain", args.work, steps=200, lr=rate, evaluate=200, prompts=1)
                result = train(model, read, args.work / "mamba" / "rates" / f"{name}-{rate:g}", short)
                print(f"{name} at {rate:g}: held-out loss {result.best:.4f}", flush=True)
        return
    for stage in STAGES:
        read = texts(stage, args.work)
        for name in args.names or SIZES:
            result = train(model, read, args.work / "mamba" / name / stage, recipe(name, stage, args.work))
            print(f"{name}, {stage}: held-out loss {result.best:.4f}, tau {result.tau:.2f}", flush=True)


if __name__ == "__main__":
    main()
