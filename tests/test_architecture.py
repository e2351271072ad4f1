"""The shape of the package: imports point one way, heavy libraries stay where they belong and come late."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bcfl

ROOT = Path(bcfl.__file__).parent
# The rooms from the ground up: each may import those before it in the list that it is given, never one after it.
MATHS = {"randomness", "belief", "association"}
CONTRACT = MATHS | {"federation", "extensions", "predict"}
LEARNING = MATHS | {"federation", "extensions", "files", "likelihood", "data", "model", "client"}
RUNNING = LEARNING | {"predict", "engines", "methods", "runs"}
ALLOWED: dict[str, set[str]] = {
    "randomness": set(),
    "files": set(),
    "console": set(),
    "belief": set(),
    "association": {"belief"},
    "likelihood": set(),
    "federation": {"belief"},
    "extensions": MATHS | {"federation"},
    "model": {"likelihood", "randomness"},
    "data": {"console", "files", "likelihood", "randomness"},
    "client": MATHS | {"extensions", "federation", "likelihood", "model"},
    "predict": LEARNING,
    "methods": CONTRACT,  # never engines, data, client, model or runs: they meet in federation
    "engines": LEARNING,  # never methods or runs
    "runs": RUNNING | {"console"},
    "api": RUNNING,
    "sklearn": RUNNING | {"api"},
    "report": RUNNING | {"console"},
    "deploy": RUNNING,
    "benchmark": RUNNING | {"api", "console", "likelihood"},
    "cli": RUNNING | {"api", "benchmark", "console", "deploy", "report"},
    "__main__": set(),
    "__init__": set(),  # names its homes as texts, so that importing bcfl costs nothing
}

# Which parts may import a library, the others never.
ONLY_IN = {
    "ray": ("engines/ray.py",),
    "flwr": ("engines/flower", "deploy"),
    "matplotlib": ("report",),
    "jinja2": ("benchmark", "report", "deploy"),
    "sklearn": ("association", "data", "predict", "runs", "sklearn"),
    "datasets": ("data",),
    "narwhals": ("data",),
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports_of(path: Path) -> Iterator[str]:
    """The full names of all that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    own = part_of(path)
    assert own in ALLOWED, f"say in ALLOWED what {own} may import"
    for name in imports_of(path):
        package, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        if package == "bcfl" and part not in (own, "__version__"):
            assert part in ALLOWED[own], f"{path.relative_to(ROOT)} must not import bcfl.{part}"


def test_the_arrows_have_no_circle() -> None:
    """A part never reaches itself through others, so there is an order in which each can be understood."""
    reached: dict[str, set[str]] = {part: set() for part in ALLOWED}
    for path in modules():
        own = part_of(path)
        parts = {name.split(".")[1] for name in imports_of(path) if name.startswith("bcfl.")}
        reached[own] |= parts - {own, "__version__"}
    ready: set[str] = set()
    while waiting := reached.keys() - ready:
        free = {part for part in waiting if reached[part] <= ready}
        assert free, f"these import each other in a circle: {sorted(waiting)}"
        ready |= free


def test_what_is_read_first_is_there_and_short() -> None:
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    first, rooms = page.split("## Read these first")[1].split("## How it is laid out")
    files = [ROOT / name for name in re.findall(r"^\d\. `(.+?)`", first, re.M)]
    assert len(files) == 5
    assert sum(len(path.read_text().splitlines()) for path in files) < 1000
    told = {
        name.rstrip("/") for row in re.findall(r"^\| (`.+?) \|", rooms, re.M) for name in re.findall("`(.+?)`", row)
    }
    there = {path.relative_to(ROOT).parts[0] for path in modules()}
    assert told == {name for name in there if not name.startswith("__")}


def test_public_names_are_where_they_are_said_to_be() -> None:
    assert all(getattr(bcfl, name) is not None for name in bcfl.__all__)


@pytest.mark.parametrize("library", ONLY_IN)
def test_libraries_stay_where_they_belong(library: str) -> None:
    for path in modules():
        if any(name.partition(".")[0] == library for name in imports_of(path)):
            place = path.relative_to(ROOT).as_posix()
            assert place.startswith(ONLY_IN[library]), f"{place} must not import {library}"


def test_plotting_libraries_are_imported_only_when_something_is_drawn() -> None:
    for path in modules():
        for node in _always_imported(ast.parse(path.read_text()).body):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                assert name.partition(".")[0] not in ("matplotlib", "jinja2"), f"{path.name} imports {name} at once"


def _always_imported(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run with the module: at its top level, except those for type checkers."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield from _always_imported([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _always_imported(node.body)


@pytest.mark.parametrize(
    "code",
    [
        "import bcfl; bcfl.__version__",
        "from bcfl.cli import build; build()",
        "from bcfl.cli import main; main(['--version'])",
        "import sys; from bcfl.cli import main; sys.argv = ['bcfl']; main([])",
    ],
)
def test_help_does_not_wait_for_heavy_libraries(code: str) -> None:
    heavy = {"torch", "numpy", "scipy", "sklearn", "rich", "flwr", "matplotlib", "jinja2"}
    check = f"{code}\nimport sys\nfound = {heavy!r} & sys.modules.keys()\nassert not found, found"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_bcfl_help_does_not_import_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-c", "from bcfl.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "Usage: bcfl" in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "bcfl" in imported
    assert not imported & {"torch", "numpy", "rich"}
