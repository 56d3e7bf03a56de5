"""The parts of docs/scaling.md that are made from the code: constants, examples, published runs beside formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from outrider.names import find

from . import plan

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = [  # config, tokens, GPUs
    ("llama-3.1-8b", "100M", "1xh100"),
    ("llama-3.1-70b", "300M", "8xh100"),
    ("deepseek-v3", "1G", "64xh200"),
]


@cache
def target(name: str) -> plan.Target:
    """A model whose config is in recipes/targets."""
    return plan.read(replace(find(str(ROOT / "recipes" / "targets" / f"{name}.json")), name=name))


@dataclass(frozen=True)
class Run:
    """A figure that somebody published, and what the formulas say."""

    what: str
    unit: str
    published: tuple[float, float]  # the least and the most that it says
    made: Callable[[], float]
    within: float  # a factor on either side; 0: not held
    source: str
    note: str = ""

    @property
    def factor(self) -> float:
        """How far off the formula is: 1 inside what was published."""
        low, high = self.published
        made = self.made()
        return max(low / made, made / high, 1.0)


def disk(model: str, kind: str, tokens: float, beside: float = 0.0) -> Callable[[], float]:
    """Bytes of features; `beside`: bytes that a run keeps of every token beside them."""
    return lambda: tokens * (2.0 * target(model).hidden * plan.KINDS[kind].stored + beside)


def taught(model: str, kind: plan.Kind, tokens: float, epochs: int, number: int, gpu: str) -> Callable[[], float]:
    """Hours of a training."""
    return lambda: epochs * plan.teaching(target(model), kind, tokens, gpu) / number / 3600


def kimi() -> float:
    """GPU hours of features and training."""
    kind, model = replace(plan.KINDS["eagle3"], head=163840), target("kimi-k2.5")
    return (plan.reading(model, 6e9, "h200") + plan.teaching(model, kind, 6e9, "h200")) / 3600


def rate(model: str, gpu: str, rows: int, context: int) -> float:
    """Tokens per second of `rows` texts on one GPU."""
    return rows / target(model).cost(gpu, 1).pass_seconds(rows, rows * context)


EAGLE, EAGLE3, DFLASH = (plan.KINDS[name] for name in ("eagle", "eagle3", "dflash"))
SPECULATORS = "speculators, examples/train"
TEXT = 1000  # tokens of a text where a source does not say
RUNS = [
    Run("features of 50,000 texts of 1,024 tokens, Llama 3.1 8B, EAGLE-3", "TB", (1.6e12, 1.6e12),
        disk("llama-3.1-8b", "eagle3", 50_000 * 1024), 1.1, "speculators, the EAGLE-3 tutorial"),
    Run("features of one text of 131,072 tokens, Kimi K2.5, EAGLE-3", "TB", (7e9, 7e9),
        disk("kimi-k2.5", "eagle3", 131_072), 1.1, "TorchSpec, on pytorch.org/blog"),
    Run("DeepSpec's cache: 1.35 M texts, Qwen3 4B, 5 + 1 features", "TB", (38e12, 38e12),
        disk("qwen3-4b", "dflash", 1.35e6 * TEXT, 6), 1.2, "DeepSpec, scripts/data/README.md",
        "the length of its texts is not published: 1,000 tokens are assumed, 38 TB would be 914"),
    Run("EAGLE's cache: 68,000 dialogues, hidden size 4,096", "TB", (740e9, 740e9),
        disk("llama-2-7b", "eagle", 68e3 * TEXT, 16), 1.5, "SafeAILab/EAGLE, issue 30",
        "the length is not published: 1,000 tokens are assumed, 740 GB would be 1,326"),
    Run("EAGLE's drafter of a 7B target", "M parameters", (240e6, 240e6),
        lambda: EAGLE.trained(target("llama-2-7b")), 1.05, "SafeAILab/EAGLE, README"),
    Run("EAGLE's drafter of a 70B target", "M parameters", (990e6, 990e6),
        lambda: EAGLE.trained(target("llama-2-70b")), 1.05, "SafeAILab/EAGLE, README"),
    Run("features of 5,000 texts, Llama 3.1 8B, 2 H100", "hours", (143 / 3600, 143 / 3600),
        lambda: plan.reading(target("llama-3.1-8b"), 5000 * 1024, "h100") / 2 / 3600, 2, SPECULATORS,
        "FEATURES is fitted to this run and to Kimi K2.5"),
    Run("EAGLE-3 on them, 5 epochs of 3 passes, 2 H100", "hours", (327 / 3600, 327 / 3600),
        taught("llama-3.1-8b", replace(EAGLE3, passes=3), 5000 * 1024, 5, 2, "h100"), 2, SPECULATORS,
        "TRAINING is fitted to this run and the next three"),
    Run("EAGLE-3 for Qwen3 8B, 5,000 dialogues, 5 epochs, 2 + 2 H100", "hours", (942 / 3600, 942 / 3600),
        taught("qwen3-8b", replace(EAGLE3, passes=3), 5000 * 1326, 5, 2, "h100"), 2, SPECULATORS,
        "features come from the other two GPUs; 1,326 tokens a dialogue, as above"),
    Run("DFlash for Qwen3 8B, the same data and GPUs", "hours", (1374 / 3600, 1374 / 3600),
        taught("qwen3-8b", replace(DFLASH, features=3, head=32000), 5000 * 1326, 5, 2, "h100"), 2, SPECULATORS,
        "3,072 anchors of 8 tokens in 8,192: 3 passes"),
    Run("EAGLE-3 for Kimi K2.5, 6 G tokens: features and training", "GPU hours", (896, 1500), kimi, 2,
        "TorchSpec, on pytorch.org/blog; the model's card",
        "the blog says 1,500 H200 hours, the card 2 runs of 14 h on 32 H200"),
    Run("EAGLE for a 70B target, 20 epochs, 4 A100 of 40 GB", "hours", (24, 48),
        taught("llama-2-70b", EAGLE, 90.2e6, 20, 4, "a100"), 3, "the paper; not looked up",
        "texts were padded, and read from disk"),
    Run("plain decoding of Llama 3.1 8B on one H100, one text", "tokens/s", (158.34, 158.34),
        lambda: rate("llama-3.1-8b", "h100", 1, 500), 1.25, "SGLang, docs on speculation"),
    Run("plain decoding of Qwen3 8B on one H200, one text", "tokens/s", (187, 187),
        lambda: rate("qwen3-8b", "h200", 1, 500), 1.25, "the card of Tengyunw/qwen3_8b_eagle3"),
    Run("plain decoding of Qwen3 4B on one B300, 32 texts of 4,100 tokens", "tokens/s", (5890, 5890),
        lambda: rate("qwen3-4b", "b300", 32, 4100), 1.25, "speculators, pull request 1006"),
    Run("features of 1.2 TB, Llama 3.1 8B, 8 H100, written to disk", "hours", (20 / 60, 20 / 60),
        lambda: plan.reading(target("llama-3.1-8b"), 1.2e12 / 32768, "h100") / 8 / 3600, 0,
        "SpecForge, pull request 37", "1 GB/s: GPUs that wait for a disk"),
    Run("EAGLE-3 on them, one epoch", "hours", (30 / 60, 30 / 60),
        taught("llama-3.1-8b", EAGLE3, 1.2e12 / 32768, 1, 8, "h100"), 0, "SpecForge, pull request 37",
        "0.7 GB/s: the same"),
]  # fmt: skip
SCALES = {"TB": 1e12, "M parameters": 1e6, "minutes": 1 / 60}


def runs() -> str:
    """Published figures beside the formulas'."""
    rows = ["| what | published | formula | held within | source |", "|---|--:|--:|--:|---|"]
    for run in RUNS:
        unit = "minutes" if run.unit == "hours" and run.published[0] < 1 else run.unit
        said, made = (
            [f"{x / SCALES.get(unit, 1):,.{digits(x / SCALES.get(unit, 1))}f}" for x in figures]
            for figures in (dict.fromkeys(run.published), [run.made()])
        )
        held = f"a factor of {run.within:g}" if run.within else "not held"
        what = f"{run.what} ({run.note})" if run.note else run.what
        rows.append(f"| {what} | {' to '.join(said)} {unit} | {made[0]} | {held} | {run.source} |")
    return "\n".join(rows)


