"""Training data by the target itself: it writes the answers, in batches, speculating; the file grows line by line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import files
from ..core.stopping import Stop
from ..engine import Engine, Request, generate
from ..params import Interrupted
from ..types import Drafter, Sampling, Target
from .questions import finished


def write(
    target: Target,
    drafter: Drafter,
    tokenizer: Any,
    asked: Sequence[tuple[str, Any]],
    out: str | Path,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
    opening: int,
    eos: frozenset[int],
    done: Callable[[int], None] = lambda count: None,
) -> int:
    """Append an answer for every question that has none in `out`.

    A text is continued from its first `opening` tokens. Question i is answered with seed + i, whatever was there.

    Returns:
        How many answers were written. An empty answer is not, since nothing can be learned from it.

    Raises:
        InputError: `out` is not a file of this command, or cannot be written; what it holds is kept.
        Interrupted: at Ctrl-C; the answers so far are kept.
    """
    out = Path(out)
    have = finished(out)
    waiting = [(i, where, what) for i, (where, what) in enumerate(asked) if i not in have]
    prompts = [_ids(tokenizer, what, opening) for _, _, what in waiting]

    def cut(output: Sequence[int], new: Sequence[int]) -> tuple[int, str | None]:
        return stop.cut(output, new)

    def text_of(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    stop = Stop(eos, (), max_new_tokens, text_of)
    engine = Engine.of(target, drafter)
    requests = [
        Request(ids, seed + i, max_new_tokens, Sampling(temperature=temperature), cut)
        for (i, _, _), ids in zip(waiting, prompts, strict=True)
    ]
    written = 0
    try:
        with files.writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        for piece in generate(engine, requests, batch_size):
            if piece.row.finish is None:
                continue
            i, _, what = waiting[piece.row.index]
            answer = text_of(piece.row.output)
            if isinstance(what, str):
                line = {"id": i, "prompt": text_of(prompts[piece.row.index]), "completion": answer}
            else:
                line = {"id": i, "messages": [*what, {"role": "assistant", "content": answer}]}
            line["ends"] = piece.row.finish == "eos"  # an answer that was cut off has no end to learn
            if answer.strip():
                files.append(out, json.dumps(line))
                written += 1
            done(1)
    except KeyboardInterrupt:
        more = f"{written} answer{'' if written == 1 else 's'} more"
        raise Interrupted(f"{out} has {more}, the same command goes on from there") from None
    return written


def _ids(tokenizer: Any, what: Any, opening: int) -> list[int]:
    if isinstance(what, str):
        return list(tokenizer(what)["input_ids"])[:opening]
    if getattr(tokenizer, "chat_template", None):
        return list(tokenizer.apply_chat_template(what, add_generation_prompt=True, return_dict=True)["input_ids"])
    text = "".join(f"{m['role'].capitalize()}: {m['content']}\n" for m in what) + "Assistant: "
    return list(tokenizer(text)["input_ids"])
