"""The papers' ablations on the demo target: `python -m recipes.demo.ablations [NAME ...]` (it resumes).

The budget, stated beforehand: 240 steps of 4 rows of 512 tokens, some 0.5 million tokens a run, from the cached
features of `recipes.demo.drafters`. Measured on held-out prompts (the first 10 of every domain, looping texts
left out) with 16 nodes. The two runs of "few" texts learn from the same OWN questions of each domain, one from the
documents' own answers, one from what the target wrote (`--own` makes both). A result.json lies beside each run;
`--gather` writes all of them into one file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from outrider import drafters
from outrider.budget import FixedBudget
from outrider.engine import Engine, Request, generate
from outrider.noise import RaceNoise
from outrider.targets import HFTarget, load_tokenizer
from outrider.training.data import read
from outrider.training.generate import questions, write
from outrider.training.loop import train
from outrider.training.recipe import Recipe
from outrider.types import Sampling
from recipes.demo.drafters import DOMAINS, SHARED, demo, documents, target

STEPS = 240
OWN, OPENING, ANSWER = 80, 64, 256  # questions of every domain; tokens
BASE = {**SHARED, "steps": STEPS, "warmup": 20, "lr": 5e-3, "evaluate": STEPS, "save": STEPS, "prompts": 1}


def eagle(**options: Any) -> Recipe:
    return Recipe("eagle", options=options, **BASE)


def hass(**options: Any) -> Recipe:
    return Recipe("hass", options=options, **BASE)


RUNS: dict[str, Recipe] = {
    "eagle": eagle(),
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
    "medusa": Recipe("medusa", options={"heads": 4}, **{**BASE, "lr": 3e-3}),
}


def ask(work: Path) -> list[dict[str, Any]]:
    """The first OWN questions of every domain, each with its document's own answer, of ANSWER tokens at most."""
    tokenizer, found = load_tokenizer(demo()), []

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
        found += rows
    return found


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
    tokenizer, found = load_tokenizer(demo()), {}
    for line in (Path(demo()).parent / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "messages" in row:
            made = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)
        else:
            made = tokenizer(row["text"])
        found.setdefault(row["domain"], []).append(list(made["input_ids"]))
    return [ids for rows in found.values() for ids in rows[:each]]


def texts(
    model: HFTarget,
    given: list[list[int]],
    tokens: int,
    eos: int,
    temperature: float,
    drafter: Any,
    only: Sequence[int] | None = None,
) -> list[Any]:
    """(tokens, rounds) of every prompt, or of some of them."""
    engine = Engine(model, drafter, FixedBudget(16, 6), RaceNoise(model.vocab))
    found = []
    for i in range(len(given)) if only is None else only:
        row = None

        def cut(output: Any, new: Any) -> tuple[int, str | None]:
            return (list(new).index(eos) + 1, "eos") if eos in new else (len(new), None)

        for piece in generate(engine, [Request(given[i], i, tokens, Sampling(temperature), cut)]):
            row = piece.row
        assert row is not None
        found.append((row.output, row.usage.rounds))
    return found


Plain = dict[float, list[Any]]


def plainly(model: HFTarget, given: list[list[int]], tokens: int, eos: int) -> Plain:
    none = drafters.load("none", model)
    return {t: texts(model, given, tokens, eos, t, none) for t in (0.0, 1.0)}


def compared(
    model: HFTarget, drafter: Any, given: list[list[int]], tokens: int, eos: int, plain: Plain | None = None
) -> dict[str, Any]:
    """tau by temperature, over the prompts whose plain text does not loop at T = 0; the texts must be the same."""
    plain = plain or plainly(model, given, tokens, eos)
    calm = [i for i, (text, _) in enumerate(plain[0.0]) if loops(text) <= 0.25 and len(text) > 2]
    tau = {}
    for t, truth in plain.items():
        mine = texts(model, given, tokens, eos, t, drafter, calm)
        assert [a for a, _ in mine] == [truth[i][0] for i in calm], "the text is the target's own"
        rounds, new = sum(rounds for _, rounds in mine), sum(len(text) - 1 for text, _ in mine)
        tau[f"{t:g}"] = round(new / rounds, 4)
    return {"prompts": len(calm), "tau": tau}


def loops(tokens: list[int], n: int = 8) -> float:
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def gather(work: Path, out: Path) -> None:
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in work.glob("*/result.json")]
    known = {name: i for i, name in enumerate(RUNS)}
    rows.sort(key=lambda row: known.get(row["name"], len(known)))
    document = {"steps": STEPS, "rows": SHARED["rows"], "length": SHARED["length"], "runs": rows}
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    missing = sorted(set(RUNS) - {row["name"] for row in rows})
    print(f"{len(rows)} runs in {out}; not there: {', '.join(missing) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--work", type=Path, default=Path("runs/demo"))
    parser.add_argument("--own", action="store_true", help="let the target write its own texts instead")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--each", type=int, default=10, help="prompts of every domain")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--gather", type=Path, help="write all results there instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    out = args.work / "ablations"
    if args.gather:
        gather(out, args.gather)
        return
    if args.own:
        own(args.work, target())
        return
    model, text, given = target(), documents(args.work), prompts(args.each)
    eos = load_tokenizer(demo()).eos_token_id
    model.compile()
    plain = plainly(model, given, args.tokens, eos)
    for name in args.names or RUNS:
        folder = out / name.replace(" ", "_").replace("=", "-").replace("'", "")
        if (folder / "result.json").exists():
            continue
        recipe, learn = RUNS[name], text
        if "few texts" in name:
            file = args.work / "own" / ("answered.jsonl" if "by the target" in name else "asked.jsonl")
            if not file.exists():
                print(f"{name}: skipped, there is no {file} (--own makes it)")
                continue
            learn = list(read([file], load_tokenizer(demo())))
        else:
            recipe = replace(recipe, cache=str(args.work / "features"))
        result = train(model, learn, folder, recipe)
        drafter = drafters.load(str(result.folder), model)
        row: dict[str, Any] = {"name": name, "options": dict(recipe.options), "held_out_loss": result.best}
        row |= compared(model, drafter, given, args.tokens, eos, plain)
        (folder / "result.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