def digits(number: float) -> int:
    """Decimals that show two or three figures."""
    return max(0, 1 - math.floor(math.log10(number)))


def constants() -> str:
    """The figures that the formulas take for granted."""
    rows = ["| drafter | features read | kept | layers | passes | its own head |", "|---|--:|--:|--:|--:|--:|"]
    rows += [
        f"| `{name}` | {k.features} | {k.stored} | {k.layers} | {k.passes:g} | {k.head or 'frozen'} |"
        for name, k in plan.KINDS.items()
    ]
    gpus = ", ".join(f"`{name}`" for name in plan.MEMORY)
    return (
        f"Efficiency of features e_f = {plan.FEATURES:g}, of training e_t = {plan.TRAINING:g}; weights take at most "
        f"{plan.WEIGHTS:.0%} of the memory, weights and texts\n{plan.FULL:.0%}; at most {plan.ROWS} texts at a time on "
        f"a copy; {plan.STEP:,} tokens of a GPU between two exchanges of gradients.\nGPUs: {gpus}.\n\n"
        + "\n".join(rows)
    )


def results(name: str) -> list[dict[str, Any]]:
    """What `papers/farm_runs.py` wrote."""
    return json.loads((ROOT / "papers" / "results" / "farm" / f"{name}.json").read_text(encoding="utf-8"))


