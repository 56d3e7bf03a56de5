"""The papers' ablations on the demo target: `python -m papers.ablations.demo [NAME ...]` (it resumes).

The budget, stated beforehand: 240 steps of 4 rows of 512 tokens, some 0.5 million tokens a run, from the cached
features of `recipes.demo.drafters`. Measured on held-out prompts (the first 14 of every domain, looping texts left out)
with 16 nodes; a run that is there is only measured again if other prompts are asked for. The two runs of "few" texts
learn from the same OWN questions of each domain, one from the documents' own answers, one from what the target wrote
(`--own` makes both). A result.json lies beside each run; `--gather` writes all of them into one file, with intervals.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from recipes.demo.drafters import DOMAINS, SHARED, demo, documents, target
from rich.console import Console
from rich.progress import Progress

from outrider import drafters
from outrider.backends.torch import HFTarget, load_tokenizer
from outrider.bench.metrics import LOOP_SHARE, loops
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Target
from outrider.engine import Engine, Request, generate
from outrider.params import Sampling
from outrider.training.data import Document, read
from outrider.training.generate import write
from outrider.training.loop import train
from outrider.training.questions import questions
from outrider.training.recipe import Recipe

from ..rows import PUBLISHED

STEPS = 240
BATCH = 8  # prompts decoded side by side
OWN, OPENING, ANSWER = 80, 64, 256  # questions of every domain; tokens
BASE: dict[str, Any] = {
    **SHARED,
    "steps": STEPS,
    "warmup": 20,
    "lr": 5e-3,
    "evaluate": STEPS,
    "save": STEPS,
    "prompts": 1,
}


def eagle(**options: Any) -> Recipe:
    return Recipe("eagle", options={"linear": False, **options}, **BASE)


def hass(**options: Any) -> Recipe:
    return Recipe("hass", options={"linear": False, **options}, **BASE)


def block(**options: Any) -> Recipe:
    return Recipe("block", options=options, **{**BASE, "lr": 4e-3})


RUNS: dict[str, Recipe] = {
    "eagle": eagle(),
    "eagle linear=true": eagle(linear=True),
    **{f"eagle inputs={x}": eagle(inputs=x) for x in ("feature+unshifted", "feature", "token")},
    "eagle without noise": eagle(noise=0.0),
    "eagle of few texts": eagle(),
    "eagle of few texts by the target": eagle(),
    **{f"hass passes={n}": hass(passes=n) for n in (1, 2, 3, 4, 5)},
    **{f"hass k={k}": hass(k=k) for k in (1, 5, 50)},
    **{f"hass topk={w:g}": hass(topk=w) for w in (0.0, 0.5)},
    "hass beta=0.5": hass(beta=0.5),
    **{
        f"hass loss={x}": hass(loss=x)
        for x in ("top-p", "normed-linear", "normed-softmax", "both-ways", "recall", "bild")
    },
    "hass published mask": hass(published=True),
    "hass linear=true": hass(linear=True),
    "medusa": Recipe("medusa", options={"heads": 4}, **{**BASE, "lr": 3e-3}),
    "block": block(),
    "block causal=false": block(causal=False),
    **{f"block pair_head={x}": block(pair_head=x) for x in ("none", "selector")},
    **{f"block loss={x}": block(loss=x) for x in ("ce", "tv", "lk")},
    **{f"block layers={n}": block(layers=n) for n in (2, 3)},
    "block conv=2": block(conv=2),
    "block seeded=false": block(seeded=False),
    "block dpace=0": block(dpace=0.0),
    "block regress=0": block(regress=0.0),
    "block block=4 anchors=128": block(block=4, anchors=128),
}


def ask(work: Path) -> list[dict[str, Any]]:
    """The first OWN questions of every domain, each with its document's own answer, of ANSWER tokens at most."""
    tokenizer, results = load_tokenizer(demo()), []

    def cut(text: str, first: int, last: int | None) -> str:
        return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][first:last])

    for domain in DOMAINS:
        rows: list[dict[str, Any]] = []
        with (work / "documents" / "train" / f"{domain}.jsonl").open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                turns = row.get("messages", [])
                if not turns and len(row["text"]) > 600:
                    text = row["text"]
                    given = {"prompt": cut(text, 0, OPENING), "completion": cut(text, OPENING, OPENING + ANSWER)}
                    rows.append({**given, "ends": False})
                elif [m["role"] for m in turns[:2] if m["content"].strip()] == ["user", "assistant"]:
                    answer = cut(turns[1]["content"], 0, ANSWER)
                    whole = len(answer) == len(turns[1]["content"])
                    rows.append({"messages": [turns[0], {"role": "assistant", "content": answer}], "ends": whole})
                if len(rows) == OWN:
                    break
        results += rows
    return results


