"""Pages in a real browser: the system's Chromium, headless, driven by Playwright. Import `browser` and `visit`."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
LOW_CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


@dataclass
class Opened:
    """A page in the browser, and what it did that it should not."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None and os.environ.get("BCFL_BROWSER") == "required":  # as in CI
        pytest.fail("no Chromium is installed, and BCFL_BROWSER=required asks for one: apt-get install chromium")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Open a file; at the end nothing may have been asked of a network, or complained of."""
    visits: list[Opened] = []

    def open_page(path: Path, device: dict[str, Any] = DESKTOP, scheme: str = "light") -> Opened:
        context = browser.new_context(color_scheme=scheme, **device)
        opened = Opened(context.new_page())
        visits.append(opened)
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.on("console", lambda message: opened.complaints.append(message.text))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.goto(path.as_uri())
        return opened

    yield open_page
    for opened in visits:
        assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []
        assert opened.complaints == []
        opened.page.context.close()
