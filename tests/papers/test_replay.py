"""Recordings replayed: the real engine on a recorded text counts what it counted on the model that wrote it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.backends.torch import load_tokenizer
from outrider.bench.document import Estimate
from outrider.budgets.budgeter import FixedBudget
from outrider.core.sampling import softmax
from outrider.core.tree import from_lists, root_only
from outrider.core.types import Usage
from outrider.drafters import load as load_drafter
from outrider.drafters.lookahead import LookaheadDrafter
from outrider.engine import generate
from outrider.params import InputError
from papers import command
from papers import cost as costs
from papers.cost import Cost, Prediction, Run, parse, predict, presets
from papers.recording import Record, read, vocabulary
from papers.replay import ReplayTarget, decode, drafter_of, engine, figures, main, replay, request

SPECS = ("none", "lookup", "suffix", "ngram", "lookahead")
ASKED = (("gsm8k-1", 64), ("gsm8k-4", 24), ("self_dialogue-0", 64), ("oasst-0", 1))  # heldout prompt, new tokens
COUNTS = ("prompt_tokens", "new_tokens", "rounds", "drafted", "accepted", "tested", "accepted_at", "tested_at")


def counts(usages: Sequence[Usage]) -> list[list[Any]]:
    return [[getattr(usage, name) for name in COUNTS] for usage in usages]


@pytest.fixture(scope="module")
def llm() -> Any:
    return outrider.load("demo", "none")


@pytest.fixture(scope="module")
def written(llm: Any, prompts: list[list[int]]) -> list[Any]:
    """The demo target's own greedy answers: two that ended, one cut off, one of a single token."""
    return [llm.generate(p, max_new_tokens=n, seed=0)[0] for p, (_, n) in zip(prompts, ASKED, strict=True)]


