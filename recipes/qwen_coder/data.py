"""Questions and the model's own answers to them, part after part: `python -m recipes.qwen_coder.data MODEL --parts 8`.

First the model writes questions of its own (`openings.py`); they are mixed with those made of texts
(`questions.py`); then it answers, even parts at T = 0 and odd ones at T = 0.7. Every stage continues where it was
interrupted, so stop at any time and start again. The answers to part K are `answers-K.jsonl` in the work folder; a
larger model answers the same questions with `--answers larger`, into `larger-K.jsonl`.
"""

from __future__ import annotations

import argparse
import json

from recipes.qwen_coder import questions
from recipes.qwen_coder.openings import openings
from recipes.smollm2.data import SPARE, TEMPERATURES, generate
from recipes.smollm2.questions import places

TOKENS = 512  # of an answer, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .gguf file, a folder or a hub id of Qwen2.5-Coder-Instruct")
    parser.add_argument("--parts", type=int, default=8, help="how many parts there shall be")
    parser.add_argument("--answers", default="answers", help="the name of the files of answers")
    parser.add_argument("--batch-size", type=int, default=32, help="answers that are written side by side")
    parser.add_argument("--weights", default="auto", help="as for `outrider generate`")
    places(parser, "qwen-coder")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    if any(not (a.work / f"questions-{part}.jsonl").exists() for part in range(a.parts)):
        asked = a.work / "openings.jsonl"
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in openings(round(SPARE * questions.OWN * a.parts))]
        asked.write_text("".join(lines), encoding="utf-8")
        generate(
            a.model, asked, a.work / "openings-answered.jsonl",
            "--temperature", 0.9, "--max-new-tokens", 128, "--seed", 1, "--weights", a.weights, batch_size=a.batch_size,
        )  # fmt: skip
        print(questions.write(a.train, a.eval, a.work, a.parts), flush=True)
    for part in range(a.parts):
        generate(
            a.model, a.work / f"questions-{part}.jsonl", a.work / f"{a.answers}-{part}.jsonl",
            "--temperature", TEMPERATURES[part % 2], "--max-new-tokens", TOKENS, "--seed", 1_000_000 * part,
            "--weights", a.weights, batch_size=a.batch_size,
        )  # fmt: skip


if __name__ == "__main__":
    main()
