"""What the scripts beside this file share. They run in environments of their own, so it wants Python alone.

    python SCRIPT < JOB

JOB is JSON: {"model": a folder, "gguf": a file, "method": one of the script's, "drafter": SPEC or a folder,
"source": the folder of an engine's code, where it is no package, "dtype", "prompts": {task: [chat]}, a chat being its
turns and a turn its ids, "ends": ids that end a text, "tokens": most tokens of a text, "temperatures", "batches",
"repeats"}.
A line of JSON comes out for each temperature, batch size and task: {"engine": its version, "method", "temperature",
"batch", "task", "tokens", "seconds": one for each repeat, "texts": [[ids]]}. What the engine prints goes to stderr.

With "contexts" in the job, its "ids" are one long text, cut into prompts of so many tokens for each batch, and a line
holds "rates": tokens per second of the steps in which all texts write on. "most": how many tokens the prompts of a
batch may have.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Texts = list[list[int]]
# Prompts, temperature, texts at a time, whether they continue the previous call's texts, whose cache may then be used.
Write = Callable[[Texts, float, int, bool], Texts]
Decode = Callable[[Texts], tuple[int, float]]  # prompts -> tokens and seconds of the steps in which all texts wrote on

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))


def serve(start: Callable[[dict[str, Any]], tuple[str, Write, Decode | None]]) -> None:
    """Time what `start(job)` returns: the engine's version, a function that writes texts, and one that decodes."""
    job, lines = json.load(sys.stdin), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    version, write, decode = start(job)
    if job.get("contexts"):
        assert decode is not None, "this engine has no batches"
        for line in by_context(job, decode):
            print(json.dumps({"engine": version, "method": job["method"], **line}), file=lines)
        return
    every = [chat[0] for chats in job["prompts"].values() for chat in chats]

    def answers(chats: list[Texts], temperature: float, batch: int) -> Texts:
        """Each turn of each chat answered, after all that was read and written before."""
        texts: Texts = []
        before: Texts = [[] for _ in chats]
        for turn in range(max(map(len, chats))):
            rows = [row for row, chat in enumerate(chats) if len(chat) > turn]
            prompts = [before[row] + chats[row][turn] for row in rows]
            made = [cut(text, job) for text in write(prompts, temperature, batch, turn > 0)]
            for row, prompt, text in zip(rows, prompts, made, strict=True):
                before[row] = prompt + [token for token in text if token not in job["ends"]]
            texts += made
        return texts

    for temperature in job["temperatures"]:
        for batch in job["batches"]:
            write(every[: 2 * batch], temperature, batch, False)  # load, compile, record, learn
            for task, chats in job["prompts"].items():
                seconds, texts = [], []
                for _ in range(job["repeats"]):
                    began = time.perf_counter()
                    texts = [text for group in groups(chats, batch) for text in answers(group, temperature, batch)]
                    seconds.append(time.perf_counter() - began)
                line = {"engine": version, "method": job["method"], "temperature": temperature, "batch": batch}
                line |= {"task": task, "tokens": sum(map(len, texts)), "seconds": seconds, "texts": texts}
                print(json.dumps(line), file=lines)


def groups(chats: list[Texts], batch: int) -> list[list[Texts]]:
    """Chats that are answered together, turn by turn. Where all have a single turn that is every one of them, since
    engines fill their batches themselves."""
    size = batch if max(map(len, chats)) > 1 else len(chats)
    return [chats[first : first + size] for first in range(0, len(chats), size)]


def by_context(job: dict[str, Any], decode: Decode) -> Iterator[dict[str, Any]]:
    """A line for each context and batch size that is not too much: tokens per second of every repeat."""
    for context in job["contexts"]:
        for batch in job["batches"]:
            if batch * context <= job["most"]:
                prompts = [job["ids"][row * context : (row + 1) * context] for row in range(batch)]
                decode(prompts)  # load, compile, record, learn
                rates = [tokens / seconds for tokens, seconds in (decode(prompts) for _ in range(job["repeats"]))]
                yield {"context": context, "batch": batch, "rates": rates}


def cut(text: list[int], job: dict[str, Any]) -> list[int]:
    """A text without what lies after its end."""
    end = next((i for i, token in enumerate(text) if token in job["ends"]), len(text))
    return text[: min(end + 1, job["tokens"])]