def own(work: Path, model: HFTarget) -> None:
    """Both files of the runs of few texts: own/asked.jsonl and own/answered.jsonl."""
    folder, tokenizer = work / "own", load_tokenizer(demo())
    folder.mkdir(parents=True, exist_ok=True)
    asked = folder / "asked.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in ask(work)), encoding="utf-8")
    waiting = list(questions([asked]))
    with Progress(*Progress.get_default_columns(), console=Console(stderr=True)) as bar:
        task = bar.add_task("the target answers", total=len(waiting))
        write(
            model, drafters.load("none", model), tokenizer, waiting, folder / "answered.jsonl", ANSWER, 1.0, 0, 16,
            OPENING, frozenset({tokenizer.eos_token_id}), lambda n: bar.advance(task, n),
        )  # fmt: skip


def prompts(each: int) -> list[list[int]]:
    tokenizer, results = load_tokenizer(demo()), dict[str, Any]()
    for line in (Path(demo()).parent / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "messages" in row:
            made = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)
        else:
            made = tokenizer(row["text"])
        results.setdefault(row["domain"], []).append(list(made["input_ids"]))
    return [ids for rows in results.values() for ids in rows[:each]]


def texts(
    model: Target,
    given: list[list[int]],
    tokens: int,
    eos: int,
    temperature: float,
    drafter: Any,
    only: Sequence[int] | None = None,
    rule: str = "coupled",
) -> list[Any]:
    """(tokens, rounds) of every prompt, or of some of them."""
    engine = Engine(model, drafter, FixedBudget(16, 6), GumbelNoise(model.vocab), rule=rule)
    chosen = range(len(given)) if only is None else only

    def cut(output: Any, new: Any) -> tuple[int, str | None]:
        return (list(new).index(eos) + 1, "eos") if eos in new else (len(new), None)

    asked = [Request(given[i], i, tokens, Sampling(temperature), cut) for i in chosen]
    results: dict[int, Any] = {}
    for piece in generate(engine, asked, BATCH):
        results[piece.row.index] = (piece.row.output, piece.row.usage.rounds)
    return [results[i] for i in range(len(asked))]


Plain = dict[float, list[Any]]


def plainly(model: Target, given: list[list[int]], tokens: int, eos: int) -> Plain:
    none = drafters.load("none", model)
    return {t: texts(model, given, tokens, eos, t, none) for t in (0.0, 1.0)}


def compared(
    model: Target, drafter: Any, given: list[list[int]], tokens: int, eos: int, plain: Plain | None = None
) -> dict[str, Any]:
    """(tokens, rounds) by temperature, of the prompts whose plain text does not loop at T = 0, and how many texts are
    plain decoding's (all, but for near ties that a batch's sums turn round in float32: at most one in fifty). Counts at
    T = 1 under the papers' rule, whose texts are others, stand under `PUBLISHED`."""
    plain = plain or plainly(model, given, tokens, eos)
    calm = [i for i, (text, _) in enumerate(plain[0.0]) if loops(text) <= LOOP_SHARE and len(text) > 2]
    counts, same = {}, {}
    for t, truth in plain.items():
        mine = texts(model, given, tokens, eos, t, drafter, calm)
        same[f"{t:g}"] = sum(text == truth[i][0] for (text, _), i in zip(mine, calm, strict=True))
        assert same[f"{t:g}"] >= 0.98 * len(calm), "the text is the target's own"
        counts[f"{t:g}"] = [(len(text) - 1, rounds) for text, rounds in mine]
    sampled = texts(model, given, tokens, eos, 1.0, drafter, calm, "rejection")
    counts[PUBLISHED] = [(len(text) - 1, rounds) for text, rounds in sampled]
    return {"prompts": len(calm), "same_text": same, "counts": counts}


