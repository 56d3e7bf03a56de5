"""`python -m papers rows`, `run ROW`, `page`: the papers' findings, what makes a row's figures, and the pages.

run   a row's studies: its paper's own, or older ones that it names. `--limit`, `--tokens`, `--minutes`, `--without`
      and `--quiet` are for the paper's own, whose run resumes. `--quiet`, on a machine with nothing else: one text at a
      time, and their times are kept.
page  docs/reproduction.md, papers/PAPER/verdicts.csv and the tables of docs/results.md, from what is stored.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from outrider.params import InputError

from . import page, rows, runs, verdicts
from .figures import verdict


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m papers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rows", help="every row, its verdicts and its studies")
    commands.add_parser("page", help="write the pages")
    run = commands.add_parser("run", help="make a row's figures")
    run.add_argument("row")
    run.add_argument("--model", choices=rows.MODELS, help="default: both")
    run.add_argument("--limit", type=int, help="prompts of each task")
    run.add_argument("--tokens", type=int)
    run.add_argument("--minutes", type=float, help="stop after so many; the same command goes on")
    run.add_argument("--without", action="append", default=[], help="leave out methods whose names begin like this")
    run.add_argument("--threads", type=int, default=2)
    run.add_argument("--quiet", action="store_true", help="keep times: nothing else runs on this machine")
    return parser.parse_args()


def claim(name: str, evidence: rows.Evidence) -> str:
    """The row that has this id. Raises InputError if there is none."""
    for row in evidence.claims:
        if name == row or name in row.split(", "):
            return row
    raise InputError(f"there is no row {name!r}; `python -m papers rows` lists them")


def make(args: argparse.Namespace, evidence: rows.Evidence) -> None:
    """Run a row's studies."""
    row = claim(args.row, evidence)
    models = [m for m in rows.ROWS[row].models if args.model in (None, m)]
    if not models:
        raise InputError(f"{row} needs no run{f' of {args.model}' if args.model else ''}")
    for model in models:
        names = rows.ROWS[row].studies.get(model, "").split()
        if names and (args.limit or args.tokens or args.minutes or args.without or args.quiet):
            made = f"{row} is made by {', '.join(names)}"
            raise InputError(f"{made}; remove --limit, --tokens, --minutes, --without and --quiet")
        if names and all(name.endswith("ablations") for name in names):
            module = f"papers.ablations.{model.lower()}"
            for more in ((), ("--gather", str(rows.RESULTS / f"{names[0]}.json"))):
                subprocess.run([sys.executable, "-m", module, *more], check=True)
        elif names:
            subprocess.run([sys.executable, "-m", "papers.studies", *names], check=True)
        else:
            changes = {"limit": args.limit, "tokens": args.tokens, "max_minutes": args.minutes, "threads": args.threads}
            runs.run(evidence.claims[row]["paper"], model, args.quiet, tuple(args.without), **changes)


def main() -> None:
    args, evidence = parsed(), rows.Evidence.read()
    rows.load()
    try:
        if args.command == "run":
            make(args, evidence)
        elif args.command == "page":
            for path, text in verdicts.made(evidence).items():
                path.write_text(text, encoding="utf-8")
            page.main()
        else:
            for row, by in verdicts.judged(evidence).items():
                print(f"{row}: " + "; ".join(f"{model} {verdict(checks)}" for model, (checks, _) in by.items()))
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
