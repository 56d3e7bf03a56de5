"""`outrider generate --compare`: each prompt decoded without drafts, with drafts, and by transformers' `generate` if it
is installed."""

from __future__ import annotations

import statistics
from dataclasses import replace
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from ..params import LOSSY

if TYPE_CHECKING:
    from ..bench.peers.transformers import Stock
    from ..engine.request import Output
    from ..llm import LLM

REPEATS, ENOUGH = 3, 1.0  # each prompt is decoded REPEATS times, or once if that takes longer than ENOUGH seconds


def compare(llm: LLM, prompts: list[Any], seed: int | None, options: dict[str, Any], as_json: bool) -> list[Output]:
    """Print and return the drafted texts; print whether they equal plain decoding's, and the speed of each method."""
    from .generate import document, stream, usage_line

    llm = replace(llm, prefixes=None)  # every method reads every prompt
    stock, plain = _stock_of(llm), plain_of(llm)
    seed = 1 if seed is None else seed
    warm = {**options, "max_new_tokens": min(24, options["max_new_tokens"])}
    for prompt in prompts:
        plain.generate([prompt], seed=seed, **{**warm, "budget": None})
        llm.generate([prompt], seed=seed, **warm)
    if stock is not None:
        _stock(stock, llm, prompts[0], seed, warm, warm["max_new_tokens"])
    rows: list[dict[str, Any]] = []
    outputs: list[Output] = []
    for prompt in prompts:
        if not as_json:
            typer.secho(_show(llm, prompt), fg="bright_black")
            line = usage_line(llm, stream(llm, prompt, seed, options), options)
            typer.secho(line, fg="bright_black", err=True)
        row, output = _one(llm, plain, stock, prompt, seed, options)
        rows.append(row)
        outputs.append(output)
    _report(llm, outputs, rows, document(llm, outputs, options["rule"], seed), difference(llm, options), as_json)
    if not difference(llm, options) and not all(r["equal"] for r in rows):
        raise RuntimeError(
            "the drafted text differs from plain decoding: please report this, with what `outrider validate` and "
            "`outrider audit` say"
        )
    return outputs


def _stock_of(llm: LLM) -> Stock | None:
    """transformers' `generate` for the same model; None if transformers is not installed."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        return None
    from transformers import GenerationConfig

    from ..bench.peers.transformers import Stock

    return Stock(llm.target.model, {"generation_config": GenerationConfig()})


def plain_of(llm: LLM) -> LLM:
    """The same target without drafts."""
    from .. import drafters

    return replace(llm, drafter=drafters.load("none"), drafter_name="none", budget="auto", budgets={})


def difference(llm: LLM, options: dict[str, Any]) -> str:
    """Why texts may differ from plain decoding's; "" where they must not."""
    if options["rule"] != "coupled" and options["sampling"].temperature > 0:
        if options["rule"] in LOSSY:
            return f"; {options['rule']} is lossy: it changes the distribution of the text"
        return f"; {options['rule']} keeps the distribution, not the text"
    kind = llm.target.precision
    if kind not in ("float32", "float64") and llm.target.exact != "bits":
        return f"; in {kind} a pass over several tokens rounds differently than a pass over one"
    return ""


def _one(
    llm: LLM, plain: LLM, stock: Stock | None, prompt: Any, seed: int, options: dict[str, Any]
) -> tuple[dict[str, Any], Output]:
    """Plain decoding, drafting and transformers, interleaved; the median time of each for as many tokens."""
    seconds: dict[str, list[float]] = {"plain": [], "drafted": []}
    texts: dict[str, Output] = {}
    stocks: list[float] = []
    while len(seconds["plain"]) < (1 if seconds["plain"] and seconds["plain"][0] > ENOUGH else REPEATS):
        for name, which in (("plain", plain), ("drafted", llm)):
            began = perf_counter()
            mine = {**options, "budget": None} if which is plain else options  # plain rounds must not update the budget
            texts[name] = which.generate([prompt], seed=seed, **mine)[0]
            seconds[name].append(perf_counter() - began)
        if stock is not None:
            stocks.append(_stock(stock, llm, prompt, seed, options, len(texts["drafted"].tokens)))
    a, b = (statistics.median(seconds[k]) for k in ("plain", "drafted"))
    a = _as_long(a, texts["plain"], len(texts["drafted"].tokens))
    row = {
        "equal": texts["plain"].tokens == texts["drafted"].tokens,
        "tokens": len(texts["drafted"].tokens),
        "plain_seconds": a,
        "drafted_seconds": b,
        "speedup": a / b,
        "tau": texts["drafted"].usage.tau,
    }
    if stocks:
        row["transformers_seconds"] = statistics.median(stocks)
    return row, texts["drafted"]


