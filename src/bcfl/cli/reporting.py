"""The commands that look at runs: report, figures, table; `bcfl demo` is in demo.py."""

from argparse import Namespace
from pathlib import Path

from bcfl.files import make_way_for, write_atomically
from bcfl.report.html import report
from bcfl.report.reading import group_runs, read_runs, unfinished_runs
from bcfl.report.tables import FORMATS


def write_report(options: Namespace) -> int:
    out: Path = options.out
    make_way_for(out, "--out")
    page = report(read_runs(options.runs)).encode()
    write_atomically(out, page)
    print(f"{out} ({len(page) / 1e6:.1f} MB): open it in any browser")
    return 0


def write_figures(options: Namespace) -> int:
    from bcfl.report.paper import save_figures

    formats = [name.strip() for name in options.formats.split(",")]
    runs = read_runs(options.runs)
    written = save_figures(runs, options.out, formats)
    print(f"{len(written)} files in {options.out}")
    for remark in unfinished_runs(group_runs(runs)):
        print(f"{remark}.")
    return 0


def print_table(options: Namespace) -> int:
    print(FORMATS[options.format](group_runs(read_runs(options.runs))), end="")
    return 0
