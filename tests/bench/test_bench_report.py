"""What a run leaves behind: whole files that any reader takes, only results shown as results, text never markup."""

from __future__ import annotations

import base64
import copy
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_document import made

from outrider.bench import page, plots, results, summary
from outrider.bench.document import Document, Estimate
from outrider.bench.results import read
from outrider.bench.summary import headline, problems
from outrider.params import InputError
from outrider.schema import from_dict

VOID = ("meta", "br", "link", "img", "hr", "input")
NASTY = '<img src=x onerror="alert(1)">|$x_{&\'*'


def read_in(matches: dict[str, Any]) -> Document:
    """The JSON of results.json as a document."""
    document: Document = from_dict(Document, copy.deepcopy(matches))
    return document


@pytest.fixture(scope="module")
def document() -> Document:
    return read_in(made())


@pytest.fixture(scope="module")
def html(document: Document) -> str:
    return page.page(document)


def few(methods: tuple[str, ...] = ("none", "HASS"), tasks: tuple[str, ...] = ("chat", "code")) -> dict[str, Any]:
    """A small run: greedy, one at a time, all cells done."""
    matches = made()
    matches["cells"] = [
        c for c in matches["cells"]
        if (c["temperature"], c["batch"]) == (0, 1) and c["method"] in methods and c["task"] in tasks
    ]  # fmt: skip
    means = [m for m in matches["macro"] if (m["temperature"], m["batch"]) == (0, 1) and m["method"] in methods]
    matches["macro"] = [{**m, "tasks": len(tasks)} for m in means]
    matches["tasks"] = {t: matches["tasks"][t] for t in tasks}
    return matches


def best(document: Document) -> str:
    """HASS's mean speed-up, greedy and one at a time, as it is printed."""
    (result,) = [m for m in document.macro if (m.setting, m.method) == ((0, 1), "HASS")]
    assert result.speedup
    return result.speedup.text()


