"""Leviathan's formulas: the paper's own figures, their limits, simulation, and the two generalisations."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from instrument import rounds_of

from outrider.core.types import Usage
from outrider.params import InputError
from papers import formulas as theory

COSTS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.95)


def test_the_papers_six_rows_to_two_decimals() -> None:
    rows = theory.table()
    assert [(r["alpha"], r["gamma"]) for r in rows] == [(0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10)]
    for r in rows:
        assert f"{r['operations']:.2f}" == f"{r['published_operations']:.2f}"
        assert f"{r['speedup']:.2f}" == f"{r['published_speedup']:.2f}"
    assert [r["published_operations"] for r in rows] == [1.53, 1.58, 1.23, 1.63, 1.11, 1.60]
    assert [r["published_speedup"] for r in rows] == [1.96, 2.53, 2.44, 3.69, 2.71, 6.86]


@pytest.mark.parametrize("gamma", [0, 1, 4, 25])
def test_expected_tokens_is_the_geometric_sum_up_to_its_limits(gamma: int) -> None:
    for alpha in (0.0, 1e-12, 0.3, 0.9, 1 - 1e-9, 1 - 1e-15, 1.0):
        expected = math.fsum(alpha**i for i in range(gamma + 1))
        assert theory.expected_tokens(alpha, gamma) == pytest.approx(expected, rel=1e-12)
    assert theory.expected_tokens(0, gamma) == 1
    assert theory.expected_tokens(1, gamma) == gamma + 1


def test_expected_tokens_is_what_a_chain_commits() -> None:
    rng, rounds, alpha, gamma = random.Random(0), 40_000, 0.7, 4
    total = 0
    for _ in range(rounds):
        accepted = 0
        while accepted < gamma and rng.random() < alpha:
            accepted += 1
        total += accepted + 1
    assert total / rounds == pytest.approx(theory.expected_tokens(alpha, gamma), abs=0.04)  # over 5 standard errors


@pytest.mark.parametrize("c", COSTS)
@pytest.mark.parametrize("alpha", [0.0, 0.04, 0.3, 0.5, 0.8, 0.93, 1.0])
def test_the_optimal_gamma_is_optimal(alpha: float, c: float) -> None:
    best = theory.optimal_gamma(alpha, c)
    gains = [theory.speedup(alpha, g, c) for g in range(300)]
    assert (best > 0) == (alpha > c)  # Corollary 3.9
    assert max(gains) <= theory.speedup(alpha, best, c) * (1 + 1e-12)
    assert theory.speedup(alpha, best, c) >= ((1 + alpha) / (1 + c) if alpha > c else 1.0) * (1 - 1e-12)


def test_free_drafts_have_no_best_gamma() -> None:
    assert theory.optimal_gamma(0.1, 0) == theory.MOST
    assert theory.optimal_gamma(1.0, 0.9, most=7) == 7
    assert theory.optimal_gamma(0, 0) == 0


def test_operations_of_plain_decoding_are_one() -> None:
    assert theory.operations(0.5, 0, 0.3) == 1
    assert theory.operations(0.0, 3, 0.1) == pytest.approx(4.3)
    assert theory.operations(1.0, 3, 0.1) == pytest.approx(4.3 / 4)


@pytest.mark.parametrize("gamma", [None, 1, 5])
def test_required_alpha_inverts_the_theorem(gamma: int | None) -> None:
    alpha = theory.required_alpha(1.7, 0.05, gamma)
    assert alpha is not None
    chosen = theory.optimal_gamma(alpha, 0.05) if gamma is None else gamma
    assert theory.speedup(alpha, chosen, 0.05) == pytest.approx(1.7)
    assert theory.required_alpha(1.0, 0.05) == 0
    assert theory.required_alpha(9, 0.2, gamma=5) is None


def test_a_verification_pass_that_costs_more() -> None:
    curve = [2.0, 2.2, 2.4, 3.0, 5.0]
    assert theory.speedup(0.8, 2, 0.1, curve) == pytest.approx(2.44 / (0.2 + 1.2))
    assert theory.speedup(0.8, 2, 0.1, lambda n: curve[n - 1]) == theory.speedup(0.8, 2, 0.1, curve)
    assert theory.speedup(0.8, 4, 0.1, lambda n: 7.0) == pytest.approx(theory.speedup(0.8, 4, 0.1))
    best = theory.optimal_gamma(0.8, 0.05, curve)
    assert best == max(range(5), key=lambda g: theory.speedup(0.8, g, 0.05, curve)) == 2
    assert theory.optimal_gamma(0.8, 0.05, lambda n: float(n)) == 0  # no parallelism, no gain


def test_measured_against_promised() -> None:
    run = theory.measured({"alpha": 0.8, "gamma": 5, "c": 0.05, "speedup": 2.5, "tau": 3.6, "verify": 1.2})
    assert run.promised == pytest.approx(theory.speedup(0.8, 5, 0.05))
    assert run.promised_at_cost == pytest.approx(run.tau / 1.45)
    assert run.best_gamma == 8
    assert "promises 2.95x at 3.69 tokens per round (2.54x with a verification pass that costs 1.20)" in run.sentence
    assert "measured: 2.50x at 3.60, 85% of the promise." in run.sentence
    assert theory.measured({"alpha": 0.8, "gamma": 5, "c": 0}).sentence.endswith("the speed-up was not measured.")


def usage(**more: object) -> dict[str, object]:
    return {
        "new_tokens": 31, "rounds": 10, "drafted": 40, "accepted": 20, "tested": 25, "tested_at": [10, 8, 5, 2],
        "draft_seconds": 0.4, "verify_seconds": 1.2, **more,
    }  # fmt: skip


def test_a_run_of_generate() -> None:
    run = theory.measured({"outputs": [{"usage": usage()}, {"usage": usage()}]})
    assert (run.alpha, run.gamma, run.measured_tau, run.measured_speedup) == (0.8, 4, 3.0, None)
    assert run.c == pytest.approx(0.01 / 0.12)
    compared = {"prompts": [{"tokens": 31}, {"tokens": 31}], "plain_seconds": 6.2, "speedup": 1.9}
    run = theory.measured({"outputs": [{"usage": usage()}, {"usage": usage()}], "comparison": compared})
    assert run.c == pytest.approx(0.1)
    assert run.verify == pytest.approx(1.2)
    assert run.measured_speedup == 1.9
    tree = theory.measured({"outputs": [{"usage": usage(drafted=300)}]})
    assert tree.gamma == 4


@pytest.mark.parametrize("document", [[], {}, {"outputs": []}, {"outputs": [{"usage": {"rounds": 3}}]}, 3, "x"])
def test_a_file_without_a_run_is_refused(document: object) -> None:
    with pytest.raises(InputError, match="generate --json"):
        theory.measured(document)


def test_bad_input_is_refused() -> None:
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match="probability"):
            theory.expected_tokens(bad, 2)
    with pytest.raises(InputError, match="at least 0"):
        theory.expected_tokens(0.5, -1)
    with pytest.raises(InputError, match="cost"):
        theory.speedup(0.5, 2, -1)
    with pytest.raises(InputError, match="measure more"):
        theory.speedup(0.5, 2, 0, [1.0, 1.1])
    with pytest.raises(InputError, match="positive"):
        theory.speedup(0.5, 1, 0, [1.0, 0.0])
    with pytest.raises(InputError, match="a number"):
        theory.measured({"alpha": "x", "gamma": 1, "c": 0})


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_figures_are_drawn(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"theory{suffix}"
    theory.plot(file, alpha=0.8, c=0.05)
    assert file.stat().st_size > 10_000
    if suffix == ".svg":
        assert file.read_text().count('<g id="axes_') == 3
    with pytest.raises(InputError, match="svg"):
        theory.plot(tmp_path / "theory.txt")


# -- measured rounds ------------------------------------------------------------


def chain(rounds: int, gamma: int, draft: float, verify: float) -> list[list[Usage]]:
    """Rounds that accept 0 .. gamma tokens of a chain by turns: round r accepts r mod (gamma + 1)."""
    messages = [r % (gamma + 1) for r in range(rounds)]
    accepted = [sum(t > d for t in messages) for d in range(gamma)]
    tested = [sum(t >= d for t in messages) for d in range(gamma)]
    one = rounds_of(
        accepted, tested, rounds, drafted=rounds * gamma, draft_seconds=draft * rounds, verify_seconds=verify * rounds,
        decode_seconds=(draft + verify) * rounds,
    )  # fmt: skip
    return [[one]]


def test_theory_of_a_chain_where_all_is_known() -> None:
    """gamma 3, accepted 0, 1, 2, 3 by turns: of 4 rounds 6 of 9 tests; a draft 0.3 and a pass 1.5 plain passes."""
    result = theory.of_rounds(chain(40, 3, draft=0.003, verify=0.015), plain_ms=10.0, speedup=1.25)
    assert result is not None
    assert (result.alpha, result.gamma, result.measured_speedup) == (pytest.approx(6 / 9), 3, 1.25)
    assert result.c == pytest.approx(0.1)
    assert result.verify == pytest.approx(1.5)
    assert result.measured_tau == pytest.approx(2.5)
    assert result.tau == pytest.approx((1 - (2 / 3) ** 4) / (1 / 3))
    assert result.promised == pytest.approx(theory.speedup(2 / 3, 3, 0.1))
    assert result.promised_at_cost == pytest.approx(result.tau / (0.3 + 1.5))
    assert "gamma 3 and c 0.100" in result.sentence


def test_a_tree_counts_as_a_chain_of_its_depth() -> None:
    wide = replace(chain(40, 3, 0.003, 0.015)[0][0], drafted=40 * 15)
    result = theory.of_rounds([[wide]], 10.0, 1.0)
    assert result is not None
    assert result.gamma == 3
    brief = replace(wide, drafted=40 * 2)  # a budget that often drafted less
    result = theory.of_rounds([[brief]], 10.0, 1.0)
    assert result is not None
    assert result.gamma == 2
    assert result.c == pytest.approx(0.15)
    rare = replace(wide, drafted=4)
    result = theory.of_rounds([[rare]], 10.0, 1.0)
    assert result is not None
    assert result.gamma == 1


def test_theory_needs_a_draft_and_a_plain_pass() -> None:
    report = chain(40, 3, 0.003, 0.015)
    assert theory.of_rounds(report, 0.0, 1.0) is None
    assert theory.of_rounds([[replace(report[0][0], drafted=0)]], 10.0, 1.0) is None
    assert theory.of_rounds([[replace(report[0][0], tested=0)]], 10.0, 1.0) is None
