"""Deliberately broken methods are caught: their cells are invalid, with the reason, and honest ones are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from instrument import VOCAB, Lab

from outrider.bench import checks
from outrider.bench.types import Answer, Ask, Method
from outrider.core.types import Usage
from outrider.testing import TableTarget, plain

EOS = 4
TOKENS = 60


def greedy(target: TableTarget, ids: Sequence[int], ask: Ask, seed: int) -> list[int]:
    """What plain decoding writes, up to its end."""
    text = plain(target, ids, ask.limit, ask.temperature, seed)
    ends = [i for i, t in enumerate(text) if t in ask.eos]
    return text[: ends[0] + 1] if ends else text


class Honest:
    """Another way to write the same texts."""

    def __init__(self, lab: Lab):
        self.lab, self.calls = lab, 0

    def run(self, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        self.calls += 1
        return self.change(Answer([self.row(p, ask, s) for p, s in zip(prompts, ask.seeds, strict=True)]), prompts, ask)

    def row(self, ids: Sequence[int], ask: Ask, seed: int) -> list[int]:
        return greedy(self.lab.target, ids, ask, seed)

    def change(self, answer: Answer, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        return answer


class Tail(Honest):
    """Returns what its loop wrote after the end of the text."""

    def row(self, ids: Sequence[int], ask: Ask, seed: int) -> list[int]:
        return plain(self.lab.target, ids, ask.limit, ask.temperature, seed)


class Longer(Honest):
    """Returns the last round's tokens beyond the limit."""

    def row(self, ids: Sequence[int], ask: Ask, seed: int) -> list[int]:
        return plain(self.lab.target, ids, ask.limit + 3)


class Shorter(Honest):
    def row(self, ids: Sequence[int], ask: Ask, seed: int) -> list[int]:
        return super().row(ids, ask, seed)[:-2]


