"""Training data by the target itself: it writes the answers, in batches, speculating; the file grows line by line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..budget import AdaptiveBudget
from ..engine import Engine, Request, generate
from ..noise import RaceNoise
from ..stopping import Stop
from ..types import Drafter, InputError, Sampling, Target


def questions(paths: Sequence[str | Path]) -> Iterator[tuple[str, Any]]:
    """(where, what to answer) of each line: messages up to the first answer, a prompt, or the opening of a text."""
    for path in map(Path, paths):
        if not path.is_file():
            raise InputError(f"there is no file {path}; give JSONL whose prompts are to be answered")
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise InputError(f"{where} is not valid JSON ({error.msg}); correct or remove the line") from None
                if isinstance(row, dict) and isinstance(row.get("messages"), list):
                    asked = []
                    for message in row["messages"]:
                        if message.get("role") == "assistant":
                            break
                        asked.append({"role": message.get("role", "user"), "content": message.get("content", "")})
                    if not asked:
                        raise InputError(f"{where} begins with an answer; put a question before it")
                    yield where, asked
                elif isinstance(row, dict) and isinstance(row.get("prompt", row.get("text")), str):
                    yield where, row.get("prompt", row.get("text"))
                else:
                    raise InputError(f"{where} has neither messages, nor a prompt, nor a text; give one of them")


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
    """Append an answer for every question that has none in `out`; how many were written.

    A text is continued from its first `opening` tokens. Question i is answered with seed + i, whatever was there.
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
    engine = Engine(target, drafter, AdaptiveBudget(), RaceNoise(target.vocab, getattr(target, "device", "cpu")))
    requests = [
        Request(ids, seed + i, max_new_tokens, Sampling(temperature=temperature), cut)
        for (i, _, _), ids in zip(waiting, prompts, strict=True)
    ]
    written = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
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
                file.write(json.dumps(line) + "\n")
                file.flush()
                written += 1
            done(1)
    return written


def finished(out: Path) -> set[int]:
    """The questions that have an answer; a line cut off by an interruption is removed."""
    if not out.exists():
        return set()
    lines = out.read_text(encoding="utf-8").split("\n")
    if lines and lines[-1]:
        out.write_text("".join(line + "\n" for line in lines[:-1]), encoding="utf-8")
    found = set()
    for number, line in enumerate(lines[:-1], 1):
        try:
            found.add(int(json.loads(line)["id"]))
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{out}:{number} was not written by this command; give another --out") from None
    return found


def _ids(tokenizer: Any, what: Any, opening: int) -> list[int]:
    if isinstance(what, str):
        return list(tokenizer(what)["input_ids"])[:opening]
    if getattr(tokenizer, "chat_template", None):
        return list(tokenizer.apply_chat_template(what, add_generation_prompt=True, return_dict=True)["input_ids"])
    text = "".join(f"{m['role'].capitalize()}: {m['content']}\n" for m in what) + "Assistant: "
    return list(tokenizer(text)["input_ids"])
