"""What speed may cost: Medusa's ladder and typical acceptance, with quality beside speed.

    python benchmarks/lossy.py --medusa runs/demo/ablations/medusa/best --medusa2 runs/demo/medusa2/best

The ladder: Medusa's heads as a chain, as a Cartesian tree, as the sparse tree tuned on other held-out prompts, as the
dynamic tree; and Medusa-2, whose target is another model. Then typical acceptance (T = 0.7) over epsilon and delta.
Quality is the mean log-likelihood, per token, of the texts under the original target at T = 1, beside that of the
target's own samples, and the loss of the decoding target on the held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import outrider
from drafters import DEMO, interval, prompts, rate, tau, with_drafter
from measure import machine, write
from outrider import tuning
from outrider.budget import FixedBudget
from outrider.engine import Engine
from peers import Sample, decode

NODES, TYPICAL_T = 16, 0.7
EPSILONS, DELTAS = (0.03, 0.09, 0.3), (0.1, 0.3)  # and delta = sqrt(epsilon), the paper's


@torch.no_grad()
def likelihood(llm: outrider.LLM, texts: Iterable[tuple[Sequence[int], int]]) -> float:
    """Mean log p per token of each text's tokens from `start` on, under the model alone at T = 1."""
    total, count = 0.0, 0
    for ids, start in texts:
        if len(ids) <= start:
            continue
        logits = llm.target.model(torch.tensor([list(ids)])).logits[0, start - 1 : -1].float()
        mine = torch.tensor(list(ids[start:]))
        total += float(logits.log_softmax(-1).gather(1, mine[:, None]).sum())
        count += len(mine)
    return total / count


def samples(engine: Engine, given: Sequence[Sequence[int]], tokens: int, eos: frozenset[int], t: float) -> list[Sample]:
    decode(engine, given[0], 16, frozenset(), t)
    return [decode(engine, ids, tokens, eos, t, seed=i) for i, ids in enumerate(given)]


def row(
    name: str, mine: Sequence[Sample], plain: Sequence[Sample], given: Sequence[Sequence[int]], judge: outrider.LLM
) -> dict[str, Any]:
    keep = [i for i, s in enumerate(mine) if len(s.tokens) > 2 and len(plain[i].tokens) > 2]

    def speed(index: Sequence[int]) -> float:
        return rate(mine, index) / rate(plain, index)

    texts = [([*ids, *s.tokens], len(ids)) for ids, s in zip(given, mine, strict=True)]
    return {
        "name": name, "tau": interval(lambda index: tau(mine, index), keep), "speedup": interval(speed, keep),
        "log_likelihood": round(likelihood(judge, texts), 4),
        "same_text": sum(a.tokens == b.tokens for a, b in zip(mine, plain, strict=True)),
    }  # fmt: skip


def ladder(args: argparse.Namespace, base: outrider.LLM, t: float) -> list[dict[str, Any]]:
    given = [ids for _, ids in prompts(base, args.per_domain)]
    others = [ids for _, ids in prompts(base, args.per_domain + 5) if ids not in given]
    medusa = f"medusa:{args.medusa}"
    tree = Path("runs/bench/medusa_tree.json")
    if not tree.exists():
        chain = with_drafter(base, medusa)
        asked = [chain.request(ids, max_new_tokens=48, seed=1)[0] for ids in others]
        measured = tuning.measure(chain.engine(), asked, 8, 4)
        tree.parent.mkdir(parents=True, exist_ok=True)
        tree.write_text(json.dumps(tuning.document(tuning.grow(measured, NODES), measured, {})), encoding="utf-8")
    rungs = {
        "heads as a chain": (base, f"{medusa}?tree=chain"),
        "Cartesian tree 3 x 2 x 1": (base, f"{medusa}?tree=static&shape=3,2,1"),
        "optimised sparse tree": (base, f"{medusa}?tree={tree}"),
        "dynamic tree": (base, medusa),
    }
    if args.medusa2:
        changed = outrider.load(str(args.medusa2 / "target"), "none", compile=True)
        rungs["Medusa-2, plain decoding"] = (changed, "none")
        rungs["Medusa-2, dynamic tree"] = (changed, f"medusa:{args.medusa2}")
    plain = samples(base.engine(), given, args.tokens, base.eos, t)
    found = [row("plain decoding", plain, plain, given, base)]
    for name, (llm, spec) in track(rungs.items(), f"ladder, T = {t:g}", console=Console(stderr=True)):
        mine = with_drafter(llm, spec)
        made = samples(mine.engine("coupled", FixedBudget(NODES, 4)), given, args.tokens, base.eos, t)
        found.append(row(name, made, plain, given, base))
        found[-1]["held_out_loss"] = round(-likelihood(llm, [(ids[:512], 1) for ids in given]), 4)
    return found


def typical(args: argparse.Namespace, base: outrider.LLM) -> list[dict[str, Any]]:
    given = [ids for _, ids in prompts(base, args.per_domain)]
    plain = samples(base.engine(), given, args.tokens, base.eos, TYPICAL_T)
    found = [row("plain decoding", plain, plain, given, base)]
    greedy = samples(base.engine(), given, args.tokens, base.eos, 0.0)
    found.append(row("plain decoding, T = 0", greedy, plain, given, base))
    mine = with_drafter(base, f"medusa:{args.medusa}")
    law = (("coupled", 0.0, 0.0), ("rejection", 0.0, 0.0))
    sweep = [("typical", e, d) for e in EPSILONS for d in sorted({*DELTAS, math.sqrt(e)})]
    for rule, epsilon, delta in track([*law, *sweep], "typical acceptance", console=Console(stderr=True)):
        engine = mine.engine(rule, FixedBudget(NODES, 4))  # type: ignore[arg-type]
        name = rule
        if rule == "typical":
            engine = replace(engine, epsilon=epsilon, delta=delta)
            name = f"typical, epsilon {epsilon:g}, delta {delta:.2g}"
        found.append(row(name, samples(engine, given, args.tokens, base.eos, TYPICAL_T), plain, given, base))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--medusa", type=Path, default=DEMO / "medusa", help="heads of the demo target")
    parser.add_argument("--medusa2", type=Path, help="what `recipes.demo.drafters medusa2` made of the target")
    parser.add_argument("--per-domain", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("runs/bench/lossy.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = outrider.load(drafter="none", compile=True)
    document: dict[str, Any] = {
        "machine": machine(),
        "arguments": {"per_domain": args.per_domain, "tokens": args.tokens, "nodes": NODES},
    }
    for t in (0.0, 1.0):
        document[f"ladder, T = {t:g}"] = ladder(args, base, t)
    document["typical"] = typical(args, base)
    write(args.out, document)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
