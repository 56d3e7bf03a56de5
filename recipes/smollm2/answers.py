"""Questions and answers as compressed files, and back: `python -m recipes.smollm2.answers --pack` or `--unpack`."""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path

from recipes.smollm2.questions import places

FOLDER = Path(__file__).with_name("kept")  # a file for each of the work folder's
KINDS = ("openings-answered", "questions", "answers", "long-questions", "long-answers")


def pack(work: Path, folder: Path = FOLDER) -> dict[str, int]:
    """Write everything that the model and the texts gave; bytes by file. What is kept already and is longer stays."""
    folder.mkdir(exist_ok=True)
    sizes = {}
    for path in sorted(f for kind in KINDS for f in work.glob(f"{kind}*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        if "answers" in path.stem:  # the question stands in its part
            rows = [{"id": r["id"], "answer": r["messages"][-1]["content"], "ends": r["ends"]} for r in rows]
        kept = folder / f"{path.name}.xz"
        if not kept.exists() or len(read(kept)) < len(rows):
            rows = [{name: value for name, value in r.items() if name != "prompt"} for r in rows]
            lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
            made = kept.with_suffix(".tmp")
            made.write_bytes(lzma.compress(lines.encode(), preset=9))
            made.replace(kept)
        sizes[kept.name] = kept.stat().st_size
    return sizes


def unpack(work: Path, folder: Path = FOLDER) -> dict[str, int]:
    """Write the files that `data.py` goes on from; how many lines each has. Longer files that are there stay."""
    work.mkdir(parents=True, exist_ok=True)
    counts = {}
    for kept in sorted(folder.glob("*.xz")):
        rows, path = read(kept), work / kept.stem
        if "answers" in path.stem:
            asked = read(folder / kept.name.replace("answers", "questions"))
            rows = [
                {
                    "id": r["id"],
                    "messages": [*asked[r["id"]]["messages"], {"role": "assistant", "content": r["answer"]}],
                    "ends": r["ends"],
                }
                for r in rows
            ]
        if not path.exists() or path.read_text(encoding="utf-8").count("\n") < len(rows):
            path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
        counts[path.name] = len(rows)
    return counts


def read(kept: Path) -> list[dict]:
    return [json.loads(line) for line in lzma.decompress(kept.read_bytes()).decode().split("\n") if line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--pack", action="store_true")
    what.add_argument("--unpack", action="store_true")
    places(parser)
    a = parser.parse_args()
    if a.pack:
        print({name: f"{size / 1e6:.2f} MB" for name, size in pack(a.work).items()})
    elif not FOLDER.is_dir():
        parser.error(f"nothing is kept in {FOLDER.name}/ yet; run python -m recipes.smollm2.data, then --pack")
    else:
        print(unpack(a.work))


if __name__ == "__main__":
    main()
