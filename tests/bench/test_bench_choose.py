"""`outrider recommend`: who is left behind, when it ends, and what is said of it; plain decoding may win."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from instrument import Lab

from outrider import InputError
from outrider.bench.choose import FINALISTS, Candidate, behind, conclude, decided, measure, narrow, recommend, task_of
from outrider.bench.config import Config
from outrider.bench.document import Cell, Estimate
from outrider.bench.types import Method
from outrider.cli import main
from outrider.commands.recommend import show
from outrider.drafters import load


def cell(spec: str, *speedup: float, budget: str = "auto") -> Cell:
    name = spec if budget == "auto" else f"{spec}, {budget}"
    rate = Estimate(100 * speedup[0]) if speedup else None
    figure = Estimate(*speedup) if speedup else None
    return Cell("prompts", 0.0, 1, name, spec=spec, budget=budget, speedup=figure, tokens_per_second=rate, prompts=4)


def by_name(*cells: Cell) -> dict[str, Cell]:
    return {c.method: c for c in cells}


PLAIN = cell("none", 1.0, 1.0, 1.0)


def test_the_best_is_the_one_whose_interval_is_clear_of_all_others() -> None:
    slow, fast = cell("lookup", 1.1, 1.05, 1.15), cell("eagle:DIR?tree=chain", 1.6, 1.4, 1.8, budget="8x3")
    result = conclude("org/model", by_name(PLAIN, slow, fast), [], 12.3)
    assert result.best is not None
    assert (result.best.drafter, result.sure) == ("eagle:DIR?tree=chain", True)
    assert result.command == "outrider generate org/model \"...\" --drafter 'eagle:DIR?tree=chain' --budget 8x3"
    assert result.python == "outrider.load('org/model', 'eagle:DIR?tree=chain', budget='8x3')"
    assert [c.drafter for c in result.candidates] == ["eagle:DIR?tree=chain", "lookup"]
    near = cell("suffix", 1.5, 1.3, 1.7)
    result = conclude("demo", by_name(PLAIN, near, fast), [], 1.0)
    assert not result.sure
    assert "others are as good within the intervals" in result.sentence


def test_the_command_loads_the_model_as_it_was_measured() -> None:
    fast = cell("lookup", 1.6, 1.4, 1.8)
    config = Config("org/model", dtype="float32", compile=False, trust_remote_code=True)
    result = conclude("org/model", by_name(PLAIN, fast), [], 1.0, config)
    assert result.command.endswith("--drafter lookup --dtype float32 --no-compile --trust-remote-code")
    assert result.python.endswith("'lookup', dtype='float32', compile=False, trust_remote_code=True)")
    assert "--" not in conclude("m", by_name(PLAIN, fast), [], 1.0, Config("m")).command.replace("--drafter", "")


def test_a_recommendation_is_printed_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing was measured there is none."""
    show(conclude("org/model", by_name(PLAIN, cell("lookup", 1.6, 1.4, 1.8)), [], 1.0))
    said = capsys.readouterr().out
    assert "lookup is the fastest for org/model" in said
    assert 'outrider generate org/model "..." --drafter lookup\n' in said
    show(conclude("org/model", by_name(replace(PLAIN, tokens_per_second=None)), [], 1.0))
    said = capsys.readouterr().out
    assert "The time was too short to measure org/model" in said
    assert "outrider generate" not in said


@pytest.mark.parametrize("minutes", [0.0, math.inf, math.nan])
def test_a_time_that_is_none_is_refused(minutes: float) -> None:
    with pytest.raises(InputError, match="--minutes must be a number above 0"):
        recommend("demo", minutes=minutes)


@pytest.mark.parametrize("speedup", [(0.9, 0.8, 0.95), (1.3, 0.9, 1.7), (2.0,)])
def test_plain_decoding_wins_unless_a_drafter_is_faster_beyond_chance(speedup: tuple[float, ...]) -> None:
    result = conclude("demo", by_name(PLAIN, cell("lookup", *speedup)), [], 1.0)
    assert result.best is None
    assert result.sentence.startswith("Plain decoding (100 tokens/s) is the fastest for demo on this machine")
    assert "--drafter none" in result.command


def test_a_mix_is_spelled_out() -> None:
    result = conclude("demo", by_name(PLAIN, cell("suffix + lookup", 2.0, 1.9, 2.1)), [], 1.0)
    assert result.command == 'outrider generate demo "..." --drafter suffix --drafter lookup'
    assert result.python == "outrider.load('demo', ['suffix', 'lookup'])"


