"""Mambas beside Transformers as draft models, trees beside chains, a bandit beside fixed shapes.

    python benchmarks/mamba.py --out benchmarks/results/mamba.json

The drafters are those of `recipes.mamba.drafters`. Prompts, turns, intervals and the recorded target are those of
`benchmarks/drafters.py`. Regret: how much longer a token took with the bandit than with the best fixed arm, chosen in
hindsight for all prompts together, and for each prompt by itself (which knows more than any policy can).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafters import Method, measure, rate, show, steady, summary
from measure import machine, write
from peers import Sample

MAMBA, LLAMA = "mamba:{}/mamba-1.5m/distil/best", "model:{}/llama-1.5m/distil/best"
CHAIN = "1,1,1,1,1"
PAPER = ("3,3,2,1", "3,2,2,1,1", "2,2,2,1,1,1")
SMALL = (CHAIN, "2,2,1,1")  # fewer nodes: what a pass of this machine has nearly for nothing
COLD, HOT = (0.0,), (1.0,)

METHODS: dict[str, Method] = {
    "none": Method("none", 1, 0),
    **{
        f"{kind} {size}, chain": Method(f"{way}:{{}}/{kind.lower()}-{size.lower()}/distil/best", arms=CHAIN)
        for size in ("0.5M", "1.5M")
        for way, kind in (("mamba", "Mamba"), ("model", "Llama"))
    },
    "Mamba 1.5M, pretrained, chain": Method(MAMBA.replace("distil", "pretrain"), arms=CHAIN, temperatures=COLD),
    "Mamba 1.5M, sft, chain": Method(MAMBA.replace("distil", "sft"), arms=CHAIN, temperatures=COLD),
    "Llama 1.5M, pretrained, chain": Method(LLAMA.replace("distil", "pretrain"), arms=CHAIN, temperatures=COLD),
    "Mamba 0.5M, pretrained, chain": Method("mamba:{}/mamba-0.5m/pretrain/best", arms=CHAIN),
    "Mamba of another tokenizer, text": Method("mamba:{}/other/pretrain/best?vocab=text", arms=CHAIN),
    "Mamba of another tokenizer, shared": Method("mamba:{}/other/pretrain/best?vocab=shared", arms=CHAIN),
    "Mamba 1.5M, chain, rejection": Method(MAMBA, arms=CHAIN, rule="rejection", temperatures=HOT),
    "Llama 1.5M, chain, rejection": Method(LLAMA, arms=CHAIN, rule="rejection", temperatures=HOT),
    "Mamba 1.5M, 3,2,2,1,1, rejection": Method(MAMBA, arms=PAPER[1], rule="rejection", temperatures=HOT),
    "Mamba 1.5M, 16 nodes": Method(MAMBA),
    "Llama 1.5M, 16 nodes": Method(LLAMA),
    "Mamba 1.5M, adaptive": Method(MAMBA, adaptive=True, temperatures=COLD),
    "Llama 1.5M, adaptive": Method(LLAMA, adaptive=True, temperatures=COLD),
    **{f"Mamba 1.5M, {shape}": Method(MAMBA, arms=shape) for shape in (*PAPER, *SMALL) if shape != CHAIN},
    "Mamba 1.5M, bandit of the paper's": Method(MAMBA, arms=" ".join(PAPER)),
    "Mamba 1.5M, bandit of all": Method(MAMBA, arms=" ".join((*PAPER, *SMALL, "none"))),
}
BANDITS = {"Mamba 1.5M, bandit of the paper's": PAPER, "Mamba 1.5M, bandit of all": (*PAPER, *SMALL, "none")}


def arm_of(shape: str) -> str:
    return "none" if shape == "none" else "Mamba 1.5M, chain" if shape == CHAIN else f"Mamba 1.5M, {shape}"


def regret(samples: dict[str, list[Sample]], bandit: str, shapes: Sequence[str]) -> dict[str, Any]:
    """How much longer a token took than with the best arm, in shares of that arm's time."""
    keep, arms = steady(samples), [arm_of(shape) for shape in shapes]
    best = max(arms, key=lambda arm: rate(samples[arm], keep))
    seconds = sum(min(1 / rate(samples[arm], [i]) for arm in arms) * (len(samples["none"][i].tokens) - 1) for i in keep)
    tokens = sum(len(samples["none"][i].tokens) - 1 for i in keep)
    mine = rate(samples[bandit], keep)
    return {
        "best": best,
        "tokens_per_second": {arm: round(rate(samples[arm], keep), 2) for arm in (*arms, bandit)},
        "regret": round(rate(samples[best], keep) / mine - 1, 4),
        "regret_by_prompt": round(tokens / seconds / mine - 1, 4),
    }


def per_token(samples: Sequence[Sample], keep: Sequence[int]) -> float:
    """Milliseconds of drafting for each drafted position of a chain."""
    used = [u for i in keep if (u := samples[i].usage)]
    return round(1e3 * sum(u.draft_seconds for u in used) / max(1, sum(u.drafted for u in used)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", type=Path, default=Path("runs/demo/mamba"))
    parser.add_argument("--per-domain", type=int, default=13)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("runs/bench/mamba.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    document: dict[str, Any] = {"temperatures": {}}
    if args.out.exists():  # other temperatures stay
        document = json.loads(args.out.read_text(encoding="utf-8"))
    document["machine"] = machine()
    for temperature in args.temperature:
        samples, domains = measure(args, temperature, METHODS)
        found, keep = summary(samples, domains), steady(samples)
        found["drafting_milliseconds_per_token"] = {
            name: per_token(mine, keep) for name, mine in samples.items() if METHODS[name].arms == CHAIN
        }
        found["bandits"] = {name: regret(samples, name, shapes) for name, shapes in BANDITS.items()}
        arguments = {"per_domain": args.per_domain, "tokens": args.tokens}
        document["temperatures"][f"{temperature:g}"] = {"arguments": arguments, **found}
        show(temperature, found)
        Console().print_json(data={k: found[k] for k in ("drafting_milliseconds_per_token", "bandits")})
        write(args.out, document)


if __name__ == "__main__":
    main()
