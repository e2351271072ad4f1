"""What is installed from a wheel is whole: it runs, far from the sources, and tells type checkers its types."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_runs_in_a_place_of_its_own(tmp_path: Path) -> None:
    sources = tmp_path / "sources"  # a copy: what a build leaves behind must not get into the next one
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, sources], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    kept = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith(".py")}
    there = {path.relative_to(sources / "src").as_posix() for path in (sources / "src/bcfl").rglob("*.*")}
    assert {name for name in there if not name.endswith(".py")} <= kept
    assert "bcfl/py.typed" in kept

    place = tmp_path / "place"
    subprocess.run([*pip, "install", "--no-deps", "--target", place, wheel], check=True)
    command = [
        sys.executable,
        "-m",
        "bcfl",
        "run",
        "--quiet",
        "--set",
        "experiment.rounds=1",
        "--out",
        tmp_path / "run",
    ]
    environment = {**os.environ, "PYTHONPATH": str(place)}  # before the sources that this environment was made for
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where = [sys.executable, "-c", "import bcfl; print(bcfl.__file__)"]
    assert str(place) in subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert (tmp_path / "run/result.json").exists()
