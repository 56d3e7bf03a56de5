"""Writes the parts of pages that are made from the code: `python -m tools.pages`.

A part stands between `<!-- NAME -->` and `<!-- /NAME -->`. The tests ask that every page holds what the code gives
(`tests/unit/test_architecture.py`).
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tools.rooms import ROOMS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "outrider"
WIDTH = 120


def rooms() -> str:
    """What each room holds and what it may import."""
    lines = ["| room | holds | may import |", "|---|---|---|"]
    for room, (wanted, holds) in ROOMS.items():
        named = "all above" if wanted == "*" else ", ".join(f"`{r}`" for r in wanted.split())
        lines.append(f"| `{room}` | {holds} | {named or 'nothing'} |")
    return "\n".join(lines)


def house() -> str:
    """Every file of the package, room by room, with the first sentence of its docstring."""
    lines = ["```", "src/outrider/"]
    for room in ["__init__", *ROOMS]:
        folder = SOURCE / room
        if not folder.is_dir():
            lines += wrapped(f"  {room}.py", first_sentence(folder.with_suffix(".py")))
            continue
        lines += wrapped(f"  {room}/", ROOMS[room][1].replace("`", ""))
        for file in sorted(folder.rglob("*.py")):
            if file.name == "_abi.py":  # made by setup.py, where the package is built
                continue
            if file.name != "__init__.py" or file.parent != folder:
                lines += wrapped(f"    {file.relative_to(folder)}", first_sentence(file))
    return "\n".join([*lines, "```"])


def first_sentence(file: Path) -> str:
    """The first sentence of a module's docstring, without a full stop."""
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(doc.split("\n\n")[0].split()).replace("`", "")
    return re.split(r"\.(?=\s+[A-Z]|$)", paragraph)[0].rstrip(".:")


def wrapped(name: str, words: str) -> list[str]:
    """`name`, then `words` in a column of their own, cut to lines of the page's width."""
    indent, lines, line = 27, [], ""
    for word in words.split():
        if len(line) + len(word) + 1 > WIDTH - indent and line:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    lines.append(line)
    head = name.ljust(indent) if len(name) < indent else f"{name}  "
    return [head + lines[0], *(" " * indent + more for more in lines[1:])]


def families() -> str:
    """The model families that the tests prove, by `model_type`, and who serves them; read from the source."""
    targets = SOURCE / "backends"
    native = keys(targets / "native" / "families.py", "FAMILIES")
    stock = keys(targets / "torch" / "families.py", "TABLE")
    others = ast.literal_eval(constant(targets / "torch" / "seq2seq.py", "FAMILIES"))
    how = "float32 and bfloat16 beside the stock forward, trees beside single tokens; wrong options are caught"
    rows = [
        ("native passes, on the processors below", "the same bits", how, native),
        ("torch, everywhere else", "rounding", "trees beside single tokens, in float32", {*stock, *others} - native),
    ]
    lines = ["| served by | promise | tested on tiny models of each, and how | families |", "|---|---|---|---|"]
    for who, what, tested, names in rows:
        lines.append(f"| {who} | {what} | {tested} | {', '.join(f'`{name}`' for name in sorted(names))} |")
    return "\n".join(lines)


def processors() -> str:
    """What serves models on which processors, and how that is tested."""
    from outrider.backends.native.variants import PLATFORMS

    lines = ["| system | processor | served by | promise | tested |", "|---|---|---|---|---|"]
    for kind in PLATFORMS.values():
        rows = [(variant.title, variant.tested) for variant in kind.variants]
        for title, tested in rows if kind.tested else [(rows[-1][0], "no: built only")]:
            lines.append(f"| {kind.title} | {title} | native passes | the same bits | {tested} |")
    return "\n".join([*lines, "| any | others, and GPUs | torch | rounding | on x86 processors |"])


def keys(file: Path, name: str) -> set[str]:
    """The keys of a dict that a module assigns to a name."""
    table = constant(file, name)
    assert isinstance(table, ast.Dict)
    return {ast.literal_eval(key) for key in table.keys if key is not None}


