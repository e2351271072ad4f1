"""What runs have come to: `bcfl report`, `bcfl figures`, `bcfl table`, and `bcfl demo`, which ends with a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

import bcfl.cli.options as options
from bcfl.cli.command import complain
from bcfl.cli.options import beside, flag, option, usable_file, usable_folder

if TYPE_CHECKING:
    from bcfl.report.reading import Run

WHERE = "default: {} in the run's folder; for several, in the innermost folder that holds them all"


def report(
    *,
    runs: options.RunPaths,
    out: Annotated[Path | None, option("FILE", WHERE.format("report.html"), usable_file)] = None,
) -> int:
    """One page about a run, or several side by side.

    It holds everything, and needs no network.

    examples:
      bcfl report runs/a
      bcfl report runs --out compared.html   all runs of a comparison, grouped by method
    """
    path = out or usable_file(beside(runs, "report.html"))
    from bcfl.files import write_atomically
    from bcfl.report.page import report as page_of

    found, code = _read(runs)
    page = page_of(found).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    print(f"{path} ({len(page) / 1e6:.1f} MB): open it in any browser")
    return code


def figures(
    *,
    runs: options.RunPaths,
    out: Annotated[Path | None, option("DIR", WHERE.format("figures"), usable_folder)] = None,
    formats: Annotated[str, option("A,B,…", "default: png,svg,pdf")] = "png,svg,pdf",
) -> int:
    """Every figure of a run as PNG, SVG and PDF.

    examples:
      bcfl figures runs/a --out figures
      bcfl figures runs --formats pdf
    """
    folder = out or usable_folder(beside(runs, "figures"))
    from bcfl.report.paper import save_figures
    from bcfl.report.reading import group_runs, unfinished_runs

    found, code = _read(runs)
    written = save_figures(found, folder, [name.strip() for name in formats.split(",")])
    print(f"{len(written)} files in {folder}")
    for remark in unfinished_runs(group_runs(found)):
        print(f"{remark}.")
    return code


def table(
    *,
    runs: options.RunPaths,
    form: Annotated[
        str, option(None, "default: markdown", click.Choice(["markdown", "csv", "latex"]), "--format")
    ] = "markdown",
) -> int:
    """Mean ± deviation over seeds, as a table.

    A row stands for a method and a combination of settings that vary.

    examples:
      bcfl table runs --format latex > table.tex
    """
    from bcfl.report.reading import group_runs
    from bcfl.report.tables import FORMATS

    found, code = _read(runs)
    print(FORMATS[form](group_runs(found)), end="")
    return code


def demo(
    *,
    out: Annotated[
        Path | None, option("DIR", "a new folder (default: bcfl-demo, bcfl-demo-2 …)", usable_folder)
    ] = None,
    no_pause: Annotated[bool, flag("--no-pause", "do not wait for Enter between the parts")] = False,
    num_workers: options.Workers = None,
) -> int:
    """A guided tour that ends with a report.

    examples:
      bcfl demo
    """
    if out is None:
        usable_folder("bcfl-demo")
    from bcfl.cli.tour import tour

    tour(out, pauses=not no_pause, num_workers=num_workers)
    return 0


def _read(paths: Sequence[Path]) -> "tuple[list[Run], int]":
    """The runs that can be read, and the exit code: 2 where one of them cannot, which is told."""
    from bcfl.report.reading import read_runs

    left_out: list[str] = []
    found = read_runs(paths, left_out.append)
    for told in left_out:
        complain(told)
    return found, 2 if left_out else 0
