"""Questions after long contexts: `python -m recipes.smollm2.long` writes `long-questions.jsonl` in the work folder.

Chapters of books, modules of Python, dialogues of people, and chats with the model itself, of 200 to 2,200 tokens. The
questions of `questions.py` have 60 tokens in the mean; a drafter that learns from these alone attends badly where more
has been said.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from recipes.demo import data as sources
from recipes.smollm2.questions import PASSAGE, RUN, evaluation, places, runs, shuffled, texts, unlike, words

SIZES = (250, 400, 550, 700, 850)  # words of a text; code has twice the tokens for each
TEXT = (
    *PASSAGE[:6],
    "Summarize the following article in three sentences:\n\n{text}",
    "Summarize:\n{text}\nSummary:",
    "{text}\n\nList all people and places that are named above.",
    "Quote the three most important sentences of this text, word for word.\n\n{text}",
    "Make a table of contents for this chapter:\n\n{text}",
    "{text}\n\nWhat happened first, and what happened after that?",
)
CODE = (
    "Explain what this module does:\n\n```python\n{text}\n```",
    "List the functions and classes of this file, with one line about each.\n\n{text}",
    "Review the following code and suggest improvements:\n\n```python\n{text}\n```",
    "{text}\n\nWrite documentation for the code above.",
    "Write unit tests for this code:\n\n```python\n{text}\n```",
    "Add type hints and docstrings to the first function of this file:\n\n```python\n{text}\n```",
)
TALK = (
    "Summarize this conversation in two sentences.\n\n{text}",
    "{text}\n\nWhat did the first speaker want, and did they get it?",
    "List the facts that are agreed on in this dialogue:\n\n{text}",
    "Continue this conversation:\n\n{text}",
    "Write an e-mail that tells a friend about this conversation.\n\n{text}",
)
AFTER = (  # a turn about the turn before
    "Can you make your last answer shorter?", "Summarize what you just said in one sentence.",
    "Can you give me an example?", "Rewrite your answer as a list.", "Why is that?", "Explain this to a child.",
    "Are you sure? Check your answer and correct it where it is wrong.", "Tell me more about the last point.",
    "Rewrite your answer in a more formal style.", "What would be the opposite view?",
)  # fmt: skip
COUNTS = {"books": 1800, "code": 1400, "talks": 700, "chats": 1500}


def stretches(domain: str, folder: Path, seed: int, share: float = 1.0) -> Iterator[str]:
    """Texts of a source, cut where a drawn number of words (a share of it) is reached; held-out ones are left out."""
    known = {d.content for d in texts(domain, folder, seed)}
    source, draw = sources.SOURCES[domain], random.Random(seed)
    results, held, group, wanted = [], [], "", draw.choice(SIZES)
    for document in source.read(domain, folder / source.file):
        if document.content not in known or document.group != group:
            held, group = [], document.group
        if document.content not in known:
            continue
        for paragraph in document.text.strip("\n").split("\n\n"):
            held.append(paragraph)
            if sum(len(words(p)) for p in held) >= share * wanted:
                results.append("\n\n".join(held))
                held, wanted = [], draw.choice(SIZES)
    yield from shuffled(results, seed)


def asked(forms: tuple[str, ...], given: Iterator[str], seed: int) -> Iterator[str]:
    """A question about each text."""
    draw = random.Random(seed)
    for text in given:
        yield draw.choice(forms).format(text=text)


def talks(folder: Path) -> Iterator[str]:
    """Long dialogues of people as text."""
    both = texts("self_dialogue", folder, 6) + texts("sgd", folder, 6)
    for document in shuffled(both, 6):
        lines = [f"{'A' if role == 'user' else 'B'}: {said}" for role, said in document.messages]
        if len(words(" ".join(lines))) > SIZES[0]:
            yield "\n".join(lines)


def chats(work: Path) -> Iterator[list[dict[str, str]]]:
    """Two to six turns that the model has answered, and one more question, of its own or about what it said."""
    draw, rows = random.Random(7), []
    for path in sorted(work.glob("answers-*.jsonl")):
        rows += [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").split("\n") if line]
    rows = shuffled([row for row in rows if len(row) == 2 and len(words(row[0]["content"])) < 200], 7)
    while len(rows) > 8:
        told = [message for _ in range(draw.randint(2, 6)) for message in rows.pop()]
        last = rows.pop()[:1] if draw.random() < 0.5 else [{"role": "user", "content": draw.choice(AFTER)}]
        yield told + last


def write(train: Path, held: Path, work: Path) -> dict[str, int]:
    """Write `long-questions.jsonl`; how many of each kind it holds."""
    barred = evaluation(held)
    code = shuffled([text for d in ("stdlib", "algorithms") for text in stretches(d, train, 8, 0.5)], 8)
    made = {
        "books": asked(TEXT, stretches("books", train, 9), 9),
        "code": asked(CODE, iter(code), 10),
        "talks": asked(TALK, talks(train), 11),
    }
    rows, counts = [], {}
    for name, given in made.items():
        kept = (q for q in unlike(given) if not runs(q, RUN) & barred)
        mine = list(islice(kept, COUNTS[name]))
        rows += [{"kind": name, "messages": [{"role": "user", "content": q}]} for q in mine]
        counts[name] = len(mine)
    said = list(islice(chats(work), COUNTS["chats"]))
    rows += [{"kind": "chats", "messages": messages} for messages in said]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in shuffled(rows, 12)]
    out = work / "long-questions.jsonl"
    out.with_suffix(".tmp").write_text("".join(lines), encoding="utf-8")
    out.with_suffix(".tmp").replace(out)
    return {**counts, "chats": len(said)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    places(parser)
    a = parser.parse_args()
    if not any(a.work.glob("answers-*.jsonl")):
        parser.error(f"there are no answers in {a.work}; run python -m recipes.answers smollm2 --unpack first")
    if missing := [folder for folder in (a.train, a.eval) if not folder.is_dir()]:
        parser.error(f"there is no folder {missing[0]}; --train and --eval name those of the texts and the prompts")
    print(write(a.train, a.eval, a.work))


if __name__ == "__main__":
    main()