def checked() -> str:
    """The simulated server beside the real one."""
    rows = ["| clients | drafted | what | real | simulated | ratio |", "|--:|--:|---|--:|--:|--:|"]
    for clients in (1, 4):
        for depth in (0, 4):
            mine = [r for r in results("check") if (r["clients"], r["depth"]) == (clients, depth)]
            for what, says in (("tokens_per_second", "all clients"), ("speed", "one client")):
                real, guess = (fmean(row[side][what] for row in mine) for side in ("real", "simulated"))
                rows.append(f"| {clients} | {depth} | {says} | {real:.1f} | {guess:.1f} | {guess / real:.2f} |")
    return "\n".join(rows)


def loads() -> str:
    """Every policy under every load, beside plain decoding; the best in bold."""
    collected = []
    for name in ("llama-3.1-8b", "llama-3.1-70b"):
        rows = results(name)
        busy, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("busy", "policy"))
        pace = {(row["busy"], row["policy"]): row["pace"] for row in rows}
        most = {row["policy"]: row["tokens_per_second"] for row in rows if row["busy"] == busy[-1]}
        collected += [f"| {name} | {' | '.join(map(str, busy))} | all users |", "|---|" + "--:|" * (len(busy) + 1)]
        plain = [f"{pace[b, 'plain']:.0f} tokens/s" for b in busy]
        collected.append(f"| plain | {' | '.join(plain)} | {most['plain']:,.0f} tokens/s |")
        best = {b: max(pace[b, p] for p in names) for b in busy}
        for policy in names[1:]:
            cells = [
                f"{'**' * (pace[b, policy] == best[b])}{pace[b, policy] / pace[b, 'plain']:.2f}"
                f"{'**' * (pace[b, policy] == best[b])}"
                for b in busy
            ]
            collected.append(f"| {policy} | {' | '.join(cells)} | {most[policy] / most['plain']:.2f} |")
        collected.append("")
    return "\n".join(collected[:-1])


def sizes() -> str:
    """Farms of different size under the same load for each GPU."""
    rows = ["| GPUs | texts/s | plain, a user's tokens/s | eagle, 4 tokens | times |", "|--:|--:|--:|--:|--:|"]
    for count in (1, 10, 100, 1000):
        plain, drafted = results(f"{count}_gpus")
        rows.append(
            f"| {count:,} | {plain['rate']:,.0f} | {plain['pace']:.0f} | {drafted['pace']:.0f} | "
            f"{drafted['pace'] / plain['pace']:.2f} |"
        )
    return "\n".join(rows)


def examples() -> str:
    """Three plans, as the command prints them."""
    collected = []
    for name, tokens, gpus in EXAMPLES:
        number, gpu = plan.gpus_of(gpus)
        made = plan.plan(target(name), EAGLE3, plan.tokens_of(tokens), number, gpu, 5)
        command = f"python -m papers.plan --target recipes/targets/{name}.json --tokens {tokens} --gpus {gpus}"
        collected.append("\n".join(["```", f"$ {command}", *plan.lines(made), "```"]))
    return "\n\n".join(collected)
