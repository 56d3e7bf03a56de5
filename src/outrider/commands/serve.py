"""`outrider serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
from math import isfinite
from typing import Annotated

import typer

from ..machine import use_threads
from . import options as opt

KEY = "OUTRIDER_API_KEY"


def serve(
    model: Annotated[str | None, typer.Argument(help="demo, smollm2, a .gguf file, a folder or a hub id.")] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="SPEC such as lookup or model:DIR; with several, requests choose.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[str, typer.Option(help="Key that clients must send.", envvar=KEY, show_envvar=True)] = "",
    name: Annotated[
        str | None,
        typer.Option("--name", "--served-model-name", help="The model's name for clients; default: MODEL."),
    ] = None,
    budget: Annotated[str, typer.Option(help="How much to draft: auto, 16x6, 3,2,1, ...")] = "auto",
    rows: Annotated[int, typer.Option("--rows", "--max-num-seqs", help="Maximum batch size.", min=1)] = 16,
    queue: Annotated[int, typer.Option(help="Texts that may wait; further requests get 429.", min=1)] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take.", min=1)] = 600.0,
    max_body: Annotated[
        float | None, typer.Option(help="Maximum MiB of a request's body. Default: 1, more for contexts above 16,384.")
    ] = None,
    max_connections: Annotated[int, typer.Option(help="Maximum open connections.", min=1)] = 1000,
    header_timeout: Annotated[float, typer.Option(help="Seconds for a request's header.", min=0.1)] = 10.0,
    send_timeout: Annotated[
        float, typer.Option(help="Seconds after which a client that reads nothing is disconnected.", min=0.1)
    ] = 10.0,
    prefill_share: Annotated[
        float, typer.Option(help="Share of the time for prefill while texts are decoded.", min=0.05, max=1)
    ] = 0.5,
    prefix_cache: Annotated[
        int, typer.Option(help="MiB of KV cache kept for prompts with a common prefix.", min=0)
    ] = 512,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds to finish running requests.", min=0)] = 30.0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    weights: opt.Weights = "auto",
    exact: opt.Exact = "auto",
    threads: opt.Threads = None,
    no_compile: opt.NoCompile = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line per request.")] = False,
) -> None:
    """Serve a model with OpenAI's API by speculative decoding: the same answers, faster.

    An answer is a function of prompt, seed and parameters; load, other requests and drafters do not change it. Open the
    address in a browser to chat.
    """
    from ..params import InputError, check_exact
    from . import check_names, check_place
    from .loading import check_drafter, check_threads, located, spinner

    check_names(dtype, device)
    check_threads(threads)
    check_exact(exact)
    if ":" in budget:
        raise InputError(f"--budget {budget!r} names drafters, but requests choose them here; give auto, 16x6 or 3,2,1")
    waits = {
        "--timeout": timeout, "--shutdown-timeout": shutdown_timeout, "--header-timeout": header_timeout,
        "--send-timeout": send_timeout,
    }  # fmt: skip
    for option, seconds in waits.items():
        if not isfinite(seconds):
            raise InputError(f"{option} must be a number of seconds, not {seconds}")
    if max_body is not None and not 0.001 <= max_body <= 4096:
        raise InputError(f"--max-body must be from 0.001 to 4,096 MiB, not {max_body}")
    for spec in drafter or ():
        check_drafter(spec)
    if os.name != "posix":
        raise InputError("the server runs on Linux and macOS; there, or under WSL, the same command starts it")
    place = located(model, weights)  # before torch is imported
    check_place(dtype, device)
    try:
        from ..serve.journal import Lines, Sparing
        from ..serve.server import listen, run
        from ..serve.service import Limits
    except ImportError as error:
        raise InputError(f"the server needs {error.name}; pip install 'outrider[serve]'") from None
    from ..serve.start import start

    lines = logging.StreamHandler()
    lines.setFormatter(Lines())
    lines.addFilter(Sparing())
    logging.basicConfig(level=logging.WARNING, handlers=[lines])
    logging.getLogger("outrider.serve").setLevel(logging.WARNING if quiet else logging.INFO)
    body = 0 if max_body is None else int(max_body * (1 << 20))
    limits = Limits(
        body=body, seconds=timeout, connections=max_connections, header=header_timeout, send=send_timeout
    )  # fmt: skip
    if threads is not None:
        use_threads(threads)
    with listen(host, port) as sock:
        with spinner(f"loading {place}"):
            service = start(
                place, drafter or None, name=name or place.name, rows=rows, queue=queue, limits=limits,
                prefill_share=prefill_share, prefix_cache=prefix_cache, budget=budget,
                dtype=dtype, device=device, weights=weights, exact=exact, trust_remote_code=trust_remote_code,
                **({"compile": False} if no_compile else {}),
            )  # fmt: skip
        where = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
        drafters = ", ".join(service.scheduler.fleet.drafters) or "none"
        from ..serve.gate import LOOPBACK

        if host not in LOOPBACK and not api_key:
            typer.echo(f"outrider: warning: open to the network without a key; set --api-key or {KEY}", err=True)
        same = "bit for bit" if service.exact == "bits" else "up to rounding (see outrider validate)"
        typer.echo(
            f"outrider: {service.llm.target.arithmetic}; the text of a seed does not depend on load, {same}",
            err=True,
        )
        typer.echo(f"outrider: serving {service.name} with {drafters} at {where} (page: {where}/)", err=True)
        code = run(service, sock, host, api_key, shutdown_timeout)
        service.llm.remember()
    if code:
        raise typer.Exit(code)
