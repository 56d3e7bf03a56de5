"""One cell of `long_context.py`, in a process of its own: `python benchmarks/context_cell.py JSON` prints JSON."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import outrider
from outrider.bench.memory import held
from outrider.budgets.adaptive import FixedBudget
from outrider.drafters._features import FeatureDrafting
from outrider.drafters.mamba import MambaDrafting
from outrider.drafters.model import ModelDrafting
from outrider.drafters.none import NoneDrafting
from outrider.engine import Batch, Engine, Request, Row
from outrider.targets.session import TreeSession
from outrider.types import Budget, Drafting, DraftTree, InputError, Round, Rows

TRAINED = 1024  # the longest rows that the demo target learnt from
LENGTH = 5  # tokens of a chain
EACH = 6  # prompts of each domain and repetition where tau is claimed; elsewhere one is enough
WARM = 600  # tokens of the warm-up's prompt: more than one chunk
NEEDLE = "\n{}The code of the north door is 4711.\n"
QUESTION = "\n{}What is the code of the north door? The code of the north door is"
DOMAINS = {"books": "", "stdlib": "# "}  # what stands before a planted line


def prompts(llm: outrider.LLM, asked: dict[str, Any]) -> list[list[int]]:
    """Prompts of exactly the same length, of every domain in turn; all of all repetitions begin at other documents."""
    folder, length = Path(asked["documents"]), asked["context"] - asked["tokens"]
    each = EACH if asked["context"] <= TRAINED else 1
    return [
        prompt(llm, documents(folder / f"{name}.jsonl", (asked["repeat"] + i / each) / asked["repeats"]), length, mark)
        for i in range(each)
        for name, mark in DOMAINS.items()
    ]


def documents(path: Path, share: float) -> Iterator[str]:
    """The texts of a file in their order, from this share of it on, and the ones before behind them."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    first = int(share * len(texts))
    yield from texts[first:] + texts[:first]


def prompt(llm: outrider.LLM, texts: Iterator[str], length: int, mark: str) -> list[int]:
    def encode(text: str) -> list[int]:
        return list(llm.tokenizer(text, add_special_tokens=False)["input_ids"])

    needle, question, ids = encode(NEEDLE.format(mark)), encode(QUESTION.format(mark)), [llm.tokenizer.bos_token_id]
    wanted = length - len(needle) - len(question)
    if wanted < 2:
        raise InputError(f"a prompt of {length} tokens has no room for the question; choose a longer context")
    for text in texts:
        ids += encode(text + "\n\n")
        if len(ids) >= wanted:
            return [*ids[: wanted // 2], *needle, *ids[wanted // 2 : wanted], *question]
    raise InputError(f"the documents have {len(ids)} tokens and {wanted} are needed; choose a shorter context")


# Memory


def used(state: Any) -> int:
    """Bytes in use of the tensors that a drafting, or a session, keeps of its text; `held` counts those allocated."""
    if isinstance(state, NoneDrafting):
        return 0
    if isinstance(state, MambaDrafting):  # constant in the text
        return state.state.bytes + sum(map(size, (state.slab.conv, state.slab.ssm) if state.slab else ()))
    if isinstance(state, ModelDrafting):
        return used(state.session)
    if isinstance(state, TreeSession):  # layers * (keys and values) * kv_heads * head_dim * tokens * itemsize
        return sum(s.shape[0] * s.shape[3] * s.element_size() for s in state.cache.slabs) * sum(state.host)
    assert isinstance(state, FeatureDrafting), f"no rule for {type(state).__name__}"
    # Keys and values of the pairs read, the features and tokens of those that wait, and the last step's vector.
    cache, waits = state.cache, [t for features, ids, _ in state.pending for t in (features, ids)]
    rest = sum(map(size, [*waits, *([] if state.last is None else [state.last])]))
    return cache.keys[0, 0].numel() * cache.keys.element_size() * 2 * sum(cache.host) + rest


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Memory:
    """What this process holds now, and its peak since `restart`: of a GPU where there is one, else resident pages."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def restart(self) -> int:
        """Give back what is free, forget the peak; the bytes held."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):  # where this cannot be done, the peak is that of the whole process
            Path("/proc/self/clear_refs").write_text("5")
        return self._status("VmRSS") or self.peak()

    def peak(self) -> int:
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        # A child's ru_maxrss begins at its parent's, so the kernel's own figure is asked first.
        unit = 1 if sys.platform == "darwin" else 1024
        return self._status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @staticmethod
    def _status(name: str) -> int:
        with suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    return int(line.split()[1]) * 1024
        return 0


# A cell: one drafter at one context, in a process of its own


@dataclass
class Timed:
    """A drafting whose proposals are timed."""

    inner: Drafting
    cuda: bool
    seconds: float = 0.0
    steps: int = 0

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        began = self._now()
        tree = self.inner.propose(rows, budget)
        self.seconds += self._now() - began
        self.steps += tree.deepest
        return tree

    def observe(self, round: Round) -> None:
        self.inner.observe(round)

    def select(self, index: Sequence[int]) -> None:
        self.inner.select(index)

    def join(self, other: Drafting) -> None:
        self.inner.join(other)

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return perf_counter()


def cell(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure one drafter at one context: memory by the first prompt, time by all."""
    torch.set_num_threads(asked["threads"])
    llm = outrider.load(asked["target"], drafter=asked["spec"], dtype="float32", compile=asked["compile"])
    engine = llm.engine(budget=FixedBudget(LENGTH + 1, LENGTH))
    given = prompts(llm, asked)
    with torch.no_grad():
        run(engine, given[0][-WARM:], 16)
        found = [run(engine, ids, asked["tokens"]) for ids in given]
    for one in found:
        one["answered"] = "4711" in llm.decode(one["tokens"])
    return {"device": str(llm.target.device), "runs": found}


def run(engine: Engine, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    """Decode one prompt, its memory and time watched."""
    memory, row = Memory(engine.target.device), Row(Request(ids, 0, tokens), 0)
    before = memory.restart()
    batch, _ = Batch.start(engine, [row])
    assert batch is not None, "more than one token is asked for"
    found: dict[str, Any] = {"prefill_peak": memory.peak() - before}
    drafting, session, usage = batch.drafting, batch.session, row.usage
    for name, state in (("state", drafting), ("cache", session)):
        found[name], found[f"{name}_allocated"] = used(state), held(state)
    batch.drafting = timed = Timed(drafting, memory.cuda)
    memory.restart()
    while batch is not None:
        batch.round()
        batch = batch.leave()
    found["decode_peak"] = memory.peak() - before
    found["running"] = used(drafting)
    return found | {
        "prefill_seconds": usage.prefill_seconds,
        "decode_seconds": usage.decode_seconds,
        "propose_seconds": timed.seconds,
        "steps": timed.steps,
        "rounds": usage.rounds,
        "added": usage.new_tokens - 1,  # by rounds: the first token is the prompt's
        "tokens": row.output,
    }


if __name__ == "__main__":
    print(json.dumps(cell(json.loads(sys.argv[1]))))
