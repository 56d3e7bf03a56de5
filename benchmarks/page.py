"""The tables of docs/results.md and docs/benchmarks.md from benchmarks/results: `python benchmarks/page.py`.

They stand between marks; the words around them are written by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def methods(document: dict[str, Any], temperature: str) -> str:
    found = document.get("temperatures", {}).get(temperature)
    if not found:
        return "Not measured."
    lines = [
        f"{found['not_looping']} of {found['prompts']} held-out prompts whose plain text does not loop.",
        "",
        "| method | tau | 95 % | speed-up | 95 % | acceptance by depth | draft, ms | verify, ms | same text |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|",
    ]
    for name, row in found["methods"].items():
        (tau, a, b), (speed, c, d) = row["not_looping"]["tau"], row["not_looping"]["speedup"]
        ms, depth = row["milliseconds_per_round"], " ".join(f"{x:.2f}" for x in row["alpha"][:5])
        drafted = f"{tau:.2f} | {a:.2f}-{b:.2f}" if tau else "| "  # transformers' own loops do not tell
        took = f"{ms['draft']:.1f} | {ms['verify']:.1f}" if tau else "| "
        lines.append(f"| {name} | {drafted} | {speed:.2f} | {c:.2f}-{d:.2f} | {depth} | {took} | {row['same_text']} |")
    return "\n".join(lines)


def cell(figures: dict[str, Any]) -> str:
    """tau and speed; the speed alone where rounds are not told, as by transformers' loops."""
    if not figures:
        return ""
    tau, speed = figures["tau"][0], f"{figures['speedup'][0]:.2f}x"
    return f"{tau:.2f} ({speed})" if tau else f"({speed})"


