"""Answers from servers as a resumable Ray Data pipeline over several machines.

Ray shards the questions, runs the workers and keeps checkpoints; requests and outputs are those of `outrider data
generate --endpoint`. Ray's `HttpRequestProcessorConfig` (2.60) is not used: it sends the requests of a batch
sequentially and ignores Retry-After.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.data
from ray.data.checkpoint import CheckpointConfig

from .. import files
from ..params import InputError
from ..training.answering import Question, Server, Written, answer, put
from ..training.endpoints import Wish
from ..training.questions import Asked, by

TOKENS = pa.list_(pa.int64())
LINES = pa.schema(
    {
        "id": pa.string(), "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "prompt": pa.string(), "completion": pa.string(), "ends": pa.bool_(),
        "prompt_token_ids": TOKENS, "token_ids": TOKENS,
        "by": pa.struct({"model": pa.string(), "temperature": pa.float64()}),
    }
)  # fmt: skip


def answers(batch: pa.Table, urls: Sequence[str], concurrency: int) -> pa.Table:
    """The row function: a batch of questions to the lines of their answers. Refused questions have no line."""
    rows: list[dict[str, Any]] = []
    waiting = [Question(row["id"], row["id"], json.loads(row["body"])) for row in batch.to_pylist()]
    asyncio.run(answer([Server(url) for url in urls], waiting, concurrency, rows.append, Written()))
    return pa.Table.from_pylist(rows, LINES)


def write(
    urls: Sequence[str],
    items: Sequence[tuple[str, Asked]],
    out: str | Path,
    wish: Wish,
    concurrency: int = 32,
    block: int = 256,
    askers: int = 1,
) -> None:
    """Write an answer for every question without one in `out`; the same call resumes.

    Args:
        urls: the servers, as `outrider.training.endpoints.connect` gives them; each worker uses all of them.
        items: (position, question), as `outrider.training.questions.questions` gives them.
        out: a folder that all machines see. `out/answers` are JSON lines for `outrider train --data`.
        wish: the model and its sampling.
        concurrency: concurrent requests per worker and server.
        block: questions per file, written atomically: what an interruption can lose.
        askers: number of concurrent workers in the cluster.

    Raises:
        InputError: `out` cannot be written, or has answers of another model or temperature. Ray's errors pass through.
    """
    out = Path(out).absolute()
    author, kept = by(wish.model, wish.temperature), out / "by.json"
    if kept.exists() and json.loads(kept.read_text(encoding="utf-8")) != author:
        raise InputError(f"{out} has answers of {kept.read_text(encoding='utf-8')}; give another folder")
    waiting = put(items, wish)
    with files.folder(out / "questions", replace=True) as made:
        for first in range(0, len(waiting), block):
            lines = [json.dumps({"id": q.key, "body": json.dumps(q.body)}) for q in waiting[first : first + block]]
            files.write(made / f"{first // block:06d}.json", "\n".join(lines) + "\n")
    files.write(kept, json.dumps(author))
    context = ray.data.DataContext.get_current()
    before = context.checkpoint_config
    context.checkpoint_config = CheckpointConfig("id", str(out / "checkpoint"), delete_checkpoint_on_success=False)
    try:
        ds = ray.data.read_json(str(out / "questions"), override_num_blocks=-(-len(waiting) // block))
        ds = ds.map_batches(
            answers, batch_size=None, batch_format="pyarrow", compute=ray.data.TaskPoolStrategy(askers),
            fn_kwargs={"urls": list(urls), "concurrency": concurrency},
        )  # fmt: skip
        ds.write_json(str(out / "answers"))
    finally:
        context.checkpoint_config = before
