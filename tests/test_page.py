"""The page of results in a real browser: it loads nothing, says no error, draws, sorts, filters, and fits a phone."""

import json
import re

import pytest

from poros.evidence.page import html_page
from poros.evidence.summary import summarize
from tests.result_rows import campaign, failed_row, speed_row
from tests.skips import BROWSER, needs_browser

HOSTILE = '</script><img src=x onerror="document.title=1"> & <b>'


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install poros[dev])")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """Open a page of rows, and fail the test if it logs anything or asks for anything but itself."""
    contexts, said = [], []

    def open_page(rows=None, width=1280, scheme="light"):
        file = tmp_path / "report.html"
        file.write_text(html_page(summarize(rows or campaign()), "Results"), encoding="utf-8")
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: request.url.startswith((file.as_uri(), "data:")) or said.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def _methods(page):
    return page.locator("#methods tbody tr:visible th a").all_inner_texts()


@needs_browser
def test_every_method_is_a_point_with_its_name_and_every_pass_a_mark(opened):
    page = opened()
    first = page.locator("#group-0")
    assert first.locator(".memory circle.point").count() == 7
    labels = first.locator(".memory a text").all_text_contents()
    assert sorted(labels) == sorted(row.label for row in campaign()[:7])
    assert first.locator(".spread circle.pass").count() == 7 * 3
    assert first.locator(".spread .step").count() == 7 * 3 * 5
    # Losses that are equal in every bit are one curve: all but those of the method without dropout.
    assert first.locator(".losses path.curve").count() == 2
    assert first.locator(".losses a text").count() == 6
    assert page.locator("#group-1 .memory circle.point").count() == 3


@needs_browser
@pytest.mark.parametrize("width", [400, 1280])
def test_labels_in_the_chart_lie_apart_and_inside(opened, width):
    page = opened(width=width)
    plot = page.locator("#group-0 .memory svg").bounding_box()
    boxes = [text.bounding_box() for text in page.locator("#group-0 .memory a text").all()]
    for place, one in enumerate(boxes):
        assert one["x"] >= plot["x"]
        assert one["x"] + one["width"] <= plot["x"] + plot["width"]
        for other in boxes[place + 1 :]:
            apart = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            assert apart or abs(one["y"] - other["y"]) >= 10


@needs_browser
def test_a_column_sorts_both_ways_with_failures_last(opened):
    page = opened()
    head = page.locator("#methods thead button", has_text=re.compile(r"^s/step$"))
    head.click()
    assert _methods(page)[:2] == ["stream loop", "resident"]
    assert set(_methods(page)[-2:]) == {"accelerate-offload", "unsloth"}
    head.click()
    assert _methods(page)[0] == "poros-train"
    assert set(_methods(page)[-2:]) == {"accelerate-offload", "unsloth"}
    assert page.locator("[aria-sort]").count() == 1
    page.locator("#methods thead button", has_text="method").click()
    assert _methods(page)[0] == "accelerate-offload"


@needs_browser
def test_words_and_models_filter_rows_and_charts(opened):
    page = opened()
    page.fill("#filter", "BLOCK 4")
    assert _methods(page) == ["poros, block size 4"] * 2
    assert page.locator("#count").inner_text() == "2 of 12 rows"
    page.select_option("#model", "qwen2.5-72b")
    assert _methods(page) == ["poros, block size 4"]
    assert not page.locator("#group-0").is_visible()
    page.select_option("#model", "")
    page.fill("#filter", "")
    assert len(_methods(page)) == 12
    assert page.locator("#group-0 .memory circle.point").count() == 7


@needs_browser
def test_every_figure_leads_to_its_row(opened):
    page = opened()
    figures = [text for text in page.locator("#glance td.number").all_inner_texts() if text]
    assert page.locator("#glance td.number a").count() == len(figures) > 8
    for link in page.locator("#glance a, #methods td a, .group svg a, #parity a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    page.locator("#methods tbody tr").nth(2).locator("td.number a").first.click()
    shown = page.locator("#row-2 pre")
    assert shown.is_visible()
    assert json.loads(shown.inner_text()) == speed_row(2).model_dump()


@needs_browser
def test_losses_that_differ_in_their_last_bit_are_drawn(opened):
    losses = [[12.9] * 7] * 3
    other = [[12.9 * (1 + 2**-52)] * 7] * 3
    page = opened([speed_row(2, losses=losses), speed_row(3, losses=other)])
    assert page.locator(".losses path.curve").count() == 2


@needs_browser
def test_the_farthest_readings_that_are_believed_are_drawn(opened):
    fast = speed_row(2, passes=[[1e-6] * 5, [1e-6] * 4 + [1e6], [1e6] * 5], losses=[[0.0, 9e8] * 3 + [0.0]] * 3)
    slow = speed_row(3, passes=[[1e6] * 5] * 3, pass_memory=[{"reserved_bytes": 1}] * 3)
    page = opened([fast, slow])
    assert page.locator("circle.point").count() == 2
    assert page.locator(".spread circle.pass").count() == 6
    assert not re.search("NaN|Infinity", page.locator(".group").inner_html())


@needs_browser
def test_a_phone_shows_it_without_scrolling_sideways(opened):
    page = opened(width=400)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    for chart in page.locator(".plot svg").all():
        assert chart.bounding_box()["width"] <= 368
    sizes = page.evaluate(
        "[...document.querySelectorAll('p, td, th, svg text')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12
    page.set_viewport_size({"width": 900, "height": 900})
    wait_until(page, "document.querySelector('.spread svg').clientWidth > 700")


def wait_until(page, expression, seconds=10.0):
    """Playwright's own waiting evaluates text in the page, which the page's security policy forbids."""
    for _ in range(int(seconds / 0.05)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"not so after {seconds} s: {expression}")


@needs_browser
def test_it_is_dark_where_the_reader_is_and_can_be_switched(opened):
    page = opened(scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(21, 23, 26)"
    point = "getComputedStyle(document.querySelector('.point')).fill"
    in_the_dark = page.evaluate(point)
    page.click("#theme")
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    assert page.evaluate(point) != in_the_dark
    assert page.locator("#theme").inner_text() == "Dark"


@needs_browser
def test_what_rows_say_is_text_never_code(opened):
    page = opened(
        [speed_row(0, label=HOSTILE, model=HOSTILE), failed_row("unsloth", "crashed", HOSTILE, model=HOSTILE)]
    )
    assert page.title() == "Results"
    assert page.locator("img").count() == 0
    assert _methods(page)[0] == HOSTILE
    assert page.locator(".memory a text").all_text_contents() == [HOSTILE]


@needs_browser
def test_a_run_without_figures_or_with_one_is_drawn_too(opened):
    page = opened([failed_row("unsloth", "crashed", "killed")])
    assert not page.locator(".memory").is_visible()
    page = opened([speed_row(6)])
    assert page.locator("circle.point").count() == 1
    assert page.locator(".losses .plot").inner_text() == "No method computes a loss."


def test_the_page_is_one_file_that_names_no_other():
    text = html_page(summarize(campaign()), "Results")
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
