"""Finished runs, as the command line of a script names them."""

import argparse
from pathlib import Path


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """A script's command line, with its docstring as the help."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def finished(folder: Path) -> list[Path]:
    """The finished runs in a folder; none at all is a slip of the pen."""
    found = sorted(result.parent for result in folder.glob("*/result.json"))
    if not found:
        raise SystemExit(f"{folder} holds no finished runs: no */result.json")
    return found


def runs_and_file(description: str | None) -> tuple[list[Path], Path]:
    """The runs that a script shall measure, and the file that it shall write."""
    parser = parser_for(description)
    parser.add_argument("runs_folder", type=Path, help="a folder of runs, as `bcfl sweep --out` leaves it")
    parser.add_argument("out", type=Path, help="the JSON file that is written")
    options = parser.parse_args()
    return finished(options.runs_folder), options.out
