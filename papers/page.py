"""The tables of docs/results.md from papers/results: `python -m papers page`.

They stand between marks; the words around them are written by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import contexts, tables
from .rows import read
from .studies import RESULTS, ROOT

TABLES: dict[str, tuple[Any, ...]] = {  # mark: the function of tables.py, and the studies that it shows
    "coder greedy": (tables.engines(0.0), "engines/coder"),
    "coder sampled": (tables.engines(0.7), "engines/coder_sampled"),
    "coder 0.5b greedy": (tables.engines(0.0), "engines/coder_05b"),
    "coder 0.5b sampled": (tables.engines(0.7), "engines/coder_05b_sampled"),
    "coder 0.5b at 1": (tables.engines(1.0), "engines/coder_05b_sampled"),
    "plain engines": (tables.plain, "engines/plain"),
    "smollm2 greedy": (tables.methods(0.0), "smollm2"),
    "smollm2 warm": (tables.methods(0.6), "smollm2"),
    "smollm2 sampled": (tables.methods(1.0), "smollm2"),
    "smollm2 domains": (tables.domains, "smollm2"),
    "smollm2 causes": (tables.causes, "smollm2"),
    "smollm2 many": (tables.tasks, "smollm2_many"),
    "smollm2 taus": (tables.taus, "smollm2_taus"),
    "smollm2 batches": (tables.blocks, "smollm2_batches"),
    "smollm2 summaries": (tables.blocks, "smollm2_summaries"),
    "smollm2 variants": (tables.variants, "smollm2_variants"),
    "smollm2 ablations": (tables.ablations, "smollm2_ablations"),
    "smollm2 confidence": (tables.calibration, "smollm2_confidence"),
    "greedy": (tables.methods(0.0), "drafters"),
    "sampled": (tables.methods(1.0), "drafters"),
    "domains": (tables.domains, "drafters"),
    "causes": (tables.causes, "sizes"),
    "batches": (tables.batches, "batches"),
    "temperatures": (tables.temperatures, "temperatures"),
    "sizes": (tables.sizes, "sizes"),
    "blocks": (tables.blocks, "blocks"),
    "grafts": (tables.blocks, "grafts"),
    "variants": (tables.variants, "variants"),
    "typical": (tables.typical, "typical"),
    "ablations": (tables.ablations, "ablations"),
    "ladder greedy": (tables.ladder(0.0), "ladder", "medusa2"),
    "ladder sampled": (tables.ladder(1.0), "ladder", "medusa2"),
    "mamba greedy": (tables.methods(0.0), "mamba"),
    "mamba sampled": (tables.methods(1.0), "mamba"),
    "drafting": (tables.drafting, "mamba"),
    "bandits": (tables.bandits, "mamba"),
    "contexts": (tables.contexts, *(f"context_{n}" for n in contexts.LENGTHS)),
    "calibration": (tables.calibration, "calibration"),
    "engine": (tables.engine, "engine", "summaries", "untrained", "rules", "oracle"),
    "t5": (tables.t5, "t5"),
}


def filled(text: str, made: dict[str, str]) -> str:
    """A page with other tables between the marks of these names."""
    for name, table in made.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        assert text.count(start) == text.count(end) == 1, f"the page has no place for {name}"
        head, _, rest = text.partition(start)
        text = f"{head}{start}{table}\n{end}{rest.partition(end)[2]}"
    return text


def replaced(page: Path, made: dict[str, str]) -> None:
    page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")


def results() -> dict[str, str]:
    """The tables of docs/results.md by the names of their marks; "Not measured." where a study is not there."""
    collected = {}
    for mark, (made, *names) in TABLES.items():
        there = all((RESULTS / f"{name}.json").exists() for name in names)
        collected[mark] = made(*map(read, names)) if there else "Not measured."
    return collected


def main() -> None:
    replaced(ROOT / "docs" / "results.md", results())
