"""`outrider recommend`: who is left behind, when it ends, and what is said of it; plain decoding may win."""

from __future__ import annotations

from pathlib import Path

import pytest
from instrument import Lab

from outrider import InputError
from outrider.bench.choose import behind, conclude, parted, race, recommend
from outrider.bench.document import Cell, Estimate
from outrider.bench.types import Method
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
    found = conclude("org/model", (by_name(PLAIN, slow, fast), 12.3), [])
    assert found.best is not None
    assert (found.best.drafter, found.sure) == ("eagle:DIR?tree=chain", True)
    assert found.command == "outrider generate org/model \"...\" --drafter 'eagle:DIR?tree=chain' --budget 8x3"
    assert found.python == "outrider.load(\"org/model\", 'eagle:DIR?tree=chain', budget='8x3')"
    assert [c.drafter for c in found.candidates] == ["eagle:DIR?tree=chain", "lookup"]
    near = cell("suffix", 1.5, 1.3, 1.7)
    found = conclude("demo", (by_name(PLAIN, near, fast), 1.0), [])
    assert not found.sure
    assert "others are as good within the intervals" in found.sentence


@pytest.mark.parametrize("speedup", [(0.9, 0.8, 0.95), (1.3, 0.9, 1.7), (2.0,)])
def test_plain_decoding_wins_unless_a_drafter_is_faster_beyond_chance(speedup: tuple[float, ...]) -> None:
    found = conclude("demo", (by_name(PLAIN, cell("lookup", *speedup)), 1.0), [])
    assert found.best is None
    assert found.sentence.startswith("Plain decoding (100 tokens/s) serves demo best")
    assert "--drafter none" in found.command


def test_a_mix_is_spelled_out() -> None:
    found = conclude("demo", (by_name(PLAIN, cell("suffix + lookup", 2.0, 1.9, 2.1)), 1.0), [])
    assert found.command == 'outrider generate demo "..." --drafter suffix --drafter lookup'
    assert found.python == "outrider.load(\"demo\", ['suffix', 'lookup'])"


def test_who_is_left_behind() -> None:
    best, slow, near = cell("a", 1.6, 1.4, 1.8), cell("b", 1.1, 1.0, 1.2), cell("c", 1.5, 1.3, 1.7)
    assert [behind(c, (PLAIN, best, slow, near)) for c in (best, slow, near)] == [False, True, False]
    assert behind(cell("d"), (PLAIN, best)), "what has no figures"
    assert not behind(cell("e", 1.0), (PLAIN, best)), "one prompt says nothing"
    assert parted([PLAIN, best])
    assert not parted([PLAIN, best, near])
    assert not parted([PLAIN, cell("f", 1.1, 0.9, 1.3)])
    assert parted([PLAIN])


def test_the_race_goes_through_all_prompts_where_nobody_is_left_behind(tmp_path: Path) -> None:
    lab = Lab(tmp_path, turns=(1,) * 3, tokens=6)
    for name in ("lookup", "suffix"):
        lab.drafter(name, load(name))
    runner, rows = lab.runner(), [Method("none"), Method("lookup"), Method("suffix")]
    runner.open(rows)
    found, _ = race(runner, lab.task, rows, 5.0, lambda what: None)
    assert set(found) == {"none", "lookup", "suffix"}
    assert found["none"].prompts in (2, 3)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="--minutes is above 0"):
        recommend("demo", minutes=0)
    with pytest.raises(InputError, match="at least 2 new tokens"):
        recommend("demo", tokens=1)
