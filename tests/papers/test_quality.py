"""What a lossy method costs: likelihoods against the stock model's own, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from small import saved

import outrider
from outrider.backends.torch.carrier import carried, carrying
from outrider.bench import methods, tasks
from outrider.bench.cells import Analysis, document, newest
from outrider.bench.models import Models
from outrider.bench.runner import Group, Runner
from outrider.bench.store import Store
from outrider.bench.types import Method, Prompt, Sample, Task
from outrider.llm import LLM
from papers.quality import exact, likelihood, quality

TYPICAL = Method("eagle:demo/hass", "typical?epsilon=0.4&delta=0.6", "16x4")


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(device="cpu", compile=False)


@torch.no_grad()
def by_hand(llm: LLM, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Mean log p a token: each token read on its own, in double precision from the logits on."""
    model: Any = llm.target
    messages = []
    for ids, new in pairs:
        out = model.model(torch.tensor([list(ids)]), use_cache=True)
        for token in new:
            scores = out.logits[0, -1].double()
            messages.append(float(scores[token] - scores.logsumexp(0)))
            out = model.model(torch.tensor([[token]]), **carrying(model.model, carried(model.model, out)))
    return sum(messages) / len(messages)


def runner_of(models: Models, folder: Path, tokens: int = 8) -> Runner:
    return Runner(models, Store.open(folder, {"target": "demo", "started": "", "arguments": {}}), tokens)


def of(runner: Runner, method: str) -> list[Sample]:
    return [s for s in runner.store.samples if s.method == method]


def test_likelihood_by_hand(models: Models) -> None:
    llm = models.llm()
    pairs = [(llm.encode("Once upon a time there"), [9, 400, 31, 1]), (llm.encode("2 + 2 ="), [77])]
    wanted = by_hand(llm, pairs)
    assert likelihood(llm, pairs) == pytest.approx(wanted, abs=1e-4)
    assert wanted < -1
    assert likelihood(llm, [pairs[0], ([5, 6], []), pairs[1]]) == pytest.approx(wanted, abs=1e-4), "no token, no weight"
    assert likelihood(llm, [([5, 6], [])]) is None
    assert likelihood(llm, []) is None


def test_quality_of_a_lossy_method(models: Models, tmp_path: Path) -> None:
    runner = runner_of(models, tmp_path)
    task = tasks.load("demo/gsm8k", None, 2)
    task = replace(task, prompts=tuple(replace(p, reference=p.reference[:60]) for p in task.prompts))
    rows = [Method("none"), TYPICAL]
    group = Group(task, 1.0, 1, tuple(rows), 1)
    runner.open(rows)
    assert runner.run(group)
    cell = document(Analysis(runner, keep_loops=True), [group]).cells[1]
    assert (cell.state, cell.lossless) == ("done", False)

    llm = models.llm()
    ids = [runner.ids(task, p, []) for p in task.prompts]
    written = {m.name: [s.turns[0].tokens[0] for s in of(runner, m.name)] for m in rows}
    assert written["none"] != written[TYPICAL.name]
    result = quality(runner, group, TYPICAL.name, "plain", llm)
    assert result.log_likelihood == pytest.approx(
        by_hand(llm, list(zip(ids, written[TYPICAL.name], strict=True))), abs=1e-4
    )
    assert result.plain == pytest.approx(by_hand(llm, list(zip(ids, written["none"], strict=True))), abs=1e-4)
    answers = [llm.tokenizer(p.reference, add_special_tokens=False)["input_ids"] for p in task.prompts]
    assert result.held_out_loss == pytest.approx(-by_hand(llm, list(zip(ids, answers, strict=True))), abs=1e-4)
    assert result.exact == 0.0, "eight tokens hold no answer"

    draft = outrider.load(str(files("outrider") / "demo" / "draft"), "none", dtype="float32", device="cpu")
    judged = quality(runner, group, TYPICAL.name, "plain", draft)
    assert judged.log_likelihood == pytest.approx(
        by_hand(draft, list(zip(ids, written[TYPICAL.name], strict=True))), abs=1e-4
    )
    assert judged.plain < result.plain, "another model would not have written that"
    assert judged.held_out_loss == result.held_out_loss, "the loss is the decoding target's own"


