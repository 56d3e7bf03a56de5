"""The questions that SmolLM2 answers for its drafters: `python -m recipes.smollm2.questions --part 0`.

They are taken from openly licensed texts (what people asked in dialogues, school exercises, functions to explain or
complete, passages to summarise, shell commands) and from what the model itself asked (`openings.py`). Nothing of an
evaluation set is among them: a question that shares a run of eight words with an evaluation prompt is left out, and so
is one that is nearly the same as an earlier one.

A part is a slice of every kind's list in a mixed order, so that the beginning of a file is a fair sample of the whole.
Parts do not overlap: another part, with its own answers, makes more data whenever it is wanted.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from recipes.demo import data as sources
from recipes.smollm2.openings import TURN, openings

ROOT = Path(__file__).resolve().parents[2]
RUN = 8  # words in a row that no question shares with an evaluation prompt
SHINGLE, ALIKE = 4, 0.6  # a question is a repetition if this share of its 4-word runs has been seen


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(text: str, size: int) -> set[tuple[str, ...]]:
    """All runs of `size` words; the whole text where it is shorter."""
    w = words(text)
    return {tuple(w[i : i + size]) for i in range(max(1, len(w) - size + 1))}


def evaluation(folder: Path) -> set[tuple[str, ...]]:
    """Runs of words of every turn of every evaluation prompt. Raises SystemExit for a folder without any."""
    result: set[tuple[str, ...]] = set()
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise SystemExit(f"there are no evaluation prompts in {folder} to keep clear of; name their folder with --eval")
    for path in paths:
        for line in path.read_text(encoding="utf-8").split("\n"):
            for turn in json.loads(line)["turns"] if line else ():
                result |= runs(turn, RUN)
    return result


def unlike(questions: Iterator[str], seen: set[tuple[str, ...]] | None = None) -> Iterator[str]:
    """Those that are not nearly the same as an earlier one."""
    seen = set() if seen is None else seen
    for question in questions:
        mine = runs(question, SHINGLE)
        if len(mine & seen) <= ALIKE * len(mine) and not (len(mine) == 1 and mine <= seen):
            seen |= mine
            yield question


def shuffled(items: list, seed: int) -> list:
    random.Random(seed).shuffle(items)
    return items


def texts(domain: str, folder: Path, seed: int) -> list[sources.Document]:
    """A source's training documents (the demo's held-out ones stay held out), in a mixed order."""
    return shuffled(sources.read_domain(domain, folder)[0], seed)


def asked(domain: str, folder: Path) -> Iterator[str]:
    """First questions of dialogues."""
    for document in texts(domain, folder, 1):
        yield document.messages[0][1]


EXPLAIN = (
    "Explain what this function does:\n\n```python\n{code}\n```",
    "Add a docstring to this Python function.\n\n```python\n{bare}\n```",
    "What does the following code return, and how does it work?\n\n{bare}",
    "Write unit tests for this function:\n\n```python\n{code}\n```",
    "Review this code and suggest improvements:\n\n{code}",
    "Implement the body of this function.\n\n{head}",
    "Finish this Python function:\n\n```python\n{head}\n```",
    "Here is the beginning of a function. Please write the rest of it.\n\n{head}",
    "Write a Python function named `{name}`. {summary}",
    "Rewrite this function so that it is easier to read:\n\n```python\n{code}\n```",
)
FUNCTION = re.compile(r"^def (\w+)\(.*?(?=^\S|\Z)", re.M | re.S)
DOC = re.compile(r'^(def .*?:\n\s+)(r?"""(.*?)""")\n(.*)', re.S)


def functions(folder: Path) -> Iterator[str]:
    """Functions of the standard library and of The Algorithms, to explain, document, complete or test."""
    draw = random.Random(2)
    documents = shuffled(texts("stdlib", folder, 2) + texts("algorithms", folder, 2), 2)
    for document in documents:
        for match in FUNCTION.finditer(document.text):
            code = match.group().rstrip()
            parts = DOC.match(code + "\n")
            form = draw.choice(EXPLAIN)
            if not 80 < len(code) < 1500 or (("{head}" in form or "{summary}" in form) and not parts):
                continue
            head = parts.group(1) + parts.group(2) if parts else ""
            bare = parts.group(1) + parts.group(4).strip("\n").lstrip() if parts else code
            summary = " ".join(parts.group(3).split(">>>")[0].split()) if parts else ""
            if "{summary}" in form and len(words(summary)) < 5:
                continue
            yield form.format(code=code, bare=bare, head=head, name=match.group(1), summary=summary)


PASSAGE = (
    "Summarize the following passage:\n\n{text}",
    "Summarise this text in two or three sentences.\n\n{text}",
    "{text}\n\nWrite a short summary of the passage above.",
    "Give the main points of this passage as a list:\n\n{text}",
    "Read the passage and answer the question.\n\n{text}\n\nQuestion: What happens here, and who takes part?",
    "Write three questions about this text, with their answers.\n\n{text}",
    "{text}\n\nWhat is the mood of this passage? Explain your answer.",
    "Rewrite this passage in simple modern English:\n\n{text}",
    "Continue this story:\n\n{text}",
    "Who are the people in this passage, and what do they want?\n\n{text}",
    "Passage: {text}\n\nUsing only the passage, say where the scene takes place.",
    "Write a newspaper article about the events of this passage.\n\n{text}",
)


def passages(folder: Path) -> Iterator[str]:
    """Passages of 60 to 450 words from books: to summarise, to question, to continue."""
    draw = random.Random(3)
    for document in texts("books", folder, 3):
        wanted, held = draw.choice((60, 120, 200, 300, 450)), []
        for paragraph in document.text.strip().split("\n\n"):
            held.append(" ".join(paragraph.split()))
            if sum(len(words(p)) for p in held) >= wanted:
                break
        text = "\n\n".join(held)
        if 40 < len(words(text)) < 600 and not text.startswith("#"):
            yield draw.choice(PASSAGE).format(text=text)


TALE = (
    "Summarize this story in one sentence.\n\n{text}",
    "What is the lesson of this story?\n\n{text}",
    "Write a different ending for this story:\n\n{text}",
    "Write a short story for children that begins like this: {start}",
    "Answer three questions about this story: who, where and why.\n\n{text}",
    "Tell me a story in which {start}",
)


def tales(folder: Path) -> Iterator[str]:
    draw = random.Random(4)
    for document in texts("stories", folder, 4):
        text = document.text.strip()
        yield draw.choice(TALE).format(text=text, start=text.split(". ")[0].strip(".") + ".")


COMMAND = (
    "Which shell command does this: {does}?",
    "How do I do the following with `{name}`: {does}?",
    "What does the command `{line}` do?",
    "Explain this command line step by step: {line}",
    "Give an example of using {name} to do this: {does}.",
    "What is `{name}` used for?",
    "Write a short help page for the command {name}. {about}",
)


def commands(folder: Path) -> Iterator[str]:
    """Shell commands of the tldr pages, one use of each."""
    draw = random.Random(5)
    for document in texts("tldr", folder, 5):
        uses = re.findall(r"^- (.+):\n\n`(.+)`", document.text, re.M)
        about = " ".join(line[2:] for line in document.text.split("\n") if line.startswith("> ") and "http" not in line)
        if uses:
            does, line = draw.choice(uses)
            name = document.text.split("\n", 1)[0].lstrip("# ")
            does = re.sub(r"\[(\w)\]", r"\1", does)
            line = re.sub(r"\{\{(?:\[[^|]*\|([^\]]*)\]|(.*?))\}\}", lambda m: m[1] or m[2], line)
            yield draw.choice(COMMAND).format(does=does[0].lower() + does[1:], name=name, line=line, about=about)


def own(answered: Path, openings: Callable[[int], list[str]] = openings, turn: str = TURN) -> Iterator[str]:
    """What the model asked when the user's turn was its to write; questions that came to no end are left out.

    Args:
        answered: how the model went on from these openings.
        openings: returns the first n of them.
        turn: what each of them begins with.
    """
    if not answered.exists():
        return
    lines = [json.loads(line) for line in answered.read_text(encoding="utf-8").split("\n") if line]
    given = openings(max((row["id"] for row in lines), default=-1) + 1)
    for row in sorted(lines, key=lambda row: row["id"]):
        question = (given[row["id"]].removeprefix(turn) + row["completion"]).strip()
        if row["ends"] and len(words(question)) >= 4:
            yield question


@dataclass(frozen=True)
class Kind:
    """A kind of question, how many of it a part holds, and how they are made."""

    count: int
    make: Callable[[Path], Iterator[str]]


KINDS = {
    "oasst": Kind(30, lambda folder: asked("oasst", folder)),
    "gsm8k": Kind(300, lambda folder: asked("gsm8k", folder)),
    "self_dialogue": Kind(170, lambda folder: asked("self_dialogue", folder)),
    "sgd": Kind(100, lambda folder: asked("sgd", folder)),
    "functions": Kind(350, functions),
    "books": Kind(300, passages),
    "stories": Kind(60, tales),
    "tldr": Kind(190, commands),
}
OWN = 900  # of a part


def write(train: Path, held: Path, work: Path, part: int) -> dict[str, int]:
    """Write `questions-PART.jsonl` in the work folder; how many of each kind it holds."""
    barred = evaluation(held)
    makers = {name: (kind.count, kind.make(train)) for name, kind in KINDS.items()}
    makers["own"] = (OWN, own(work / "openings-answered.jsonl"))
    rows, counts = [], {}
    for name, (count, made) in makers.items():
        kept = (q for q in unlike(made) if not runs(q, RUN) & barred)
        mine = list(islice(kept, part * count, (part + 1) * count))
        rows += lines_of(name, mine)
        counts[name] = len(mine)
    keep(work, part, rows)
    return counts


def lines_of(kind: str, asked: Iterable[str]) -> list[dict]:
    """Questions of a kind, as lines of a part."""
    return [{"kind": kind, "messages": [{"role": "user", "content": q}]} for q in asked]


def keep(work: Path, part: int, rows: list[dict]) -> None:
    """Write a part's questions, shuffled, into the work folder."""
    out = work / f"questions-{part}.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in shuffled(rows, part)]
    out.with_suffix(".tmp").write_text("".join(lines), encoding="utf-8")
    out.with_suffix(".tmp").replace(out)


def places(parser: argparse.ArgumentParser, folder: str = "smollm2") -> None:
    """Options of where things are; `folder`: the work folder's name in runs/."""
    shared = ROOT.parent / "shared" / "data"
    parser.add_argument("--train", type=Path, default=shared / "train", help="texts that questions are made of")
    parser.add_argument("--eval", type=Path, default=shared / "eval", help="evaluation prompts to keep clear of")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / folder, help="where everything is written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    places(parser)
    parser.add_argument("--part", type=int, default=0)
    a = parser.parse_args()
    print(write(a.train, a.eval, a.work, a.part))


if __name__ == "__main__":
    main()
