"""Leviathan's table 2 on a small T5 pair: `PYTHONPATH=. python benchmarks/t5.py`, after `python -m recipes.t5.build`.

The larger T5 is the target, the smaller one drafts chains of gamma = 3, 5, 7 tokens at T = 0 and T = 1. For each:
alpha (acceptance per token tested), tau, the measured speed-up over the same loop without drafts, and what Theorem 3.8
promises for this alpha and the measured cost ratio c.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from measure import interleave, machine, spread, write
from outrider import drafters, theory
from outrider.budget import FixedBudget
from outrider.engine import Engine
from outrider.noise import RaceNoise
from outrider.targets import load_target
from peers import Peer, decode

GAMMAS = (3, 5, 7)


def prompts_of(demo: Path, pair: Path, count: int) -> list[list[int]]:
    """Dialogues that neither model was trained on, as encoder ids."""
    from recipes.t5.pairs import DOMAINS, heldout_pairs
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(pair / "larger"))
    each = -(-count // len(DOMAINS))
    return [list(source) for d in DOMAINS for source, _ in heldout_pairs(tokenizer, demo, d, each)][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, default=Path("runs/t5"))
    parser.add_argument(
        "--demo", type=Path, default=Path("runs/demo"), help="the demo recipe's work folder (held-out text)"
    )
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/t5.json"))
    args = parser.parse_args()
    target = load_target(str(args.pair / "larger"), dtype="float32")
    prompts = prompts_of(args.demo, args.pair, args.prompts)
    ends = target.model.generation_config.eos_token_id
    eos = frozenset([ends] if isinstance(ends, int) else ends)
    race, document = RaceNoise(target.vocab), {"machine": machine(), "rows": []}
    for temperature in (0.0, 1.0):
        peers = [_peer("none", Engine(target, drafters.load("none"), FixedBudget(1, 0), race), eos, temperature)]
        for rule in ("rejection", "coupled"):
            for gamma in GAMMAS:
                drafter = drafters.load(f"model:{args.pair / 'smaller'}?tree=chain", target)
                engine = Engine(target, drafter, FixedBudget(gamma + 1, gamma), race, rule)
                peers.append(_peer(f"{rule} {gamma}", engine, eos, temperature))
        series = interleave(peers, prompts, args.tokens, args.repeats, f"T={temperature}")
        everything = range(len(prompts))
        base = series["none"].rate(list(everything))
        for peer in peers[1:]:
            document["rows"].append(
                _row(peer.name, temperature, series[peer.name], base, list(everything), series["none"])
            )
            write(args.out, document)
    show(document["rows"])


def _peer(name: str, engine: Engine, eos: frozenset[int], temperature: float) -> Peer:
    return Peer(name, lambda prompt, limit: decode(engine, prompt, limit, eos, temperature, 1))


def _row(name: str, temperature: float, series: Any, base: list[float], keep: list[int], none: Any) -> dict[str, Any]:
    """alpha and c over all texts; c is a draft step's time over a plain pass of the target."""
    used = [s.usage for run in series.samples for s in run if s.usage and s.usage.rounds]
    plain = [s.usage for run in none.samples for s in run if s.usage and s.usage.rounds]
    gamma = int(name.split()[1])
    alpha = sum(u.accepted for u in used) / max(1, sum(u.tested for u in used))
    pass_seconds = statistics.median(u.decode_seconds / u.rounds for u in plain)
    c = statistics.median(u.draft_seconds / u.rounds for u in used) / gamma / pass_seconds
    return {
        "temperature": temperature,
        "rule": name.split()[0],
        "gamma": gamma,
        "alpha": alpha,
        "tau": series.tau(keep),
        "expected_tau": theory.expected_tokens(alpha, gamma),
        "c": c,
        "speedup": spread([a / b for a, b in zip(series.rate(keep), base, strict=True)]),
        "predicted": theory.speedup(alpha, gamma, c),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Leviathan, table 2, on a small T5 pair")
    for column in ("T", "rule", "gamma", "alpha", "tau", "(1-a^(g+1))/(1-a)", "c", "speed-up", "spread", "Theorem 3.8"):
        table.add_column(column, justify="right")
    for r in rows:
        s = r["speedup"]
        table.add_row(
            f"{r['temperature']:.0f}", r["rule"], str(r["gamma"]), f"{r['alpha']:.3f}", f"{r['tau']:.2f}",
            f"{r['expected_tau']:.2f}", f"{r['c']:.2f}", f"{s['median']:.2f}", f"{s['min']:.2f}-{s['max']:.2f}",
            f"{r['predicted']:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
