"""A picture of a terminal from a real run: `python -m tools.recording [--text] OUT.svg COMMAND...`.

The command runs in a terminal of its own (a pty), so that it shows what a user sees, colours included. What it wrote is
drawn by rich as an SVG that fetches no font.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shlex
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 92
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b[=>()][AB0]?")


def run(command: list[str]) -> str:
    """What a command writes on a terminal of WIDTH columns.

    Raises:
        SystemExit: The command failed; nothing is drawn of a failure.
    """
    os.environ.update(COLUMNS=str(WIDTH), LINES="40", TERM="xterm-256color")
    os.environ.pop("NO_COLOR", None)
    written: list[bytes] = []

    def read(fd: int) -> bytes:
        data = os.read(fd, 1 << 16)
        written.append(data)
        return data

    status = os.waitstatus_to_exitcode(pty.spawn(command, read))
    if status:
        raise SystemExit(f"{shlex.join(command)} ended with {status}")
    return b"".join(written).decode("utf-8", "replace")


def settled(raw: str) -> list[str]:
    """The lines that stay on the screen, with their colours: returns, erased lines and the cursor's way up are applied.

    Only what spinners and progress bars do is understood: they rewrite whole lines.
    """
    lines, row, fresh, style, end = [""], 0, False, "", 0
    for match in [*CONTROL.finditer(raw), None]:
        for part in re.split(r"([\r\n])", raw[end : match.start() if match else len(raw)]):
            if part == "\n":
                row, fresh = row + 1, False
                lines += [""] * (row + 1 - len(lines))
            elif part == "\r":
                fresh = True
            elif part:
                lines[row] = (style if fresh else lines[row]) + part
                fresh = False
        if match is None:
            break
        end, count = match.end(), int(match[1]) if (match[1] or "").isdigit() else 1
        if match[2] == "m":
            style = "" if match[1] in ("", "0") else style + match[0]
            if not fresh:
                lines[row] += match[0]
        elif match[2] == "K":
            lines[row] = ""
        elif match[2] == "A":
            row = max(0, row - count)
    return lines


def picture(command: list[str], lines: list[str]) -> str:
    """The SVG of a command and what it showed."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ ", style="bold green") + Text(shlex.join(command), style="bold"))
    console.print(Text.from_ansi("\n".join(lines).rstrip()))
    svg = console.export_svg(title="outrider", theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S).replace("Fira Code", "ui-monospace, Menlo, Consolas")


def main() -> None:
    """Run, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT.svg")
    parser.add_argument(
        "--text", action="store_true", help="only what it writes to stdout, no figures of a busy machine"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND...")
    given = parser.parse_args()
    command = given.command
    if not command:
        parser.error("give a command to record")
    quiet = ["sh", "-c", 'exec "$@" 2>/dev/null', "sh"] if given.text else []
    lines = settled(run([*quiet, *command]))
    shown = ["outrider", *command[3:]] if command[1:3] == ["-m", "outrider"] else command
    Path(given.out).write_text(picture(shown, lines), encoding="utf-8")


if __name__ == "__main__":
    main()
