"""The simulated farm: by hand, beside queueing theory, and beside the engine whose acceptance it replays."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.budgets.adaptive import AdaptiveBudget
from outrider.budgets.budgeter import FixedBudget
from outrider.engine import generate
from outrider.llm import LLM, load
from papers.farm import Server, Text, farm, servers
from papers.farm_runs import traces

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Plain:
    """A prompt takes a second; a round half a second, and a tenth for each drafted token."""

    def read(self, tokens: int) -> float:
        return 1.0

    def round(self, rows: int, context: int, depth: int) -> tuple[float, float]:
        return 0.1 * depth, 0.5


def test_a_text_by_hand() -> None:
    text = Text(7, (2, 0, 0, 1, 0))  # six tokens
    plain = farm([Server(Plain(), FixedBudget(1, 0), 1)], [text], math.inf, clients=1)
    assert plain.speed == pytest.approx(5 / 2.5)
    assert plain.tokens_per_second == pytest.approx(6 / 3.5)
    # Two drafted tokens: 1 -> 4 (both right), 4 -> 6 (one right, and one draft fits into the last round).
    drafted = farm([Server(Plain(), FixedBudget(3, 2), 1)], [text], math.inf, clients=1)
    assert drafted.speed == pytest.approx(5 / (0.7 + 0.6))
    assert drafted.depth == pytest.approx(1.5)


def test_texts_side_by_side_take_turns() -> None:
    text = Text(7, (0, 0))  # three tokens: a prompt of a second, two rounds
    done = farm([Server(Plain(), FixedBudget(1, 0), 2)], [text] * 2, math.inf, clients=2)
    # 0-1 the first prompt; a second is owed to rounds: 1-1.5, 1.5-2 end the first text; 2-3 the second, 3-4 its rounds.
    assert done.tokens_per_second == pytest.approx(6 / 4)
    assert done.speed == pytest.approx(2)
    assert done.left == 0


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_a_queue_waits_as_theory_predicts(load: float) -> None:
    """One row is the M/D/1 queue: a wait of load * service / (2 (1 - load)) on average (Pollaczek and Khinchine)."""
    text, service = Text(7, (0,) * 4), 3.0
    result = farm([Server(Plain(), FixedBudget(1, 0), 1)], [text], 40_000, rate=load / service)
    assert text.tokens / result.pace == pytest.approx(service + load * service / (2 * (1 - load)), rel=0.1)
    assert result.tokens_per_second == pytest.approx(5 * load / service, rel=0.05)


def test_many_servers_wait_less_than_one() -> None:
    text = Text(7, (0,) * 4)
    one, ten = (
        farm(servers(n, Plain(), lambda: FixedBudget(1, 0), 1), [text], 1000, rate=0.8 * n / 3) for n in (1, 10)
    )
    assert ten.pace > 1.5 * one.pace
    assert ten.tokens_per_second == pytest.approx(10 * one.tokens_per_second, rel=0.1)


def test_the_engines_budget_learns_when_drafting_pays() -> None:
    right, wrong = Text(7, (8,) * 200), Text(7, (0,) * 200)
    results = {}
    for name, text in (("right", right), ("wrong", wrong)):
        server = Server(Plain(), AdaptiveBudget(9, 8), 4)
        results[name] = farm([server], [text] * 10, math.inf, clients=2)
    assert results["right"].depth > 6
    assert results["wrong"].depth < 1
    assert results["right"].speed > 3 * results["wrong"].speed


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load("demo", "eagle:demo/hass", compile=False)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_trace_replays_the_engine(llm: LLM, depth: int) -> None:
    """Rounds of the engine with a chain are those of its trace, which was recorded with another depth."""
    prompts = ["The sea was", "def add(a, b):\n"]
    traced = [text for text, _ in traces(llm, prompts, 20)]
    requests, _ = llm.requests(prompts, max_new_tokens=20, temperature=0.0)
    engine = llm.engine(budget=FixedBudget(depth + 1, depth, (1,) * depth))
    for number, request in enumerate(requests):
        row = [piece.row for piece in generate(engine, [request], 1)][-1]
        server = Server(Plain(), FixedBudget(depth + 1, depth), 1)
        farm([server], [traced[number]], math.inf, clients=1)
        assert traced[number].tokens == len(row.output)
        assert server.rounds == row.usage.rounds


@pytest.mark.parametrize(
    ("clients", "depth", "what", "within"),
    [
        (1, 0, "tokens_per_second", 0.15), (1, 0, "speed", 0.15), (1, 4, "tokens_per_second", 0.15),
        (1, 4, "speed", 0.15), (4, 0, "tokens_per_second", 0.15), (4, 0, "speed", 0.15), (4, 4, "speed", 0.15),
        (4, 4, "tokens_per_second", 0.2),  # more than was aimed at, as the page says
    ],
)  # fmt: skip
def test_the_simulation_was_near_the_real_server(clients: int, depth: int, what: str, within: float) -> None:
    matches = json.loads((ROOT / "papers/results/farm/check.json").read_text(encoding="utf-8"))
    mine = [row for row in matches if (row["clients"], row["depth"]) == (clients, depth)]
    real, simulated = (sum(row[side][what] for row in mine) for side in ("real", "simulated"))
    assert simulated / real == pytest.approx(1, abs=within)
