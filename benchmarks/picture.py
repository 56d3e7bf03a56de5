"""The README's table and picture from a run: `python benchmarks/picture.py runs/bench/engine.json`.

Writes docs/results.svg, and the Markdown table between the `<!-- results -->` marks of README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
# (case, method, label, is it ours?)
BARS = [
    ("model", "transformers", "transformers generate", False),
    ("model", "assisted", "transformers assisted, same draft model", False),
    ("model", "none", "outrider none", True),
    ("model", "model", "outrider model (adaptive tree)", True),
    ("lookup", "stock lookup", "transformers prompt lookup*", False),
    ("lookup", "lookup", "outrider lookup*", True),
    ("lookup", "suffix", "outrider suffix*", True),
]


def rows(document: dict[str, Any]) -> list[tuple[str, bool, dict[str, Any]]]:
    """(label, ours, figures of the prompts that do not loop)."""
    found = []
    for case, method, label, ours in BARS:
        methods = document["cases"].get(case, {}).get("methods", {})
        if method in methods:
            row = methods[method]
            found.append((label, ours, {**row.get("not_looping", row["all"]), "same": row["same_text"]}))
    return found


def draw(document: dict[str, Any], path: Path) -> None:
    found = rows(document)
    figure, axes = plt.subplots(figsize=(7.5, 0.42 * len(found) + 1.1))
    for i, (_, ours, row) in enumerate(found):
        rate = row["tokens_per_second"]
        off = [[rate["median"] - rate["min"]], [rate["max"] - rate["median"]]]
        axes.barh(i, rate["median"], xerr=off, color="#2a6f97" if ours else "#b8b8b8", capsize=3)
        axes.text(rate["max"] + 3, i, f"{rate['median']:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [label for label, _, _ in found])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second while decoding (median, with the lowest and highest repeat)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def table(document: dict[str, Any]) -> str:
    lines = ["| method | tokens/s | spread | x transformers | tau |", "|---|--:|--:|--:|--:|"]
    for case in ("model", "lookup"):
        methods = document["cases"].get(case, {}).get("methods", {})
        base = methods.get("transformers", {}).get("not_looping", {}).get("tokens_per_second", {}).get("median")
        for name, row in methods.items():
            calm = row.get("not_looping", row["all"])
            rate, tau = calm["tokens_per_second"], calm["tau"]
            ratio = f"{rate['median'] / base:.2f}" if base else ""
            cells = [f"{case}: {name}", f"{rate['median']:.0f}", f"{rate['min']:.0f}-{rate['max']:.0f}", ratio]
            lines.append("| " + " | ".join([*cells, "" if tau is None else f"{tau:.2f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    draw(document, ROOT / "docs" / "results.svg")
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split("<!-- results -->", 1)
    _, after = rest.split("<!-- /results -->", 1)
    machine = document["machine"]
    note = (
        f"\n![Tokens per second by method](docs/results.svg)\n\n{table(document)}\n\n"
        f"The demo target in float32 at temperature 0 on {machine['cores']} cores ({machine['threads']} threads), "
        f"torch {machine['torch']},\ntransformers {machine['transformers']}; held-out prompts of every domain, texts "
        "that fall into loops left out.\nStarred bars and `lookup:` rows: articles to be summarised.\n"
    )
    page.write_text(f"{before}<!-- results -->{note}<!-- /results -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
