"""The page in a real browser, at the width of a phone and of a desk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_world import Served

pytestmark = [pytest.mark.trained, pytest.mark.process]
QUIET = (
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("selenium", reason="the selenium package is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver here: the page's test needs a browser")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*QUIET, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield made
    made.quit()


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def wait(browser: Any, script: str, seconds: float = 90) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, seconds, 0.1).until(lambda b: b.execute_script(f"return {script}"))


def sized(browser: Any, width: int, height: int, touch: bool = False) -> None:
    """A window of this size; `touch`: a phone's, whose screen is touched."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch, "maxTouchPoints": 1})


def asked(served: Served, browser: Any) -> list[Any]:
    """Have an answer written: its rounds whose drafts were accepted in part."""
    from selenium.webdriver.common.keys import Keys

    browser.get(served.url)
    wait(browser, "document.querySelector('#model').textContent.includes('eagle')")
    browser.execute_script("document.querySelector('#tokens').value = 40")
    find(browser, "#prompt").send_keys("Tell me a story about a dog.", Keys.ENTER)
    wait(browser, "document.body.dataset.busy === 'false'")
    result = browser.execute_script(
        "return [...document.querySelectorAll('.turn.assistant .round[tabindex]')].filter(r => {"
        "const got = rounds.get(r); return got.accepted > 0 && got.tree.tokens.length > got.accepted + 1 })"
    )
    assert len(result) > 1, "too few rounds with accepted and refused drafts: nothing is shown here"
    return list(result)


def shows(browser: Any, span: Any) -> bool:
    """Is the tree in sight that of this round? Then its accepted nodes, and they alone, are marked."""
    tip = find(browser, "#tip")
    if not tip.is_displayed():
        return False
    said, accepted, refused, words, path, box, colours = browser.execute_script(
        """
        const round = rounds.get(arguments[0]), tip = document.querySelector('#tip');
        const texts = (s) => [...tip.querySelectorAll(s)].map(e => e.textContent);
        const fill = (s) => getComputedStyle(tip.querySelector(s)).fill;
        const box = tip.getBoundingClientRect();
        const colours = [fill('g.on text'), fill('g:not(.on):not(.root) text')];
        const around = [box.left, box.top, innerWidth - box.right, innerHeight - box.bottom];
        return [tip.querySelector('p').textContent, texts('g.on text'), texts('g:not(.on):not(.root) text'),
          round.tree.tokens.map(word), round.tree.path, around, colours];
        """,
        span,
    )
    if sorted([*accepted, *refused]) != sorted(words[1:]):
        return False
    assert accepted == [words[node] for node in path[1:]]
    assert said.startswith(f"{len(words) - 1} drafted, {len(accepted)} accepted")
    assert len(accepted) > 0 < len(refused)
    assert colours[0] != colours[1], "the mark is not to be seen"
    assert browser.execute_script("return document.querySelectorAll('#tip path.on').length") == len(accepted)
    assert min(box) >= 0, f"a part of the tree's box is out of sight: {box}"
    return True


