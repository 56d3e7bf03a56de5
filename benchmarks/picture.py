"""The README's table and picture: `python benchmarks/picture.py` (from benchmarks/results/drafters.json).

Writes docs/results.svg, and the Markdown table between the `<!-- results -->` marks of README.md.
"""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from page import ROOT, read, replaced

# method -> label; transformers' own first
STOCK = {"transformers": "transformers generate", "transformers, assisted": "transformers assisted, same draft model"}
OURS = {
    "none": "none (plain decoding, recorded)",
    "lookup": "lookup",
    "draft model": "model",
    "Medusa": "medusa",
    "Hydra": "hydra",
    "EAGLE chain": "eagle, chain",
    "EAGLE-2": "eagle, dynamic tree",
    "HASS": "eagle/hass, dynamic tree",
    "HASS chain": "eagle/hass, chain",
    "EAGLE-3": "eagle3, dynamic tree",
    "HASS, adaptive": "eagle/hass, adaptive",
}


def rows(methods: dict[str, Any]) -> list[tuple[str, bool, dict[str, Any]]]:
    """(label, ours, figures of the prompts that do not loop)."""
    return [
        (label, name not in STOCK, methods[name]["not_looping"])
        for name, label in {**STOCK, **OURS}.items()
        if name in methods
    ]


def draw(found: list[tuple[str, bool, dict[str, Any]]]) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 0.36 * len(found) + 1.0))
    for i, (_, ours, row) in enumerate(found):
        rate, low, high = row["tokens_per_second"]
        colour = "#2a6f97" if ours else "#b8b8b8"
        axes.barh(i, rate, xerr=[[rate - low], [high - rate]], color=colour, ecolor="#555555", capsize=3)
        axes.text(high + 5, i, f"{rate:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [label for label, _, _ in found])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second while decoding, with intervals of 95 %")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "results.svg", metadata={"Date": None})


def table(found: list[tuple[str, bool, dict[str, Any]]]) -> str:
    base = found[0][2]["tokens_per_second"][0]
    lines = ["| method | tokens/s | 95 % | x transformers | tau |", "|---|--:|--:|--:|--:|"]
    for label, ours, row in found:
        rate, low, high = row["tokens_per_second"]
        tau = f"{row['tau'][0]:.2f}" if ours else ""
        lines.append(f"| {label} | {rate:.0f} | {low:.0f}-{high:.0f} | {rate / base:.2f} | {tau} |")
    return "\n".join(lines)


def main() -> None:
    document = read("drafters")
    greedy, machine = document["temperatures"]["0"], document["machine"]
    found = rows(greedy["methods"])
    draw(found)
    note = (
        f"![Tokens per second by method](docs/results.svg)\n\n{table(found)}\n\n"
        f"The demo target in float32 at temperature 0 on {machine['cores']} cores ({machine['threads']} threads), "
        f"torch {machine['torch']},\ntransformers {machine['transformers']}; {greedy['not_looping']} held-out prompts "
        "of nine domains whose texts do not loop. Ours run with `--compile`."
    )
    replaced(ROOT / "README.md", {"results": note})


if __name__ == "__main__":
    main()
