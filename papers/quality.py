"""What a lossy method costs: its texts judged by the target that they should have come from.

A rule that changes the distribution (typical acceptance), or a target that was changed to be guessed more easily
(Medusa-2, judged by `--judge ORIGINAL`), gets beside its speed

    log_likelihood   mean log p of its tokens under the judge at T = 1, in nats a token; `plain`: that of plain decoding
    held_out_loss    mean -log p of the reference answers under the decoding target, where a task has some
    exact            share of prompts answered exactly, where a task has an answer to compare with
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal

import numpy as np

from outrider.bench.cells import newest
from outrider.bench.runner import Group, Runner, answer_of
from outrider.bench.types import Sample
from outrider.llm import LLM
from outrider.proofs.logits import logits

from .distribution import softmax
from .document import Quality

NUMBER = re.compile(r"(?<!\d)-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|(?<!\d)-?\d+(?:\.\d+)?")


def likelihood(llm: LLM, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> float | None:
    """Mean log p per token of (prompt, text) pairs at T = 1; None if there is no token."""
    total, count = 0.0, 0
    for ids, new in texts:
        if not new:
            continue
        p = softmax(logits(llm, ids, new))
        total += float(np.log(p[np.arange(len(new)), list(new)]).sum())
        count += len(new)
    return total / count if count else None


def good(samples: Sequence[Sample]) -> list[Sample]:
    """The samples without faults."""
    return [s for s in samples if not s.faults]


def quality(runner: Runner, group: Group, method: str, variant: str, judge: LLM) -> Quality:
    """A cell's quality, plain decoding's beside it."""
    llm, task = runner.models.llm(variant), group.task

    def of(name: str) -> list[Sample]:
        return [s for s in group.own(runner.store.samples) if s.method == name]

    def judged_by(name: str) -> float | None:
        texts = runner.texts(group, newest(good(of(name))))
        return likelihood(judge, [(text.ids, text.new) for text in texts])

    plain = next((m.name for m in group.methods if m.plain and m.variant == variant), "")
    told = [
        exact(task.kind, llm.decode(answer_of(prompts, sample.turns, len(prompt.turns) - 1, i)), prompt.reference)
        for chunk, sample in newest(good(of(method))).items()
        for prompts in [group.chunks[chunk]]
        for i, prompt in enumerate(prompts)
        if prompt.reference
    ]
    judged = [t for t in told if t is not None]
    known = [
        (runner.ids(task, p, []), list(llm.tokenizer(p.reference, add_special_tokens=False)["input_ids"]))
        for p in task.prompts
        if p.reference and len(p.turns) == 1
    ]
    remaining = llm.target.context
    held = likelihood(llm, [(a, b) for a, b in known if len(a) + len(b) <= remaining])
    exactly = sum(judged) / len(judged) if judged else None
    return Quality(judged_by(method), judged_by(plain), exactly, None if held is None else -held)


def exact(kind: str, answer: str, reference: str) -> bool | None:
    """Whether an answer is right, where the kind of task can tell: None elsewhere, or without a reference.

    maths: the answer's number (the last after "####", or the last of the text) is the reference's. question answering:
    one of the reference's lines is in the answer, as whole words, whatever the case, punctuation and articles.
    """
    if kind == "maths":
        wanted = _number(reference)
        return None if wanted is None else _number(answer) == wanted
    if kind == "question answering":
        lines = [words for words in map(_words, reference.splitlines()) if words.strip()]
        return any(words in _words(answer) for words in lines) if lines else None
    return None


def _number(text: str) -> Decimal | None:
    result = NUMBER.findall(text.rpartition("####")[2])
    return Decimal(result[-1].replace(",", "")) if result else None


def _words(text: str) -> str:
    words = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return f" {' '.join(w for w in words if w not in ('a', 'an', 'the'))} "
