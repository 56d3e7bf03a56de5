"""`outrider validate`: proves on this machine that tree passes of a model equal sequential decoding."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from . import options as opt


def validate(
    model: opt.Model = None,
    seed: Annotated[int, opt.sampling("--seed", help="Of the random prompts.")] = 0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    exact: opt.Exact = "auto",
    weights: opt.Weights = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
) -> None:
    """Prove on this machine that MODEL's passes over draft trees equal its passes over plain text.

    Uses the precision of generate. A negative control with a wrong mask must be far off. Prints PASS bits, PASS
    rounding or FAIL, and exits 1 on FAIL.
    """
    from ..params import check_exact
    from . import check_names, check_place
    from .loading import located, spinner

    check_names(dtype, device)
    check_exact(exact)
    place = located(model, weights)
    check_place(dtype, device)
    from ..backends.choose import load
    from ..backends.torch.validate import validate as prove

    with spinner(f"loading {place}"):
        loaded = load(
            place, dtype=dtype, device=device, trust_remote_code=trust_remote_code, exact=exact, weights=weights
        )
    report = prove(loaded.target, seed)
    if as_json:
        import json

        typer.echo(json.dumps({**asdict(report), "seed": seed}))
    else:
        typer.echo(report.sentence)
    if not report.exact:
        raise typer.Exit(1)