class Page(HTMLParser):
    """The elements of a page, with a list of those that were not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.wrong += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open += [tag] * (tag not in VOID)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def headings(self) -> set[str]:
        return {str(a["id"]) for name, a in self.elements if name == "section"}


# ------------------------------------------------------------------------------------------------- files


def test_a_run_leaves_a_report_and_its_figures(tmp_path: Path) -> None:
    document = read_in(few())
    document.cells[0].prompt_tokens = math.nan
    files = results.write(document, tmp_path / "deep" / "run")
    assert [f.name for f in files] == ["results.json", "report.html"]
    assert sorted(p.name for p in files[0].parent.iterdir()) == sorted(f.name for f in files)
    text = files[0].read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail)["cells"][0]["prompt_tokens"] is None
    document.cells[0].prompt_tokens = None
    assert read(files[0]) == read(files[0].parent) == document


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ('{"format": 4, "cells": [', "not complete JSON"),
        ("\udcff", "not complete JSON"),
        ("[]", "does not hold the results"),
        ('{"format": 1}', "does not hold the results"),
        ('{"format": 0, "run": {}, "cells": [], "macro": []}', "has format 0.*measure again"),
        ('{"format": 5, "run": {}, "cells": [], "macro": []}', "has format 5.*the version that wrote it"),
        ('{"format": 4, "run": {"target": "t"}, "cells": [{"mood": 1}], "macro": []}', "does not hold the results"),
        ('{"format": "x", "run": {}, "cells": [], "macro": []}', "format x.*measure again"),
    ],
)  # fmt: skip
def test_a_file_without_a_report_is_refused_in_one_sentence(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(InputError, match=says) as result:
        read(tmp_path)
    assert "\n" not in str(result.value)


# -------------------------------------------------------------------------------------------- the page


def test_the_page_is_well_formed_and_needs_no_network(html: str) -> None:
    result = Page(html)
    assert not result.wrong
    for name, attributes in result.elements:
        assert name not in ("link", "iframe", "object", "base")
        for key in ("src", "href", "xlink:href", "action"):
            assert (attributes.get(key) or "#").startswith(("#", "data:image/svg+xml;base64,")), (name, attributes)
        assert name != "img" or attributes["alt"]
    assert "@import" not in html
    assert all(inner.startswith("#") for inner in re.findall(r"url\(([^)]*)\)", html))
    ids = [a["id"] for _, a in result.elements if "id" in a]
    links = [a["href"] for name, a in result.elements if name == "a"]
    assert links
    assert {str(link)[1:] for link in links} <= set(ids)
    assert 'name="viewport" content="width=device-width' in html
    assert "prefers-color-scheme: dark" in html


def test_columns_sort_by_mouse_and_keyboard(document: Document, html: str) -> None:
    heads = re.findall(r"<thead>(.*?)</thead>", html, flags=re.S)
    assert heads
    for head in heads:
        assert head.count("<th ") == head.count('aria-sort="none"') == head.count('<button type="button">')
    value, low, high = re.findall(r"[\d.]+", best(document))
    shown = rf'<td data-sort="\d\.\d+" class="number up"><b>{value}</b><small>{low}–{high}</small>'
    assert re.search(shown, html)


def test_a_full_run_has_every_section(document: Document, html: str) -> None:
    assert Page(html).headings() == {section.anchor for section in page.sections(document)}
    assert len(page.sections(document)) == 9


def test_a_section_without_data_does_not_appear() -> None:
    matches = few()
    for cell in matches["cells"]:
        cell |= {"depths": []}
    held = Page(page.page(read_in(matches)))
    assert held.headings() == {"results", "mean-speed-up", "all-cells", "how-it-was-measured"}
    assert not held.wrong


def test_a_run_that_only_failed_still_has_a_page() -> None:
    matches = few()
    keys = ("task", "temperature", "batch", "method", "spec", "rule", "budget", "variant", "peer", "lossless")
    matches["cells"] = [{**{k: c[k] for k in keys}, "state": "failed", "reason": "gone"} for c in matches["cells"]]
    held = Page(page.page(read_in({**matches, "macro": []})))
    assert held.headings() == {"problems", "results", "how-it-was-measured"}
    assert "there is no speed-up to claim" in "".join(held.text)


def test_text_of_the_run_is_never_markup(tmp_path: Path) -> None:
    matches = few()
    matches["run"] |= {"target": NASTY, "arguments": {NASTY: NASTY}}
    matches["tasks"] = {f"{t}{NASTY}": {**v, "note": NASTY, "kind": NASTY} for t, v in matches["tasks"].items()}
    for row in (*matches["cells"], *matches["macro"]):
        row["method"] += NASTY
    for cell in matches["cells"]:
        cell["task"] += NASTY
    prompt = {"prompt": NASTY, "turn": 0, "position": 3, "margin": 0.1, "mine": 3, "plain": None}
    matches["cells"][0] |= {"state": "invalid", "reason": NASTY, "faults": [NASTY], "divergences": [prompt]}
    results.write(read_in(matches), tmp_path)
    held = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not held.wrong
    assert not [e for e in held.elements if "onerror" in e[1] or e[1].get("src") == "x"]
    assert sum(NASTY in text for text in held.text) > 10


# -------------------------------------------------------------------------- only results are shown as results


def test_figures_of_an_invalid_cell_are_in_no_table_and_no_plot() -> None:
    """Whatever they are, what is shown is the same to the last byte."""
    made = few(("none", "EAGLE chain", "HASS"))
    cell = next(c for c in made["cells"] if (c["method"], c["task"]) == ("HASS", "code"))
    cell |= {"state": "invalid", "reason": "counts too many"}
    other = copy.deepcopy(made)
    cell |= {"speedup": [9.87, 9.8, 9.9], "tau": [8.0, 7.0, 9.0], "round_ms": {"draft": 1, "verify": 1, "overhead": 1}}
    cell |= {"depths": [], "prompts": 7}
    next(m for m in made["macro"] if m["method"] == "HASS")["speedup"] = [9.87, 9.8, 9.9]
    assert page.page(read_in(made)) == page.page(read_in(other))
    assert "HASS" not in plots.speedups(read_in(made))[0].svg
    cell["state"] = "done"
    assert page.page(read_in(made)) != page.page(read_in(other))
    assert "9.87" in page.page(read_in(made))


def test_problems_come_first_with_their_reasons(document: Document, html: str) -> None:
    assert [p.state for p in problems(document)] == ["invalid", "failed", "partial"]
    box = html[html.index('<section id="problems">') : html.index('<section id="results">')]
    assert "counts 33 tokens where its text has 32" in box
    assert "the target ran out of memory" in box
    assert "<s>invalid</s>" in html


def test_the_headline_is_the_best_lossless_method_and_the_slowest_cell(document: Document) -> None:
    first, second = headline(document)
    assert first.startswith(f"HASS, the best of 7 lossless methods, is {best(document)} times")
    assert "over all 4 settings" in first
    ours = {c.key: c.speedup.value for c in document.results if c.peer == "outrider" and not c.plain and c.speedup}
    task, *_, method = min(ours, key=lambda key: ours[key])
    assert f"{method} on {task} at" in second


def test_the_headline_leaves_out_tasks_whose_texts_all_loop() -> None:
    """Their cells are the fastest and the slowest of the run, and are neither."""
    matches = few(("none", "lookup", "HASS"))
    for cell in matches["cells"]:
        if cell["task"] == "code":
            cell |= {"loops": True, "speedup": [0.1, 0.1, 0.1]}
    matches["macro"] = [{**m, "tasks": 1, "speedup": [1.5, 1.4, 1.6]} for m in matches["macro"]]
    first, slowest, left = headline(read_in(matches))
    assert "on one task" in first
    assert "0.10" not in slowest
    assert left == "Left out of all means, since every plain text repeats itself: code."
    shown = page.page(read_in(matches))
    assert "all texts loop" in shown
    for cell in matches["cells"]:
        cell["loops"] = True
    matches["macro"] = [{**m, "tasks": 2} for m in matches["macro"]]
    assert headline(read_in(matches))[-1].endswith("there are no others, so they count.")


def test_a_single_prompt_has_no_interval() -> None:
    result = few(("none", "HASS"), ("chat",))
    for row in (*result["cells"], *result["macro"]):
        row |= {"speedup": [2.0, None, None]}
    document = read_in(result)
    assert "is 2.00 (n = 1, no interval) times as fast" in headline(document)[0]
    shown = page.page(document)
    assert "<b>2.00</b><small>n = 1, no interval</small>" in shown
    assert 'number up"><b>2.00' not in shown, "nothing is known to be clear of 1"


@pytest.mark.parametrize("change", [{"lossless": False}, {"variant": "int8"}, {"state": "invalid"}])
def test_who_is_not_crowned(change: dict[str, Any]) -> None:
    matches = few(("none", "lookup", "HASS"))
    for m in matches["macro"]:
        m["speedup"] = {"none": [1, 1, 1], "lookup": [1.2, 1.1, 1.3], "HASS": [2, 1.9, 2.1]}[m["method"]]
    assert headline(read_in(matches))[0].startswith("HASS")
    for cell in matches["cells"]:
        cell["variant"] = "int8"  # a run of a quantised target alone
    assert headline(read_in(matches))[0].startswith("HASS")
    for cell in matches["cells"]:
        cell |= {"variant": "plain", **(change if cell["method"] == "HASS" else {})}
    assert headline(read_in(matches))[0].startswith("lookup, the only lossless method, is 1.20")


def test_the_terminal_shows_means_and_problems(document: Document, capsys: pytest.CaptureFixture[str]) -> None:
    summary.show(document)
    said = capsys.readouterr().out
    assert best(document) in said
    assert "invalid: EAGLE-2, 60x6" in said


# ------------------------------------------------------------------------------------------------ plots


def texts(svg: str) -> list[str]:
    return re.findall(r">([^<>]+)</text>", svg)


def test_the_same_values_give_the_same_plot() -> None:
    rows = [("a", plots.COLOURS[0], Estimate(1.5, 1.4, 1.6)), ("b", plots.COLOURS[1], Estimate(0.9, 0.8, 1.0))]
    one = plots.bars("here", "times", rows)
    assert one == plots.bars("here", "times", rows)
    assert not re.search(r"20\d\d-\d\d", one.svg), "no date"


def test_text_stays_text_to_the_last_digit() -> None:
    name = "<i>$x_{1$ & 語 3.14159"
    svg = plots.bars("here", "times", [(name, plots.COLOURS[0], Estimate(1.5, 1.4, 1.6))]).svg
    assert any("&lt;i&gt;$x_{1$ &amp; 語 3.14159" in t for t in texts(svg))
    assert "1.50" in "".join(texts(svg))


def test_the_page_has_the_plots(document: Document, html: str) -> None:
    drawn = plots.speedups(document)
    assert [p.title for p in drawn] == [
        f"Temperature {t}, batch size {b}" for t in (0, 1) for b in (1, 4)
    ]  # fmt: skip
    for plot in drawn:
        assert base64.b64encode(plot.svg.encode()).decode() in html


def test_curves_are_over_every_batch_size_and_temperature(document: Document) -> None:
    cold, hot = plots.batches(document)
    assert (cold.title, hot.title) == ("Temperature 0", "Temperature 1")
    assert {"HASS", "lookup", "1", "4", "tokens/s"} <= set(texts(cold.svg))
    alone, four = plots.temperatures(document)
    assert {"HASS", "0", "1", "tau"} <= set(texts(alone.svg))
    assert "none" not in texts(alone.svg)
    assert "lookup" not in texts(four.svg), "it has no mean at one of the temperatures"


def test_acceptance_by_depth_is_of_all_tasks_together() -> None:
    matches = few()
    for cell, (tested, accepted) in zip(
        (c for c in matches["cells"] if c["method"] == "HASS"), ((10, 10), (30, 0)), strict=True
    ):
        cell["depths"] = [{"depth": 1, "tested": tested, "accepted": accepted, "rate": [accepted / tested]}]
    (plot,) = plots.depths(read_in(matches))
    line = re.search(r'<g id="line2d_\d+">', plot.svg)
    assert line
    assert {"depth", "HASS", "1"} <= set(texts(plot.svg))
