"""What matters in training drafters for SmolLM2: `python -m papers.ablations.smollm2 [NAME ...]` (it resumes).

The runs "as published" have every option of the papers, whatever the recipes are: EAGLE's weight of 0.1 for the tokens'
loss, and HASS with three passes, K = 10 and weight 1, both at one rate; those after them change one of HASS's. The two
of "few texts" are EAGLE's on school exercises and dialogues: with the answers that stand there, and with the target's
own to the same questions. The others have our weight of 0.5 for the tokens' loss.

The budget, stated beforehand: 1,000 steps of one row of 512 tokens, half a million tokens a run, on the first answers
of the first two parts (one at T = 0, one at 0.7), from features that are kept. The recipe's rates and options, but for
what a run is named after. Measured on prompts of the papers' tasks with 16 nodes, at T = 1 under both rules; a
result.json lies beside each run, and `--gather` writes all of them into one file, with intervals.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from recipes.smollm2.questions import places, texts
from recipes.smollm2.train import LENGTH, METHODS, ROWS

from outrider import drafters, names
from outrider.backends import choose
from outrider.backends.torch import load_target
from outrider.backends.torch.load import multiplies_halves
from outrider.bench import tasks
from outrider.commands.train import read_options
from outrider.training.data import Document, read
from outrider.training.loop import train
from outrider.training.objectives import native, options_of
from outrider.training.recipe import Recipe

from .demo import compared, folder_of, gather, plainly, taus

STEPS, PARTS = 1000, 2
FEW, ANSWERED = 1500, ("gsm8k", "oasst")  # questions of texts that have an answer each
TASKS = "mt-bench", "humaneval", "gsm8k", "alpaca", "natural-questions"


def run(method: str, **other: Any) -> Recipe:
    """A method with the recipe's settings and some other options."""
    rate, options = METHODS[method]
    given = {**read_options(method, options, options_of(method)), **other}
    half = multiplies_halves()
    return Recipe(method, steps=STEPS, rows=ROWS, length=LENGTH, lr=rate, warmup=STEPS // 15, bf16=half,
                  evaluate=STEPS, prompts=1, options=given)  # fmt: skip


def published(method: str, **other: Any) -> Recipe:
    """EAGLE or HASS as the papers have them, but for `other` and the tokens that can be drafted."""
    given = {"inputs": "feature+shifted", "noise": 0.1, "cls": 0.1, "draft_vocab": 8192, "linear": True}
    if method == "hass":
        given |= {"passes": 3, "beta": 1.0, "topk": 1.0, "k": 10, "loss": "top-k", "published": False}
    return replace(run("eagle"), method=method, options={**given, **other})


def ours(method: str, **other: Any) -> Recipe:
    """EAGLE or HASS with our weight of the tokens' loss."""
    return run(method, **{"cls": 0.5, **other})


RUNS: dict[str, Recipe] = {
    "eagle as published": published("eagle"),
    "hass as published": published("hass"),
    "hass k=5 topk=0.5": published("hass", k=5, topk=0.5),
    **{f"hass k={k}": published("hass", k=k) for k in (1, 5, 50)},
    "hass topk=0": published("hass", topk=0.0),
    "eagle of few texts": published("eagle"),
    "eagle of few texts by the target": published("eagle"),
    "hass beta=0.5": published("hass", beta=0.5),
    **{
        f"hass loss={x}": published("hass", loss=x)
        for x in ("top-p", "normed-linear", "normed-softmax", "both-ways", "recall", "bild")
    },
    "eagle": ours("eagle"),
    "eagle linear=false": ours("eagle", linear=False),
    "block": run("block"),
    "block pair_head=selector": run("block", pair_head="selector"),
    "hass": ours("hass", passes=2),
    "block pair_head=none": run("block", pair_head="none"),
    "block causal=false": run("block", causal=False),
    "block layers=2": run("block", layers=2),
    "eagle3": run("eagle3"),
    "block loss=lk": run("block", loss="lk"),
    "block loss=tv": run("block", loss="tv"),
    "block seeded=false": run("block", seeded=False),
    "block block=4 anchors=128": run("block", block=4, anchors=128),
    "eagle draft_vocab=0": ours("eagle", draft_vocab=0),
    "eagle draft_vocab=16384": ours("eagle", draft_vocab=16384),
    "eagle draft_vocab=4096": ours("eagle", draft_vocab=4096),
    **{f"hass passes={n}": ours("hass", passes=n) for n in (1, 3, 4, 5)},
    "hass topk=1": ours("hass", passes=2, topk=1.0),
    **{f"eagle inputs={x}": ours("eagle", inputs=x) for x in ("feature+unshifted", "feature", "token")},
    "eagle noise=0": ours("eagle", noise=0.0),
}


