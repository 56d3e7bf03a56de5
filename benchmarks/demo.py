"""Every run of `outrider bench` behind docs/results.md: `python benchmarks/demo.py [NAME ...]` (it resumes).

Each is one command, printed before it runs; its samples and report lie in runs/bench/NAME. What the pages are made of
goes to benchmarks/results: `drafters.json` by `pooled.py`, the others as they are, without what the pages do not show.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from outrider.bench import report
from outrider.cli import main as outrider
from pooled import pooled

ROOT = Path(__file__).resolve().parents[1]
RUNS, RESULTS = ROOT / "runs" / "bench", ROOT / "benchmarks" / "results"
HASS, CHAIN = "HASS=eagle:demo/hass", "HASS chain=eagle:demo/hass?tree=chain"
DRAFTERS = [
    "lookup@16x6", "draft model=model@16x4", "Medusa=medusa:demo@16x4", "EAGLE chain=eagle:demo?tree=chain@6x5",
    "Hydra=hydra:demo@16x4", "EAGLE tree=eagle:demo?tree=static@26x5", "EAGLE-2=eagle:demo@16x6",
    "EAGLE-2, 60 nodes=eagle:demo@60x6", "EAGLE-2 without value=eagle:demo?value=false@16x6",
    "EAGLE-2 without re-ranking=eagle:demo?rerank=false@16x6", "EAGLE-2, rejection=eagle:demo@16x6@rejection",
    f"{HASS}@16x6", "HASS, scale fitted=eagle:demo/hass?scale=auto@16x6", f"{CHAIN}@6x5",
    "HASS, rejection=eagle:demo/hass@16x6@rejection", "EAGLE-3=eagle3:demo@16x6",
    "HASS, adaptive=eagle:demo/hass@adaptive", "HASS chain, adaptive=eagle:demo/hass?tree=chain@adaptive",
    "EAGLE-3, adaptive=eagle3:demo@adaptive",
]  # fmt: skip
SHORT = ["--max-new-tokens", "32"]
NOISE = ["--drafter", "lookup@16x6", f"{HASS}@16x6", "--variant", "compile", "--limit", "4", *SHORT]
COMMANDS: dict[str, list[str]] = {
    "drafters": ["--drafter", *DRAFTERS, "--peer", "transformers", "transformers:demo", "--temperature", "0", "1",
                 "--variant", "compile", "--limit", "11", *SHORT],
    "noise-a": NOISE,
    "batches": ["--drafter", f"{HASS}@16x6", f"{CHAIN}@6x5", "lookup@16x6", "--batch-size", "1", "2", "4", "8",
                "--tasks", "demo/gsm8k", "demo/oasst", "demo/self-dialogue", "--limit", "16", "--memory", "1",
                "--keep-loops", *SHORT],
    "sizes": ["--drafter", HASS, "--budget", "4x3", "8x4", "16x6", "32x6", "60x6", "--variant", "compile",
              "--temperature", "0", "1", "--limit", "4", "--observe", *SHORT],
    "variants": ["--drafter", "lookup@16x6", f"{HASS}@16x6", "--variant", "plain", "compile", "int8", "compile+int8",
                 "--peer", "transformers", "transformers?cache=static", "transformers?lookup=10", "--limit", "2",
                 *SHORT],
    "noise-b": NOISE,
    "temperatures": ["--drafter", f"{HASS}@16x6", f"{CHAIN}@6x5", "--rules", "coupled", "rejection", "typical",
                     "--lossy", "--temperature", "0", "0.3", "0.6", "1", "--variant", "compile", "--limit", "3",
                     *SHORT],
    "typical": ["--drafter", "Medusa=medusa:demo@16x4", "--lossy", "--temperature", "0.7", "--rules", "coupled",
                *(f"typical?epsilon={e}&delta={d}" for e in (0.03, 0.09, 0.3) for d in (0.1, 0.3)),
                "--variant", "compile", "--limit", "3", *SHORT],
}  # fmt: skip
UNSHOWN = (
    "faults",
    "reason",
    "over_stock",
    "prompt_tokens",
    "new_tokens",
    "label",
    "peer",
    "theory",
)


def kept(document: dict[str, Any]) -> dict[str, Any]:
    """A report without what no page shows."""
    cells = [{k: v for k, v in c.items() if k not in UNSHOWN and v not in (None, [], {})} for c in document["cells"]]
    for cell in cells:
        if "positions" in cell:
            cell["positions"] = cell["positions"][:3]
        if "reliability" in cell:
            cell["reliability"] = {k: v for k, v in cell["reliability"].items() if k != "bins"}
    return {**document, "cells": cells}


def write(name: str, document: dict[str, Any]) -> None:
    path = RESULTS / f"{name}.json"
    path.write_text(
        json.dumps(document, separators=(",", ":")).replace('{"task"', '\n{"task"') + "\n", encoding="utf-8"
    )
    print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(COMMANDS)}")
    parser.add_argument("--threads", default="2")
    args = parser.parse_args()
    unknown = [n for n in args.names if n not in COMMANDS]
    if unknown:
        parser.error(f"there is no run {unknown[0]}; choose from {', '.join(COMMANDS)}")
    for name in args.names or COMMANDS:
        command = ["bench", *COMMANDS[name], "--threads", args.threads, "--out", str(RUNS / name)]
        print(f"outrider {shlex.join(command)}", file=sys.stderr)
        if code := outrider(command):
            raise SystemExit(code)
        if name == "drafters":
            write(name, pooled(RUNS / name))
        else:
            write(f"bench_{name.replace('-', '_')}", kept(report.read(RUNS / name)))


if __name__ == "__main__":
    main()
