"""report.html: one file that needs no network, for phones and desks, light and dark.

A section is a function of the document that returns its parts; one without data returns none and does not appear.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from . import plots, sections
from .draw import Plot
from .markup import Html, join, pictures, several, tag
from .report import counted, headline, problems

Section = Callable[[dict[str, Any]], list[Html]]


def drawn(of: Callable[[dict[str, Any]], list[Plot]], words: str) -> Section:
    """A section that is nothing but plots."""

    def section(document: dict[str, Any]) -> list[Html]:
        found = pictures(of(document))
        return [tag("p", words), *found] if found else []

    return section


LEAST = "at the run's smallest batch size"
SECTIONS: dict[str, Section] = {
    "Problems": sections.wrong,
    "Results": sections.results,
    "Mean speed-up": drawn(
        plots.macro,
        "Means over the tasks, with intervals of 95 %; the stroke at 1 is plain decoding. Grey: plain decoding itself "
        "and others' loops; blue: ours; orange: lossy.",
    ),
    "Where the speed goes": sections.explained,
    "Time of a round": drawn(plots.rounds, "Draft, verification and all the rest, in means over the tasks."),
    "Acceptance by depth": drawn(
        plots.depths,
        "Of the nodes tested at a depth (all before them were accepted), the share accepted: the mean as a mark; the "
        f"spread over prompts from 10 to 90 % as a line, from 25 to 75 % as a bar, its median as a stroke; {LEAST}.",
    ),
    "Acceptance by position": drawn(
        plots.positions,
        "The share of all rounds in which a node of the tree was accepted, nodes in the drafter's order: the mean as a "
        f"mark, the spread over prompts as above; {LEAST}.",
    ),
    "Reliability of confidence": drawn(
        plots.reliability,
        "How often drafted nodes were accepted, over the confidence that the drafter had; on the dashed line the "
        f"confidence is right. All tasks together, {LEAST}.",
    ),
    "Tree size": drawn(plots.sizes, "The same drafter with larger and larger trees."),
    "Tree against chain": drawn(plots.chains, "The same drafter, drafting several branches or one."),
    "Batch size": drawn(plots.batches, "The more rows share a pass, the less idle the machine is to draft with."),
    "Temperature": drawn(plots.temperatures, f"Tokens a round over the temperature, by rule; {LEAST}."),
    "Context length": drawn(plots.contexts, "The same prompts, cut to different lengths."),
    "Promised and measured": sections.theory,
    "Variants of the target": sections.variants,
    "Room in memory": sections.capacity,
    "Lossy methods": sections.lossy,
    "Predicted for a recorded model": sections.predicted,
    "Divergences": sections.divergences,
    "All cells": sections.everything,
    "How it was measured": sections.how,
}


def page(document: dict[str, Any]) -> str:
    """The whole file."""
    made = [(title, parts) for title, section in SECTIONS.items() if (parts := section(document))]
    links = [tag("a", title, href=f"#{anchor(title)}") for title, _ in made]
    body = [tag("section", tag("h2", title), *parts, id=anchor(title)) for title, parts in made]
    data = files(__package__) / "data"
    style, script = ((data / f"report.{end}").read_text(encoding="utf-8") for end in ("css", "js"))
    head = [
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", f"Outrider bench: {document['run']['target']}"), tag("style", Html(style)),
    ]  # fmt: skip
    main = tag("main", top(document), tag("nav", *links, aria_label="Sections"), *body)
    whole = tag("html", tag("head", *head), tag("body", main, tag("script", Html(script))), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


def top(document: dict[str, Any]) -> Html:
    """What was run, and the honest headline."""
    run, cells = document["run"], document["cells"]
    counts = {n: len({c[n] for c in cells}) for n in ("method", "task", "temperature", "batch")}
    words = {"method": "method", "task": "task", "temperature": "temperature", "batch": "batch size"}
    grid = " × ".join(several(counts[k], word) for k, word in words.items())
    first, *rest = headline(document)
    wrong = sum(len(p.cells) for p in problems(document) if p.state != "partial")
    facts = {
        "cells": f"{len(counted(document))} of {len(cells)}" if wrong else str(len(cells)),
        "prompts": str(sum(t["prompts"] for t in document["tasks"].values())),
        "texts compared with plain decoding": str(sum(c.get("compared") or 0 for c in counted(document))),
        "of those the same": str(sum(c.get("same_text") or 0 for c in counted(document))),
    }
    tiles = [tag("div", tag("dt", k), tag("dd", v)) for k, v in facts.items()]
    return tag(
        "header", tag("p", "Outrider bench", class_="eyebrow"), tag("h1", run["target"]),
        tag("p", join([grid, ". ", sections.machine(run)]), class_="soft"), tag("p", first, class_="headline"),
        *(tag("p", s) for s in rest), tag("dl", *tiles, class_="tiles"),
    )  # fmt: skip
