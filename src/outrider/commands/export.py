"""`outrider export`: a drafter as other engines load it, and a check of what their loaders let through."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    folder: Annotated[str, typer.Argument(help="A drafter's folder, of whatever layout `outrider import` reads.")],
    to: Annotated[str, typer.Option(help="safeailab, medusa, speculators, vllm or sglang.")],
    target: Annotated[str, typer.Option(help="The drafter's target, a folder or hub id; demo: ours.")],
    out: Annotated[str | None, typer.Option(help="The new folder.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the folder strictly before it stays; without --out, check FOLDER.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Write FOLDER's drafter as SafeAILab's code, speculators, vLLM or SGLang load it.

    Engines leave missing weights random, skip unknown ones and take ids for offsets; a low acceptance is all one sees.
    --verify finds that: each key and shape, NaN, the draft vocabulary, the layers, the fields of the config, and
    whether it is this target's drafter.
    """
    from ..checkpoints import read
    from ..checkpoints.check import check
    from ..checkpoints.write import FORMATS, write
    from ..types import InputError
    from .import_ import facts_of

    if to not in FORMATS:
        raise InputError(f"there is no format {to!r}; choose one of {', '.join(FORMATS)}")
    if out is None and not verify:
        raise InputError("say where the folder goes (--out DIR), or check one that is there (--verify)")
    facts = facts_of(target)
    faults: list[str] = []

    def inspect(made: Path) -> None:
        faults.extend(check(made, to, facts))
        if faults and out is not None:
            raise InputError(f"the export failed its check, and nothing is written: {'; '.join(faults)}")

    if out is None:
        inspect(Path(folder))
    else:
        write(read(folder, facts), to, facts, out, inspect if verify else None)
    if as_json:
        import json

        typer.echo(json.dumps({"folder": folder, "to": to, "out": out, "verified": verify, "faults": faults}))
    elif out is not None:
        typer.echo(f"written for {to} to {out}{', checked' if verify else ''}: {launch(to, out, facts.name)}")
    elif not faults:
        typer.echo(f"{folder} is what {to} loads for {facts.name}")
    else:
        for fault in faults:
            typer.echo(fault)
    if faults:
        raise typer.Exit(1)


def launch(to: str, out: str, target: str) -> str:
    """How the engine is told."""
    import json

    names = json.loads((Path(out) / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    kind = {"LlamaForCausalLMEagle": "eagle", "LlamaForCausalLMEagle3": "eagle3", "MedusaModel": "medusa"}.get(names[0])
    if to == "vllm":
        given = json.dumps({"method": kind, "model": out, "num_speculative_tokens": 4})
        return f"vllm serve {target} --speculative-config '{given}'"
    if to == "sglang":
        how = f"--speculative-algorithm {str(kind).upper()} --speculative-draft-model-path {out}"
        return f"python -m sglang.launch_server --model-path {target} {how}"
    return f"vllm serve {out}" if to == "speculators" else "load it with the method's own code"
