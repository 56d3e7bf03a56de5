"""Leviathan's table 2 on a small T5 pair: `PYTHONPATH=. python benchmarks/t5.py`, after `python -m recipes.t5.build`.

The larger T5 is the target, the smaller one drafts chains of gamma = 3, 5, 7 tokens at T = 0 and T = 1. For each:
alpha (acceptance per token tested), tau, the measured speed-up over the same loop without drafts, and what Theorem 3.8
promises for this alpha and the measured cost ratio c.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Shown

from measure import machine, measured, rates, spread, write
from outrider.bench import metrics, theory
from outrider.bench.metrics import Table
from outrider.bench.models import Models
from outrider.bench.types import Method

GAMMAS, RULES = (3, 5, 7), ("rejection", "coupled")


def prompts_of(demo: Path, tokenizer: Any, count: int) -> dict[str, list[int]]:
    """Dialogues that neither model was trained on, as encoder ids."""
    from recipes.t5.pairs import DOMAINS, heldout_pairs

    each = -(-count // len(DOMAINS))
    found = [(f"{d}-{i}", ids) for d in DOMAINS for i, (ids, _) in enumerate(heldout_pairs(tokenizer, demo, d, each))]
    return dict(found[:count])


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
    models = Models(str(args.pair / "larger"), "float32")
    given = prompts_of(args.demo, models.llm().tokenizer, args.prompts)
    spec = f"model:{args.pair / 'smaller'}?tree=chain"
    rows = {(r, g): Method(spec, r, f"{g + 1}x{g}", label=f"{r} {g}") for r in RULES for g in GAMMAS}
    none = Method("none", label="none")
    document: dict[str, Any] = {"machine": machine(), "rows": []}
    for t in (0.0, 1.0):
        found = measured(args.out.stem, models, "t5", given, [none, *rows.values()], t, args.tokens, args.repeats)
        tables = {label: Table.of(mine, range(len(given))) for label, mine in found.items()}
        for (rule, gamma), method in rows.items():
            document["rows"].append(
                {"temperature": t, "rule": rule, "gamma": gamma, **row(tables[method.label], tables["none"], gamma)}
            )
        write(args.out, document)
    show(document["rows"])


def row(mine: Table, plain: Table, gamma: int) -> dict[str, Any]:
    """c is a draft step's time over a plain pass of the target."""
    usages = mine.usages()
    alpha = metrics.alpha(usages).value
    c = metrics.round_ms(usages).draft / gamma / metrics.round_ms(plain.usages()).verify
    return {
        "alpha": alpha,
        "tau": metrics.tau(usages).value,
        "expected_tau": theory.expected_tokens(alpha, gamma),
        "c": c,
        "speedup": spread([a / b for a, b in zip(rates(mine), rates(plain), strict=True)]),
        "predicted": theory.speedup(alpha, gamma, c),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Shown(title="Leviathan, table 2, on a small T5 pair")
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