def constant(file: Path, name: str) -> ast.expr:
    """What a module assigns to a name."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(t, ast.Name) and t.id == name for t in targets) and node.value is not None:
            return node.value
    raise ValueError(f"{file} has no {name}")


def commands() -> str:
    """Every command with its line of `outrider --help`."""
    from outrider.cli import COMMANDS, file_of

    there = {name: does for name, does in COMMANDS.items() if (SOURCE / "commands" / f"{file_of(name)}.py").is_file()}
    lines = ["| command | does |", "|---|---|"]
    return "\n".join([*lines, *(f"| `outrider {name}` | {does} |" for name, does in there.items())])


def options() -> str:
    """The options of every method of `outrider train` with their defaults, and the first paragraph of its `build`."""
    lines = ["| METHOD | options and defaults | they are |", "|---|---|---|"]
    for file in sorted((SOURCE / "training" / "objectives").glob("[!_]*.py")):
        functions = [
            node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
        ]
        build = next(node for node in functions if node.name == "build")
        given = build.args.args[-len(build.args.defaults) :]
        pairs = [f"`{a.arg}={default(d)}`" for a, d in zip(given, build.args.defaults, strict=True)]
        says = " ".join((ast.get_docstring(build) or "").split("\n\n")[0].split())
        named = ", ".join(pair for pair in pairs if not pair.startswith("`documents="))
        lines.append(f"| `{file.stem.replace('_', '-')}` | {named} | {says} |")
    return "\n".join(lines)


def default(value: ast.expr) -> str:
    """A default as `--option NAME=VALUE` has it; `configs.NAME[i]` is looked up in `nets/configs.py`."""
    if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Attribute):
        home = SOURCE / "nets" / f"{ast.unparse(value.value.value)}.py"
        made = ast.literal_eval(constant(home, value.value.attr))[ast.literal_eval(value.slice)]
    else:
        made = ast.literal_eval(value)
    if isinstance(made, tuple):
        return ",".join(map(str, made))
    return str(made).lower() if isinstance(made, bool) else str(made)


def example(file: str) -> Callable[[], str]:
    """Makes a program of `examples/` as a block of code."""
    return lambda: f"```python\n{(ROOT / 'examples' / file).read_text(encoding='utf-8')}```"


def scaling(part: str) -> Callable[[], str]:
    """A part of docs/scaling.md; its module imports torch, so it is read when it is asked for."""
    return lambda: getattr(import_module("papers.scaling"), part)()


# page -> the parts made for it
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"families": families, "processors": processors},
    "docs/commands.md": {"commands": commands},
    "docs/scaling.md": {part: scaling(part) for part in ("constants", "examples", "runs", "checked", "loads", "sizes")},
    "docs/training.md": {"options": options},
    "docs/structure.md": {"rooms": rooms, "house": house},
    **{
        f"docs/howto/{page}.md": {file: example(file) for file in files}
        for page, files in {
            "engines": ["export_to_vllm.py"],
            "generate": ["generate.py", "stream.py"],
            "measure": ["read_a_report.py"],
            "transformers": ["transformers_dropin.py"],
            "write-a-drafter": ["write_a_drafter.py"],
        }.items()
    },
}


def filled(text: str, parts: dict[str, Callable[[], str]]) -> str:
    """A page with its parts made anew.

    Raises:
        ValueError: The page has no place for a part.
    """
    for name, make in parts.items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        if not pattern.search(text):
            raise ValueError(f"no place for {name}: a page says where by <!-- {name} --> and <!-- /{name} -->")
        made = make()
        text = pattern.sub(lambda match, made=made: f"{match[1]}{made}\n{match[2]}", text)
    return text


def main() -> None:
    """Write every page whose parts are old, and name it."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page, parts in PARTS.items():
        path = ROOT / page
        old = path.read_text(encoding="utf-8")
        new = filled(old, parts)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    sys.exit(main())
