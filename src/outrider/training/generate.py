"""Training data from the target: it generates the answers in batches, appended line by line.

A line has an answer's text, and its token ids too where the text, read as training data, would give other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import files
from ..backends.torch import SeqTarget
from ..core.protocols import Drafter, Target
from ..core.text import detokenizer, text_of
from ..encoding import has_template
from ..engine import Engine, Request, Row, generate
from ..engine.stopping import Stop
from ..params import InputError, Interrupted, Sampling
from .data import document, timeless
from .questions import Asked, Opening, finished, mark, same_author

WINDOW = 8  # batches whose questions are sorted by length, to reduce padding


def write(
    target: Target,
    drafter: Drafter,
    tokenizer: Any,
    items: Sequence[tuple[str, Asked]],
    out: str | Path,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
    opening: int,
    eos: frozenset[int],
    done: Callable[[int], None] = lambda count: None,
    say: Callable[[str], None] = lambda words: None,
    by: Mapping[str, Any] | None = None,
) -> int:
    """Append an answer for every question without one in `out`.

    A text is continued from its first `opening` tokens. Question i uses seed + i. Questions that fill the model's
    context are left out, and `say` tells how many. by: who answers, for the lines (`questions.by`).

    Returns:
        The number of answers written. Empty answers are not.

    Raises:
        InputError: `out` is not a file of this command, or cannot be written; its contents are kept.
        Interrupted: at Ctrl-C; the answers so far are kept.
    """
    out, written = Path(out), 0

    def cut(output: Sequence[int], new: Sequence[int]) -> tuple[int, str | None]:
        return stop.cut(output, new)

    def answer_of(row: Row) -> str:
        return stop.text(row.request.prompt, row.output)

    def line(i: int, what: Asked, ids: Sequence[int], row: Row) -> dict[str, Any]:
        answer, ends = answer_of(row), row.finish == "eos"  # a truncated answer has no end
        made: dict[str, Any] = {"ends": ends} if by is None else {"ends": ends, "by": by}
        if isinstance(what, list):
            made = {"messages": [*what, {"role": "assistant", "content": answer}], **made}
        else:
            prompt = text_of(words.open(), ids)
            made = {"asked": mark(what), "prompt": prompt, "completion": answer, **made}
        if not stop.apart and not _faithful(made, [*ids, *row.output], tokenizer):
            made |= {"prompt_token_ids": list(ids), "token_ids": list(row.output)}
        return {"id": i, **made}

    words = detokenizer(tokenizer)
    stop = Stop(eos, (), max_new_tokens, words, apart=isinstance(target, SeqTarget))
    engine = Engine.of(target, drafter)
    sampling = Sampling(temperature=temperature)
    try:
        with files.alone(out):
            have = finished(out)
            same_author(out, have, by)
            todo = [(i, what, _ids(tokenizer, what, opening)) for i, (_, what) in enumerate(items) if i not in have]
            long = [i for i, _, ids in todo if len(ids) >= target.context]
            if long:
                which = f"question {long[0] + 1} fills" if len(long) == 1 else f"{len(long)} questions fill"
                more = "" if len(long) == 1 else f", the first of them question {long[0] + 1}"
                say(f"left out: {which} the context of {target.context} tokens{more}")
                done(len(long))
                todo = [one for one in todo if len(one[2]) < target.context]
            some = WINDOW * batch_size
            todo = [one for i in range(0, len(todo), some) for one in sorted(todo[i : i + some], key=_length)]
            requests = [Request(ids, seed + i, max_new_tokens, sampling, cut) for i, _, ids in todo]
            for piece in generate(engine, requests, batch_size):
                if piece.row.finish is None:
                    continue
                if answer_of(piece.row).strip():
                    files.append(out, json.dumps(line(*todo[piece.row.index], piece.row)))
                    written += 1
                done(1)
    except KeyboardInterrupt:
        more = f"{written} answer{'' if written == 1 else 's'} more"
        raise Interrupted(f"{out} has {more}; the same command resumes from there") from None
    return written


def _faithful(line: Mapping[str, Any], tokens: list[int], tokenizer: Any) -> bool:
    """Does a line's text give these tokens, with or without more of the template behind them?"""
    try:
        return list(document(line, "", tokenizer).tokens[: len(tokens)]) == tokens
    except (InputError, KeyError, NotImplementedError, ValueError):
        return False  # the template rewrites what was said before, or the tokenizer knows no offsets


def _length(question: tuple[int, Any, list[int]]) -> int:
    return len(question[2])


def _ids(tokenizer: Any, what: Asked, opening: int) -> list[int]:
    if isinstance(what, Opening):
        return list(tokenizer(what.text)["input_ids"])[:opening]
    if isinstance(what, str):
        return list(tokenizer(what)["input_ids"])
    if has_template(tokenizer):
        more = timeless(tokenizer.chat_template)
        made = tokenizer.apply_chat_template(what, add_generation_prompt=True, return_dict=True, **more)
        return list(made["input_ids"])
    text = "".join(f"{m['role'].capitalize()}: {m['content']}\n" for m in what) + "Assistant: "
    return list(tokenizer(text)["input_ids"])
