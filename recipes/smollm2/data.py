"""Questions and the model's own answers to them, part after part: `python -m recipes.smollm2.data --parts 8`.

Each part: the model writes questions (`openings.py`), they are mixed with those of the texts (`questions.py`), and it
answers them, the even parts at T = 0 and the odd ones at T = 0.7. Every stage continues where it was interrupted, so
stop at any time and start again. The answers of part K are `answers-K.jsonl` in the work folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from recipes.smollm2 import questions
from recipes.smollm2.openings import openings

TEMPERATURES = (0.0, 0.7)  # of even and odd parts
SPARE = 1.25  # questions written for each that is wanted: some have no end, some are repetitions
TOKENS = 256  # of an answer, at most


def generate(target: str, data: Path, out: Path, *options: object, batch_size: int = 128) -> None:
    """`outrider data generate`: appends what is missing."""
    command = [sys.executable, "-m", "outrider.cli", "data", "generate", target, "--drafter", "none"]
    command += ["--data", str(data), "--out", str(out), "--batch-size", str(batch_size)]
    if subprocess.run([*command, *map(str, options)], check=False).returncode:
        raise SystemExit(f"{out} was not finished; start again to continue")


def part(number: int, a: argparse.Namespace) -> None:
    wanted = round(SPARE * questions.OWN * (number + 1))
    path = a.work / f"questions-{number}.jsonl"
    if not path.exists():
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in openings(wanted)]
        (a.work / "openings.jsonl").write_text("".join(lines), encoding="utf-8")
        generate(
            a.target, a.work / "openings.jsonl", a.work / "openings-answered.jsonl",
            "--temperature", 0.9, "--max-new-tokens", 128, "--seed", 1, "--weights", "full",
        )  # fmt: skip
        print(path, questions.write(a.train, a.eval, a.work, number), flush=True)
    generate(
        a.target, path, a.work / f"answers-{number}.jsonl",
        "--temperature", TEMPERATURES[number % 2], "--max-new-tokens", TOKENS, "--seed", 1_000_000 * number,
        "--weights", "full",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=1, help="how many parts there shall be")
    parser.add_argument("--target", default="smollm2")
    questions.places(parser)
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    for number in range(a.parts):
        part(number, a)


if __name__ == "__main__":
    main()
