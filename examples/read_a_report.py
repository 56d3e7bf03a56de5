"""Read the figures of a run of `outrider bench`: which method was fastest on each task, and how sure that is.

python examples/read_a_report.py RUN_FOLDER
"""

import json
import sys
from pathlib import Path

results = json.loads((Path(sys.argv[1]) / "results.json").read_text(encoding="utf-8"))
for name in results["tasks"]:
    cells = [c for c in results["cells"] if c["task"] == name and c["state"] == "done" and c["speedup"]]
    if not cells:
        print(f"{name}: no figures")
        continue
    best = max(cells, key=lambda c: c["speedup"][0])
    value, low, high = best["speedup"]  # a figure and the ends of its 95 % interval, null where there is one prompt
    sure = "one prompt, no interval" if low is None else f"{low:.2f} to {high:.2f}"
    same = f"{best['same_text']} of {best['compared']} texts equal to plain decoding's"
    print(f"{name}: {best['method']} decodes {value:.2f} times as fast as plain ({sure}); {same}")
