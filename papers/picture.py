"""The README's picture and its table of speeds: `python -m papers.picture` (from papers/results).

Writes docs/results.svg, and what stands between the `<!-- results -->` marks of README.md.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from outrider.bench.document import Estimate

from .document import Document
from .page import replaced
from .rows import read
from .studies import ROOT
from .tables import engines

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
    results = {m.method: m.tokens_per_second for m in report.pooled if m.temperature == 0}
    return [
        (label, name not in STOCK, rate) for name, label in {**STOCK, **OURS}.items() if (rate := results.get(name))
    ]


def rate(row: Row) -> float:
    return row[2].value


def draw(results: list[Row]) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 0.36 * len(results) + 1.0))
    for i, (_, ours, row) in enumerate(results):
        value, (low, high) = row.value, row.ends
        colour = "#2a6f97" if ours else "#b8b8b8"
        axes.barh(i, value, xerr=[[value - low], [high - value]], color=colour, ecolor="#555555", capsize=3)
        axes.text(high + 5, i, f"{value:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(results)), [label for label, _, _ in results])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second while decoding, with intervals of 95 %")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "results.svg", metadata={"Date": None})


@dataclass(frozen=True)
class Line:
    """A line of the README's table: a study at a temperature, and its methods without drafts and with them. `means`: of
    the tasks, as docs/results.md shows this study; else all prompts together."""

    study: str
    temperature: float
    plain: str
    drafted: str
    setting: str  # machine, weights and drafter, which the results do not name
    means: bool = True


INTEL, AMD = "Intel, AVX-512 and AMX", "AMD, AVX2 without AVX-512"
DEFAULT = "suffix and EAGLE-3, adaptive"
LINES = (
    Line("smollm2", 0.0, "none", DEFAULT, f"{INTEL}; default drafter", means=False),
    Line("smollm2", 1.0, "none", DEFAULT, f"{INTEL}; default drafter", means=False),
    Line("smollm2_many", 0.0, "none", DEFAULT, f"{INTEL}; default drafter"),
    Line("smollm2_many", 1.0, "none", DEFAULT, f"{INTEL}; default drafter"),
    Line("smollm2_variants", 0.0, "none", "HASS", f"{AMD}; HASS"),
    Line("smollm2_variants", 0.0, "none, native", "HASS, native", f"{AMD}; HASS, native weights"),
)


def cells(line: Line) -> tuple[str, ...]:
    """A line of the table, from the results alone."""
    report: Document = read(line.study)
    at = line.temperature, 1
    shown = {m.method: m for m in (report.macro if line.means else report.pooled) if (m.temperature, m.batch) == at}
    prompts = next(m.prompts for m in report.pooled if (m.method, m.temperature, m.batch) == (line.plain, *at))
    rates = [value(shown[name].tokens_per_second) if name in shown else None for name in ("transformers", line.plain)]
    rates.append(value(shown[line.drafted].tokens_per_second))
    ratio = value(shown[line.drafted].speedup) / value(shown[line.plain].speedup)
    return (
        line.setting, f"{line.temperature:g}", f"{prompts}, {report.run.arguments['tokens']}",
        *("" if rate is None else f"{rate:.0f}" for rate in rates), f"{ratio:.2f}",
        f"`{line.study}`, {report.run.started[:10]}",
    )  # fmt: skip


def value(figure: Estimate | None) -> float:
    assert figure is not None
    return figure.value


def coder() -> str:
    """The coder beside llama.cpp, with how it was measured."""
    document: dict[str, Any] = read("engines/coder")
    run = document["run"]
    about = f"""
Tokens per second of Qwen2.5-Coder-1.5B-Instruct from its `Q4_K_M` file, one text at a time at T = 0, with the time of
its prompts; chats are answered turn by turn, and what was read and written before is not read again. Ours: plain, and
with drafts by suffix decoding and [its trained drafter](drafters/qwen2.5-coder-1.5b/README.md). llama.cpp's own server,
the same file: plain, and with its n-grams (lookup).
{run["limit"]} prompts of each task, at most {run["tokens"]} tokens; two cores of an {run["machine"]["processor"]},
{run["started"][:10]}, by `benchmarks/peers.py`.
"""
    counts = re.findall(r"(.*), T = .*: (\d+ of \d+) texts", "\n".join(document["same"]))
    same = f"Texts as without drafts: {'; '.join(f'{name} {count}' for name, count in counts)}."
    (own, other), sampled = trained("engines/coder_05b", 0.0), trained("engines/coder_05b_sampled", 0.7)
    smaller = f"""
With [its trained drafter](drafters/qwen2.5-coder-0.5b/README.md) the 0.5B writes {other} times as many tokens a second
as llama.cpp's plain decoding in the mean of these tasks, and {own} times its own plain decoding's; at T = 0.7,
before its last training, {sampled[1]} and {sampled[0]} times
([more](docs/results.md#qwen25-coder-05b-with-a-trained-drafter)).
"""
    return "\n".join([about.lstrip(), engines(0.0)(document), "", same, smaller.rstrip()])


def trained(name: str, temperature: float) -> tuple[str, str]:
    """Our drafts' mean over tasks by our plain decoding and by llama.cpp's, as `benchmarks/peers.py` stored it."""
    (rows,) = (one["rows"] for one in read(name)["tables"] if (one["temperature"], one["batch"]) == (temperature, 1))
    (drafts,) = (row for row in rows if row[0] == "ours, drafts")
    return drafts[-2], drafts[-1]


def note() -> str:
    """What stands between the marks of the README."""
    heads = (
        "two cores of",
        "T",
        "prompts, tokens",
        "transformers",
        "no drafts",
        "drafts",
        "ratio",
        "STUDY, date (UTC)",
    )
    torch, transformers = (read("smollm2").run.versions[name] for name in ("torch", "transformers"))
    words = f"""
Tokens per second of decoding SmolLM2-135M, one text at a time: transformers' `generate`, Outrider without drafts and
with them, and the ratio of the last two, as `python -m papers.studies STUDY` measured it. Prompts of six tasks that
the papers used, without those whose plain text loops. Full weights where a row names no others; torch {torch},
transformers {transformers}.
"""
    table = [f"| {' | '.join(row)} |" for row in (heads, *map(cells, LINES))]
    table.insert(1, "|---|--:|--:|--:|--:|--:|--:|---|")
    return "\n".join([coder(), "", "![Tokens per second by method](docs/results.svg)", words, *table])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw(rows(read("smollm2")))
    replaced(ROOT / "README.md", {"results": note()})


if __name__ == "__main__":
    main()
