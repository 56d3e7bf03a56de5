"""Outrider. Methods: plain, default (the drafter that ships)."""

from __future__ import annotations

from typing import Any

from job import Texts, Write, serve

import outrider


def start(job: dict[str, Any]) -> tuple[str, Write]:
    llm = outrider.load(job["model"], "none" if job["method"] == "plain" else job["drafter"])

    def write(prompts: Texts, temperature: float, batch: int) -> Texts:
        found = llm.generate(prompts, max_new_tokens=job["tokens"], temperature=temperature, batch_size=batch, seed=1)
        return [output.tokens for output in found]

    return f"{outrider.__version__}, {llm.target.dtype}, {llm.target.exact}", write


serve(start)