def _as_long(seconds: float, output: Output, tokens: int) -> float:
    """Seconds of a text of `tokens` tokens at the speed of this one, which took `seconds`: under a rule that keeps the
    distribution alone, two texts end at different lengths."""
    written, prefill = len(output.tokens), output.usage.prefill_seconds
    if tokens == written or written < 2:  # a text of one token has no speed
        return seconds
    return prefill + (seconds - prefill) * (tokens - 1) / (written - 1)


def _stock(stock: Stock, llm: LLM, prompt: Any, seed: int, options: dict[str, Any], tokens: int) -> float:
    """Seconds of transformers' `generate` for so many tokens; it draws other samples, and goes on after their end."""
    from ..bench.types import Ask

    ask = Ask(tokens, options["sampling"].temperature, (seed,), frozenset())
    began = perf_counter()
    stock.run(llm.prompts([prompt]), ask)
    return perf_counter() - began


def _report(
    llm: LLM, outputs: list[Output], rows: list[dict[str, Any]], document: dict[str, Any], why: str, as_json: bool
) -> None:
    plain, drafted = (sum(r[f"{name}_seconds"] for r in rows) for name in ("plain", "drafted"))
    stock = sum(r.get("transformers_seconds", 0.0) for r in rows)
    tokens, same = sum(r["tokens"] for r in rows), sum(r["equal"] for r in rows)
    if as_json:
        import json

        totals = {
            "equal": same == len(rows),
            "plain_seconds": plain,
            "drafted_seconds": drafted,
            "speedup": plain / drafted,
        } | ({"transformers_seconds": stock} if stock else {})
        typer.echo(json.dumps({**document, "comparison": {"prompts": rows, **totals}}, ensure_ascii=False))
        return
    _table(llm, rows, why)
    beside = f", {tokens / stock:.0f} by transformers' generate ({stock / drafted:.2f} times as fast)" if stock else ""
    typer.secho(
        f"{same} of {len(rows)} texts identical to plain decoding under the same seed{why}. {llm.name} with the "
        f"drafter {llm.drafter_name}: {tokens / drafted:.0f} tokens/s, {tokens / plain:.0f} without drafts "
        f"({plain / drafted:.2f} times as fast){beside}; prefill included.",
        bold=True,
    )


def _table(llm: LLM, rows: list[dict[str, Any]], why: str) -> None:
    """Tokens per second of each method, one row per prompt."""
    from rich.console import Console
    from rich.table import Table

    methods = [name for name in ("transformers", "plain", "drafted") if f"{name}_seconds" in rows[0]]
    table = Table("prompt", "tokens", "tau", *methods, "speed-up", "text", box=None)
    for column in table.columns[:-1]:
        column.justify = "right"
    for i, r in enumerate(rows, 1):
        verdict = "identical" if r["equal"] else "different" if why else "DIFFERENT"
        speeds = (r["tokens"] / r[f"{name}_seconds"] for name in methods)
        cells = [f"{speed:.0f}/s" for speed in speeds]
        table.add_row(str(i), str(r["tokens"]), f"{r['tau']:.2f}", *cells, f"{r['speedup']:.2f}x", verdict)
    typer.echo()
    Console().print(table)


def _show(llm: LLM, prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
    return f"\n--- {text.strip()[-300:]}"
