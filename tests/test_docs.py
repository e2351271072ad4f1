"""Every Python block and `bcfl` command in README and docs is run, as written but for the number of rounds.

Blocks marked `sh` need data or machines that are not at hand; those of the page on Flower are run in
deploy/test_federation.py.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from browser_fixtures import LOW_CONTRAST, Opened

from bcfl.cli import main
from bcfl.runs.reference import all_settings, described_in, with_tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
FILE = re.compile(r"`(\w+\.toml)`:\n\n```toml\n(.*?)^```", re.S | re.M)  # a page's own file, and what it is called
TRAINING = {"run", "compare"}


def python_of(page: Path) -> str:
    return "\n".join(text for language, text in BLOCK.findall(page.read_text()) if language == "python")


def commands_of(page: Path) -> list[str]:
    """The lines of shell blocks that call bcfl, without their comments."""
    text = "\n".join(
        block for language, block in BLOCK.findall(page.read_text()) if language in ("", "bash", "console")
    )
    return [line.split("  #")[0].strip() for line in text.splitlines() if line.startswith("bcfl ")]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def in_folder_for(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that holds the page's files, and a reader's own settings."""
    monkeypatch.chdir(folder)
    (folder / "settings.toml").write_text('[method]\nname = "bcfl-g"\n')
    for called, text in FILE.findall(page.read_text()):
        (folder / called).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=name)
def test_python_blocks_run_as_written(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bcfl.methods import METHODS

    in_folder_for(page, tmp_path, monkeypatch)
    known = dict(METHODS)
    try:
        exec(compile(python_of(page), str(page), "exec"), {"__name__": "__main__"})
    finally:
        METHODS.clear()  # a tutorial registers a method of its own
        METHODS.update(known)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=name)
def test_commands_run_as_written(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_folder_for(page, tmp_path, monkeypatch)
    for command in commands_of(page):
        arguments = shlex.split(command)[1:]
        shorter = ["--set", "experiment.rounds=1"] if arguments[0] in TRAINING else []
        assert main([*arguments, *shorter]) == 0, f"{command}: {capsys.readouterr().err}"


def test_every_link_of_a_page_outside_the_site_leads_somewhere() -> None:
    for page in ROOT.glob("*.md"):  # within the site, building it tells
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation site, which is built without a warning."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return path


@pytest.mark.slow
def test_the_site_draws_its_formulas_without_a_script(site: Path) -> None:
    maths = (site / "maths.html").read_text()
    assert "<math" in maths
    assert "arithmatex" not in maths


@pytest.mark.slow
def test_the_site_is_searched_and_gone_through_from_the_file_system(site: Path, visit: Callable[..., Opened]) -> None:
    page = visit(site / "index.html").page
    page.wait_for_timeout(500)  # the search is there a moment after the page
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").press_sequentially("calibration", delay=50)
    page.locator("a.md-search-result__link").first.click(timeout=30_000)
    page.wait_for_url(lambda url: "index.html" not in url)
    assert "calibration" in page.locator("article").inner_text().lower()


CUT = """() => [...document.querySelectorAll('pre > code')].filter((e) => e.scrollWidth > e.clientWidth + 1)
    .map((e) => e.textContent.slice(0, 80))"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_of_the_site_can_be_read(site: Path, visit: Callable[..., Opened], scheme: str) -> None:
    page = visit(site / "index.html", scheme=scheme).page
    for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # which only a server shows
        page.goto(path.as_uri())
        assert page.evaluate(CUT) == [], path
        assert page.evaluate(LOW_CONTRAST) == [], path


def test_the_page_of_settings_is_as_the_fields_say() -> None:
    flower = pytest.importorskip("bcfl.engines.flower")
    every = all_settings() | {f"deploy.{key}": one for key, one in described_in(flower.Terms).items()}
    page = (ROOT / "docs/settings.md").read_text()
    assert with_tables(page, every) == page, "run python -m bcfl.runs.reference docs/settings.md"
    assert all(f"| `{key}` |" in page and one.meaning for key, one in every.items())
