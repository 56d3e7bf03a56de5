"""A recipe's questions and answers as compressed files: `python -m recipes.answers RECIPE --pack`; back: `--unpack`."""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECIPES = ("qwen_coder", "smollm2")
ASKED = {
    "openings-answered": "",
    "questions": "",
    "answers": "questions",
    "larger": "questions",
    "long-questions": "",
    "long-answers": "long-questions",
}  # kinds of files, and the kind that each one answers


def kind(path: Path) -> str:
    """The kind of a file, `answers` of `answers-3.jsonl.xz`."""
    return path.name.partition(".")[0].rstrip("0123456789").rstrip("-")


def pack(work: Path, folder: Path) -> dict[str, int]:
    """Write everything that the model and the texts gave; bytes by file. What is kept already and is longer stays."""
    folder.mkdir(exist_ok=True)
    sizes = {}
    for path in sorted(f for f in work.glob("*.jsonl") if kind(f) in ASKED):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        if any("token_ids" in r and "messages" not in r for r in rows):
            raise SystemExit(f"{path} holds token ids without their text; only texts are packed")
        if ASKED[kind(path)]:  # the question stands in its part
            rows = [_with(r, "messages", "answer", lambda turns: turns[-1]["content"]) for r in rows]
        kept = folder / f"{path.name}.xz"
        if not kept.exists() or len(read(kept)) < len(rows):
            rows = [{name: value for name, value in r.items() if name != "prompt"} for r in rows]
            lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
            made = kept.with_suffix(".tmp")
            made.write_bytes(lzma.compress(lines.encode(), preset=9))
            made.replace(kept)
        sizes[kept.name] = kept.stat().st_size
    return sizes


def unpack(work: Path, folder: Path) -> dict[str, int]:
    """Write the files that `data.py` goes on from; how many lines each has. Longer files that are there stay."""
    work.mkdir(parents=True, exist_ok=True)
    counts = {}
    for kept in sorted(folder.glob("*.xz")):
        rows, path = read(kept), work / kept.stem
        if ASKED[kind(kept)]:
            asked = read(folder / kept.name.replace(kind(kept), ASKED[kind(kept)]))
            before = (asked[r["id"]]["messages"] for r in rows)
            rows = [
                _with(r, "answer", "messages", lambda text, b=turns: [*b, {"role": "assistant", "content": text}])
                for r, turns in zip(rows, before, strict=True)
            ]
        if not path.exists() or path.read_text(encoding="utf-8").count("\n") < len(rows):
            path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
        counts[path.name] = len(rows)
    return counts


def _with(row: dict, name: str, other: str, made: Callable[[Any], Any]) -> dict:
    """A row with one value made into another, under another name in its place."""
    return {(other if key == name else key): made(value) if key == name else value for key, value in row.items()}


def read(kept: Path) -> list[dict]:
    return [json.loads(line) for line in lzma.decompress(kept.read_bytes()).decode().split("\n") if line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--pack", action="store_true", help="from the work folder into the recipe's `kept`")
    what.add_argument("--unpack", action="store_true", help="from the recipe's `kept` into the work folder")
    parser.add_argument("--work", type=Path, help="the work folder (default: the recipe's, in runs/)")
    a = parser.parse_args()
    kept = HERE / a.recipe / "kept"  # a file for each of the work folder's
    work = a.work or HERE.parent / "runs" / a.recipe.replace("_", "-")
    if a.pack:
        print({name: f"{size / 1e6:.2f} MB" for name, size in pack(work, kept).items()})
    elif not kept.is_dir():
        made = f"python -m recipes.{a.recipe}.data"
        parser.error(f"nothing is kept in {kept.relative_to(HERE)} yet; run {made}, then --pack")
    else:
        print(unpack(work, kept))


if __name__ == "__main__":
    main()
