"""The report in a real browser: it renders, it fetches nothing, and the console stays empty."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import AVAILABLE, browser
from run_directory import AUDIT, HISTOGRAM, guarantee, make_run
from selenium import webdriver
from selenium.webdriver.common.by import By

from sordino import report
from sordino.report import numbers

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="Debian's chromium and chromium-driver are not installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(make_run(tmp_path_factory.mktemp("run"), audit=AUDIT, histogram=HISTOGRAM))


@pytest.fixture(scope="module")
def driver(page: Path) -> Iterator[webdriver.Chrome]:
    with browser() as opened:
        opened.get_log("performance")
        opened.get(page.as_uri())
        yield opened


def requests(driver: webdriver.Chrome) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


def test_nothing_is_fetched_and_the_console_is_empty(driver: webdriver.Chrome, page: Path) -> None:
    assert {url for url in requests(driver) if not url.startswith("data:")} == {page.as_uri()}
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert driver.get_log("browser") == []


def test_the_guarantee_is_what_one_sees_first(driver: webdriver.Chrome) -> None:
    big = driver.find_element(By.CSS_SELECTOR, ".epsilon .big")
    assert big.is_displayed()
    assert big.text == f"ε = {numbers.epsilon(guarantee(None, True)['epsilon'])}"
    assert big.location["y"] < 500
    assert "δ = 10⁻⁵" in driver.find_element(By.CSS_SELECTOR, ".epsilon .at").text
    assert driver.title == "fashion-mnist-linear: privacy report"


def test_every_section_is_visible(driver: webdriver.Chrome) -> None:
    headings = [h.text for h in driver.find_elements(By.TAG_NAME, "h2") if h.is_displayed()]
    assert headings == [
        "The guarantee", "The statement and its theorem", "Assumptions", "What this guarantee does not say",
        "Over the steps", "The ledger",
        "Record norms", "Audit", "What each number is about", "Environment", "Recipe",
    ]  # fmt: skip


def test_the_policy_lets_the_style_sheet_in(driver: webdriver.Chrome) -> None:
    weight = "return getComputedStyle(document.querySelector('.epsilon .big')).fontWeight"
    assert driver.execute_script(weight) == "600"


def test_plots_have_a_size_and_a_name(driver: webdriver.Chrome) -> None:
    plots = driver.find_elements(By.CSS_SELECTOR, "svg.plot")
    assert len(plots) == 3
    for plot in plots:
        assert plot.size["width"] > 300
        assert plot.size["height"] > 150
        assert plot.get_attribute("aria-label")


def test_the_numbers_behind_a_plot_open_on_a_click(driver: webdriver.Chrome) -> None:
    details = driver.find_element(By.CSS_SELECTOR, "figure details")
    table = details.find_element(By.TAG_NAME, "table")
    assert not table.is_displayed()
    details.find_element(By.TAG_NAME, "summary").click()
    assert table.is_displayed()


_WIDE = """return [...document.querySelectorAll('.scroll, h1, h2, h3, figcaption, pre')]
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.trim().slice(0, 40))"""


def test_a_phone_needs_no_sideways_scrolling_and_sees_the_alarm(tmp_path: Path) -> None:
    alarmed = report.write(make_run(tmp_path, secure=False, noise_free=None))
    with browser(width=390, height=800) as phone:
        phone.get(alarmed.as_uri())
        assert phone.execute_script("return document.documentElement.scrollWidth") <= 390
        alarm = phone.find_element(By.CSS_SELECTOR, ".warning")
        assert alarm.is_displayed()
        assert alarm.location["y"] < 400
        assert phone.execute_script(_WIDE) == [], "no table hides a column behind a scroll bar"
        assert phone.get_log("browser") == []


def test_no_table_or_heading_is_cut_on_a_screen_of_1280(driver: webdriver.Chrome) -> None:
    assert driver.execute_script(_WIDE) == []


def test_dark_mode_is_dark_and_legible(page: Path) -> None:
    with browser(dark=True) as night:
        night.get(page.as_uri())
        style = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        background, ink = (_brightness(colour) for colour in night.execute_script(style))
        assert background < 40
        assert ink > 200


def _brightness(colour: str) -> float:
    return sum(float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 3