def test_exact_is_the_share_of_right_answers(models: Models, tmp_path: Path) -> None:
    """References are taken from the texts themselves: the first of three is right, the last has none."""
    runner = runner_of(models, tmp_path)
    task = replace(tasks.load("demo/gsm8k", None, 3), kind="question answering")
    group = Group(task, 0.0, 2, (Method("none"),), 1)
    runner.open(group.methods)
    assert runner.run(group)
    said = [models.llm().decode(row) for s in of(runner, "none") for row in s.turns[0].tokens]
    for references, share in (
        ((said[0], "zebra crossings", ""), 0.5), (tuple(said), 1.0), (("", "no", "no"), 0.0), (("", "", ""), None),
    ):  # fmt: skip
        prompts = tuple(replace(p, reference=r) for p, r in zip(task.prompts, references, strict=True))
        result = quality(runner, replace(group, task=replace(task, prompts=prompts)), "none", "plain", models.llm())
        assert result.exact == share
        assert (result.held_out_loss is None) == (share is None)
        assert result.log_likelihood == result.plain


def test_texts_of_many_turns(models: Models, tmp_path: Path) -> None:
    """Each answer with the conversation before it, rows that have ended left out."""
    runner = runner_of(models, tmp_path, 4)
    talks = (
        Prompt("a", ("Hello!", "Why?")),
        Prompt("b", ("Who are you?",)),
        Prompt("c", ("Sing!", "More.", "Thanks.")),
    )
    group = Group(Task("talks", talks), 0.0, 2, (Method("none"),), 2)
    runner.open(group.methods)
    assert runner.run(group)
    first = [s for s in of(runner, "none") if s.repeat == 0]
    results = [(text.ids, text.new) for text in runner.texts(group, newest(of(runner, "none")))]
    a, b, c = talks
    (one, two), (three,) = (turn.tokens for turn in first[0].turns)
    wanted = [(runner.ids(group.task, a, []), one), (runner.ids(group.task, b, []), two)]
    wanted.append((runner.ids(group.task, a, [one]), three))
    said = [t.tokens[0] for t in first[1].turns]
    wanted += [(runner.ids(group.task, c, said[:i]), said[i]) for i in range(3)]
    assert results == wanted
    assert len(results) == 2 + 1 + 3


def test_references_that_do_not_fit_are_left_out(models: Models, tmp_path: Path) -> None:
    runner = runner_of(models, tmp_path, 4)
    group = Group(replace(tasks.load("demo/gsm8k", None, 1), kind="chat"), 0.0, 1, (Method("none"),), 1)
    runner.open(group.methods)
    assert runner.run(group)
    (prompt,) = group.task.prompts
    long = replace(group, task=replace(group.task, prompts=(replace(prompt, reference="word " * 3000),)))
    result = quality(runner, long, "none", "plain", models.llm())
    assert result.held_out_loss is None
    assert result.exact is None, "a chat has no answer to compare with"


def test_a_variant_is_judged_beside_its_own_plain_decoding(tmp_path: Path) -> None:
    models = Models(saved(tmp_path / "model", "llama", max_position_embeddings=1024), device="cpu")
    runner = runner_of(models, tmp_path, 6)
    rows = methods.table([methods.parse(f"lookup@8x3@typical@{v}") for v in ("plain", "int8")], [])
    group = Group(tasks.load("demo/gsm8k", None, 1), 1.0, 1, tuple(rows), 1)
    runner.open(rows)
    assert runner.run(group)
    ids = runner.ids(group.task, group.task.prompts[0], [])
    for variant, plain in (("plain", "none"), ("int8", "none, int8")):
        name = next(m.name for m in rows if m.variant == variant and not m.plain)
        result = quality(runner, group, name, variant, models.llm())
        text = of(runner, plain)[0].turns[0].tokens[0]
        assert result.plain == pytest.approx(by_hand(models.llm(), [(ids, text)]), abs=1e-4)
    losses = [quality(runner, group, m.name, m.variant, models.llm()).held_out_loss for m in rows[:2]]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02), "eight bits cost little"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("so it costs 10 - 3 = 7.\n#### 1,007", True),
        ("The total is $1,007.00.", True),
        ("1007 it is, not 8", False),
        ("#### 1007 euros\nDone.", True),
        ("I do not know", False),
        ("#### -1007", False),
        ("2014-1007", True),
        ("1007\n####", False),
    ],
)
def test_exact_maths(answer: str, right: bool) -> None:
    assert exact("maths", answer, "a\n#### 1,007") is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It is THE Indian, ocean.", True),
        ("indian   ocean", True),
        ("An Indian-ocean island", True),
        ("Indian oceans", False),
        ("the Pacific", True),
        ("", False),
    ],
)
def test_exact_question_answering(answer: str, right: bool) -> None:
    assert exact("question answering", answer, "the Indian Ocean\nPacific") is right


def test_exact_does_not_judge_where_it_cannot() -> None:
    assert exact("chat", "x", "x") is None
    assert exact("maths", "7", "seven") is None
    assert exact("question answering", "x", "") is None
    assert exact("question answering", "x", "the\n...") is None
