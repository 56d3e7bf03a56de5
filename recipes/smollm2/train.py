"""Trains a drafter on all answers that are there: `python -m recipes.smollm2.train eagle`; the same command goes on.

The budget is the same for every method and stated beforehand: 8 million tokens, or `--tokens`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from outrider.targets.load import multiplies_halves
from recipes.smollm2.questions import places

BUDGET = 8_000_000  # tokens read in training, epochs counted
ROWS, LENGTH = 4, 512
VOCAB = "draft_vocab=8192"
# method: peak learning rate, options. Networks are small beside the papers', so they learn faster.
METHODS: dict[str, tuple[float, list[str]]] = {
    "medusa": (1e-3, ["share_head=true", VOCAB]),
    "hydra": (1e-3, ["draft_vocab=4096"]),
    "eagle": (2e-4, [VOCAB]),  # which begin as a linear map; more would undo it
    "hass": (2e-4, [VOCAB]),
    "eagle3": (1e-3, [VOCAB]),
    "block": (1e-3, [VOCAB]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=sorted(METHODS))
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--tokens", type=int, default=BUDGET)
    places(parser)
    a = parser.parse_args()
    answers = sorted(a.work.glob("answers-*.jsonl"))
    if not answers:
        raise SystemExit(f"there are no answers in {a.work}; run recipes.smollm2.data or recipes.smollm2.answers first")
    rate, options = METHODS[a.method]
    command = [sys.executable, "-m", "outrider.cli", "train", a.method, a.target]
    command += ["--bf16"] if multiplies_halves() else []
    command += ["--rows", str(ROWS), "--length", str(LENGTH), "--steps", str(a.tokens // (ROWS * LENGTH))]
    command += ["--lr", str(rate), "--cache", str(a.work / "features")]
    command += ["--out", str(a.work / a.method)]
    command += [part for file in answers for part in ("--data", str(file))]
    command += [part for option in options for part in ("--option", option)]
    raise SystemExit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
