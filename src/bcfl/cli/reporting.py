"""The commands that look at runs: report, figures, table; `bcfl demo` is in demo.py."""

import sys
from argparse import Namespace
from pathlib import Path

from bcfl.files import make_way_for, write_atomically
from bcfl.report.html import report
from bcfl.report.reading import Run, group_runs, read_runs, unfinished_runs
from bcfl.report.tables import FORMATS


def _read(options: Namespace) -> list[Run]:
    """The runs that can be read; others are told of, and spoil nothing."""
    return read_runs(options.runs, lambda trouble: print(f"bcfl: {trouble}", file=sys.stderr))


def write_report(options: Namespace) -> int:
    out: Path = options.out
    make_way_for(out, "--out")
    page = report(_read(options)).encode()
    write_atomically(out, page)
    print(f"{out} ({len(page) / 1e6:.1f} MB): open it in any browser")
    return 0


def write_figures(options: Namespace) -> int:
    from bcfl.report.paper import save_figures

    formats = [name.strip() for name in options.formats.split(",")]
    runs = _read(options)
    written = save_figures(runs, options.out, formats)
    print(f"{len(written)} files in {options.out}")
    for remark in unfinished_runs(group_runs(runs)):
        print(f"{remark}.")
    return 0


def print_table(options: Namespace) -> int:
    print(FORMATS[options.format](group_runs(_read(options))), end="")
    return 0
