"""Memory and time of drafters over the length of the context: `python benchmarks/long_context.py` (a table, and JSON).

A context of N tokens is a prompt and the 32 tokens that follow it (end-of-text is not heeded). The prompt is held-out
text, of a book and of code, with a line planted in its middle and a question about it at its end. Every drafter drafts
a chain of 5 tokens at T = 0; plain decoding stands beside it. Each drafter and context runs in a process of its own, in
turn, once for each repetition, and each repetition reads other text. Per cell:

prefill s         the prompt's pass through target and drafter
prefill, decode   peak memory over what stood before the prompt: resident set, or what torch allocated on a GPU
state             bytes of the tensors that the drafter's side remembers after the prompt; "running": after the last
                  round, with the scratch of a round (a Mamba keeps the states of the nodes it fed). Weights excluded
cache             bytes of the target's keys and values, likewise. Both count the slots in use; the JSON has those held
draft ms          time of `propose` per step of depth, which for a chain is per drafted token
tau, tokens/s     while decoding, the target's own token counted; n.l.: of the prompts whose plain text does not loop

The demo target was trained on rows of up to 1,024 tokens: beyond them only time and memory are claimed, and tau stands
in brackets. Beyond its 2,048 positions target and drafters run with YaRN (a Mamba has no positions), untuned.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from context_cell import DOMAINS, TRAINED
from measure import machine, spread, write
from outrider.bench.metrics import LOOP_SHARE, loops
from outrider.types import InputError

DEMO = Path(str(files("outrider") / "demo"))
METHODS = ("none", "mamba", "model", "eagle")  # those whose memory `used` knows
MAMBA = "runs/demo/mamba/{}/distil/best"
DRAFTERS = {
    "none": "none",
    "Mamba 0.5M": "mamba:" + MAMBA.format("mamba-0.5m"),
    "Mamba 1.5M": "mamba:" + MAMBA.format("mamba-1.5m"),
    "Transformer 0.5M": "model:" + MAMBA.format("llama-0.5m"),
    "Transformer 1.5M": "model:" + MAMBA.format("llama-1.5m"),
    "EAGLE": "eagle:demo/eagle",
}


@dataclass
class Shelf:
    """Folders of target and drafters, stretched by YaRN where a context asks for more positions than they have."""

    place: Path

    def target(self, context: int) -> str:
        return str(self._stretched(DEMO / "target", context))

    def spec(self, spec: str, context: int) -> str:
        """The SPEC of a chain, its folder stretched if need be."""
        body, _, query = spec.partition("?")
        method, _, path = body.partition(":")
        if method not in METHODS:
            raise InputError(f"the memory of {method!r} is not known here; choose from {', '.join(METHODS)}")
        if method == "none":
            return method
        folder = Path(path or "demo/draft")
        if folder.parts[:1] == ("demo",) and not folder.exists():
            folder = DEMO / folder.relative_to("demo")
        if not (folder / "config.json").is_file():
            raise InputError(f"there is no drafter in {folder}; train it first, or name others with --drafters")
        options = query if "tree=" in query else "&".join(filter(None, (query, "tree=chain")))
        return f"{method}:{self._stretched(folder, context)}?{options}"

    def _stretched(self, folder: Path, context: int) -> Path:
        factor, config = stretch(context), json.loads((folder / "config.json").read_text(encoding="utf-8"))
        ropes = config["layer"]["rope"] if "layer" in config else config.get("rope_parameters")
        if factor is None or ropes is None:
            return folder
        made = self.place / f"{context}-{folder.resolve().as_posix().replace('/', '-').lstrip('-')}"
        if not made.exists():
            ropes |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": positions()}
            if "max_position_embeddings" in config:
                config["max_position_embeddings"] = context
            shutil.copytree(folder, made)
            (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return made


def positions() -> int:
    return int(json.loads((DEMO / "target" / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"])


def stretch(context: int) -> float | None:
    """YaRN's factor, for contexts beyond the target's positions."""
    return context / positions() if context > positions() else None


def apart(asked: dict[str, Any]) -> dict[str, Any]:
    """A cell in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("context_cell.py")), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"{asked['spec']} at {asked['context']} tokens failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace, chosen: dict[str, str]) -> Iterator[dict[int, dict[str, list[Any]]]]:
    """What was found so far [context][name][repeat], after each repetition: contexts and drafters in turn."""
    found: dict[int, dict[str, list[Any]]] = {c: {name: [] for name in chosen} for c in args.contexts}
    shared = {k: getattr(args, k) for k in ("tokens", "threads", "repeats", "compile")}
    with tempfile.TemporaryDirectory() as place, Progress(console=Console(stderr=True)) as bar:
        shelf = Shelf(Path(place))
        plan = [(c, {name: shelf.spec(spec, c) for name, spec in chosen.items()}) for c in args.contexts]
        task = bar.add_task("", total=args.repeats * len(plan) * len(chosen))
        for repeat in range(args.repeats):
            for context, specs in plan:
                for name in list(chosen)[:: -1 if repeat % 2 else 1]:
                    bar.update(task, description=f"{name}, {context}")
                    asked = {"target": shelf.target(context), "spec": specs[name], "documents": str(args.documents)}
                    found[context][name].append(apart({**asked, **shared, "context": context, "repeat": repeat}))
                    bar.advance(task)
            yield found


