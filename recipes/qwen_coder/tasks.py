"""The coder tasks of `outrider bench`: `python -m recipes.qwen_coder.tasks`, which writes `bench/data/coder.jsonl`.

Four tasks as people put them to a coding model, over files of TheAlgorithms/Python (MIT) that no training question is
about (`questions.py` leaves them out):

- `code-edits`: a file of 20 to 150 lines to document, to type, to rename in, or to repair; 15 each. The answer repeats
  most of the file.
- `explain`: what a function or file does, how, and at what cost.
- `file-chat`: eight turns about one file.
- `agent`: a tool-calling agent repairs a planted fault. Each turn is the result of a call that it would have made, so
  the context grows to several thousand tokens and repeats itself.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
from pathlib import Path

from recipes.demo.data import SOURCES, digest, read_domain
from recipes.qwen_coder import questions
from recipes.qwen_coder.faults import planted
from recipes.qwen_coder.questions import DEFINITION, DOC, PREFIXES, TASKS, untyped, valid

TASK_NAMES = "code-edits", "explain", "file-chat", "agent"
EACH, CHATS, AGENTS = 15, 8, 8
SHORTEST, LONGEST = 20, 150  # lines of a file

LEFT_OUT = re.compile(r"author|credit|written by|@|youtube|project euler", re.I)  # people, and one exercise many times

EDITS = {
    "document": "Add a docstring to every function and class of this file. Return the whole file.",
    "type": "Add type annotations to every function of this file. Change nothing else, and return the whole file.",
    "rename": "Rename `{name}` to `{new}` everywhere in this file, and return the whole file.",
    "repair": "This file has a bug. Return the corrected file, then say in one sentence what was wrong.",
}
EXPLAIN = (
    "Explain this file to a colleague who is new to it.",
    "Explain step by step what `{name}` does, with an example.",
    "What is the time and space complexity of `{name}`, and why?",
)
CHAT = (
    "What does this file do? Two sentences.",
    "Which functions does it define, and what does each return?",
    "Add a docstring to `{name}` in Google style. Return only that function.",
    "Write three pytest tests for `{name}`.",
    "Which inputs make `{name}` fail? Add checks that raise ValueError, and return the function.",
    "Rename `{name}` to `{new}` in your last version, and return it.",
    "Rewrite it so that it is easier to read. Keep its behaviour.",
    "Return the whole file with all changes that we made.",
)
AGENT = """You are a coding agent that works on a repository through tools. Answer with one call of a tool as JSON, \
and nothing else:
{{"tool": "list_files"}}
{{"tool": "read_file", "path": "..."}}
{{"tool": "replace", "path": "...", "old": "...", "new": "..."}}
{{"tool": "run_tests"}}
{{"tool": "done", "summary": "..."}}