@pytest.fixture(scope="module")
def prompts(llm: Any) -> list[list[int]]:
    lines = (files("outrider") / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    messages = {line["id"]: line.get("messages") for line in map(json.loads, lines)}
    return [llm.encode(messages[name]) for name, _ in ASKED]


@pytest.fixture(scope="module")
def recording(written: list[Any], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "demo.jsonl"
    lines = [
        {"id": name, "task": "maths" if name.startswith("gsm8k") else "chat", "model": "demo",
         "prompt_tokens": prompt, "answer_tokens": out.tokens}
        for (name, _), prompt, out in zip(ASKED, prompts, written, strict=True)
    ]  # fmt: skip
    path.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def records(recording: Path, llm: Any) -> list[Record]:
    return read(recording, llm.tokenizer)


def real(llm: Any, spec: str, prompts: list[list[int]], together: bool) -> list[Usage]:
    """The same drafter and budget on the model itself."""
    drafter = LookaheadDrafter(window=0) if spec == "lookahead" else load_drafter(spec, llm.target, llm.tokenizer)
    drafted, budget, limits = replace(llm, drafter=drafter), FixedBudget(16, 6), [n for _, n in ASKED]
    asked = [drafted.requests(p, max_new_tokens=n, seed=0)[0][0] for p, n in zip(prompts, limits, strict=True)]
    machine = drafted.engine(budget=budget)
    if together:
        rows = {piece.row.index: piece.row for piece in generate(machine, asked, 3)}
        return [rows[i].usage for i in range(len(asked))]
    return [[piece.row for piece in generate(machine, [one])][-1].usage for one in asked]


def test_what_was_recorded(records: list[Record], written: list[Any]) -> None:
    assert [r.answer for r in records] == [tuple(out.tokens) for out in written]
    assert [out.finish_reason for out in written] == ["eos", "length", "eos", "length"]
    assert [r.ended for r in records] == [True, False, True, False]
    assert [(r.id, r.task, r.model) for r in records[2:]] == [
        ("self_dialogue-0", "chat", "demo"),
        ("oasst-0", "chat", "demo"),
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_a_replay_counts_what_the_model_counted(
    spec: str, llm: Any, records: list[Record], prompts: list[list[int]]
) -> None:
    result = replay(records, [spec], "16x6", llm.tokenizer)
    name = "lookahead (pool alone)" if spec == "lookahead" else spec
    mine, model = result.usages(name), real(llm, spec, prompts, together=False)
    assert counts(mine) == counts(model)
    assert [u.tau for u in mine] == [u.tau for u in model]
    assert [u.alpha for u in mine] == [u.alpha for u in model]
    if spec not in ("none", "ngram"):
        assert sum(u.accepted for u in mine) > 5
    for run, record in zip(result.runs[name], records, strict=True):
        assert [nodes for nodes, _ in run.passes] == [1] * run.usage.rounds or spec != "none"
        assert sum(nodes - 1 for nodes, _ in run.passes) == run.usage.drafted
        assert len(run.passes) == run.usage.rounds
        contexts = [context for _, context in run.passes]
        assert contexts == sorted(set(contexts))
        assert all(len(record.prompt) <= c < len(record.prompt) + len(record.answer) for c in contexts)
        assert contexts[:1] in ([], [len(record.prompt)])


@pytest.mark.parametrize("spec", ["lookup", "suffix", "ngram"])
def test_ragged_batches(spec: str, llm: Any, records: list[Record], prompts: list[list[int]]) -> None:
    """Three rows at a time: rows leave, and the fourth joins those that run."""
    target = ReplayTarget(records, llm.target.vocab)
    machine = engine(target, drafter_of(spec, target, llm.tokenizer)[1], "16x6")
    rows = {piece.row.index: piece.row for piece in generate(machine, map(request, records), 3)}
    assert [tuple(rows[i].output) for i in range(4)] == [r.answer for r in records]
    assert counts([rows[i].usage for i in range(4)]) == counts(real(llm, spec, prompts, together=True))
    if spec != "ngram":  # its rows share the depth of their tree
        together = [run.usage for run in decode(machine, records)]
        assert counts(together) == counts([run.usage for r in records for run in decode(machine, [r])])


def test_a_persistent_memory_grows_over_a_recording(llm: Any, records: list[Record]) -> None:
    """Replaying a recording twice over: the second time the suffix drafter knows the answers."""
    twice = [records[0], records[1], records[0], records[1]]
    result = replay(twice, ["suffix", "suffix?persist=true"], "16x6", llm.tokenizer)
    plain, kept = result.usages("suffix"), result.usages("suffix?persist=true")
    assert counts(plain[:2]) == counts(plain[2:])
    assert all(late.tau > 1.5 * early.tau for early, late in zip(kept[:2], kept[2:], strict=True))


def test_a_recording_has_its_distribution() -> None:
    target = ReplayTarget([Record((1, 2), (5, 6, 7, 3)), Record((4,), (8,))], vocab=10)
    session = target.open(64)
    (chunk,) = session.prefill([[1, 2], [4]])
    assert chunk.output.logits.argmax(-1).tolist() == [[5], [8]]
    assert softmax(chunk.output.logits).max(-1).tolist() == [[1.0], [1.0]]
    tree = from_lists([([5, 6, 9, 7, 6], [0, 0, 0, 1, 2], []), ([8, 8], [0, 0], [])], values=False)
    output = session.forward(tree)
    assert (output.logits.max(-1) > 0).tolist() == [[True, True, False, True, False], [False] * 5]
    assert output.logits.argmax(-1)[0, [0, 1, 3]].tolist() == [6, 7, 3]
    assert np.array_equal(session.forward(tree, since=2).logits, output.logits[:, 2:])

    session.keep([[0, 2], [0]])  # row 0 takes the wrong turn 5, 9
    assert session.lengths == [4, 2]
    assert not session.forward(root_only([7, 8])).logits.any()
    session.rewind([2, 1])
    session.forward(root_only([8, 8]))
    session.keep([[0], []])  # and again, at once: 8
    assert not session.forward(root_only([6, 9])).logits.any()
    session.rewind([2, 1])
    session.forward(root_only([5, 8]))
    session.keep([[0], []])
    session.select([0, 1, 0])
    output = session.forward(root_only([6, 8, 9]))
    assert output.logits.argmax(-1).flatten().tolist() == [7, 0, 0]
    assert output.logits.any(-1).flatten().tolist() == [True, False, False]

    other = target.open(64)
    list(other.prefill([[4]]))
    session.join(other)
    assert session.lengths == [3, 1, 3, 1]


@pytest.mark.parametrize(
    ("refuse", "why"),
    [
        (lambda t: t.embed([0]), "no embeddings"),
        (lambda t: t.head([0]), "no output layer"),
        (lambda t: list(t.open(8).prefill([[1]], (2,))), "no hidden states"),
        (lambda t: list(t.open(8).prefill([[1, 9]])), "no answer to this prompt of 2 tokens"),
        (lambda t: drafter_of("eagle:demo/hass", t), "need no model"),
        (lambda t: drafter_of("model:demo/draft", t), "need no model"),
        (lambda t: drafter_of("lookup?depth=3", t), "no option"),
        (lambda t: drafter_of("lookahead?text=false", t), "leave out text"),
        (lambda t: engine(t, drafter_of("none", t)[1], "auto"), "NODESxDEPTH"),
        (lambda t: ReplayTarget([Record((1,), (2,)), Record((1,), (3,))], 9), "answer 2 is to a prompt that another"),
        (lambda t: ReplayTarget([Record((1,), (9,))], 9), "outside the vocabulary of 9"),
    ],
)
def test_refusals(refuse: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        refuse(ReplayTarget([Record((1,), (2, 3))], 9))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('{"prompt_tokens": [1], "answer_tokens": [2]}\n\n{"prompt', "line 3: not JSON"),
        ("[1, 2]", "line 1: give an object"),
        ('{"prompt": "a", "answer": ""}', "not empty"),
        ('{"prompt": "a"}', "not empty"),
        ('{"prompt": "", "answer": "b"}', '"prompt" must be a text'),
        ('{"prompt_tokens": [1], "answer_tokens": []}', '"answer_tokens" must be'),
        ('{"prompt_tokens": [1, true], "answer_tokens": [2]}', '"prompt_tokens" must be'),
        ('{"answer_tokens": [2]}', '"prompt_tokens" must be'),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "messages are a list"),
        ('{"prompt": [], "answer": "b"}', "messages are a list"),
    ],
)
def test_broken_recordings(text: str, why: str, tmp_path: Path, llm: Any) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=why):
        read(path, llm.tokenizer)


