"""Every run of `outrider bench` behind docs/results.md: `python benchmarks/demo.py [NAME ...]` (it resumes).

Samples and report of a run lie in runs/bench/NAME. What the pages are made of goes to benchmarks/results:
`drafters.json` by `pooled.py`, the others as they are, without what the pages do not show.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.bench import Config, Document, run
from outrider.bench.results import to_json
from pooled import pooled

ROOT = Path(__file__).resolve().parents[1]
RUNS, RESULTS = ROOT / "runs" / "bench", ROOT / "benchmarks" / "results"
HASS, CHAIN = "HASS=eagle:demo/hass", "HASS chain=eagle:demo/hass?tree=chain"
DRAFTERS = (
    "lookup@16x6", "draft model=model@16x4", "Medusa=medusa:demo@16x4", "EAGLE chain=eagle:demo?tree=chain@6x5",
    "Hydra=hydra:demo@16x4", "EAGLE tree=eagle:demo?tree=static@26x5", "EAGLE-2=eagle:demo@16x6",
    "EAGLE-2, 60 nodes=eagle:demo@60x6", "EAGLE-2 without value=eagle:demo?value=false@16x6",
    "EAGLE-2 without re-ranking=eagle:demo?rerank=false@16x6", "EAGLE-2, rejection=eagle:demo@16x6@rejection",
    f"{HASS}@16x6", "HASS, scale fitted=eagle:demo/hass?scale=auto@16x6", f"{CHAIN}@6x5",
    "HASS, rejection=eagle:demo/hass@16x6@rejection", "EAGLE-3=eagle3:demo@16x6",
    "HASS, adaptive=eagle:demo/hass@auto", "HASS chain, adaptive=eagle:demo/hass?tree=chain@auto",
    "EAGLE-3, adaptive=eagle3:demo@auto",
)  # fmt: skip
TYPICAL = tuple(f"typical?epsilon={e}&delta={d}" for e in (0.03, 0.09, 0.3) for d in (0.1, 0.3))
BASE = Config("demo", tokens=32)
RUN: dict[str, Config] = {
    "drafters": replace(BASE, drafters=DRAFTERS, peers=("transformers", "transformers:demo"),
                        temperatures=(0.0, 1.0), limit=11),
    "batches": replace(BASE, drafters=(f"{HASS}@16x6", f"{CHAIN}@6x5", "lookup@16x6"), batch_sizes=(1, 2, 4, 8),
                       tasks=("demo/gsm8k", "demo/oasst", "demo/self-dialogue"), limit=16, memory=1.0,
                       keep_loops=True, variants=("eager",)),
    "sizes": replace(BASE, drafters=(HASS,), budgets=("4x3", "8x4", "16x6", "32x6", "60x6"), temperatures=(0.0, 1.0),
                     limit=4, observe=True),
    "variants": replace(BASE, drafters=("lookup@16x6", f"{HASS}@16x6"), limit=2,
                        variants=("eager", "plain", "eager+int8", "int8"),
                        peers=("transformers", "transformers?cache=static", "transformers?lookup=10")),
    "temperatures": replace(BASE, drafters=(f"{HASS}@16x6", f"{CHAIN}@6x5"), rules=("coupled", "rejection", "typical"),
                            lossy=True, temperatures=(0.0, 0.3, 0.6, 1.0), limit=3),
    "calibration": replace(BASE, drafters=tuple(f"{label}={spec}" for label, spec in (
                               ("hass", "eagle:demo/hass"), ("hass fitted", "eagle:demo/hass?scale=auto"),
                               ("eagle", "eagle:demo"), ("eagle fitted", "eagle:demo?scale=auto"),
                               ("model", "model"), ("model fitted", "model?scale=auto"))),
                           budgets=("16x6",), rules=("coupled", "rejection"), temperatures=(0.0, 1.0), limit=13,
                           observe=True, peers=()),
    "typical": replace(BASE, drafters=("Medusa=medusa:demo@16x4",), lossy=True, temperatures=(0.7,),
                       rules=("coupled", *TYPICAL), limit=3),
}  # fmt: skip
UNSHOWN = ("faults", "reason", "over_stock", "prompt_tokens", "new_tokens", "label", "peer", "theory")


def kept(document: Document, bins: bool = False) -> dict[str, Any]:
    """A report without what no page shows; with the `bins` of reliability diagrams on request."""
    found: dict[str, Any] = to_json(document)
    cells = [{k: v for k, v in c.items() if k not in UNSHOWN} for c in found["cells"]]
    found["cells"] = [{k: v for k, v in c.items() if v not in (None, [], {})} for c in cells]
    for cell in found["cells"]:
        if "positions" in cell:
            cell["positions"] = cell["positions"][:3]
        if "reliability" in cell and not bins:
            cell["reliability"].pop("bins")
    return found


def write(name: str, document: dict[str, Any]) -> None:
    path = RESULTS / f"{name}.json"
    text = json.dumps(document, separators=(",", ":")).replace('{"task"', '\n{"task"')
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(RUN)}")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    unknown = [n for n in args.names if n not in RUN]
    if unknown:
        parser.error(f"there is no run {unknown[0]}; choose from {', '.join(RUN)}")
    for name in args.names or RUN:
        found = run(replace(RUN[name], threads=args.threads, out=RUNS / name))
        if name == "drafters":
            write(name, pooled(RUNS / name))
        else:
            write(f"bench_{name}", kept(found, name == "calibration"))


if __name__ == "__main__":
    main()
