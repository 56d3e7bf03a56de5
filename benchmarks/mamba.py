"""Mambas beside Transformers as draft models, trees beside chains, a bandit beside fixed shapes.

    python benchmarks/mamba.py --out benchmarks/results/mamba.json

The drafters are those of `recipes.mamba.drafters`. For each temperature a run of `outrider bench` in runs/bench/NAME-T,
NAME being that of --out; it resumes, and `pooled.py` makes the table. Regret: how much longer a token took with the
bandit than with the best fixed arm, chosen in hindsight for all prompts together, and for each prompt by itself (which
knows more than any policy can).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from measure import RUNS, machine, write
from outrider.bench import metrics, read
from outrider.bench.metrics import Table
from outrider.bench.results import to_json
from outrider.bench.types import PLAIN, Sample
from outrider.cli import main as outrider
from pooled import calm, pooled, samples

MAMBA, LLAMA = "mamba:{}/mamba-1.5m/distil/best", "model:{}/llama-1.5m/distil/best"
CHAIN = "1,1,1,1,1"
PAPER = ("3,3,2,1", "3,2,2,1,1", "2,2,2,1,1,1")
SMALL = (CHAIN, "2,2,1,1")  # fewer nodes: what a pass of this machine has nearly for nothing
BANDITS = {"Mamba 1.5M, bandit of the paper's": PAPER, "Mamba 1.5M, bandit of all": (*PAPER, *SMALL, "none")}

# label -> SPEC@BUDGET[@RULE]; {} is the folder of the drafters
ROWS = {
    **{
        f"{kind} {size}, chain": f"{way}:{{}}/{kind.lower()}-{size.lower()}/distil/best@{CHAIN}"
        for size in ("0.5M", "1.5M")
        for way, kind in (("mamba", "Mamba"), ("model", "Llama"))
    },
    "Mamba 1.5M, pretrained, chain": f"{MAMBA.replace('distil', 'pretrain')}@{CHAIN}",
    "Mamba 1.5M, sft, chain": f"{MAMBA.replace('distil', 'sft')}@{CHAIN}",
    "Llama 1.5M, pretrained, chain": f"{LLAMA.replace('distil', 'pretrain')}@{CHAIN}",
    "Mamba 0.5M, pretrained, chain": f"mamba:{{}}/mamba-0.5m/pretrain/best@{CHAIN}",
    "Mamba of another tokenizer, text": f"mamba:{{}}/other/pretrain/best?vocab=text@{CHAIN}",
    "Mamba of another tokenizer, shared": f"mamba:{{}}/other/pretrain/best?vocab=shared@{CHAIN}",
    "Mamba 1.5M, chain, rejection": f"{MAMBA}@{CHAIN}@rejection",
    "Llama 1.5M, chain, rejection": f"{LLAMA}@{CHAIN}@rejection",
    "Mamba 1.5M, 3,2,2,1,1, rejection": f"{MAMBA}@3,2,2,1,1@rejection",
    "Mamba 1.5M, 16 nodes": f"{MAMBA}@16x6",
    "Llama 1.5M, 16 nodes": f"{LLAMA}@16x6",
    "Mamba 1.5M, adaptive": f"{MAMBA}@auto",
    "Llama 1.5M, adaptive": f"{LLAMA}@auto",
    **{f"Mamba 1.5M, {shape}": f"{MAMBA}@{shape}" for shape in (*PAPER, *SMALL) if shape != CHAIN},
    **{name: f"{MAMBA}@{' '.join(arms)}" for name, arms in BANDITS.items()},
}
COLD = (
    "Mamba 1.5M, pretrained, chain", "Mamba 1.5M, sft, chain", "Llama 1.5M, pretrained, chain", "Mamba 1.5M, adaptive",
    "Llama 1.5M, adaptive",
)  # at T = 0 alone; `outrider bench` itself leaves rejection to T > 0  # fmt: skip


def arm_of(shape: str) -> str:
    return PLAIN if shape == "none" else "Mamba 1.5M, chain" if shape == CHAIN else f"Mamba 1.5M, {shape}"


def regret(mine: dict[str, list[Sample]], keep: Sequence[int], bandit: str, arms: Sequence[str]) -> dict[str, Any]:
    """How much longer a token took than with the best arm, in shares of that arm's time."""
    tables = {name: Table.of(mine[name], keep) for name in (*arms, bandit)}
    rates = {name: table.rate().value for name, table in tables.items()}
    best = max(arms, key=lambda arm: rates[arm])
    each = np.min([tables[arm].map(metrics.seconds)[0] for arm in arms], axis=0)  # they all write the same text
    tokens = Table.of(mine[PLAIN], keep).map(metrics.tokens)[0]
    return {
        "best": best,
        "tokens_per_second": {name: round(rate, 2) for name, rate in rates.items()},
        "regret": round(rates[best] / rates[bandit] - 1, 4),
        "regret_by_prompt": round(tokens.sum() / each.sum() / rates[bandit] - 1, 4),
    }


def extras(run: Path, t: float) -> dict[str, Any]:
    """Milliseconds of drafting for each drafted position of a chain, and what the bandits lost."""
    document: dict[str, Any] = to_json(read(run))
    mine = samples(run, document, t)
    keep = calm(mine)

    def drafting(name: str) -> float:
        usages = Table.of(mine[name], keep).usages()
        return round(metrics.share(usages, lambda u: 1e3 * u.draft_seconds, lambda u: u.drafted).value, 3)

    chains = dict.fromkeys(c["label"] for c in document["cells"] if c["budget"] == CHAIN)
    return {
        "drafting_milliseconds_per_token": {name: drafting(name) for name in chains},
        "bandits": {name: regret(mine, keep, name, [*map(arm_of, arms)]) for name, arms in BANDITS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", type=Path, default=Path("runs/demo/mamba"))
    parser.add_argument("--per-domain", type=int, default=13)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("runs/bench/mamba.json"))
    args = parser.parse_args()
    document: dict[str, Any] = {"temperatures": {}}
    if args.out.exists():  # other temperatures stay
        document = json.loads(args.out.read_text(encoding="utf-8"))
    for t in args.temperature:
        run = RUNS / f"{args.out.stem}-{t:g}"
        drafters = [f"{n}={row.format(args.drafters)}" for n, row in ROWS.items() if t == 0 or n not in COLD]
        options = f"--limit {args.per_domain} --max-new-tokens {args.tokens} --threads {args.threads}"
        options += f" --temperature {t:g} "
        command = ["bench", "--drafter", *drafters, *options.split(), "--out", str(run)]
        print(f"outrider {shlex.join(command)}", file=sys.stderr)
        if code := outrider(command):
            raise SystemExit(code)
        more = extras(run, t)
        document["machine"] = machine()
        document["temperatures"][f"{t:g}"] = pooled(run)["temperatures"][f"{t:g}"] | more
        Console().print_json(data=more)
        write(args.out, document)


if __name__ == "__main__":
    main()
