"""What `--weights native` and `int8` cost a model: the loss of texts with them and with full weights.

    python benchmarks/weights.py smollm2 --task mt-bench gsm8k --data DIR --limit 12

Read are the tasks' prompts with their reference answers, as plain text, each to `--length` tokens. For every way: the
mean -log p of the texts' tokens in nats; how far its distribution is from that of full weights (Kullback-Leibler
divergence, in nats a token); and at how many places both have the same most likely token. Each way computes as it
decodes, by its own passes. (A .gguf file's full weights are what its few bits
stand for; `native` rounds activations as well, and `int8` the weights once more.)
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import outrider
from outrider.bench import tasks
from outrider.bench.types import Prompt
from outrider.core.protocols import Target
from outrider.core.types import Array
from outrider.params import InputError
from outrider.proofs.logits import own_logits

FULL = "full"


@dataclass
class Cost:
    """Sums over all tokens read."""

    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    same: int = 0


def whole_text(prompt: Prompt) -> str:
    """Prompt and reference, without a chat template."""
    return "\n".join([*prompt.turns, *([prompt.reference] if prompt.reference else [])])


def load(model: str, way: str) -> outrider.LLM:
    return outrider.load(model, "none", weights=way)


def log_probabilities(target: Target, ids: list[int]) -> Array:
    """float64 [len(ids) - 1, v]: log-probabilities of every token but the first, by the target's own passes."""
    logits = own_logits(target, ids[:1], ids[1:])
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def costs(targets: dict[str, Target], texts: list[list[int]]) -> dict[str, Cost]:
    """What these texts cost with every way of keeping the weights; "full" is one of them."""
    collected = {way: Cost() for way in targets}
    for i, ids in enumerate(texts, 1):
        each = {way: log_probabilities(target, ids) for way, target in targets.items()}
        right = each[FULL]
        for way, own in each.items():
            one = collected[way]
            one.tokens += len(own)
            one.loss -= float(own[np.arange(len(own)), ids[1:]].sum())
            one.divergence += float((np.exp(right) * (right - own)).sum())
            one.same += int((right.argmax(-1) == own.argmax(-1)).sum())
        print(f"{i} of {len(texts)} texts", end="\r", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return collected


def line(way: str, cost: Cost) -> str:
    n = cost.tokens
    return f"| {way} | {n:,} | {cost.loss / n:.4f} | {cost.divergence / n:.4f} | {cost.same / n:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", nargs="+", choices=["native", "int8"], default=["native", "int8"])
    parser.add_argument("--task", nargs="+", default=["sample"], help="names or groups, as in `outrider bench`")
    parser.add_argument("--data", type=Path, help="the tasks' files; else they come from the hub")
    parser.add_argument("--limit", type=int, default=12, help="texts of each task")
    parser.add_argument("--length", type=int, default=400, help="tokens of each text, at most")
    given = parser.parse_args()
    if given.length < 3:
        parser.error("--length is at least 3")
    try:
        names = tasks.expand(given.task)
        models = {FULL: load(given.model, FULL)}
        encode, most = models[FULL].tokenizer.encode, models[FULL].target.context
        if given.length > most:
            raise InputError(f"--length is at most {most}, the model's context")
        collected = [tasks.load(name, given.data, given.limit) for name in names]
        models |= {way: load(given.model, way) for way in given.weights}
    except InputError as error:
        parser.error(str(error))
    texts = [
        (tasks.cut(ids, task.cut) if task.cut else ids)[: given.length]
        for task in collected
        for ids in (encode(whole_text(prompt)) for prompt in task.prompts)
    ]
    if not (texts := [ids for ids in texts if len(ids) > 2]):
        parser.error("there is no text of three tokens or more")
    results = costs({way: model.target for way, model in models.items()}, texts)
    print("| weights | tokens | loss | divergence | same most likely token |", "|---|--:|--:|--:|--:|", sep="\n")
    print(*(line(way, cost) for way, cost in results.items()), sep="\n")


if __name__ == "__main__":
    main()