def summary(found: dict[int, dict[str, list[Any]]], tokens: int) -> dict[str, Any]:
    return {
        str(context): {
            "claimed": "time, memory and tau" if context <= TRAINED else "time and memory only",
            "yarn_factor": stretch(context),
            "prompt_tokens": context - tokens,
            "drafters": {name: figures(runs, cells["none"]) for name, runs in cells.items()},
        }
        for context, cells in found.items()
    }


def figures(cells: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A cell's figures: medians, lowest and highest over the repetitions; counts over all of their runs."""
    repeats, every = [c["runs"] for c in cells], [r for c in cells for r in c["runs"]]
    truth = [r["tokens"] for c in plain for r in c["runs"]]
    rates, base = [rate(runs) for runs in repeats], [rate(c["runs"]) for c in plain]
    calm = [r for r, text in zip(every, truth, strict=True) if loops(text) <= LOOP_SHARE]
    row: dict[str, Any] = {
        "device": cells[0]["device"],
        "prefill_seconds": spread([statistics.mean(r["prefill_seconds"] for r in runs) for runs in repeats]),
        "tokens_per_second": spread(rates),
        "speedup": spread([a / b for a, b in zip(rates, base, strict=True)]),
        "tau": total(every, "added") / total(every, "rounds"),
        "tau_not_looping": total(calm, "added") / total(calm, "rounds") if calm else None,
        "runs": len(every),
        "not_looping": len(calm),
        "same_text": sum(r["tokens"] == text for r, text in zip(every, truth, strict=True)),
        "answered": total(every, "answered"),
    }
    if total(every, "steps"):
        row["draft_ms_per_token"] = spread([1e3 * total(r, "propose_seconds") / total(r, "steps") for r in repeats])
    for name in ("prefill_peak", "decode_peak"):
        row[f"{name}_mib"] = spread([max(0, runs[0][name]) / 2**20 for runs in repeats])
    for name in ("state", "state_allocated", "running", "cache", "cache_allocated"):
        row[f"{name}_bytes"] = max(r[name] for r in every)
    return row


def total(runs: Sequence[dict[str, Any]], name: str) -> Any:
    return sum(r[name] for r in runs)


def rate(runs: Sequence[dict[str, Any]]) -> float:
    return total(runs, "added") / total(runs, "decode_seconds")


# Table and picture


def show(contexts: dict[str, Any]) -> None:
    table = Table(title="a chain of 5 tokens at T = 0; medians; tau in brackets: not claimed")
    names = (
        "prefill s",
        "prefill MiB",
        "decode MiB",
        "state KiB",
        "running KiB",
        "cache MiB",
        "draft ms",
        "tau",
        "n.l.",
    )
    for column in ("context", "drafter", *names, "tokens/s", "x none"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for context, found in contexts.items():
        for name, row in found["drafters"].items():
            mark = "{:.2f}" if int(context) <= TRAINED else "({:.2f})"
            taus = ["" if row[t] is None else mark.format(row[t]) for t in ("tau", "tau_not_looping")]
            table.add_row(
                context, name, middle(row["prefill_seconds"], 2), middle(row["prefill_peak_mib"]),
                middle(row["decode_peak_mib"]), f"{row['state_bytes'] / 1024:.0f}",
                f"{row['running_bytes'] / 1024:.0f}", f"{row['cache_bytes'] / 2**20:.1f}",
                middle(row.get("draft_ms_per_token"), 2), *taus, middle(row["tokens_per_second"]),
                middle(row["speedup"], 2),
            )  # fmt: skip
        table.add_section()
    console = Console()
    console.width = max(console.width, 140)
    console.print(table)


def middle(given: dict[str, float] | None, digits: int = 1) -> str:
    return "" if given is None else f"{given['median']:.{digits}f}"


def draw(contexts: dict[str, Any], path: Path) -> None:
    """The drafter's memory and its time per token, over the context."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2))
    lengths = sorted(map(int, contexts))
    for name in next(iter(contexts.values()))["drafters"]:
        rows = [contexts[str(c)]["drafters"][name] for c in lengths]
        if not all(row["state_bytes"] for row in rows):
            continue
        (line,) = left.plot(lengths, [row["state_bytes"] / 1024 for row in rows], marker="o", label=name)
        left.plot(lengths, [row["running_bytes"] / 1024 for row in rows], linestyle=":", color=line.get_color())
        ms = [row["draft_ms_per_token"] for row in rows]
        low, high = ([abs(m["median"] - m[end]) for m in ms] for end in ("min", "max"))
        right.errorbar(lengths, [m["median"] for m in ms], yerr=[low, high], marker="o", capsize=3, label=name)
    left.set_yscale("log")
    left.set_ylabel("drafter's state, KiB (dotted: running)")
    right.set_ylim(bottom=0)
    right.set_ylabel("milliseconds per drafted token")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{c:,}" for c in lengths])
        axes.set_xlabel("context, tokens")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    print(f"wrote {path}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", metavar="SPEC", help=f"SPECs, or names from {', '.join(DRAFTERS)}")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=32, help="new tokens, part of the context")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true", help="record the passes of target and Transformer drafter")
    parser.add_argument(
        "--documents", type=Path, default=Path("runs/demo/documents/heldout"), help="folder of held-out JSONL"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench/long_context.json"))
    parser.add_argument("--picture", type=Path, help="default: beside --out, as .svg")
    parser.add_argument("--draw", action="store_true", help="measure nothing: table and picture of --out")
    args = parser.parse_args()
    try:
        document = json.loads(args.out.read_text(encoding="utf-8")) if args.draw else measured(args)
    except (InputError, OSError) as error:
        parser.error(str(error))
    show(document["contexts"])
    draw(document["contexts"], args.picture or args.out.with_suffix(".svg"))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The whole document, written after each repetition."""
    lacking = [name for name in DOMAINS if not (args.documents / f"{name}.jsonl").is_file()]
    if lacking:
        raise InputError(
            f"there is no {lacking[0]}.jsonl in {args.documents}; build the demo's documents with "
            "`python -m recipes.demo.build`, or name another folder with --documents"
        )
    if args.repeats < 1 or args.tokens < 2 or min(args.contexts) <= args.tokens:
        raise InputError("repeats must be at least 1, tokens at least 2, and every context longer than the new tokens")
    wanted = ["none", *(args.drafters or DRAFTERS)]
    chosen = {name: DRAFTERS.get(name, name) for name in dict.fromkeys(wanted)}
    torch.set_num_threads(args.threads)
    settings = {k: getattr(args, k) for k in ("tokens", "repeats", "threads", "compile")}
    document: dict[str, Any] = {"machine": machine(), "arguments": {**settings, "drafters": chosen}}
    for found in measure(args, chosen):
        document["contexts"] = summary(found, args.tokens)
        write(args.out, document)
    return document


if __name__ == "__main__":
    main()
