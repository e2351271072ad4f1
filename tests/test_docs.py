"""Every Python block and `bcfl` command in README and docs is run, as written but for the number of rounds.

Blocks marked `sh` need data or machines that are not at hand; those of the page on Flower are run in
deploy/test_federation.py.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bcfl.cli import main
from bcfl.data.sources import SOURCES
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


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


@pytest.mark.slow
def test_the_documentation_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    maths = (tmp_path / "site" / "maths" / "index.html").read_text()
    assert "<math" in maths
    assert "arithmatex" not in maths


def test_the_page_on_data_names_what_every_set_can_be_read_from() -> None:
    text = (ROOT / "docs/experiments.md").read_text()
    (hubs,) = (line for line in text.splitlines() if line.startswith("3. The Hugging Face hub"))
    assert re.findall(r"`(\w+)`", hubs) == [name for name, source in SOURCES.items() if source.hub]
    for name, source in SOURCES.items():
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        told = row.replace("the four files as for `fashion_mnist`", "`train-images-idx3-ubyte`")
        told = told.replace(
            "`train_32x32.mat`, `test_32x32.mat` (also with", "`train_32x32.mat` `svhn_train_32x32.mat`"
        )
        for first in [f"{name}.npz", *(raw.files[0] for raw in source.formats)]:
            assert f"`{first}`" in told


def test_the_page_of_settings_is_as_the_fields_say() -> None:
    flower = pytest.importorskip("bcfl.engines.flower")
    every = all_settings() | {f"deploy.{key}": one for key, one in described_in(flower.Terms).items()}
    page = (ROOT / "docs/settings.md").read_text()
    assert with_tables(page, every) == page, "run python -m bcfl.runs.reference docs/settings.md"
    assert all(f"| `{key}` |" in page and one.meaning for key, one in every.items())
