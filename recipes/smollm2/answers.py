"""Questions and answers as one compressed file, and back: `python -m recipes.smollm2.answers --pack` or `--unpack`."""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path

from recipes.smollm2.questions import places

FILE = Path(__file__).with_name("answers.jsonl.xz")
KINDS = ("openings-answered", "questions", "answers")


def pack(work: Path, file: Path = FILE) -> int:
    """Write everything that the model and the texts gave to one file; its size in bytes."""
    files = sorted(f for kind in KINDS for f in work.glob(f"{kind}*.jsonl"))
    with lzma.open(file.with_suffix(".tmp"), "wt", preset=9, encoding="utf-8") as out:
        for path in files:
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if path.stem.startswith("answers"):  # the question stands in its part
                    row = {"id": row["id"], "answer": row["messages"][-1]["content"], "ends": row["ends"]}
                elif "prompt" in row:
                    row.pop("prompt")
                out.write(json.dumps([path.stem, row], ensure_ascii=False) + "\n")
    file.with_suffix(".tmp").replace(file)
    return file.stat().st_size


def unpack(work: Path, file: Path = FILE) -> dict[str, int]:
    """Write the files that `data.py` goes on from; how many lines each has. Longer files that are there stay."""
    rows: dict[str, list[dict]] = {}
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            name, row = json.loads(line)
            rows.setdefault(name, []).append(row)
    for name, found in rows.items():
        if name.startswith("answers"):
            asked = rows[name.replace("answers", "questions")]
            found = [
                {
                    "id": r["id"],
                    "messages": [*asked[r["id"]]["messages"], {"role": "assistant", "content": r["answer"]}],
                    "ends": r["ends"],
                }
                for r in found
            ]
        path = work / f"{name}.jsonl"
        if not path.exists() or len(path.read_text(encoding="utf-8").splitlines()) < len(found):
            work.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in found), encoding="utf-8")
    return {name: len(found) for name, found in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--pack", action="store_true")
    what.add_argument("--unpack", action="store_true")
    places(parser)
    a = parser.parse_args()
    if a.pack:
        print(f"{FILE.name}: {pack(a.work) / 1e6:.2f} MB")
    elif not FILE.is_file():
        parser.error(f"there is no {FILE.name} yet; write answers by python -m recipes.smollm2.data, then --pack")
    else:
        print(unpack(a.work))


if __name__ == "__main__":
    main()
