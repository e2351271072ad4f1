"""The tutorial on a new method keeps its promise, in an environment that has bcfl and nothing of the method's."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import bcfl

PAGE = (Path(__file__).parents[2] / "docs/tutorials/new-method.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S)
SMALL = "--set experiment.rounds=2 --set data.partition=feature(4,2) --set training.local_steps=2 --quiet"
Call = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.slow


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Runs a command of a fresh environment that sees what this one has installed."""
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", fresh], check=True)
    (here,) = fresh.glob("lib/*/site-packages")
    seen = {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))}
    (here / "seen.pth").write_text("\n".join([*seen, str(Path(bcfl.__file__).parents[1])]))
    (tmp_path / "work").mkdir()
    leave = ("PYTHON", "VIRTUAL")
    quiet = {key: value for key, value in os.environ.items() if not key.startswith(leave)}

    def run(command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        arguments = shlex.split(command.replace("(", "'('").replace(")", "')'"))
        program = [fresh / "bin/python", "-m", *arguments]
        return subprocess.run(
            program, cwd=tmp_path / "work", env=quiet | environment, capture_output=True, text=True, check=False
        )

    return run


def put_files(folder: Path) -> None:
    """The page's two files, as a reader would write them."""
    python = [text for language, text in BLOCKS if language == "python"]
    (folder / "fedmedian.py").write_text(python[0])
    (folder / "pyproject.toml").write_text(next(text for language, text in BLOCKS if language == "toml"))


def commands() -> list[list[str]]:
    return [text.splitlines() for language, text in BLOCKS if language == "sh"]


def test_a_file_that_is_named_is_a_method_and_its_run_is_resumed(call: Call, tmp_path: Path) -> None:
    put_files(tmp_path / "work")
    (named,) = commands()[0]
    done = call(f"{named} {SMALL} --out run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "work/run/config.json").read_text())["method"] == {
        "name": "fedmedian",
        "plugin": "fedmedian",
        "pull": 0.5,
    }
    expected = json.loads((tmp_path / "work/run/result.json").read_text())
    (tmp_path / "work/run/result.json").unlink()
    resumed = call("bcfl resume run --json --quiet", PYTHONPATH=".")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["accuracy"] == expected["accuracy"]


def test_an_installed_package_brings_its_method_to_every_command(call: Call, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    put_files(project)
    installed = call(f"pip install --quiet --no-index --no-deps --no-build-isolation {project}")
    assert installed.returncode == 0, installed.stderr
    for command in commands()[1]:
        small = SMALL.removesuffix(" --quiet") if "list" not in command else ""
        done = call(f"{command} {small}")
        assert done.returncode == 0, done.stderr
        assert "fedmedian" in done.stdout
    refused = call("bcfl run --set method.name=fedmedian --set method.pull=2")
    assert (refused.returncode, refused.stderr) == (2, "bcfl: method.pull must be in (0, 1], got 2\n")
    (tmp_path / "work/runs/a/result.json").unlink()
    assert call("bcfl resume runs/a --quiet").returncode == 0
    assert call("pip uninstall --yes --quiet fedmedian").returncode == 0
    for command in ("bcfl table runs", "bcfl report runs --out page.html"):  # among others that are installed
        shown = call(command)
        assert shown.returncode == 0, shown.stderr
    page = (tmp_path / "work/page.html").read_text()
    assert "fedavg" in page
    assert "fedmedian" in page
