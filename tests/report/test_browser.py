"""The page in a real browser: the system's Chromium, headless, driven by Playwright."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_fixtures import DESKTOP, LOW_CONTRAST, PHONE, Opened
from made_up_runs import write_run

from bcfl.report.drawing import FAINTEST, accumulated_co_association
from bcfl.report.page import report
from bcfl.report.reading import read_run, read_runs


@pytest.fixture
def visit(visit: Callable[..., Opened]) -> Callable[..., Opened]:
    """Open a report and wait until all of it is drawn."""

    def open_report(*arguments: Any, **options: Any) -> Opened:
        opened = visit(*arguments, **options)
        wait_until_drawn(opened.page)
        return opened

    return open_report


def wait_until_drawn(page: Any) -> None:
    page.wait_for_selector("body[data-drawn=yes]", timeout=90_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages")
    write_run(path / "runs" / "mh")
    write_run(path / "runs" / "mh1", seed=1)
    write_run(path / "runs" / "g", method="bcfl-g", hypotheses=1)
    (path / "one.html").write_text(report([read_run(path / "runs" / "mh")]))
    (path / "all.html").write_text(report(read_runs([path / "runs"])))
    return path


DRAWN = """() => [...document.querySelectorAll('[data-figure]')].filter(e => !e.closest('[hidden]')).map(e => ({
    name: e.dataset.figure, width: e.getBoundingClientRect().width, height: e.getBoundingClientRect().height,
    marks: e.querySelectorAll('.line, .cell, .edge, circle, .sign').length}))"""


RIGHT_EDGE = """() => Math.max(...[...document.querySelectorAll('main *')]
    .filter(e => !e.closest('.scroll, pre, svg')).map(e => e.getBoundingClientRect().right))"""


def assert_all_drawn(page: Any, names: set[str]) -> None:
    drawn = page.evaluate(DRAWN)
    assert {one["name"] for one in drawn} == names
    for one in drawn:
        assert one["marks"] > 0, f"{one['name']} is empty"
        assert one["width"] > 200, one
        assert one["height"] > 200, one


DETAILS = ("graph", "association", "trellis", "certainty", "calibration", "client_measure", "labels", "work")
ONE = {"accuracy", "macro_f1", "agreement", *(f"{name}-0" for name in DETAILS)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_plot_is_drawn(visit: Callable[..., Opened], folder: Path, device: dict[str, Any], scheme: str) -> None:
    page = visit(folder / "one.html", device, scheme).page
    assert_all_drawn(page, ONE)
    widest = page.evaluate(RIGHT_EDGE)
    assert widest <= device["viewport"]["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= device["viewport"]["width"]
    brightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (np.mean(brightness) < 60) == (scheme == "dark")


def numbers(page: Any, name: str) -> list[list[str]]:
    """What the table beside a figure holds."""
    rows: list[list[str]] = page.evaluate(
        "e => [...e.parentElement.querySelectorAll('.numbers tr')].map(r => [...r.cells].map(c => c.textContent))",
        page.query_selector(f"[data-figure={name}]"),
    )
    return rows


def told(page: Any, name: str) -> str:
    return str(page.evaluate(
        "e => e.parentElement.querySelector('.told').textContent", page.query_selector(f"[data-figure={name}]")
    ))  # fmt: skip


def test_slider_moves_the_heat_map_and_its_table(visit: Callable[..., Opened], folder: Path) -> None:
    page = visit(folder / "one.html").page
    run = read_run(folder / "runs" / "mh")
    page.locator(".f-association summary").click()

    def shown() -> np.ndarray:
        return np.array([[float(cell) for cell in row[1:]] for row in numbers(page, "association-0")[1:]])

    heat = page.locator("[data-figure=association-0]")
    picture = heat.screenshot()
    np.testing.assert_allclose(shown(), run.marginals[-1][run.order], atol=5.1e-4)
    slider = page.locator(".slider input")
    slider.press("Home")
    assert page.locator(".slider output").inner_text() == "round 1"
    np.testing.assert_allclose(shown(), run.marginals[0][run.order], atol=5.1e-4)
    assert heat.screenshot() != picture
    page.locator(".slider button").click()
    page.get_by_text("round 8", exact=True).wait_for(timeout=30_000)
    np.testing.assert_allclose(shown(), run.marginals[-1][run.order], atol=5.1e-4)


def test_every_figure_has_its_numbers_as_a_table(visit: Callable[..., Opened], folder: Path) -> None:
    page = visit(folder / "one.html").page
    for summary in page.locator(".numbers summary").all():
        summary.click()
    for name in ONE:
        head, *rows = numbers(page, name)
        assert rows
        assert all(len(row) == len(head) and all(row) for row in rows)
    run = read_run(folder / "runs" / "mh")
    accuracy = [[str(record["round"]), record["accuracy"]] for record in run.rounds]
    assert [[r, pytest.approx(float(v), abs=5e-5)] for r, v in numbers(page, "accuracy")[1:]] == accuracy


def test_the_arrow_keys_go_through_every_figure(visit: Callable[..., Opened], folder: Path) -> None:
    page = visit(folder / "one.html").page
    for name in ONE:
        page.locator(f"[data-figure={name}] svg").focus()
        page.keyboard.press("ArrowRight")
        first = told(page, name)
        page.keyboard.press("ArrowRight")
        assert first
        assert told(page, name) not in ("", first)
        page.keyboard.press("ArrowLeft")
        assert told(page, name) == first
        page.keyboard.press("Escape")
        assert told(page, name) == ""


def test_a_pointer_is_told_what_is_there(visit: Callable[..., Opened], folder: Path) -> None:
    page = visit(folder / "one.html").page
    record = read_run(folder / "runs" / "mh").rounds[-1]
    chart = page.locator("[data-figure=accuracy] svg")
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] - 20, "y": box["height"] / 2})
    assert f"{record['accuracy']:.3f}" in page.locator("[data-figure=accuracy] .tip").inner_text()


def test_the_legend_takes_curves_away_and_back(visit: Callable[..., Opened], folder: Path) -> None:
    page = visit(folder / "all.html").page
    lines = page.locator("[data-figure=accuracy] .line")
    button = page.locator(".f-accuracy .legend button").first
    assert lines.count() == 2
    button.click()
    assert lines.count() == 1
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert lines.count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_words_stand_out_from_what_is_behind_them(visit: Callable[..., Opened], folder: Path, scheme: str) -> None:
    page = visit(folder / "one.html", scheme=scheme).page
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate(LOW_CONTRAST) == []


def test_line_widths_are_the_co_association(visit: Callable[..., Opened], folder: Path) -> None:
    page = visit(folder / "one.html").page
    expected = accumulated_co_association(read_run(folder / "runs" / "mh"))
    lines = page.evaluate(
        """() => [...document.querySelectorAll('[data-figure=graph-0] .edge')].map(l =>
            [+l.dataset.a, +l.dataset.b, +l.getAttribute('stroke-width') / +l.ownerSVGElement.dataset.widest])"""
    )
    found = np.zeros_like(expected)
    for a, b, width in lines:
        found[a, b] = found[b, a] = width
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(found, np.where(expected >= FAINTEST, expected, 0), atol=5.1e-5)


def test_a_client_shows_its_own_lines(visit: Callable[..., Opened], folder: Path) -> None:
    page = visit(folder / "one.html", PHONE).page
    page.locator(".f-graph .node").nth(3).tap()
    assert "Client 3 " in told(page, "graph-0")
    bright = page.evaluate("[...document.querySelectorAll('.edge:not(.dim)')].map(l => [l.dataset.a, l.dataset.b])")
    assert bright
    assert all("3" in ends for ends in bright)


def test_chooser_shows_another_run(visit: Callable[..., Opened], folder: Path) -> None:
    page = visit(folder / "all.html").page
    overview = {"accuracy", "macro_f1", "agreement", "accuracy_by_work"}
    for index in ("0", "1"):
        page.locator("#run").select_option(index)
        wait_until_drawn(page)
        label = page.locator("#run option:checked").inner_text()
        own = [name for name in DETAILS if name != "trellis" or "mh" in label]
        assert_all_drawn(page, overview | {f"{name}-{index}" for name in own})


def test_turning_the_phone_draws_anew(visit: Callable[..., Opened], folder: Path) -> None:
    page = visit(folder / "one.html", PHONE).page
    chart = page.locator("[data-figure=association-0] svg")
    for width, height in ((844, 390), (390, 844), (1280, 900)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(300)
        assert chart.count() == 1
        assert float(chart.get_attribute("data-width")) == pytest.approx(chart.bounding_box()["width"], abs=1)
    page.locator(".slider input").press("Home")
    assert page.locator(".slider output").inner_text() == "round 1"


def test_dark_mode_changes_while_reading(visit: Callable[..., Opened], folder: Path) -> None:
    page = visit(folder / "one.html").page
    colour = "getComputedStyle(document.querySelector('[data-figure=accuracy] .line')).stroke"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(colour) != light


def test_a_thousand_clients_do_not_freeze(
    visit: Callable[..., Opened], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", clients=1000, rounds=30, hypotheses=6, clusters=4)
    (tmp_path / "big.html").write_text(report([read_run(tmp_path / "run")]))
    began = time.perf_counter()
    page = visit(tmp_path / "big.html").page
    with capsys.disabled():
        print(f"\n1000 clients: all drawn {time.perf_counter() - began:.1f} s after opening")
    assert_all_drawn(page, ONE)
    assert page.locator(".edge").count() == 2500
    began = time.perf_counter()
    page.locator(".slider input").press("Home")
    assert page.locator(".slider output").inner_text() == "round 1"
    assert time.perf_counter() - began < 10  # far above what it takes: only a freeze fails
