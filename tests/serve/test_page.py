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


def picture(browser: Any, name: str) -> None:
    """Kept where OUTRIDER_PICTURES says, for eyes."""
    if folder := os.environ.get("OUTRIDER_PICTURES"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 780)], ids=["desk", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_chat_side_by_side(served: Served, browser: Any, width: int, height: int, theme: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )
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
