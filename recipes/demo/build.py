"""Builds the demo models from the training texts: `python -m recipes.demo.build` from the repository's root.

Stages, in order: split, tokenizer, tokens, target, draft, export, card. Each is a process of its own. The stages
up to draft do nothing when their result is there and continue where they were interrupted; stop at any time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("split", "tokenizer", "tokens", "target", "draft", "export", "card")


def run(stage: str, data: Path, work: Path, package: Path, steps: int | None, threads: int) -> None:
    """Runs one stage in this process."""
    import torch

    from recipes.demo.config import RECIPES

    torch.set_num_threads(threads)
    if stage == "split":
        from recipes.demo.data import write_split

        write_split(data, work)
    elif stage == "tokenizer":
        from recipes.demo.tokenizer import build

        build(work)
    elif stage == "tokens":
        from recipes.demo.data import write_tokens
        from recipes.demo.tokenizer import build

        write_tokens(work, build(work))
    elif stage in RECIPES:
        from recipes.demo.train import train

        recipe = RECIPES[stage]
        train(dataclasses.replace(recipe, steps=steps or recipe.steps), work, say=lambda line: print(line, flush=True))
    elif stage == "export":
        from recipes.demo.export import export

        export(data, work, package)
    elif stage == "card":
        from recipes.demo.card import write_cards

        write_cards(data, work, package)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "train", help="training texts")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "demo", help="checkpoints and logs")
    parser.add_argument("--package", type=Path, default=ROOT / "src" / "outrider" / "demo", help="where to export to")
    parser.add_argument("--only", choices=STAGES, help="run this stage alone")
    parser.add_argument("--steps", type=int, help="with --only target or draft: another number of steps")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    a = parser.parse_args()
    if a.only:
        return run(a.only, a.data, a.work, a.package, a.steps, a.threads)
    for stage in STAGES:
        print(f"== {stage} {time.strftime('%H:%M:%S')}", flush=True)
        command = [sys.executable, "-m", "recipes.demo.build", "--only", stage, "--threads", str(a.threads)]
        command += ["--data", str(a.data), "--work", str(a.work), "--package", str(a.package)]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            raise SystemExit(f"Stage {stage} ended with code {code}; start again to continue.")


if __name__ == "__main__":
    main()