def domains(document: dict[str, Any], temperature: str) -> str:
    found = document.get("temperatures", {}).get(temperature)
    if not found:
        return "Not measured."
    names = list(next(iter(found["methods"].values()))["domains"])
    lines = ["| method | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    for name, row in found["methods"].items():
        cells = [cell(r) for r in row["domains"].values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ablations(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "Not measured."
    lines = ["| run | tau, T = 0 | of eagle's | tau, T = 1 | of eagle's | held-out loss |", "|---|--:|--:|--:|--:|--:|"]
    for r in rows:
        cells = " | ".join(f"{span(r['tau'][t])} | {span(r.get('ratio', {}).get(t))}" for t in ("0", "1"))
        lines.append(f"| {r['name']} | {cells} | {r['held_out_loss']:.4f} |")
    return "\n".join(lines)


def span(figures: list[float] | None) -> str:
    """A figure with its interval."""
    return "{:.2f} ({:.2f}-{:.2f})".format(*figures) if figures else ""


def lossy(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "Not measured."
    lines = [
        "| | tau | 95 % | speed-up | 95 % | log-likelihood | target's held-out loss | same text |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        (tau, a, b), (speed, c, d) = r["tau"], r["speedup"]
        loss, quality = f"{r['held_out_loss']:.3f}" if "held_out_loss" in r else "", f"{r['log_likelihood']:.3f}"
        lines.append(
            f"| {r['name']} | {tau:.2f} | {a:.2f}-{b:.2f} | {speed:.2f} | {c:.2f}-{d:.2f} | {quality} | {loss} | "
            f"{r['same_text']} |"
        )
    return "\n".join(lines)


def engine(cases: dict[str, Any]) -> str:
    columns = ("case", "method", "tokens/s", "ratio", "lowest-highest", "ratio n.l.", "tau", "tau n.l.", "overhead")
    lines = ["| " + " | ".join(columns) + " |", "|---|---|" + "--:|" * (len(columns) - 2)]
    for case, found in cases.items():
        for name, row in found.get("methods", {}).items():
            every, calm = row["all"], row.get("not_looping", row["all"])
            ratio, tau = every["speedup"], [f"{r['tau']:.2f}" if r["tau"] else "" for r in (every, calm)]
            share = f"{100 * row['shares']['overhead']:.1f} %" if row["shares"] else ""
            cells = [case, name, f"{every['tokens_per_second']['median']:.0f}", f"{ratio['median']:.2f}"]
            cells += [f"{ratio['min']:.2f}-{ratio['max']:.2f}", f"{calm['speedup']['median']:.2f}", *tau, share]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def drafting(document: dict[str, Any]) -> str:
    """Milliseconds of drafting for each drafted token of a chain, by temperature."""
    found = {t: d["drafting_milliseconds_per_token"] for t, d in document.get("temperatures", {}).items()}
    if not found:
        return "Not measured."
    names = list(dict.fromkeys(name for row in found.values() for name in row))
    lines = [
        "| chain of 5 | " + " | ".join(f"ms a token, T = {t}" for t in found) + " |",
        "|---|" + "--:|" * len(found),
    ]
    for name in names:
        cells = [f"{row[name]:.2f}" if name in row else "" for row in found.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bandits(document: dict[str, Any]) -> str:
    """Tokens per second of every arm and of the bandit over them, and its regret."""
    lines = ["| T | bandit | tokens/s | its arms | best | regret | regret by prompt |", "|---|---|--:|---|---|--:|--:|"]
    for t, found in document.get("temperatures", {}).items():
        for name, row in found["bandits"].items():
            speeds = row["tokens_per_second"]
            arms = ", ".join(f"{arm.split(', ', 1)[-1]}: {v:.0f}" for arm, v in speeds.items() if arm != name)
            best = row["best"].split(", ", 1)[-1]
            lines.append(
                f"| {t} | {name} | {speeds[name]:.0f} | {arms} | {best} | {100 * row['regret']:.1f} % | "
                f"{100 * row['regret_by_prompt']:.1f} % |"
            )
    return "\n".join(lines) if len(lines) > 2 else "Not measured."


def contexts(document: dict[str, Any]) -> str:
    columns = ("context", "drafter", "prefill, s", "prefill, MiB", "state, KiB", "running, KiB", "target's cache, MiB")
    columns += ("ms a drafted token", "tau", "tokens/s", "over plain")
    lines = ["| " + " | ".join(columns) + " |", "|--:|---|" + "--:|" * (len(columns) - 2)]
    for context, found in document.get("contexts", {}).items():
        claimed = "tau" in found["claimed"]
        for name, r in found["drafters"].items():
            ms = r.get("draft_ms_per_token")
            tau = f"{r['tau']:.2f}" if claimed else f"({r['tau']:.2f})"
            cells = [context, name, f"{r['prefill_seconds']['median']:.2f}", f"{r['prefill_peak_mib']['median']:.0f}"]
            cells += [f"{r['state_bytes'] / 1024:.0f}", f"{r['running_bytes'] / 1024:.0f}"]
            cells += [f"{r['cache_bytes'] / 2**20:.1f}", f"{ms['median']:.2f}" if ms else "", tau]
            cells += [f"{r['tokens_per_second']['median']:.0f}", f"{r['speedup']['median']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else "Not measured."


def filled(text: str, tables: dict[str, str]) -> str:
    """A page with other tables between the marks of these names."""
    for name, table in tables.items():
        mark = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(mark, lambda m, t=table: m[1] + t + "\n" + m[2], text, flags=re.S)
        assert count == 1, f"the page has no place for {name}"
    return text


def replaced(page: Path, tables: dict[str, str]) -> None:
    page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def results() -> dict[str, str]:
    """The tables of docs/results.md by the names of their marks."""
    drafters, runs, costs = read("drafters"), read("ablations").get("runs", []), read("lossy")
    mamba = read("mamba")
    return {
        "greedy": methods(drafters, "0"),
        "sampled": methods(drafters, "1"),
        "domains": domains(drafters, "0"),
        "ablations": ablations(runs),
        "ladder greedy": lossy(costs.get("ladder, T = 0", [])),
        "ladder sampled": lossy(costs.get("ladder, T = 1", [])),
        "mamba greedy": methods(mamba, "0"),
        "mamba sampled": methods(mamba, "1"),
        "drafting": drafting(mamba),
        "bandits": bandits(mamba),
        "contexts": contexts(read("long_context")),
        **{name: made(*map(read, files)) for name, (made, *files) in STUDIES.items()},
    }


STUDIES = {  # of `outrider bench`: the function of tables.py, the reports
    "batches": (tables.batches, "bench_batches"),
    "temperatures": (tables.temperatures, "bench_temperatures"),
    "sizes": (tables.sizes, "bench_sizes"),
    "variants": (tables.variants, "bench_variants"),
    "typical": (tables.typical, "bench_typical"),
    "causes": (tables.causes, "bench_sizes"),
    "calibration": (tables.calibration, "bench_calibration"),
}


def engines() -> dict[str, str]:
    """That of docs/benchmarks.md."""
    return {"engine": engine(read("engine").get("cases", {}))}


def main() -> None:
    replaced(ROOT / "docs" / "results.md", results())
    replaced(ROOT / "docs" / "benchmarks.md", engines())


if __name__ == "__main__":
    main()