def test_a_clearly_slower_candidate_drops_out() -> None:
    best, slow, near = cell("a", 1.6, 1.4, 1.8), cell("b", 1.1, 1.0, 1.2), cell("c", 1.5, 1.3, 1.7)
    assert [behind(c, (PLAIN, best, slow, near)) for c in (best, slow, near)] == [False, True, False]
    assert behind(cell("d"), (PLAIN, best)), "what has no figures"
    assert not behind(cell("e", 1.0), (PLAIN, best)), "one prompt says nothing"
    assert decided([PLAIN, best])
    assert not decided([PLAIN, best, near])
    assert not decided([PLAIN, cell("f", 1.1, 0.9, 1.3)])
    assert decided([PLAIN])


def silent(what: str, left: float | None) -> None:
    pass


def test_all_prompts_are_used_where_no_candidate_drops_out(tmp_path: Path) -> None:
    lab = Lab(tmp_path, turns=(1,) * 3, tokens=6)
    for name in ("lookup", "suffix"):
        lab.drafter(name, load(name))
    runner, rows = lab.runner(), [Method("none"), Method("lookup"), Method("suffix")]
    runner.open(rows)
    result = narrow(runner, lab.task, rows, silent)
    assert set(result) == {"none", "lookup", "suffix"}
    assert result["none"].prompts in (2, 3)


def test_the_fastest_go_on_and_load_failures_are_reported(tmp_path: Path) -> None:
    """Every candidate answers one or two prompts; three of them, at most, and plain decoding answer the others."""
    lab, messages = Lab(tmp_path, turns=(1,) * 6, tokens=8), list[tuple[str, float | None]]()
    names = ("lookup", "suffix", "lookahead", "ngram?n=1")
    for name in names:
        lab.drafter(name, load(name, lab.target))
    runner = lab.runner()
    rows = [Method(name) for name in ("none", *names, "no-such-drafter")]
    results, lost = measure(runner, lab.task, rows, 5.0, lambda what, left: messages.append((what, left)))
    assert {"none", *names} <= set(results)
    assert all(name.partition(", ")[0] in names for name in results if name != "none")  # the leader's fixed budgets too
    assert [(c.drafter, c.note.partition(";")[0]) for c in lost] == [
        ("no-such-drafter", "there is no drafter 'no-such-drafter'")
    ]
    answered = {name: {s.chunk for s in runner.store.samples if s.method == name} for name in ("none", *names)}
    assert all(chunks >= {0} for chunks in answered.values())
    assert sum(len(answered[name]) > 2 for name in names) <= FINALISTS
    assert all(left is not None and left <= 300 for _, left in messages)


def test_candidates_that_the_time_does_not_allow_are_named(tmp_path: Path) -> None:
    """The time is up at once: plain decoding and what was promising come first, and nothing is measured late."""
    lab = Lab(tmp_path, turns=(1,) * 3, tokens=6)
    lab.drafter("lookup", load("lookup"))
    result, lost = measure(lab.runner(), lab.task, [Method("none"), Method("lookup")], 1e-9, silent)
    assert [c.drafter for c in lost] == ["lookup"]
    assert "there was no time to try it" in lost[0].note
    made = conclude("demo", result, lost, 0.0)
    assert isinstance(made.plain, Candidate)
    assert made.sentence == "The time was too short to measure demo; give more --minutes."


@pytest.mark.process
def test_a_recommendation_comes_within_its_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    """However few they are: plain decoding is measured, and every candidate has figures or a reason."""
    assert main(["recommend", "demo", "--minutes", "0.1", "--no-compile", "--max-new-tokens", "16", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["seconds"] < 150, "6 s, and what was begun in them on a machine that does other things too"
    assert results["plain"]["tokens_per_second"][0] > 0
    assert [c for c in results["candidates"] if not c["speedup"] and not c["note"]] == []
    assert "demo" in results["sentence"]


def test_prompts_keep_their_system_message() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    (made,) = task_of("demo", [[system, user]]).prompts
    assert made.turns == ("Be brief.\n\nHello",)
    with pytest.raises(InputError, match=r"prompt 2: no message is the user's"):
        task_of("demo", [[user], [system]])


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="--minutes must be a number above 0"):
        recommend("demo", minutes=0)
    with pytest.raises(InputError, match="must be at least 2 to measure"):
        recommend("demo", tokens=1)