def picture(browser: Any, name: str) -> None:
    """Kept where OUTRIDER_PICTURES says, for eyes."""
    if folder := os.environ.get("OUTRIDER_PICTURES"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 780)], ids=["desk", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_chat_side_by_side(served: Served, browser: Any, width: int, height: int, theme: str) -> None:
    from selenium.webdriver.common.keys import Keys

    sized(browser, width, height)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    browser.get(served.url)
    wait(browser, "document.querySelector('#model').textContent.includes('eagle')")
    browser.execute_script("document.querySelector('#tokens').value = 40")
    if theme == "dark":
        find(browser, "#both").click()
    find(browser, "#prompt").send_keys("Tell me a story about a dog.", Keys.ENTER)
    wait(browser, "document.body.dataset.busy === 'false'")
    first = "document.querySelector('[data-lane=fast] .turn.assistant')"
    assert len(browser.execute_script(f"return {first}.textContent")) > 20
    assert browser.execute_script(f"return {first}.querySelectorAll('.drafted').length") > 0
    colours = browser.execute_script(
        "return ['.log .drafted', '.log .own'].map(s => getComputedStyle(document.querySelector(s)).color)"
    )
    assert colours[0] != colours[1]
    tau = float(browser.execute_script("return document.querySelector('[data-figure=tau]').textContent"))
    assert tau > 1
    if theme == "dark":
        assert find(browser, "[data-figure=same]").text == "✓ the same text"
        plain = "document.querySelector('[data-lane=plain] .turn.assistant')"
        assert browser.execute_script(f"return {plain}.textContent === {first}.textContent")
        assert browser.execute_script(f"return {plain}.querySelectorAll('.drafted').length") == 0
    accepted = f"[...{first}.querySelectorAll('.round[tabindex]')].find(r => r.querySelector('.drafted'))"
    browser.execute_script(f"{accepted}.focus()")
    assert find(browser, "#tip").is_displayed()
    assert browser.execute_script("return document.querySelectorAll('#tip .on').length") > 0
    picture(browser, f"{width}-{theme}")
    before = find(browser, "#tip").text
    find(browser, "body").send_keys(Keys.ARROW_RIGHT)
    assert find(browser, "#tip").text != before or browser.execute_script(
        f"return document.activeElement !== {accepted}"
    )
    find(browser, "body").send_keys(Keys.ESCAPE)
    assert not find(browser, "#tip").is_displayed()
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    urls = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(url.startswith(served.url) for url in urls), urls


def test_escape_stops_and_the_switch_turns_it_off(served: Served, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(served.url)
    wait(browser, "document.querySelector('#model').textContent.includes('eagle')")
    find(browser, "#speculate").click()
    browser.execute_script("document.querySelector('#tokens').value = 1500")
    find(browser, "#prompt").send_keys("Write the longest story.", Keys.ENTER)
    wait(browser, "document.querySelectorAll('.turn.assistant .round').length > 3")
    find(browser, "body").send_keys(Keys.ESCAPE)
    wait(browser, "document.body.dataset.busy === 'false'")
    assert browser.execute_script("return document.querySelectorAll('.turn.assistant .drafted').length") == 0
    assert served.idle()


def test_hovering_over_a_round_shows_its_tree(served: Served, browser: Any) -> None:
    sized(browser, 1280, 800)
    spans = asked(served, browser)
    for span in spans:
        hover(browser, find(browser, "#prompt"))
        assert not find(browser, "#tip").is_displayed()
        hover(browser, span)
        assert shows(browser, span)
    assert not shows(browser, spans[0])


def test_keys_alone_come_to_every_tree(served: Served, browser: Any) -> None:
    """Tab to the answer, arrows from round to round, Escape to be rid of it; the pointer stays where it is."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    sized(browser, 1280, 800)
    wanted = asked(served, browser)
    every = browser.execute_script("return [...document.querySelectorAll('.turn.assistant .round[tabindex]')]")
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
    for span in every:
        assert browser.switch_to.active_element == span
        assert find(browser, "#tip").is_displayed()
        assert span not in wanted or shows(browser, span)
        ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    ActionChains(browser).send_keys(Keys.ARROW_LEFT).perform()
    assert browser.switch_to.active_element == every[-2]
    ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    assert not find(browser, "#tip").is_displayed()


def test_a_touch_shows_a_tree_on_a_phone(served: Served, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    sized(browser, 390, 780, touch=True)
    try:
        for span in asked(served, browser)[:3]:
            tap(browser, span)
            WebDriverWait(browser, 10, 0.1).until(lambda b, span=span: shows(b, span))
            picture(browser, "touch")
            tap(browser, find(browser, "#prompt"))
            wait(browser, "document.querySelector('#tip').hidden", 10)
    finally:
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def spot(browser: Any, element: Any) -> tuple[float, float]:
    """A place on the element's first letter, which is in sight."""
    x, y = browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center'}); const line = arguments[0].getClientRects()[0];"
        "return [line.left + Math.min(4, line.width / 2), line.top + line.height / 2]", element,
    )  # fmt: skip
    return float(x), float(y)


def hover(browser: Any, element: Any) -> None:
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    pointer = ActionBuilder(browser)
    pointer.pointer_action.move_to_location(*map(round, spot(browser, element)))
    pointer.perform()


def tap(browser: Any, element: Any) -> None:
    """A finger on it, and off again."""
    x, y = spot(browser, element)
    for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