Task: a test of `{name}` fails. Find the fault in {path} and mend it."""
RESULT = "Result of the tool:\n\n{result}\n\nThe next call?"
FAILED = "FAILED tests/test_{stem}.py::test_{name} - AssertionError: {name} gives a wrong result\n1 failed, 7 passed"


def candidates(folder: Path, asked: str) -> list[tuple[str, str]]:
    """(path, source) of files of SHORTEST to LONGEST lines that define functions and that no question is about.

    Args:
        folder: the sources.
        asked: all questions that were made of them so far (`questions.py` leaves out the files of TASKS from then on).
    """
    pieces: dict[str, list[str]] = {}
    for document in (d for part in read_domain("algorithms", folder) for d in part):
        pieces.setdefault(document.group, []).append(document.text)
    collected = []
    for path in sorted(pieces, key=lambda path: digest("coder tasks " + path)):
        code = pieces[path][0].strip("\n") + "\n"
        if len(pieces[path]) > 1 or not SHORTEST <= code.count("\n") <= LONGEST or not valid(code):
            continue
        functions = [m.group(1) for m in DEFINITION.finditer(code)]
        known = any(f"def {name}(" in asked or f"`{name}`" in asked for name in functions)
        if functions and not known and not LEFT_OUT.search(code):
            collected.append((path, code))
    return collected


def bare(code: str) -> str:
    """The file without the docstrings of its functions; as it was where none can be cut out."""
    text = DEFINITION.sub(lambda m: _undocumented(m.group()), code)
    return text if valid(text) else code


def _undocumented(function: str) -> str:
    parts = DOC.match(function)
    return parts.group(1) + parts.group(4).lstrip() if parts else function


def fence(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def names_of(code: str, draw: random.Random) -> dict[str, str]:
    """A function of the file, and a new name for it."""
    name = draw.choice([m.group(1) for m in DEFINITION.finditer(code)])
    return {"name": name, "new": f"{draw.choice(PREFIXES)}_{name.strip('_')}"}


def edit(kind: str, code: str, draw: random.Random) -> str | None:
    """The file as this kind of edit finds it; None where it offers nothing to edit."""
    functions = sum(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(code)))
    given = {"document": bare(code), "type": untyped(code), "rename": code, "repair": planted(code, draw)}[kind]
    if given is None or not valid(given) or (kind in ("document", "type") and given == code) or not functions:
        return None
    return given if SHORTEST <= given.count("\n") <= LONGEST else None


def edits(files: list[tuple[str, str]], draw: random.Random) -> list[dict]:
    """EACH edits of every kind, each of a file of its own."""
    rows, left = [], list(files)
    for kind, form in EDITS.items():
        for n in range(EACH):
            path, code, text = next((p, c, t) for p, c in left if (t := edit(kind, c, draw)))
            left.remove((path, code))
            question = form.format(**names_of(code, draw))
            rows.append(_row("code-edits", f"{kind}/{n}", path, [f"{question}\n\n{fence(text)}"]))
    return rows


def explanations(files: list[tuple[str, str]], draw: random.Random) -> list[dict]:
    rows = []
    for n, (path, code) in enumerate(files[:EACH]):
        question = EXPLAIN[n % len(EXPLAIN)].format(**names_of(code, draw))
        rows.append(_row("explain", str(n), path, [f"{question}\n\n{fence(code)}"]))
    return rows


def chats(files: list[tuple[str, str]], draw: random.Random) -> list[dict]:
    rows = []
    for n, (path, code) in enumerate([f for f in files if 30 <= f[1].count("\n") <= 80][:CHATS]):
        first, *rest = (turn.format(**names) for names in [names_of(code, draw)] for turn in CHAT)
        rows.append(_row("file-chat", str(n), path, [f"Here is {path}:\n\n{fence(code)}\n\n{first}", *rest]))
    return rows


def agents(files: list[tuple[str, str]], draw: random.Random) -> list[dict]:
    rows: list[dict] = []
    tree = "\n".join(path for path, _ in files)
    for path, code in reversed(files):
        wrong, name = planted(code, draw), names_of(code, draw)["name"]
        if wrong is None or not code.count("\n") >= 40 or len(rows) == AGENTS:
            continue
        failed = FAILED.format(stem=Path(path).stem, name=name)
        other = draw.choice([f for f in files if f[0] != path and f[1].count("\n") < 60])[1]
        results = (tree, wrong, failed, other, wrong, "1 occurrence replaced", code, "8 passed")
        turns = [AGENT.format(name=name, path=path), *(RESULT.format(result=result.rstrip()) for result in results)]
        rows.append(_row("agent", str(len(rows)), path, turns))
    return rows


def _row(task: str, name: str, path: str, turns: list[str]) -> dict:
    return {"id": f"{task}/{name}", "category": task, "file": path, "turns": turns}


def write(folder: Path, work: Path, out: Path = TASKS) -> dict[str, int]:
    """Write the four tasks from the sources in `folder`, clear of the questions in `work`; how many rows each has."""
    asked = "".join(
        json.loads(line)["messages"][0]["content"] + "\n"
        for file in sorted(work.glob("questions-*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    )
    files, draw = candidates(folder, asked), random.Random(64)
    rest = files[4 * EACH :]
    rows = [*edits(files, draw), *explanations(rest, draw), *chats(rest[EACH:], draw), *agents(rest[EACH:], draw)]
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return {task: sum(row["category"] == task for row in rows) for task in TASK_NAMES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    questions.places(parser, "qwen-coder")
    a = parser.parse_args()
    if not (a.train / SOURCES["algorithms"].file).is_file():
        parser.error(f"--train {a.train} has no {SOURCES['algorithms'].file}")
    print(write(a.train, a.work))


if __name__ == "__main__":
    main()