def test_files_that_cannot_be_read(tmp_path: Path, llm: Any) -> None:
    path = tmp_path / "answers.jsonl"
    with pytest.raises(InputError, match="no recording"):
        read(path)
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(InputError, match="not UTF-8 text"):
        read(path)
    path.write_text('{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}', encoding="utf-8")
    with pytest.raises(InputError, match="name the folder of its model's tokenizer"):
        read(path)
    with pytest.raises(InputError, match="refuses these messages"):
        read(path, replace(llm.tokenizer, chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InputError, match="no chat template"):
        read(path, replace(llm.tokenizer, chat_template=None))


def test_messages_and_texts(tmp_path: Path, llm: Any) -> None:
    """Text goes to the tokens that the model itself reads; what ended by itself gets the end of text."""
    messages, (end,) = [{"role": "user", "content": "What is 2 + 3?"}], llm.eos
    lines = [
        {"prompt": messages, "answer": "2 + 3 =\u20285"},  # a line separator, raw in the file, ends no line
        {"prompt": "Once upon a time", "answer": " there was a fox.", "finish_reason": "length"},
        {"prompt_tokens": [5, 6], "answer_tokens": [7], "finish_reason": "stop"},
    ]
    path = tmp_path / "text.jsonl"
    path.write_text("\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8", newline="")
    chat, story, ids = read(path, llm.tokenizer)
    assert list(chat.prompt) == llm.encode(messages)
    assert llm.decode(chat.answer) == "2 + 3 =\u20285"
    assert (chat.answer[-1], chat.ended) == (end, True)
    assert [*story.prompt, *story.answer] == llm.encode("Once upon a time there was a fox.")
    assert (story.answer[-1] != end, story.ended) == (True, False)
    assert ids == Record((5, 6), (7,))
    assert vocabulary([ids]) == 8
    assert vocabulary([ids], llm.tokenizer) == len(llm.tokenizer)


@pytest.mark.parametrize("model", ["stories260K", "tinystories-656k"])
def test_other_tokenizers(model: str, shared: Path, tmp_path: Path) -> None:
    """Real questions and answers through another tokenizer, and back to the text."""
    tokenizer = load_tokenizer(shared / "models" / model)
    source = (shared / "data" / "eval" / "gsm8k_test_400.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    lines = [{"prompt": q["turns"][0], "answer": "\n" + q["reference"]} for q in map(json.loads, source)]
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    records = read(path, tokenizer)
    assert all(r.answer[-1] == tokenizer.eos_token_id for r in records)
    result = replay(records, ["lookup", "suffix"], "16x6", tokenizer)
    for usage, record in zip(result.usages("suffix"), records, strict=True):
        assert usage.new_tokens == len(record.answer)
        assert usage.tau > 1
    assert [row.answers for row in figures(result, parse("7b@a100"))] == [2, 2]


def test_another_text_than_recorded_is_our_error(records: list[Record], llm: Any) -> None:
    target = ReplayTarget(records, llm.target.vocab)
    machine = engine(target, drafter_of("none", target)[1], "16x6")
    with pytest.raises(RuntimeError, match="gsm8k-1 wrote another text"):
        decode(machine, [replace(records[0], answer=(*records[0].answer[:-1], 0))])


# ------------------------------------------------------------------------------------------------ cost


def test_a_pass_is_bound_by_memory_or_by_arithmetic() -> None:
    cost = Cost("mine", parameters=1e9, bandwidth=1e11, flops=1e13, bytes=2, overhead=1e-3, kv=1e5)
    assert cost.pass_seconds(1, 0) == pytest.approx(1e-3 + 2e9 / 1e11)
    assert cost.pass_seconds(1, 2000) == pytest.approx(1e-3 + 2.2e9 / 1e11)
    assert cost.pass_seconds(100, 0) == cost.pass_seconds(1, 0)  # 20 ms of reading, 20 ms of arithmetic
    assert cost.pass_seconds(200, 0) == pytest.approx(1e-3 + 2 * 1e9 * 200 / 1e13)
    times = [cost.pass_seconds(n, 500) for n in range(1, 400)]
    assert times == sorted(times)
    assert times[0] == times[50] < times[-1]


def test_a_mixture_reads_the_experts_that_its_nodes_use() -> None:
    cost = Cost("mixture", parameters=1e9, bandwidth=1e11, flops=1e15, bytes=1, experts=8e9, share=0.25)
    assert cost.pass_seconds(1, 0) == pytest.approx(3e9 / 1e11)
    assert cost.pass_seconds(2, 0) == pytest.approx((1e9 + 8e9 * (1 - 0.75**2)) / 1e11)
    assert cost.pass_seconds(10_000, 0) == pytest.approx(max(9e9 / 1e11, 2 * 3e9 * 10_000 / 1e15))


def test_costs_by_name() -> None:
    a100 = parse("7b@a100")
    assert (a100.parameters, a100.bytes, a100.kv) == (7e9, 2, 524288)
    assert a100.bandwidth == pytest.approx(1.53e12, rel=0.01)
    assert a100.flops == pytest.approx(203e12, rel=0.01)
    assert a100.pass_seconds(1, 0) == pytest.approx(5e-4 + 14e9 / 1.52925e12)
    for name in presets():
        assert 0.002 < parse(name).pass_seconds(1, 1000) < 0.5
    assert parse("7b@a100,bytes=0.5").pass_seconds(1, 0) == pytest.approx(5e-4 + 3.5e9 / 1.52925e12)
    own = parse("parameters=8e9, bandwidth=9e11, flops=1.5e14, bytes=2, overhead=2e-4")
    assert own.pass_seconds(1, 10) == pytest.approx(2e-4 + 16e9 / 9e11)
    assert own.kv == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("7b", "there is no cost '7b'; choose one of 7b@a100"),
        ("7b@abacus", "there is no cost"),
        ("7b@a100,speed=3", "no figure 'speed'"),
        ("7b@a100,name=3", "no figure 'name'"),
        ("7b@a100,bytes=two", "bytes must be a number"),
        ("parameters=8e9", "lacks bandwidth, flops"),
        ("7b@a100,bandwidth=0", "bandwidth must be positive"),
        ("7b@a100,overhead=-1", "overhead must be not negative"),
        ("7b@a100,flops=inf", "flops must be positive and finite"),
        ("7b@a100,kv=nan", "kv must be"),
    ],
)
def test_refused_costs(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse(text)


def test_a_prediction_by_hand() -> None:
    """Passes of 1 s (10 nodes or fewer) or n / 10 s, no cost of context: by mental arithmetic."""
    cost = Cost("round", parameters=1, bandwidth=1, flops=20, bytes=1)
    first = Run(Usage(prompt_tokens=5, new_tokens=9, rounds=2, draft_seconds=1.0), ((8, 5), (20, 9)))  # 8 s -> 1 + 2
    second = Run(Usage(prompt_tokens=3, new_tokens=5, rounds=4), ((1, 3), (1, 4), (1, 5), (1, 6)))  # 4 s -> 4
    single = Run(Usage(prompt_tokens=3, new_tokens=1), ())
    assert predict([first], cost) == Prediction("round", Estimate(2.0), Estimate(2.66667), 500.0)
    both = predict([first, second, single], cost)
    assert both.speedup == (1.5, 1.0, 2.0)
    assert both.without_drafting == (1.71429, 1.0, 2.66667)
    assert predict([single], cost) == Prediction("round")
    longer = replace(cost, kv=0.5)  # contexts 5 .. 12 cost 3.5 .. 7 s in plain decoding, 3.5 + 5.5 s here
    without = predict([first], longer).without_drafting
    assert without is not None
    assert without.value == pytest.approx(42 / 9, abs=1e-5)


def test_figures(records: list[Record], llm: Any) -> None:
    seen: list[tuple[int, int]] = []
    result = replay(records, ["none", "lookup"], "8x4", llm.tokenizer, progress=lambda *at: seen.append(at))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    made = figures(result, parse("7b@rtx4090,kv=0"))
    by = {(c.task, c.method): c for c in made}
    assert set(by) == {(t, s) for t in ("maths", "chat") for s in ("none", "lookup")}
    plain, drafted = by["maths", "none"], by["maths", "lookup"]
    assert plain.answers == drafted.answers == 2
    assert (plain.rounds["tau"], plain.rounds["depths"], plain.rounds["nodes"]) == ((1.0, 1.0, 1.0), [], 1.0)
    usages = result.usages("lookup")[:2]
    rounds = sum(u.rounds for u in usages)
    tau = drafted.rounds["tau"]
    assert tau.value == pytest.approx((sum(u.new_tokens for u in usages) - 2) / rounds, abs=1e-5)
    assert drafted.rounds["alpha"].value == pytest.approx(
        sum(u.accepted for u in usages) / sum(u.tested for u in usages), abs=1e-5
    )
    assert drafted.rounds["depths"][0].accepted == sum(u.accepted_at[0] for u in usages)
    assert len(drafted.rounds["depths"]) <= 4
    assert 1 < drafted.rounds["nodes"] <= 8
    assert plain.predicted.without_drafting == (1.0, 1.0, 1.0)
    assert drafted.predicted.without_drafting == tau  # passes of 8 nodes cost as much as those of one
    assert drafted.predicted.speedup is not None
    assert 1 < drafted.predicted.speedup.value < tau.value


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answers.jsonl"
    row = {"prompt_tokens": [1, 2, 3, 4, 1, 2], "answer_tokens": [3, 4, 1, 2, 3, 4, 7, 5, 1, 2, 3, 4]}
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert command.run(main, [str(file), "--drafter", "lookup", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["rounds"]["tau"][0] > 1.5
    assert report["predicted"]["speedup"][0] > 1
    assert command.run(main, [str(file), "--drafter", "lookup"]) == 0
    assert "replay, lookup: tau" in capsys.readouterr().out
    assert command.run(main, [str(tmp_path / "nowhere.jsonl")]) == 2


def test_every_figure_of_a_cost_is_checked() -> None:
    assert costs.FIGURES == ("parameters", "bandwidth", "flops", "bytes", "overhead", "kv", "experts", "share")
