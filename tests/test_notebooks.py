"""The notebooks beside the documentation's pages: they are the pages, and they run from top to bottom."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_says_what_its_page_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "hooks")
    from notebook import notebook_of

    assert nbformat.read(path, 4) == notebook_of(path.with_suffix(".md").read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what runs notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    nbclient.NotebookClient(
        nbformat.read(path, 4), timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert (tmp_path / "runs" / "hospitals" / "table.json").is_file()