def taus(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """tau, and its ratio to another run's on the same prompts, each with a bootstrap interval of 95 % over prompts."""
    results: dict[str, Any] = {"tau": {}, "ratio": {}}
    for t, mine in row["counts"].items():
        whole, dice, theirs = range(len(mine)), random.Random(0), base["counts"].get(t, ())
        drawn = [dice.choices(whole, k=len(mine)) for _ in range(1000)]
        results["tau"][t] = interval([tau(mine, index) for index in (whole, *drawn)])
        if len(theirs) == len(mine):  # another target's prompts are others
            results["ratio"][t] = interval([tau(mine, index) / tau(theirs, index) for index in (whole, *drawn)])
    return results


def tau(counts: Sequence[Sequence[int]], index: Sequence[int]) -> float:
    return sum(counts[i][0] for i in index) / max(1, sum(counts[i][1] for i in index))


def interval(values: Sequence[float]) -> list[float]:
    """[value, low, high] of a value and 1000 that were drawn."""
    drawn = sorted(values[1:])
    return [round(x, 4) for x in (values[0], drawn[25], drawn[974])]


def folder_of(out: Path, name: str) -> Path:
    """Where a run lies."""
    return out / name.replace(" ", "_").replace("=", "-").replace("'", "")


def gather(work: Path, out: Path, head: dict[str, Any], known: Sequence[str]) -> None:
    """All results in one file, after `head`, with the counts of each prompt. What it has of known runs stays."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in work.glob("*/result.json")]
    base: dict[str, Any] = next((row for row in rows if row["name"] == "eagle"), {"counts": {}})
    made = {row["name"]: {**row, **taus(row, base)} for row in rows}
    old = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.exists() else []
    stays = [row for row in old if row["name"] in known or " on a " in row["name"]]  # of moe.py
    rows = [*{row["name"]: row for row in (*stays, *made.values())}.values()]
    places = {name: i for i, name in enumerate(known)}
    rows.sort(key=lambda row: places.get(row["name"], len(places)))
    out.write_text(json.dumps({**head, "runs": rows}, indent=1) + "\n", encoding="utf-8")
    missing = sorted(set(known) - {row["name"] for row in rows})
    print(f"{len(rows)} runs in {out}; not there: {', '.join(missing) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--work", type=Path, default=Path("runs/demo"))
    parser.add_argument("--own", action="store_true", help="let the target write its own texts instead")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--each", type=int, default=14, help="prompts of every domain")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--gather", type=Path, help="write all results there instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    out = args.work / "ablations"
    if args.gather:
        gather(out, args.gather, {"steps": STEPS, "rows": SHARED["rows"], "length": SHARED["length"]}, tuple(RUNS))
        return
    if args.own:
        own(args.work, target())
        return
    model, text, given = target(), documents(args.work), prompts(args.each)
    eos = load_tokenizer(demo()).eos_token_id
    plain = plainly(model, given, args.tokens, eos)
    for name in args.names or RUNS:
        folder = folder_of(out, name)
        kept = folder / "result.json"
        row: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        if "held_out_loss" not in row:
            row = {"name": name, "options": dict(RUNS[name].options)}
            row["held_out_loss"] = learned(name, folder, args.work, model, text)
        elif len(row.get("counts", {}).get(PUBLISHED, ())) and row.get("asked") == [args.each, args.tokens]:
            continue
        row = {key: row[key] for key in ("name", "options", "held_out_loss")} | {"asked": [args.each, args.tokens]}
        row |= compared(model, drafters.load(str(folder / "best"), model), given, args.tokens, eos, plain)
        kept.write_text(json.dumps(row), encoding="utf-8")
        print(f"{name}: {taus(row, row)['tau']}", flush=True)


def learned(name: str, folder: Path, work: Path, model: HFTarget, text: list[Document]) -> float:
    """Train this run; its held-out loss."""
    recipe = RUNS[name]
    if "few texts" not in name:
        return train(model, text, folder, replace(recipe, cache=str(work / "features"))).best
    file = work / "own" / ("answered.jsonl" if "by the target" in name else "asked.jsonl")
    if not file.exists():
        raise SystemExit(f"{name} learns from {file}, which is not there; make it by --own")
    return train(model, list(read([file], load_tokenizer(demo()))), folder, recipe).best


if __name__ == "__main__":
    main()
