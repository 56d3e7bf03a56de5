"""`outrider generate --compare`: each prompt decoded plainly and with drafts, under one seed."""

from __future__ import annotations

import statistics
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..llm import LLM, Output

REPEATS = 3


def compare(llm: LLM, prompts: list[Any], seed: int | None, options: dict[str, Any], as_json: bool) -> None:
    """Print what was written, whether both texts are equal, and how much faster drafting was."""
    from .. import drafters
    from .generate import document, stream

    plain = replace(llm, drafter=drafters.load("none"), drafter_name="none", budgets={})
    seed = 1 if seed is None else seed
    warm = {**options, "max_new_tokens": min(24, options["max_new_tokens"])}
    for prompt in prompts:
        plain.generate([prompt], seed=seed, **{**warm, "budget": None})
        llm.generate([prompt], seed=seed, **warm)
    rows: list[dict[str, Any]] = []
    outputs: list[Output] = []
    for prompt in prompts:
        if not as_json:
            typer.secho(_show(llm, prompt), fg="bright_black")
            stream(llm, prompt, seed, options)
        row, output = _one(llm, plain, prompt, seed, options)
        rows.append(row)
        outputs.append(output)
    _report(llm, outputs, rows, document(llm, outputs, options["rule"], seed), _difference(llm, options), as_json)
    if not _difference(llm, options) and not all(r["equal"] for r in rows):
        raise RuntimeError("the drafted text differs from plain decoding: please report this with `outrider audit`")


def _difference(llm: LLM, options: dict[str, Any]) -> str:
    """Why texts may differ from plain decoding's; "" where they must not."""
    if options["rule"] != "coupled" and options["temperature"] > 0:
        return f"; under {options['rule']} the law is the same, not the text"
    kind = str(getattr(llm.target, "dtype", "float32")).removeprefix("torch.")
    if kind not in ("float32", "float64"):
        return f"; in {kind} a pass over several tokens rounds differently from a pass over one"
    return ""


def _one(llm: LLM, plain: LLM, prompt: Any, seed: int, options: dict[str, Any]) -> tuple[dict[str, Any], Output]:
    """Plain and drafted in turn, several times; the median of each."""
    seconds: dict[str, list[float]] = {"plain": [], "drafted": []}
    texts: dict[str, Output] = {}
    for _ in range(REPEATS):
        for name, which in (("plain", plain), ("drafted", llm)):
            began = perf_counter()
            mine = {**options, "budget": None} if which is plain else options  # plain rounds teach a budget nothing
            texts[name] = which.generate([prompt], seed=seed, **mine)[0]
            seconds[name].append(perf_counter() - began)
    a, b = (statistics.median(seconds[k]) for k in ("plain", "drafted"))
    row = {
        "equal": texts["plain"].tokens == texts["drafted"].tokens,
        "tokens": len(texts["drafted"].tokens),
        "plain_seconds": a,
        "drafted_seconds": b,
        "speedup": a / b,
        "tau": texts["drafted"].usage.tau,
    }
    return row, texts["drafted"]


def _report(
    llm: LLM, outputs: list[Output], rows: list[dict[str, Any]], found: dict[str, Any], why: str, as_json: bool
) -> None:
    plain, drafted = sum(r["plain_seconds"] for r in rows), sum(r["drafted_seconds"] for r in rows)
    tokens, same = sum(r["tokens"] for r in rows), sum(r["equal"] for r in rows)
    if as_json:
        import json

        totals = {
            "equal": same == len(rows),
            "plain_seconds": plain,
            "drafted_seconds": drafted,
            "speedup": plain / drafted,
        }
        typer.echo(json.dumps({**found, "comparison": {"prompts": rows, **totals}}, ensure_ascii=False))
        return
    typer.echo()
    for i, r in enumerate(rows, 1):
        verdict = "identical" if r["equal"] else "another text" if why else "DIFFERENT"
        typer.echo(f"prompt {i}: {r['tokens']:4d} tokens  tau {r['tau']:.2f}  {r['speedup']:.2f}x  {verdict}")
    typer.secho(
        f"\n{same} of {len(rows)} texts identical to plain decoding under the same seed{why}. With the drafter "
        f"{llm.drafter_name}: {tokens / drafted:.0f} tokens/s against {tokens / plain:.0f}, "
        f"{plain / drafted:.2f} times as fast (prompts included, medians of {REPEATS}).",
        bold=True,
    )


def _show(llm: LLM, prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
    return f"\n--- {text.strip()[-300:]}"
