"""`outrider generate`: writes text as it comes, drafted tokens in another colour, a line of usage at the end."""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..llm import LLM, Output

DRAFTED = "cyan"


def generate(
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT...", help="A hub id or folder, then prompts; one argument alone is a prompt."
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="SPEC such as lookup, suffix, model:DIR; give several for a mix.")
    ] = None,
    rule: Annotated[str, typer.Option(help="coupled, rejection, block, or typical (lossy).")] = "coupled",
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow a rule that changes the text's law.")] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_new_tokens: int = 128,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string (repeatable).")] = None,
    n: Annotated[int, typer.Option("-n", "--samples", help="Texts per prompt; sample j uses seed + j.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Default: a fresh seed for every prompt.")] = None,
    prompts_file: Annotated[str | None, typer.Option(help="JSONL of prompts or chat messages.")] = None,
    batch_size: int = 8,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt in the model's chat template.")] = False,
    nodes: Annotated[
        int | None, typer.Option(help="A fixed tree size (root included) instead of the adaptive one.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="A fixed depth instead of the adaptive one.")] = None,
    arms: Annotated[
        str | None, typer.Option(help="Tree shapes for a bandit: '3,2,1 1,1 none', or '1:3,2,1 2:1,1' of drafters.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile: Annotated[
        bool, typer.Option("--compile", help="Record the models' passes first: the same text, sooner.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also decode plainly; show equality and speed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Write text with a model, speculating: the same text as without, sooner.

    Without MODEL, the demo model that ships with the package. With --compare and no prompt, its held-out prompts.
    """
    from .. import InputError, Sampling, load
    from . import check_place

    law: dict[str, Any] = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }  # fmt: skip
    if rule == "typical" and not lossy:
        raise InputError("typical acceptance changes the text's law; say --lossy if that is what you want")
    Sampling(**law)  # these complain before a model is loaded
    check_place(dtype, device)
    budget = _budget(nodes, depth, arms)
    choose = _chosen(arms or "", budget, len(drafter or [""]))
    model, prompts = _prompts(args or [], prompts_file, compare, chat)
    llm = load(model, drafter or None, dtype=dtype, device=device, compile=compile, choose=choose)
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, stop=stop or (), rule=rule, budget=budget, **law)
    if compare:
        if n != 1:
            raise InputError("--compare decodes one text per prompt; leave out --samples")
        from .compare import compare as show

        show(llm, prompts, seed, options, as_json)
    elif as_json:
        outputs = llm.generate(prompts, n=n, seed=seed, batch_size=batch_size, **options)
        _print_json(document(llm, outputs, rule, seed))
    elif len(prompts) == 1 and n == 1:
        stream(llm, prompts[0], seed, options)
    else:
        for output in llm.generate(prompts, n=n, seed=seed, batch_size=batch_size, **options):
            typer.echo(output.text)
            typer.secho(usage_line(output), fg="bright_black", err=True)


def _prompts(args: list[str], file: str | None, compare: bool, chat: bool) -> tuple[str | None, list[Any]]:
    """MODEL and prompts: a word alone is a prompt, unless the prompts come from a file."""
    from .. import InputError, prompts

    if file is not None:
        if len(args) > 1:
            raise InputError("give prompts as arguments or as a file, not both")
        found = prompts.read(file)
        model = args[0] if args else None
    elif not args:
        if not compare:
            raise InputError('give a prompt, as in: outrider generate "Once upon a time"')
        return None, held_out()
    else:
        model, found = (None, list(args)) if len(args) == 1 else (args[0], list(args[1:]))
    if "" in found:
        raise InputError("the prompt is empty; give some text")
    if chat:
        found = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in found]
    return None if model == "demo" else model, found


def held_out() -> list[Any]:
    """One held-out prompt per domain of the demo target's text."""
    import json

    lines = (files("outrider") / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    first: dict[str, Any] = {}
    for line in map(json.loads, lines):
        first.setdefault(line["domain"], line.get("messages") or line["text"])
    return list(first.values())


def _budget(nodes: int | None, depth: int | None, arms: str | None) -> Any:
    from ..budget import FixedBudget
    from ..types import InputError

    if arms is not None:
        from ..bandit import BanditBudget, parse

        if nodes is not None or depth is not None:
            raise InputError("--arms chooses the shape of every tree; leave out --nodes and --depth")
        return BanditBudget(parse(arms))
    if nodes is None and depth is None:
        return None
    if (nodes is not None and nodes < 1) or (depth is not None and depth < 0):
        raise InputError("--nodes must be at least 1 and --depth at least 0")
    return FixedBudget(nodes or 32, 6 if depth is None else depth)


def _chosen(arms: str, budget: Any, drafters: int) -> bool:
    """Does a bandit choose among drafters?"""
    from ..bandit import part_of, shape_of
    from ..types import InputError

    if ":" not in arms:
        return False
    named = {part_of(arm) + 1 for arm in budget.arms if shape_of(arm)}
    if named != set(range(1, drafters + 1)):
        given = ", ".join(map(str, sorted(named)))
        raise InputError(f"--arms names the drafters {given}, and --drafter gives {drafters}; name each of them")
    return drafters > 1


def stream(llm: LLM, prompt: Any, seed: int | None, options: dict[str, Any]) -> None:
    """Text as it comes, drafted tokens in colour where the terminal has colours."""
    how = {name: options[name] for name in ("rule", "budget")}
    request, stops = llm.request(prompt, seed=seed, **{k: v for k, v in options.items() if k not in how})
    text, row = llm.text_stream(stops), None
    for piece in llm.pieces(request, **how):
        row, shown = piece.row, stops.visible(piece.tokens)
        for tokens, colour in ((shown[: piece.drafted], DRAFTED), (shown[piece.drafted :], None)):
            typer.secho(text.push(tokens), fg=colour, nl=False)
    typer.echo(text.flush())
    if row is not None:
        typer.secho(usage_line(llm.output(row, 0, stops)), fg="bright_black", err=True)


def usage_line(output: Output) -> str:
    u = output.usage
    rate = (u.new_tokens - 1) / u.decode_seconds if u.decode_seconds else 0.0
    return (
        f"[{u.new_tokens} tokens, {u.rounds} rounds, tau {u.tau:.2f}, {rate:.0f} tokens/s after "
        f"{u.prefill_seconds * 1000:.0f} ms of prompt; {output.finish_reason}, seed {output.seed}]"
    )


def document(llm: LLM, outputs: list[Output], rule: str, seed: int | None) -> dict[str, Any]:
    """The JSON of `generate` (docs/formats.md)."""
    from ..types import LOSSY
    from .info import versions

    return {
        "outputs": [
            {
                "prompt": o.prompt,
                "text": o.text,
                "tokens": o.tokens,
                "finish_reason": o.finish_reason,
                "seed": o.seed,
                "usage": usage_dict(o),
            }
            for o in outputs
        ],
        "target": llm.name,
        "drafter": llm.drafter_name,
        "rule": rule,
        "lossless": rule not in LOSSY,
        "seed": seed,
        "versions": versions(),
    }


def usage_dict(output: Output) -> dict[str, Any]:
    u = output.usage
    return {**asdict(u), "tau": u.tau, "alpha": u.alpha, "overhead_seconds": u.overhead_seconds}


def _print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, ensure_ascii=False))