def documents(work: Path, tokenizer: Any) -> list[Document]:
    """The first answers, as many from each part, that fill the rows of a run."""
    wanted, results = STEPS * ROWS * LENGTH // PARTS, []
    for part in range(PARTS):
        left = wanted
        for document in read([work / f"answers-{part}.jsonl"], tokenizer):
            if left <= 0:
                break
            results.append(document)
            left -= len(document.tokens)
    return results


def few(work: Path, train: Path, own: bool) -> Path:
    """The first FEW questions that the texts answer, with their answers or with the target's own."""
    theirs = {d.messages[0][1]: d.messages[1][1] for name in ANSWERED for d in texts(name, train, 1)}
    rows: list[dict[str, Any]] = []
    for part in count():
        for line in (work / f"answers-{part}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            asked = row["messages"][0]["content"]
            if asked in theirs and len(rows) < FEW:
                answer = {"role": "assistant", "content": theirs[asked]}
                rows.append(row if own else {"messages": [row["messages"][0], answer], "ends": True})
        if len(rows) == FEW:
            break
    file = work / f"few-{'answered' if own else 'asked'}.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def prompts(tokenizer: Any, folder: Path, each: int) -> Iterator[list[int]]:
    """The first turns of the papers' tasks."""
    for name in TASKS:
        for prompt in islice(tasks.load(name, folder, each).prompts, each):
            given = [{"role": "user", "content": prompt.turns[0]}]
            made = tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=True)
            yield list(made["input_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    places(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--each", type=int, default=6, help="prompts of every task")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--gather", type=Path, help="write all results there instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    out = args.work / "ablations"
    if args.gather:
        gather(out, args.gather, {"steps": STEPS, "rows": ROWS, "length": LENGTH}, tuple(RUNS))
        return
    loaded = choose.load(names.find("smollm2"), dtype="auto", device="auto", weights="full")
    model, tokenizer = loaded.target, loaded.tokenizer
    text, given = documents(args.work, tokenizer), list(prompts(tokenizer, args.eval, args.each))
    eos = tokenizer.eos_token_id
    plain = plainly(model, given, args.tokens, eos)
    for name in args.names or RUNS:
        folder = folder_of(out, name)
        kept = folder / "result.json"
        if kept.exists():
            continue
        row: dict[str, Any] = {"name": name, "options": dict(RUNS[name].options), "asked": [args.each, args.tokens]}
        learnt = text
        if "few texts" in name:
            learnt = list(read([few(args.work, args.train, "by the target" in name)], tokenizer))
        ours = native(RUNS[name].method)
        teacher, cache = (model, args.work / "features") if ours else (load_target("smollm2"), out / "features")
        row["held_out_loss"] = train(teacher, learnt, folder, replace(RUNS[name], cache=str(cache))).best
        row |= compared(model, drafters.load(str(folder / "best"), model), given, args.tokens, eos, plain)
        kept.write_text(json.dumps(row), encoding="utf-8")
        print(f"{name}: {taus(row, row)['tau']}", flush=True)


if __name__ == "__main__":
    main()
