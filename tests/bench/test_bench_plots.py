"""Pictures: the same for the same run, in the reader's colours, and of the cells they say."""

from __future__ import annotations

import re
from typing import Any

import pytest
from made_document import made

from outrider.bench import draw, plots


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return made()


def texts(svg: str) -> list[str]:
    return re.findall(r">([^<>]+)</text>", svg)


def test_the_same_values_give_the_same_picture() -> None:
    bars = {"times": [("a", draw.COLOURS[0], (1.5, 1.4, 1.6)), ("b", draw.COLOURS[1], (0.9, 0.8, 1.0))]}
    one, two = draw.bars("here", bars), draw.bars("here", bars)
    assert one == two
    assert draw.bars("there", bars).svg != one.svg  # ids differ, so both can stand in one page
    assert not re.search(r"20\d\d-\d\d|matplotlib", one.svg)


def test_every_colour_is_a_variable_of_the_page() -> None:
    svg = draw.bars("here", {"times": [("a", draw.COLOURS[0], (1.5, 1.4, 1.6))]}).svg
    assert {"--ink", "--grid", "--c0"} <= set(re.findall(r"var\((--\w+), #", svg))
    assert not re.search(r"(fill|stroke): (#|black|white)", svg)


def test_text_stays_text_to_the_last_digit() -> None:
    name = "<i>$x_{1$ & 語 3.14159"
    svg = draw.bars("here", {"times": [(name, draw.COLOURS[0], (1.5, 1.4, 1.6))]}).svg
    assert any("&lt;i&gt;$x_{1$ &amp; 語 3.14159" in t for t in texts(svg))


def test_bins_of_several_tasks_are_pooled_by_their_counts() -> None:
    low = {"low": 0.0, "high": 0.5, "count": 10, "confidence": 0.2, "acceptance": 0.1}
    more = {**low, "count": 30, "confidence": 0.4, "acceptance": 0.5}
    high = {**low, "low": 0.5, "high": 1.0}
    found = plots.pooled([{"reliability": {"bins": [high, low]}}, {"reliability": {"bins": [more]}}])
    assert [(b.low, b.count) for b in found] == [(0.0, 40), (0.5, 10)]
    assert (found[0].confidence, found[0].acceptance) == pytest.approx((0.35, 0.4))


@pytest.mark.parametrize(
    ("spec", "budget", "chain"),
    [
        ("eagle:DIR?tree=chain", "adaptive", True), ("model:DIR?depth=4&width=1", "adaptive", True),
        ("eagle:DIR", "6x5", True), ("eagle:DIR", "1,1,1", True), ("eagle:DIR", "16x5", False),
        ("eagle:DIR?tree=chains", "adaptive", False), ("model:DIR?width=12", "3,1", False),
    ],
)  # fmt: skip
def test_what_is_a_chain(spec: str, budget: str, chain: bool) -> None:
    cell = {"spec": spec, "budget": budget, "rule": "coupled", "variant": "plain", "peer": "outrider"}
    assert plots.is_chain(cell) == chain
    assert plots.family(cell)[0] in ("eagle:DIR", "model:DIR?depth=4", "model:DIR")


def test_trees_stand_beside_the_chain_of_their_drafter(document: dict[str, Any]) -> None:
    found = plots.chains(document)
    assert len(found) == 4
    assert {t.strip() for t in texts(found[1].svg) if ": " in t} == {
        "tree: EAGLE-2, 8x5", "tree: EAGLE-2, 16x5", "tree: EAGLE-2, 60x6", "chain: EAGLE chain",
    }  # fmt: skip


def test_sizes_are_of_one_drafter_and_leave_out_what_is_invalid(document: dict[str, Any]) -> None:
    greedy, other, *_ = (texts(p.svg) for p in plots.sizes(document))
    assert {"8", "16"} <= set(greedy)
    assert "60" not in greedy
    assert {"8", "16", "60", "EAGLE-2"} <= set(other)


def test_a_drafters_rules_share_a_plot(document: dict[str, Any]) -> None:
    found = {p.title: texts(p.svg) for p in plots.temperatures(document)}
    assert set(found) == {"Rule coupled", "HASS"}
    assert {"HASS", "HASS, rejection"} <= set(found["HASS"])
    assert "none" not in found["Rule coupled"]


def test_prompts_of_several_lengths_are_put_in_their_order(document: dict[str, Any]) -> None:
    (plot,) = plots.contexts(document)
    assert plot.title == "narrative, temperature 0, batch size 1"
    shown = texts(plot.svg)
    assert [t for t in shown if t in ("1024", "2048", "4096")] == ["1024", "2048", "4096"]


def test_quality_is_told_apart_from_plain_decodings() -> None:
    assert plots.worse({"quality": {"log_likelihood": -1.2, "plain": -0.9}}) == pytest.approx(-0.3)
    assert plots.worse({"quality": None}) is plots.worse({"quality": {"log_likelihood": -1.0, "plain": None}}) is None
