"""What alpha, c and gamma promise (Leviathan et al. 2023), and what came of it: `python -m papers.theory --help`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.params import InputError

from . import command, formulas


def theory(
    alpha: Annotated[
        float | None, typer.Option(help="Acceptance per drafted token that was tested, between 0 and 1.")
    ] = None,
    c: Annotated[float, typer.Option(help="Time of one drafter step, in target passes.")] = 0.0,
    gamma: Annotated[int | None, typer.Option(help="Tokens drafted per round. Default: the best number.")] = None,
    c_hat: Annotated[
        float | None, typer.Option("--c-hat", help="Operations of one drafter step, in target passes. Default: --c.")
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(metavar="V1,V2,...", help="Measured times of verification passes over 1, 2, ... nodes, any unit."),
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(help="Say which alpha this speed-up needs, with --gamma or the best one.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="The paper's table, computed and published.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this .svg, .png or .pdf.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Compare with a run: a file written by `outrider generate --compare --json`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Work out what speculation promises: the theorems of Leviathan et al. 2023.

    For example: python -m papers.theory --alpha 0.8 --c 0.05
    """
    if measured is not None and alpha is not None:
        raise InputError("--measured takes alpha from its file; leave out --alpha")
    results: dict[str, Any] = {}
    curve = None if verify is None else _curve(verify)
    if alpha is not None:
        results["promise"] = promise(alpha, c, gamma, c if c_hat is None else c_hat, curve)
    if speedup is not None:
        needed = formulas.required_alpha(speedup, c, gamma, curve)
        results["required"] = {"speedup": speedup, "c": c, "gamma": gamma, "alpha": needed}
    if measured is not None:
        results["measured"] = formulas.measured(_read(measured)).document()
    if table or not (results or plot):
        results["table"] = formulas.table()
    if plot is not None:
        _draw(plot, alpha, c, c if c_hat is None else c_hat)
        results["plot"] = str(plot)
    if as_json:
        typer.echo(json.dumps(results))
    else:
        show(results)


def promise(alpha: float, c: float, gamma: int | None, c_hat: float, curve: list[float] | None) -> dict[str, Any]:
    """What the theorems say of these numbers. Without gamma: for the best one. `gammas` holds those up to the best."""

    def row(gamma: int) -> dict[str, Any]:
        return {
            "gamma": gamma,
            "tau": formulas.expected_tokens(alpha, gamma),
            "speedup": formulas.speedup(alpha, gamma, c, curve),
            "operations": formulas.operations(alpha, gamma, c_hat),
        }

    best = formulas.optimal_gamma(alpha, c, curve)
    last = max(8, min(best + 2, 16)) if curve is None else min(16, len(curve) - 1)
    return {
        "alpha": alpha, "c": c, "c_hat": c_hat, "verify": curve, **row(best if gamma is None else gamma),
        "best_gamma": best, "best_speedup": formulas.speedup(alpha, best, c, curve), "pays": best > 0,
        "gammas": [row(g) for g in range(last + 1)],
    }  # fmt: skip


def show(results: dict[str, Any]) -> None:
    """The same for people."""
    if p := results.get("promise"):
        typer.echo(
            f"alpha {p['alpha']:g}, c {p['c']:g}, gamma {p['gamma']}: {p['tau']:.2f} tokens per round, "
            f"{p['speedup']:.2f} times as fast, {p['operations']:.2f} times the operations"
        )
        typer.echo("gamma  tokens/round  speed-up  operations")
        for r in p["gammas"]:
            mark = "  <- best" if r["gamma"] == p["best_gamma"] else ""
            typer.echo(f"{r['gamma']:5d}  {r['tau']:12.2f} {r['speedup']:8.2f}x {r['operations']:10.2f}x{mark}")
        if not p["pays"]:
            typer.echo("do not speculate: plain decoding is fastest here (drafting pays only if alpha is above c)")
        elif p["best_gamma"] == formulas.MOST:
            typer.echo("the more the better: drafting costs nothing here, or every drafted token is accepted")
        else:
            typer.echo(f"best gamma: {p['best_gamma']} ({p['best_speedup']:.2f} times as fast)")
    if r := results.get("required"):
        how = "the best gamma" if r["gamma"] is None else f"gamma {r['gamma']}"
        need = "cannot be reached with any alpha" if r["alpha"] is None else f"needs alpha {r['alpha']:.3f}"
        typer.echo(f"a speed-up of {r['speedup']:g} {need}, with c {r['c']:g} and {how}")
    if m := results.get("measured"):
        typer.echo(m["sentence"])
    if rows := results.get("table"):
        typer.echo("alpha  gamma  operations (paper)  speed-up (paper)      for c = c_hat = 0")
        for r in rows:
            typer.echo(
                f"{r['alpha']:5.1f}  {r['gamma']:5d}  {r['operations']:9.2f}x ({r['published_operations']:.2f}) "
                f"{r['speedup']:9.2f}x ({r['published_speedup']:.2f})"
            )
    if "plot" in results:
        typer.echo(f"wrote {results['plot']}")


def _curve(text: str) -> list[float]:
    try:
        return [float(x) for x in text.split(",")]
    except ValueError:
        raise InputError(f"--verify takes numbers with commas between them, as in 1,1.05,1.1, not {text!r}") from None


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes().decode("utf-8"))
    except OSError as error:
        reason = f"{file} cannot be read ({error.strerror})"
    except ValueError:
        reason = f"{file} is not JSON; give what `outrider generate --compare --json` wrote"
    raise InputError(reason)


def _draw(file: Path, alpha: float | None, c: float, c_hat: float) -> None:
    try:
        formulas.plot(file, alpha, c, c_hat)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    command.main(theory)