class Skips(Honest):
    def change(self, answer: Answer, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        return replace(answer, tokens=answer.tokens[1:])


class Empty(Honest):
    def row(self, ids: Sequence[int], ask: Ask, seed: int) -> list[int]:
        return []


class SameTime(Honest):
    """Tells the time of its first prompt for all of them."""

    def change(self, answer: Answer, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        messages = [Usage(new_tokens=len(t), rounds=9, decode_seconds=1e-6) for t in answer.tokens]
        return replace(answer, usages=messages)


class Before(Honest):
    """Reports that its prompts took longer than the full call, so that its decoding takes no time."""

    def change(self, answer: Answer, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        return replace(answer, prefill=1e3 + self.calls)


class Foreign(Honest):
    def row(self, ids: Sequence[int], ask: Ask, seed: int) -> list[int]:
        return [VOCAB + 7, *super().row(ids, ask, seed)[1:]]


class OtherText(Honest):
    """Errs once, in the second token of every text."""

    def row(self, ids: Sequence[int], ask: Ask, seed: int) -> list[int]:
        good = super().row(ids, replace(ask, eos=frozenset()), seed)
        other = (good[-1 if ask.limit < 2 else 1] + 1) % VOCAB
        return [good[0], other, *plain(self.lab.target, [*ids, good[0], other], TOKENS - 2)][: ask.limit]


BROKEN: list[tuple[type[Honest], str]] = [
    (Tail, "tokens after the end"), (Longer, "tokens where the limit is 60"), (Shorter, "without an end of the text"),
    (Skips, "answered 0 of 1 prompts"), (Empty, "stopped after 0"), (SameTime, "reported before"),
    (Before, "says that the prompt took"), (Foreign, "vocabulary does not have"), (OtherText, "is not the target's"),
]  # fmt: skip


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All broken methods beside an honest one, in one run; those that end a text early in another."""
    cells: dict[str, dict[str, Any]] = {}
    for eos in (frozenset[int](), frozenset({EOS})):
        lab = Lab(tmp_path_factory.mktemp("broken"), eos=eos, tokens=TOKENS, turns=(1,) * 4)
        kinds = [kind for kind, _ in BROKEN if (kind is Tail) == bool(eos)]
        peers: dict[str, Any] = {"honest": Honest(lab)} | {kind.__name__: kind(lab) for kind in kinds}
        result = lab.measure([Method("none"), *(Method(name, peer=name) for name in peers)], peers=peers)
        assert result["honest"]["state"] == "done", result["honest"]
        assert result["honest"]["same_text"] == 4
        cells |= result
    return cells


@pytest.mark.parametrize(("kind", "words"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_broken_methods_are_caught(judged: dict[str, dict[str, Any]], kind: type[Honest], words: str) -> None:
    cell = judged[kind.__name__]
    assert cell["state"] == "invalid"
    assert any(words in f for f in cell["faults"]), cell["faults"]


def test_counting_too_many_tokens_is_caught(tmp_path: Path) -> None:
    """A method of ours whose books have one token more than its text."""
    lab = Lab(tmp_path, turns=(1,) * 3)
    runner = lab.runner()
    runner.open([Method("none")])
    ours = runner.peers["none"]

    class Boastful:
        def run(self, prompts: Any, ask: Ask) -> Answer:
            given = ours.run(prompts, ask)
            return replace(given, usages=[replace(u, new_tokens=u.new_tokens + 1) for u in given.usages])

    class LateClock:
        def run(self, prompts: Any, ask: Ask) -> Answer:
            given = ours.run(prompts, ask)
            return replace(given, usages=[replace(u, decode_seconds=u.decode_seconds + 9) for u in given.usages])

    rows = [Method("none"), Method("boastful", peer="x"), Method("late", peer="x")]
    cells = lab.measure(rows, peers={"boastful": Boastful(), "late": LateClock()})
    assert "counts 41 tokens where its text has 40" in cells["boastful"]["faults"]
    assert "reports more time than has passed" in cells["late"]["faults"]
    assert cells["none"]["state"] == "done"


def test_ties_that_rounding_turned_are_no_fault(tmp_path: Path) -> None:
    """Texts that part at a tie of the target: reported, with the margin, and not counted against a method."""
    lab = Lab(tmp_path, turns=(1,))
    target = lab.target
    ids = lab.runner().ids(lab.task, lab.task.prompts[0], [])
    first = plain(target, ids, 1)[0]
    row = target.logits_after(ids)
    row[(first + 1) % VOCAB] = row[first] - 1e-12  # the table itself: its two best tokens are one

    class Other(Honest):
        def row(self, ids: Sequence[int], ask: Ask, seed: int) -> list[int]:
            other = (first + 1) % VOCAB
            return [other, *plain(target, [*ids, other], ask.limit - 1)]

    cell = lab.measure([Method("none"), Method("other", peer="x")], peers={"other": Other(lab)})["other"]
    assert cell["state"] == "done", cell["faults"]
    assert [d["position"] for d in cell["divergences"]] == [0]
    assert cell["divergences"][0]["margin"] == pytest.approx(1e-12, abs=1e-6)
    assert cell["same_text"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_texts_are_checked_against_the_models_own_pass(temperature: float, tmp_path: Path) -> None:
    """Tokens that it would not have chosen are counted; a last one that is another changes none of those before."""
    lab = Lab(tmp_path, turns=(1,))
    ids = lab.runner().ids(lab.task, lab.task.prompts[0], [])
    text = plain(lab.target, ids, 20, temperature, 5)
    assert checks.own(lab.models.llm(), ids, text, temperature, 5) == 0
    text[-1] = (text[-1] + 1) % VOCAB
    assert checks.own(lab.models.llm(), ids, text, temperature, 5) == 1


@pytest.mark.parametrize(("often", "state"), [(40, "done"), (41, "invalid")])
def test_plain_decoding_may_differ_in_a_rare_token(
    often: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token in each text of 40: as often as may be, and more often."""
    monkeypatch.setattr(checks, "own", lambda *_: 1)
    monkeypatch.setattr(checks, "RARE", often)
    assert Lab(tmp_path).measure([Method("none")])["none"]["state"] == state
