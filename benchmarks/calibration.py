"""Do drafters know how often they are right? `python benchmarks/calibration.py` (a table, JSON, and pictures).

Every drafter decodes the held-out prompts whose plain text does not loop, at T = 0, at T = 1 with shared noise (rule
coupled) and at T = 1 without (rejection), with the confidences softmax(r / s) at s = 1, and with s fitted online from
1 over all its prompts in turn. A pair is a drafted node whose parent was accepted: its confidence, and whether it was
accepted. tau counts the target's own token; its intervals are bootstrap intervals of 95 % over prompts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import outrider
from measure import answer, heldout, machine, write
from outrider import drafters
from outrider.bench import metrics
from outrider.bench.methods import labelled
from outrider.bench.metrics import LOOP_SHARE, loops
from outrider.budget import FixedBudget
from outrider.calibration import Bin, Calibrated, Family, Fit, Observed, ece, reliability, rescaled
from outrider.engine import Engine
from outrider.types import Usage
from page import ROOT

DRAFTERS = ("hass=eagle:demo/hass", "eagle=eagle:demo", "model=model")
COLOURS = {"s = 1": "#b8b8b8", "fitted": "#2a6f97"}


@dataclass(frozen=True)
class Setting:
    """One panel of a picture."""

    name: str
    temperature: float
    rule: str = "coupled"


SETTINGS = (Setting("T = 0", 0.0), Setting("T = 1, shared noise", 1.0), Setting("T = 1, rejection", 1.0, "rejection"))


@dataclass
class Way:
    """One drafter, at one s or with a fit, in one setting."""

    engine: Engine
    fit: Fit | None
    pairs: list[tuple[float, bool]] = field(default_factory=list)
    usages: list[list[Usage]] = field(default_factory=list)  # of each prompt

    def note(self, family: Family) -> None:
        self.pairs += family.pairs

    def figures(self) -> dict[str, Any]:
        bins = reliability(self.pairs)
        return {
            "scale": round(self.fit.scale, 4) if self.fit else 1.0,
            "tau": metrics.tau(self.usages).interval,
            "ece": round(ece(bins), 4),
            "pairs": len(self.pairs),
            "bins": [{k: round(v, 4) for k, v in asdict(b).items()} for b in bins],
        }


def way(llm: outrider.LLM, drafter: Any, setting: Setting, args: argparse.Namespace, fitted: bool) -> Way:
    plain = rescaled(drafter, 1.0)
    fit = Fit() if fitted else None
    made = Way(llm.engine(setting.rule, FixedBudget(args.nodes, args.depth)), fit)
    made.engine = replace(made.engine, drafter=Observed(Calibrated(plain, fit) if fit else plain, made.note))
    return made


def calm(llm: outrider.LLM, given: Sequence[list[int]], tokens: int, temperature: float) -> dict[int, list[int]]:
    """The plain texts that do not loop, by prompt."""
    engine = llm.engine("coupled", FixedBudget(1, 0))
    texts = {i: answer(engine, ids, tokens, llm.eos, temperature, i).tokens[0] for i, ids in enumerate(given)}
    return {i: text for i, text in texts.items() if loops(text) <= LOOP_SHARE and len(text) > 2}


def measure(
    llm: outrider.LLM, drafter: Any, setting: Setting, given: Sequence[list[int]], truth: dict[int, list[int]],
    args: argparse.Namespace, label: str,
) -> dict[str, Any]:  # fmt: skip
    """s = 1 and fitted, on every prompt in turn."""
    ways = {name: way(llm, drafter, setting, args, name == "fitted") for name in COLOURS}
    same = 0
    for i, text in track(truth.items(), f"{label}, {setting.name}", console=Console(stderr=True)):
        for w in ways.values():
            made = answer(w.engine, given[i], args.tokens, llm.eos, setting.temperature, i)
            w.usages.append(made.usages)
            same += made.tokens == [text]
    found: dict[str, Any] = {"prompts": len(truth), **{name: w.figures() for name, w in ways.items()}}
    if setting.rule == "coupled":
        found["same_text"] = same / len(ways) / len(truth)
    return found


def draw(label: str, found: dict[str, Any], folder: Path) -> None:
    """Acceptance by confidence above, counts below; one column for each setting."""
    figure, axes = plt.subplots(
        2, len(found), figsize=(3.4 * len(found), 4.6), sharex=True, squeeze=False, height_ratios=(3, 1.4)
    )
    for (name, setting), above, below in zip(found.items(), *axes, strict=True):
        above.plot([0, 1], [0, 1], color="#555555", linewidth=0.8, linestyle=":")
        for at, (kind, colour) in enumerate(COLOURS.items()):
            row = setting[kind]
            bins = [Bin(**b) for b in row["bins"]]
            words = f"{kind if kind == 's = 1' else 's = ' + format(row['scale'], '.2f')}: error {row['ece']:.3f}"
            x = [b.confidence for b in bins]
            above.plot(x, [b.acceptance for b in bins], "o-", color=colour, markersize=3, linewidth=1, label=words)
            middles = [(b.low + b.high) / 2 + (at - 0.5) * 0.022 for b in bins]
            below.bar(middles, [b.count for b in bins], 0.02, color=colour)
            for middle, b in zip(middles, bins, strict=True):
                below.text(middle, b.count * 1.2, str(b.count), rotation=90, fontsize=4, ha="center", va="bottom")
        above.set_title(name, fontsize=10)
        above.legend(fontsize=7, frameon=False, loc="lower right")
        below.set_yscale("log")
        below.set_ylim(0.7, below.get_ylim()[1] * 12)
        below.set_xlabel("confidence, given the parent")
    axes[0][0].set_ylabel("acceptance")
    axes[1][0].set_ylabel("nodes tested")
    for panel in axes.flat:
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"calibration-{label}.svg", metadata={"Date": None})
    plt.close(figure)


def show(found: dict[str, dict[str, Any]]) -> None:
    table = Table()
    for column in ("drafter", "setting", "s", "error at 1", "error fitted", "tau at 1", "95 %", "tau fitted", "95 %"):
        table.add_column(column, justify="left" if column in ("drafter", "setting") else "right")
    for label, settings in found.items():
        for name, row in settings.items():
            one, fit = row["s = 1"], row["fitted"]
            (a, b, c), (d, e, f) = one["tau"], fit["tau"]
            table.add_row(
                label, name, f"{fit['scale']:.2f}", f"{one['ece']:.3f}", f"{fit['ece']:.3f}",
                f"{a:.2f}", f"{b:.2f}-{c:.2f}", f"{d:.2f}", f"{e:.2f}-{f:.2f}",
            )  # fmt: skip
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--drafters", nargs="+", default=DRAFTERS, metavar="[LABEL=]SPEC",
        help=f"default: {' '.join(DRAFTERS)}",
    )  # fmt: skip
    parser.add_argument("--per-domain", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/calibration.json"))
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs", help="folder of the SVG files")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = outrider.load(drafter="none", compile=True)
    given = list(heldout(llm, args.per_domain).values())
    truth = {t: calm(llm, given, args.tokens, t) for t in {s.temperature for s in SETTINGS}}
    sizes = {name: getattr(args, name) for name in ("per_domain", "tokens", "nodes", "depth")}
    document: dict[str, Any] = {"drafters": {}}
    if args.out.exists():  # other drafters stay
        document = json.loads(args.out.read_text(encoding="utf-8"))
    document |= {"machine": machine(), "arguments": sizes, "loop_share": LOOP_SHARE}
    for name, spec, *_ in map(labelled, args.drafters):
        label, drafter = name or re.sub(r"\W+", "-", spec).strip("-"), drafters.load(spec, llm.target, llm.tokenizer)
        llm.target.warm(drafter.taps)
        found = {s.name: measure(llm, drafter, s, given, truth[s.temperature], args, label) for s in SETTINGS}
        document["drafters"][label] = found
        draw(label, found, args.pictures)
        write(args.out, document)
    show(document["drafters"])


if __name__ == "__main__":
    main()
