"""The command line: parses, calls, prints. Everything heavy is imported only once a command needs it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = """\
examples:
  bcfl run                                          the default: digits in 4 rotations, 20 clients, BCFL-MH-3
  bcfl run experiment.toml --seed 1 --out runs/a    your own settings, kept in runs/a
  bcfl run --set method.name=fedavg --set experiment.rounds=50
  bcfl compare --methods fedavg,bcfl-g,bcfl-mh-3 --seeds 0,1,2
  bcfl resume runs/a                                go on after a stop, to the same result
  bcfl list methods
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bcfl",
        description="Bayesian clustered federated learning: which client belongs where, and how sure are we.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    run = commands.add_parser("run", help="train one federation", description="Train one federation.")
    run.add_argument(
        "config", nargs="?", type=Path, metavar="FILE.toml", help="settings (default: the bundled example)"
    )
    _add_settings(run)
    run.add_argument("--seed", type=int, metavar="N", help="the run's seed (experiment.seed)")
    run.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/…)")
    _add_output(run)

    resume = commands.add_parser("resume", help="continue a stopped run", description="Continue a stopped run.")
    resume.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    _add_output(resume)

    compare = commands.add_parser(
        "compare",
        help="several methods and seeds side by side",
        description="Run several methods over several seeds and print mean ± standard deviation. What is already done "
        "is not run again; a stopped comparison goes on where it was.",
    )
    compare.add_argument("config", nargs="?", type=Path, metavar="FILE.toml", help="settings shared by all runs")
    _add_settings(compare)
    compare.add_argument("--methods", required=True, metavar="A,B,…", help="methods, as in `bcfl list methods`")
    compare.add_argument("--seeds", default="0", metavar="0,1,…", help="seeds (default: 0)")
    compare.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="folder of all runs (default: runs)"
    )
    _add_output(compare)

    sweep = commands.add_parser(
        "sweep",
        help="all runs of experiment files",
        description="Run every combination that experiment files describe in their [sweep] sections, one after the "
        "other. What is already done is not run again; a stopped sweep goes on where it was.",
    )
    sweep.add_argument("configs", nargs="+", type=Path, metavar="FILE.toml", help="experiment files")
    _add_settings(sweep)
    sweep.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="folder of all runs (default: runs)"
    )
    sweep.add_argument("--dry-run", action="store_true", help="only list the runs, and which of them are done")
    _add_output(sweep)

    listing = commands.add_parser("list", help="what there is", description="What there is to choose from.")
    listing.add_argument("what", choices=("methods", "datasets", "models"))
    listing.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="change one setting; sections: data, model, method, training, experiment",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=_positive, metavar="N", help="threads that train clients (default: all cores)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0 for success, 2 for bad input, 1 for a stop that can be resumed."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.version:
        from bcfl import __version__

        print(__version__)
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    from bcfl import commands

    try:
        return commands.COMMANDS[options.command](options)
    except (ValueError, FileNotFoundError) as error:
        print(f"bcfl: {error}", file=sys.stderr)
        return 2
    except commands.RunStoppedError as error:
        print(f"bcfl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bcfl: interrupted; nothing is lost, `bcfl resume` goes on from the last checkpoint", file=sys.stderr)
        return 130
