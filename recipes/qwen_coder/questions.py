"""Questions for a coding model's drafters: `python -m recipes.qwen_coder.questions --part 0`.

Instructions over code (explain, document, type, test, translate, simplify, repair, complete, rename, review), made of
openly licensed Python sources; school exercises; shell commands; and what the model asks itself (`openings.py`). A
question that shares a run of eight words with an evaluation prompt is dropped, and so is one that is nearly the same as
an earlier one. Documents that the demo's recipe holds out are not used: evaluations can be made of them.

A part is a slice of every kind's list in a shuffled order, so that the beginning of a file is a fair sample of the
whole. Parts do not overlap.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from recipes.qwen_coder.faults import planted
from recipes.qwen_coder.openings import TURN, openings
from recipes.smollm2.questions import (
    RUN,
    asked,
    commands,
    evaluation,
    keep,
    lines_of,
    own,
    places,
    runs,
    shuffled,
    texts,
    unlike,
    words,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "src" / "outrider" / "bench" / "data" / "coder.jsonl"  # what `tasks.py` writes

LANGUAGES = ("JavaScript", "TypeScript", "Go", "Rust", "Java", "C", "C++", "C#", "Kotlin", "Ruby", "Swift", "PHP")

FUNCTION = {
    "explain": (
        "Explain what this function does:\n\n```python\n{code}\n```",
        "What does the following code return, and how does it work?\n\n```python\n{bare}\n```",
        "{code}\n\nExplain this step by step to a beginner.",
        "What is the time and space complexity of this function?\n\n```python\n{code}\n```",
    ),
    "document": (
        "Add a docstring to this Python function. Return the whole function.\n\n```python\n{bare}\n```",
        "Document this function in Google style, with arguments, returns and errors.\n\n```python\n{bare}\n```",
        "Add comments to the following code where they help.\n\n```python\n{bare}\n```",
    ),
    "type": (
        "Add type hints to this function. Change nothing else.\n\n```python\n{untyped}\n```",
        "Add type annotations for mypy --strict:\n\n```python\n{untyped}\n```",
    ),
    "test": (
        "Write unit tests for this function with pytest:\n\n```python\n{code}\n```",
        "Write a unittest.TestCase for `{name}`:\n\n```python\n{code}\n```",
        "Which edge cases should be tested here? Write the tests.\n\n```python\n{code}\n```",
    ),
    "translate": (
        "Translate this function to {language}:\n\n```python\n{code}\n```",
        "Rewrite the following in idiomatic {language}.\n\n```python\n{bare}\n```",
    ),
    "simplify": (
        "Rewrite this function so that it is easier to read:\n\n```python\n{code}\n```",
        "Refactor this code. Keep its behaviour.\n\n```python\n{code}\n```",
        "Make this function faster, and say what you changed.\n\n```python\n{code}\n```",
        "Rename the variables of this function so that they speak for themselves.\n\n```python\n{bare}\n```",
    ),
    "repair": (
        "This function has a bug. Find it and fix it.\n\n```python\n{wrong}\n```",
        "The tests of `{name}` fail. Return the corrected function.\n\n```python\n{wrong}\n```",
        "What is wrong with this code?\n\n```python\n{wrong}\n```",
    ),
    "complete": (
        "Finish this Python function:\n\n```python\n{head}\n```",
        "Implement the body of this function.\n\n{head}",
        "Write a Python function named `{name}`. {summary}",
        "Complete the code:\n\n```python\n{half}\n```",
    ),
    "review": (
        "Review this code and suggest improvements:\n\n```python\n{code}\n```",
        "Handle errors and invalid arguments in this function.\n\n```python\n{code}\n```",
        "Add logging to this function.\n\n```python\n{code}\n```",
    ),
}
FILE = (
    "Add docstrings to all functions and classes of this file. Return the whole file.\n\n```python\n{code}\n```",
    "Add type hints to this module. Return the whole file.\n\n```python\n{code}\n```",
    "Rename `{name}` to `{other}` everywhere in this file, and return the whole file.\n\n```python\n{code}\n```",
    "There is a bug in this file. Return the corrected file.\n\n```python\n{wrong}\n```",
    "Here is a module:\n\n```python\n{code}\n```\n\nWhat does `{name}` do, and who calls it?",
    "Write a README section with examples for this module:\n\n```python\n{code}\n```",
    "Modernise this file for Python 3.12. Return the whole file.\n\n```python\n{code}\n```",
    "Write tests for `{name}` in this file:\n\n```python\n{code}\n```",
)
DEFINITION = re.compile(r"^(?:@.*\n)*(?:async )?def (\w+)\(.*?(?=^\S|\Z)", re.M | re.S)
DOC = re.compile(r'^(.*?def .*?:\n\s+)(r?"""(.*?)"""\n)(.*)', re.S)
PREFIXES = ("compute", "build", "make", "get", "find", "run", "load", "parse", "new", "do")


def documents(folder: Path) -> list[str]:
    """Stretches of about 3,000 characters of Python files, shuffled; no held-out ones, and no files of the tasks."""
    lines = TASKS.read_text(encoding="utf-8").splitlines() if TASKS.exists() else []
    barred = {json.loads(line)["file"] for line in lines}
    known = shuffled(texts("stdlib", folder, 2) + texts("algorithms", folder, 2), 11)
    return [d.text for d in known if d.group not in barred]


def valid(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def untyped(code: str) -> str:
    """The same function without annotations; as it was where it has none or cannot be parsed."""
    tree = ast.parse(code)
    notes = [
        note
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for note in [node.returns, *(a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg))]
        if note is not None
    ]
    if not notes:
        return code
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(tree)


def fields(code: str, name: str, draw: random.Random) -> dict[str, str | None]:
    """What the forms of FUNCTION name; None: this function does not have it."""
    parts = DOC.match(code + "\n")
    summary = " ".join(parts.group(3).split(">>>")[0].split()) if parts else ""
    lines = code.split("\n")
    return {
        "code": code,
        "name": name,
        "bare": parts.group(1) + parts.group(4).strip("\n").lstrip() if parts else code,
        "head": parts.group(1) + parts.group(2).rstrip() if parts else None,
        "summary": summary if len(words(summary)) >= 5 else None,
        "half": "\n".join(lines[: len(lines) // 2]) if len(lines) >= 8 else None,
        "untyped": untyped(code),
        "wrong": planted(code, draw),
        "language": draw.choice(LANGUAGES),
    }


def functions(task: str, folder: Path) -> Iterator[str]:
    """Questions of one task about functions of 5 to 80 lines; every task takes other functions first."""
    draw = random.Random(task)
    offset = list(FUNCTION).index(task)
    places = [(m.group().rstrip(), m.group(1)) for text in documents(folder) for m in DEFINITION.finditer(text)]
    for code, name in places[offset :: len(FUNCTION)] + places:
        if 120 < len(code) < 3000 and code.count("\n") >= 4 and valid(code):
            form = draw.choice(FUNCTION[task])
            given = fields(code, name, draw)
            if all(given[key] is not None for key in re.findall(r"{(\w+)}", form)):
                yield form.format(**given)


def modules(folder: Path) -> Iterator[str]:
    """Questions about files, or about stretches of them that can be parsed, of 20 to 120 lines."""
    draw = random.Random(21)
    for text in documents(folder):
        code = text.strip("\n")
        names = [m.group(1) for m in DEFINITION.finditer(code)]
        if names and 20 <= code.count("\n") <= 120 and valid(code):
            name, form = draw.choice(names), draw.choice(FILE)
            wrong = planted(code, draw)
            if "{wrong}" not in form or wrong is not None:
                yield form.format(
                    code=code, name=name, other=f"{draw.choice(PREFIXES)}_{name.lstrip('_')}", wrong=wrong
                )


# kind: how many of it a part holds, and how they are made
KINDS: dict[str, tuple[int, Callable[[Path], Iterator[str]]]] = {
    **{task: (22, lambda folder, task=task: functions(task, folder)) for task in FUNCTION},
    "files": (30, modules),
    "gsm8k": (40, lambda folder: asked("gsm8k", folder)),
    "tldr": (16, commands),
    "oasst": (4, lambda folder: asked("oasst", folder)),
    "self_dialogue": (6, lambda folder: asked("self_dialogue", folder)),
}
OWN = 106  # of a part of 400


def write(train: Path, held: Path, work: Path, parts: int) -> dict[str, int]:
    """Write `questions-PART.jsonl` for every part up to `parts` that is not there; how many of each kind there are.

    What the model asks itself is added as far as it is there, so write openings before further parts.
    """
    barred, counts = evaluation(held), {}
    wanted = [part for part in range(parts) if not (work / f"questions-{part}.jsonl").exists()]
    rows: dict[int, list[dict]] = {part: [] for part in wanted}
    makers = {name: (count, make(train)) for name, (count, make) in KINDS.items()}
    makers["own"] = (OWN, own(work / "openings-answered.jsonl", openings, TURN))
    for name, (count, made) in makers.items():
        kept = list(islice((q for q in unlike(made) if not runs(q, RUN) & barred), parts * count))
        for part in wanted:
            mine = kept[part * count : (part + 1) * count]
            rows[part] += lines_of(name, mine)
        counts[name] = len(kept)
    for part in wanted:
        keep(work, part, rows[part])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    places(parser, "qwen-coder")
    parser.add_argument("--parts", type=int, default=1, help="how many parts there shall be")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    print(write(a.train, a.eval, a.work, a.parts))


if __name__ == "__main__":
    main()
