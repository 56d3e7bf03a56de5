"""`outrider export`: a drafter in the format of another engine, with checks that its loader does not make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt


def export(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="A drafter's folder, in any layout that `outrider import` reads, or one that ships: smollm2/eagle3.",
        ),
    ],
    model: opt.Model = None,
    to: Annotated[str, opt.output("--to", help="safeailab, medusa, speculators, vllm or sglang.")] = "",
    out: Annotated[str | None, opt.output("--out", metavar="DIR", help="The new folder.")] = None,
    verify: Annotated[
        bool,
        opt.output("--verify", help="Check the new folder; without --out: check FOLDER."),
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Write FOLDER's drafter, trained for MODEL, in the format of SafeAILab's code, speculators, vLLM or SGLang.

    Engines leave missing weights random, skip unknown ones and mistake ids for offsets; all one sees is low acceptance.
    --verify checks every key and shape, NaN, the draft vocabulary, the layers, the fields of the config, and whether it
    is this target's drafter.
    """
    from .. import hub, shipped
    from ..params import FORMATS, InputError, check_format
    from .import_ import facts_of
    from .loading import located

    if not to:
        raise InputError(f"give a format by --to: one of {', '.join(FORMATS)}")
    check_format(to)
    if out is None and not verify:
        raise InputError("give --out DIR for the new folder, or --verify to check one")
    hub.ensure(shipped.drafter_at(folder))
    place = located(model)  # before torch is imported
    from ..checkpoints import read
    from ..checkpoints.check import check
    from ..checkpoints.files import folder_of
    from ..checkpoints.write import trimmed, write

    facts = facts_of(place)
    faults: list[str] = []

    def inspect(made: Path) -> None:
        faults.extend(check(made, to, facts))
        if faults and out is not None:
            raise InputError(f"the export failed its check and was not written: {'; '.join(faults)}")

    if out is None:
        inspect(folder_of(folder))
    else:
        checkpoint = read(folder, facts)
        write(checkpoint, to, facts, out, inspect if verify else None)
        if trimmed(checkpoint):
            typer.echo(f"{to} will draft from all tokens: it has no draft vocabulary for this drafter", err=True)
    if as_json:
        import json

        typer.echo(json.dumps({"folder": folder, "to": to, "out": out, "verified": verify, "faults": faults}))
    elif out is not None:
        target = "TARGET" if place.gguf else facts.name  # engines want a folder (docs/howto/engines.md)
        typer.echo(f"written for {to} to {out}{', checked' if verify else ''}: {launch(to, out, target)}")
    elif not faults:
        typer.echo(f"{folder} is what {to} loads for {facts.name}")
    else:
        for fault in faults:
            typer.echo(fault)
    if faults:
        raise typer.Exit(1)


# the engines' names of drafters, by architecture
KINDS = {
    "LlamaForCausalLMEagle": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
    "MedusaModel": "medusa",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
}


def launch(to: str, out: str, target: str) -> str:
    """The engine's command. target: the model's folder or hub id."""
    import json

    from ..checkpoints.peagle import VLLM

    config = json.loads((Path(out) / "config.json").read_text(encoding="utf-8"))
    names = config.get("architectures") or [""]
    kind = KINDS.get(names[0])
    if to == "vllm":
        given = {"method": kind, "model": out, "num_speculative_tokens": 4}
        if kind == "dflash":
            given["num_speculative_tokens"] = int(config["block_size"]) - 1
        elif VLLM[0] in config:  # P-EAGLE
            given |= {"num_speculative_tokens": int(config["outrider"]["parallel"]), "parallel_drafting": True}
        return f"vllm serve {target} --speculative-config '{json.dumps(given)}'"
    if to == "sglang":
        how = f"--speculative-algorithm {str(kind).upper()} --speculative-draft-model-path {out}"
        return f"python -m sglang.launch_server --model-path {target} {how}"
    return f"vllm serve {out}" if to == "speculators" else "load it with the method's own code"
