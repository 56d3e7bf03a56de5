"""The README's picture and its sentence: `python benchmarks/picture.py` (from benchmarks/results/smollm2.json).

Writes docs/results.svg, and what stands between the `<!-- results -->` marks of README.md.
"""

from __future__ import annotations

import argparse

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from outrider.bench import Document
from outrider.bench.document import Estimate
from page import read, replaced
from studies import ROOT

# method -> label; transformers' own first
STOCK = {"transformers": "transformers generate"}
OURS = {
    "none": "none (plain decoding)",
    "lookup": "lookup, adaptive",
    "suffix": "suffix, adaptive",
    "Medusa, adaptive": "Medusa, adaptive",
    "HASS chain of 1": "HASS, chain of 1",
    "HASS chain of 2": "HASS, chain of 2",
    "HASS, 4 nodes": "HASS, 4 nodes",
    "HASS, 16 nodes": "HASS, 16 nodes",
    "HASS, adaptive": "HASS, adaptive",
    "EAGLE-3, 4 nodes": "EAGLE-3, 4 nodes",
    "EAGLE-3, 16 nodes": "EAGLE-3, 16 nodes",
    "EAGLE-3, adaptive": "EAGLE-3, adaptive",
    "suffix and EAGLE-3, adaptive": "suffix and EAGLE-3, adaptive",
}


Row = tuple[str, bool, Estimate]  # label, ours, tokens per second


def rows(report: Document) -> list[Row]:
    found = {m.method: m.tokens_per_second for m in report.pooled if m.temperature == 0}
    return [(label, name not in STOCK, rate) for name, label in {**STOCK, **OURS}.items() if (rate := found.get(name))]


def rate(row: Row) -> float:
    return row[2].value


def draw(found: list[Row]) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 0.36 * len(found) + 1.0))
    for i, (_, ours, row) in enumerate(found):
        value, (low, high) = row.value, row.ends
        colour = "#2a6f97" if ours else "#b8b8b8"
        axes.barh(i, value, xerr=[[value - low], [high - value]], color=colour, ecolor="#555555", capsize=3)
        axes.text(high + 5, i, f"{value:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [label for label, _, _ in found])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second while decoding, with intervals of 95 %")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "results.svg", metadata={"Date": None})


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    report: Document = read("smollm2")
    machine, versions = report.run.machine, report.run.versions
    found = rows(report)
    draw(found)
    plain = next(row for row in found if row[0] == OURS["none"])
    prompts = next(m.prompts for m in report.pooled if (m.method, m.temperature) == ("none", 0))
    best, base = max(found, key=rate), found[0]
    note = (
        f"![Tokens per second by method](docs/results.svg)\n\n"
        f"`{best[0]}` decodes {rate(best):.0f} tokens/s, {rate(best) / rate(base):.2f} times {base[0]} and "
        f"{rate(best) / rate(plain):.2f} times our own plain decoding:\n"
        f"SmolLM2-135M at temperature 0 on {machine['cores']} cores, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {prompts} prompts\nof six tasks that the papers measured."
    )
    replaced(ROOT / "README.md", {"results": note})


if __name__ == "__main__":
    main()
