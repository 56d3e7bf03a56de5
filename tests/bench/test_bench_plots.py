"""Pictures: the same for the same run, in the reader's colours, and of the cells they say."""

from __future__ import annotations

import re

import pytest
from made_document import made

from outrider.bench import draw, plots
from outrider.bench.document import Cell, Document, Estimate, Quality, Reliability
from outrider.bench.results import from_json
from outrider.budgets.calibration import Bin


@pytest.fixture(scope="module")
def document() -> Document:
    found: Document = from_json(Document, made())
    return found


def texts(svg: str) -> list[str]:
    return re.findall(r">([^<>]+)</text>", svg)


def test_the_same_values_give_the_same_picture() -> None:
    bars = {"times": [("a", draw.COLOURS[0], Estimate(1.5, 1.4, 1.6)), ("b", draw.COLOURS[1], Estimate(0.9, 0.8, 1.0))]}
    one, two = draw.bars("here", bars), draw.bars("here", bars)
    assert one == two
    assert draw.bars("there", bars).svg != one.svg  # ids differ, so both can stand in one page
    assert not re.search(r"20\d\d-\d\d|matplotlib", one.svg)


def test_every_colour_is_a_variable_of_the_page() -> None:
    svg = draw.bars("here", {"times": [("a", draw.COLOURS[0], Estimate(1.5, 1.4, 1.6))]}).svg
    assert {"--ink", "--grid", "--c0"} <= set(re.findall(r"var\((--\w+), #", svg))
    assert not re.search(r"(fill|stroke): (#|black|white)", svg)


def test_text_stays_text_to_the_last_digit() -> None:
    name = "<i>$x_{1$ & 語 3.14159"
    svg = draw.bars("here", {"times": [(name, draw.COLOURS[0], Estimate(1.5, 1.4, 1.6))]}).svg
    assert any("&lt;i&gt;$x_{1$ &amp; 語 3.14159" in t for t in texts(svg))


def test_bins_of_several_tasks_are_pooled_by_their_counts() -> None:
    low, more, high = Bin(0.0, 0.5, 10, 0.2, 0.1), Bin(0.0, 0.5, 30, 0.4, 0.5), Bin(0.5, 1.0, 10, 0.2, 0.1)
    held = [Reliability(0.0, 20, [high, low]), Reliability(0.0, 30, [more])]
    found = plots.pooled([Cell("t", 0.0, 1, "m", reliability=r) for r in held])
    assert [(b.low, b.count) for b in found] == [(0.0, 40), (0.5, 10)]
    assert (found[0].confidence, found[0].acceptance) == pytest.approx((0.35, 0.4))


@pytest.mark.parametrize(
    ("spec", "budget", "chain"),
    [
        ("eagle:DIR?tree=chain", "auto", True), ("model:DIR?depth=4&width=1", "auto", True),
        ("eagle:DIR", "6x5", True), ("eagle:DIR", "1,1,1", True), ("eagle:DIR", "16x5", False),
        ("eagle:DIR?tree=chains", "auto", False), ("model:DIR?width=12", "3,1", False),
    ],
)  # fmt: skip
def test_what_is_a_chain(spec: str, budget: str, chain: bool) -> None:
    cell = Cell("t", 0.0, 1, "m", spec=spec, budget=budget)
    assert plots.is_chain(cell) == chain
    assert plots.family(cell)[0] in ("eagle:DIR", "model:DIR?depth=4", "model:DIR")


def test_trees_stand_beside_the_chain_of_their_drafter(document: Document) -> None:
    found = plots.chains(document)
    assert len(found) == 4
    assert {t.strip() for t in texts(found[1].svg) if ": " in t} == {
        "tree: EAGLE-2, 8x5", "tree: EAGLE-2, 16x5", "tree: EAGLE-2, 60x6", "chain: EAGLE chain",
    }  # fmt: skip


def test_sizes_are_of_one_drafter_and_leave_out_what_is_invalid(document: Document) -> None:
    greedy, other, *_ = (texts(p.svg) for p in plots.sizes(document))
    assert {"8", "16"} <= set(greedy)
    assert "60" not in greedy
    assert {"8", "16", "60", "EAGLE-2"} <= set(other)


def test_a_drafters_rules_share_a_plot(document: Document) -> None:
    found = {p.title: texts(p.svg) for p in plots.temperatures(document)}
    assert set(found) == {"Rule coupled", "HASS"}
    assert {"HASS", "HASS, rejection"} <= set(found["HASS"])
    assert "none" not in found["Rule coupled"]


def test_prompts_of_several_lengths_are_put_in_their_order(document: Document) -> None:
    (plot,) = plots.contexts(document)
    assert plot.title == "narrative, temperature 0, batch size 1"
    shown = texts(plot.svg)
    assert [t for t in shown if t in ("1024", "2048", "4096")] == ["1024", "2048", "4096"]


def test_quality_is_told_apart_from_plain_decodings() -> None:
    assert Quality(-1.2, -0.9).gain == pytest.approx(-0.3)
    assert Quality(-1.0).gain is Quality().gain is None
