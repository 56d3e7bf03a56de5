"""The demo's drafters side by side: `python benchmarks/drafters.py --out runs/bench/drafters.json` (tables, and JSON).

Every method decodes the same held-out prompts in turn, at T = 0 and T = 1, with the same number of nodes; the target's
passes are recorded for all of them. Beside them stand transformers' own loops, at T = 0. tau counts
the target's own token. Intervals are bootstrap intervals of 95 % over prompts; prompts whose plain text loops at T = 0
are left out of the figures called "not looping".
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import AutoModelForCausalLM

import outrider
from measure import LOOP_SHARE, loops, machine, write
from outrider import drafters
from outrider.bandit import BanditBudget, nodes, parse
from outrider.budget import AdaptiveBudget, FixedBudget
from peers import Sample, decode, stock_peer

DEMO = files("outrider") / "demo"


@dataclass(frozen=True)
class Method:
    """A row of the table: a SPEC ({} is the folder of the demo's drafters), a budget, a rule."""

    spec: str
    nodes: int = 16
    depth: int = 6
    rule: str = "coupled"
    temperatures: tuple[float, ...] = (0.0, 1.0)
    adaptive: bool = False
    arms: str = ""  # a bandit over these shapes; a single one is a fixed shape

    def budget(self) -> Any:
        if self.adaptive:
            return AdaptiveBudget()
        shapes = parse(self.arms)
        if len(shapes) == 1:
            return FixedBudget(nodes(shapes[0]), len(shapes[0]), shape=shapes[0])
        return BanditBudget(shapes) if shapes else FixedBudget(self.nodes, self.depth)


Run = Callable[[Sequence[int], int, int], Sample]  # prompt, tokens, seed
STOCK = ("transformers", "transformers, assisted")
METHODS: dict[str, Method] = {
    "none": Method("none", 1, 0),
    "transformers": Method("", temperatures=(0.0,)),
    "transformers, assisted": Method("", temperatures=(0.0,)),
    "lookup": Method("lookup"),
    "draft model": Method("model", depth=4),
    "Medusa": Method("medusa:{}/medusa", depth=4),
    "EAGLE chain": Method("eagle:{}/eagle?tree=chain", nodes=6, depth=5),
    "Hydra": Method("hydra:{}/hydra", depth=4),
    "EAGLE tree": Method("eagle:{}/eagle?tree=static", nodes=26, depth=5),
    "EAGLE-2": Method("eagle:{}/eagle"),
    "EAGLE-2, 60 nodes": Method("eagle:{}/eagle", nodes=60),
    "EAGLE-2 without value": Method("eagle:{}/eagle?value=false"),
    "EAGLE-2 without re-ranking": Method("eagle:{}/eagle?rerank=false"),
    "EAGLE-2, rejection": Method("eagle:{}/eagle", rule="rejection", temperatures=(1.0,)),
    "HASS": Method("eagle:{}/hass"),
    "HASS, scale fitted": Method("eagle:{}/hass?scale=auto"),
    "HASS chain": Method("eagle:{}/hass?tree=chain", nodes=6, depth=5),
    "HASS, rejection": Method("eagle:{}/hass", rule="rejection", temperatures=(1.0,)),
    "EAGLE-3": Method("eagle3:{}/eagle3"),
    "HASS, adaptive": Method("eagle:{}/hass", adaptive=True),
    "HASS chain, adaptive": Method("eagle:{}/hass?tree=chain", adaptive=True),
    "EAGLE-3, adaptive": Method("eagle3:{}/eagle3", adaptive=True),
}


def prompts(llm: Any, each: int) -> list[tuple[str, list[int]]]:
    """(domain, ids): the first `each` held-out prompts of every domain."""
    found: dict[str, list[list[int]]] = {}
    for line in (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["domain"], []).append(llm.encode(row.get("messages") or row["text"]))
    return [(domain, ids) for domain, rows in found.items() for ids in rows[:each]]


def with_drafter(llm: outrider.LLM, spec: str) -> outrider.LLM:
    """The same compiled target with another drafter."""
    drafter = drafters.load(spec, llm.target, llm.tokenizer)
    llm.target.warm(drafter.taps)
    return outrider.LLM(llm.target, llm.tokenizer, drafter, eos=llm.eos)


def ours(method: Method, llm: outrider.LLM, folder: Path, temperature: float) -> Run:
    engine = with_drafter(llm, method.spec.format(folder)).engine(method.rule, method.budget())
    return lambda ids, tokens, seed: decode(engine, ids, tokens, llm.eos, temperature, seed)


def stock(name: str, llm: outrider.LLM) -> Run:
    """transformers' own `generate`, and its assisted generation with the demo's draft model."""
    model = load_model("target")
    options = {"assistant_model": load_model("draft")} if "assisted" in name else {}
    peer = stock_peer(name, model, llm.eos, **options)
    return lambda ids, tokens, seed: peer.run(ids, tokens)


def load_model(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(DEMO / name), dtype=torch.float32).eval()


def measure(
    args: argparse.Namespace, temperature: float, methods: Mapping[str, Method]
) -> tuple[dict[str, list[Sample]], list[str]]:
    """All methods on all prompts, in turn: their samples, and the prompts' domains."""
    llm = outrider.load(drafter="none", compile=True)
    given = prompts(llm, args.per_domain)
    runs: dict[str, Run] = {}
    for name, method in methods.items():
        if temperature in method.temperatures:
            runs[name] = stock(name, llm) if name in STOCK else ours(method, llm, args.drafters, temperature)
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    columns = (TextColumn(f"T = {temperature:g}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(given) * len(runs))
        for run in runs.values():
            run(given[0][1], 16, 0)
        for i, (_, ids) in enumerate(given):
            order = list(runs) if i % 2 == 0 else list(runs)[::-1]
            for name in order:
                samples[name].append(runs[name](ids, args.tokens, i))
                bar.advance(task)
    return samples, [domain for domain, _ in given]


def summary(samples: dict[str, list[Sample]], domains: Sequence[str]) -> dict[str, Any]:
    truth = [s.tokens for s in samples["none"]]
    calm = steady(samples)
    every = [i for i, text in enumerate(truth) if len(text) > 2]
    found: dict[str, Any] = {"prompts": len(every), "not_looping": len(calm), "loop_share": LOOP_SHARE, "methods": {}}
    for name, mine in samples.items():
        row: dict[str, Any] = {
            "same_text": sum(a.tokens == b for a, b in zip(mine, truth, strict=True)),
            "all": figures(mine, samples["none"], every),
            "not_looping": figures(mine, samples["none"], calm),
            "alpha": alpha(mine, calm),
            "milliseconds_per_round": parts(mine, calm),
            "domains": {
                d: figures(mine, samples["none"], [i for i in calm if domains[i] == d]) for d in dict.fromkeys(domains)
            },
        }
        found["methods"][name] = row
    return found


def steady(samples: dict[str, list[Sample]]) -> list[int]:
    """The prompts whose plain text does not loop."""
    truth = [s.tokens for s in samples["none"]]
    return [i for i, text in enumerate(truth) if loops(text) <= LOOP_SHARE and len(text) > 2]


def figures(mine: Sequence[Sample], plain: Sequence[Sample], keep: Sequence[int]) -> dict[str, Any]:
    """tau and speed over plain decoding, with their intervals."""
    if not keep:
        return {}

    def speed(index: Sequence[int]) -> float:
        return rate(mine, index) / rate(plain, index)

    return {
        "prompts": len(keep),
        "tau": interval(lambda index: tau(mine, index), keep),
        "speedup": interval(speed, keep),
        "tokens_per_second": interval(lambda index: rate(mine, index), keep),
    }


def tau(samples: Sequence[Sample], index: Sequence[int]) -> float:
    used = [samples[i].usage for i in index]
    return sum(u.new_tokens - 1 for u in used if u) / max(1, sum(u.rounds for u in used if u))


def rate(samples: Sequence[Sample], index: Sequence[int]) -> float:
    return sum(len(samples[i].tokens) - 1 for i in index) / sum(samples[i].seconds - samples[i].prefill for i in index)


def interval(of: Callable[[Sequence[int]], float], keep: Sequence[int], draws: int = 500) -> list[float]:
    """[value, low, high]."""
    dice = random.Random(0)
    drawn = sorted(of([dice.choice(keep) for _ in keep]) for _ in range(draws))
    return [round(x, 4) for x in (of(keep), drawn[int(0.025 * draws)], drawn[int(0.975 * draws)])]


def alpha(mine: Sequence[Sample], keep: Sequence[int]) -> list[float]:
    """Acceptance by depth, given that all before were accepted: n-alpha for a chain."""
    used = [mine[i].usage for i in keep]
    depth = max((len(u.tested_at) for u in used if u), default=0)
    found = []
    for d in range(depth):
        tested = sum(u.tested_at[d] for u in used if u and len(u.tested_at) > d)
        accepted = sum(u.accepted_at[d] for u in used if u and len(u.accepted_at) > d)
        found.append(round(accepted / tested, 4) if tested else 0.0)
    return found


def parts(mine: Sequence[Sample], keep: Sequence[int]) -> dict[str, float]:
    used = [mine[i].usage for i in keep]
    rounds = max(1, sum(u.rounds for u in used if u))
    names = ("draft_seconds", "verify_seconds", "overhead_seconds")
    return {n.split("_")[0]: round(1e3 * sum(getattr(u, n) for u in used if u) / rounds, 3) for n in names}


def show(temperature: float, found: dict[str, Any]) -> None:
    table = Table(title=f"T = {temperature:g}: {found['not_looping']} of {found['prompts']} prompts do not loop")
    for column in ("method", "tau", "95 %", "speed-up", "95 %", "tau, all", "draft ms", "verify ms", "same text"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, row in found["methods"].items():
        calm, ms = row["not_looping"], row["milliseconds_per_round"]
        (tau, a, b), (speed, c, d) = calm["tau"], calm["speedup"]
        table.add_row(
            name, f"{tau:.2f}", f"{a:.2f}-{b:.2f}", f"{speed:.2f}x", f"{c:.2f}-{d:.2f}", f"{row['all']['tau'][0]:.2f}",
            f"{ms['draft']:.2f}", f"{ms['verify']:.2f}", str(row["same_text"]),
        )  # fmt: skip
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help=f"default: all of {', '.join(METHODS)}")
    parser.add_argument(
        "--drafters", type=Path, default=DEMO, help="folder that holds medusa, hydra, eagle, hass, eagle3"
    )
    parser.add_argument("--per-domain", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("runs/bench/drafters.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chosen = args.methods or list(METHODS)
    unknown = [name for name in chosen if name not in METHODS]
    if unknown:
        parser.error(f"there is no method {', '.join(unknown)}; choose from {', '.join(METHODS)}")
    chosen = list(dict.fromkeys(["none", *chosen]))
    arguments = {"per_domain": args.per_domain, "tokens": args.tokens}
    document: dict[str, Any] = {"temperatures": {}}
    if args.out.exists():  # other temperatures stay
        document = json.loads(args.out.read_text(encoding="utf-8"))
    document["machine"] = machine()
    for temperature in args.temperature:
        found = summary(*measure(args, temperature, {name: METHODS[name] for name in chosen}))
        document["temperatures"][f"{temperature:g}"] = {"arguments": arguments, **found}
        show(temperature, found)
        write(args.out, document)


if __name__ == "__main__":
    main()
