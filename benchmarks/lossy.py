"""What speed may cost: Medusa's ladder, with quality beside speed.

    python benchmarks/lossy.py --medusa runs/demo/ablations/medusa/best --medusa2 runs/demo/medusa2/best

The ladder: Medusa's heads as a chain, as a Cartesian tree, as the sparse tree tuned on other held-out prompts, as the
dynamic tree; and Medusa-2, whose target is another model. Typical acceptance is `demo.py typical`.
The rows of a table take turns. Quality is the mean log-likelihood, per token, of the texts under the original target
at T = 1, beside that of the target's own samples, and the loss of the decoding target on the held-out prompts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import outrider
from measure import DEMO, RUNS, Given, heldout, machine, measured, write
from outrider.bench.models import Models
from outrider.bench.peers.outrider import load
from outrider.bench.quality import likelihood
from outrider.bench.types import Method, Peer, Sample
from outrider.training import tree_tuning as tuning
from pooled import figures

NODES = 16


def method(label: str, spec: str = "none", rule: str = "coupled") -> Method:
    return Method(spec, rule, f"{NODES}x4", "plain", label=label)


PLAIN = method("plain decoding")


def table(found: dict[str, list[Sample]], given: Given, judge: outrider.LLM) -> list[dict[str, Any]]:
    """tau, speed and quality of every method."""
    plain, ids, rows = found[PLAIN.label], list(given.values()), []
    truth = {s.chunk: s.turns[0].tokens for s in plain}
    for name, mine in found.items():
        speeds, texts = figures(mine, plain, range(len(ids))), {s.chunk: s.turns[0].tokens for s in mine}
        quality = likelihood(judge, [(ids[i], new) for i, (new,) in texts.items()])
        assert quality is not None, "there are texts"
        same = sum(texts[i] == truth[i] for i in texts)
        row = {"name": name, "tau": speeds["tau"], "speedup": speeds["speedup"]}
        rows.append({**row, "log_likelihood": round(quality, 4), "same_text": same})
    return rows


def tuned(base: Models, medusa: str, others: Given, place: Path) -> Path:
    """The sparse tree for these heads, grown on other prompts; one that is there is taken."""
    if not place.exists():
        chain = base.with_drafter("plain", medusa)
        asked = [chain.request(ids, max_new_tokens=48, seed=1)[0] for ids in others.values()]
        ranks = tuning.measure(chain.engine(), asked, 8, 4)
        write(place, tuning.document(tuning.grow(ranks, NODES), ranks, {}))
    return place


def ladder(args: argparse.Namespace, base: Models, given: Given, tree: Path, t: float) -> list[dict[str, Any]]:
    medusa, peers, judge = f"medusa:{args.medusa}", dict[str, Peer](), base.llm()
    rungs = [
        method("heads as a chain", f"{medusa}?tree=chain"),
        method("Cartesian tree 3 x 2 x 1", f"{medusa}?tree=static&shape=3,2,1"),
        method("optimised sparse tree", f"{medusa}?tree={tree}"),
        method("dynamic tree", medusa),
    ]
    targets = {m.label: judge for m in rungs}
    if args.medusa2:
        changed = Models(str(args.medusa2 / "target"))
        second = [
            method("Medusa-2, plain decoding"),
            method("Medusa-2, dynamic tree", f"medusa:{args.medusa2}"),
        ]
        peers = {m.label: load(m, changed) for m in second}
        targets |= {m.label: changed.llm() for m in second}
        rungs += second
    found = measured(args.out.stem, base, "ladder", given, [PLAIN, *rungs], t, args.tokens, peers=peers)
    rows = table(found, given, judge)
    for row in rows[1:]:
        loss = likelihood(targets[row["name"]], [(ids[:1], ids[1:512]) for ids in given.values()])
        row["held_out_loss"] = round(-(loss or 0.0), 4)
    return rows


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
    base = Models()
    given, more = (heldout(base.llm(), n) for n in (args.per_domain, args.per_domain + 5))
    others = {name: ids for name, ids in more.items() if name not in given}
    place = RUNS / args.out.stem / f"tree_{args.per_domain}.json"
    tree = tuned(base, f"medusa:{args.medusa}", others, place)
    document: dict[str, Any] = {
        "machine": machine(),
        "arguments": {"per_domain": args.per_domain, "tokens": args.tokens, "nodes": NODES},
    }
    for t in (0.0, 1.0):
        document[f"ladder, T = {t:g}"] = ladder(args, base, given, tree, t)
    write(args.out, document)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
