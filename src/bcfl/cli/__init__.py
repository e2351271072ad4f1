"""The command line: parses, calls, prints. Everything heavy is imported only once a command needs it."""

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Sequence

# pathlib and typing come late as well: each takes longer to import than this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, NoReturn

EXAMPLES = """\
examples:
  bcfl run                                          the default: digits in 4 rotations, 20 clients, BCFL-MH-3
  bcfl run settings.toml --seed 1 --out runs/a      your own settings, kept in runs/a
  bcfl run --set method.name=fedavg --set experiment.rounds=50
  bcfl compare --methods fedavg,bcfl-g,bcfl-mh-3 --seeds 0,1,2
  bcfl resume runs/a                                go on after a stop, to the same result
  bcfl report runs                                  one page that shows what happened
  bcfl associate runs/a --data mine.npz             where does a client that was never seen belong?
  bcfl evaluate runs/a                              how good are a run's predictions as probabilities?
  bcfl demo                                         a guided tour
  bcfl deploy local --set experiment.rounds=5       a real federation of processes, on this machine
  bcfl list methods
"""


RUN_EXAMPLES = """\
examples:
  bcfl run
  bcfl run settings.toml --seed 1 --out runs/a
  bcfl run --set data.partition='label(4,10,0.1)' --set method.name=bcfl-mh-6-w --set method.num_clusters=4
  bcfl run --set data.factory=mine:make_clients --set model.factory=mine:make_model   functions in mine.py
"""
RESUME_EXAMPLES = """\
examples:
  bcfl resume runs/a          after a crash or a full disk, to the same result
  bcfl resume runs/a --json   a complete run is only read
  bcfl resume runs/a --rounds 60 --out runs/b   what it has learned so far, and on to round 60
  bcfl resume runs/a --data-path /data/elsewhere
"""
COMPARE_EXAMPLES = """\
examples:
  bcfl compare --methods fedavg,bcfl-g,bcfl-mh-3 --seeds 0,1,2
  bcfl compare settings.toml --methods ifca,bcfl-mh-6-w --seeds 0,1,2,3,4 --out runs/mine --json
"""
SWEEP_EXAMPLES = """\
examples:
  bcfl sweep experiments/*.toml --dry-run
  bcfl sweep experiments/a.toml --set experiment.rounds=5 --out runs/short
  bcfl sweep experiments/a.toml --set experiment.seed=7   one seed instead of those that the file lists
  bcfl sweep experiments/*.toml --without results          only what has not been collected there yet
"""
LIST_EXAMPLES = """\
examples:
  bcfl list methods
  bcfl list datasets --json
  bcfl list settings          for files and --set: the default, what is allowed, which methods have it
"""
DEPLOY_EXAMPLES = """\
examples:
  bcfl deploy local --set experiment.rounds=5
  bcfl deploy local settings.toml --clients 6 --out runs/deployed --set deploy.deadline=60
  bcfl deploy init federation --clients 3 --server fl.example.org --data-factory mydata:load --set model.name=mlp
"""
REPORT_EXAMPLES = """\
examples:
  bcfl report runs/a
  bcfl report runs --out compared.html   all runs of a comparison, grouped by method
"""
FIGURES_EXAMPLES = """\
examples:
  bcfl figures runs/a --out figures
  bcfl figures runs --formats pdf
"""
TABLE_EXAMPLES = """\
examples:
  bcfl table runs --format latex > table.tex
"""
ASSOCIATE_EXAMPLES = """\
examples:
  bcfl associate runs/a --data mine.npz
  bcfl associate runs/a --data mine.npz --examples 32 --save mine.safetensors --json
"""
EVALUATE_EXAMPLES = """\
examples:
  bcfl evaluate runs/a
  bcfl evaluate runs/a --beliefs last_layer --prior-precision 100 --out predictive.json
"""
DEMO_EXAMPLES = """\
examples:
  bcfl demo
"""


class _Form(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, which argparse would ask of a module that imports all of Python's archive formats."""

    def __init__(self, prog: str):
        columns = os.environ.get("COLUMNS", "")
        try:
            width = int(columns) if columns.isdecimal() else os.get_terminal_size(1).columns
        except OSError:  # no terminal
            width = 80
        super().__init__(prog, width=(width or 80) - 2)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like everything else here."""

    def __init__(self, **options: "Any"):
        super().__init__(formatter_class=_Form, **options)

    def error(self, message: str) -> "NoReturn":
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


class _Command:
    """A command's parser, made when it is first used: `bcfl --help` needs no more of the commands than their names."""

    def __init__(self, fill: "Callable[[_Parser], None]", **options: "Any"):
        self._fill, self._options = fill, options

    def __getattr__(self, name: str) -> "Any":  # only what is not there yet comes here
        if name == "_parser":
            self._parser = _Parser(**self._options)
            self._fill(self._parser)
            return self._parser
        return getattr(self._parser, name)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="bcfl",
        description="Bayesian clustered federated learning: which client belongs where, and how sure are we.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    later: Any = _Command  # stands in for a parser, though it is none
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=later)
    for name, summary, fill in (
        ("run", "train one federation", _fill_run),
        ("resume", "continue a stopped run", _fill_resume),
        ("compare", "several methods and seeds side by side", _fill_compare),
        ("sweep", "all runs of experiment files", _fill_sweep),
        ("list", "what there is", _fill_list),
        ("report", "see what happened: one HTML page", _fill_report),
        ("figures", "figures for papers", _fill_figures),
        ("table", "tables for papers", _fill_table),
        ("demo", "a guided tour of two minutes", _fill_demo),
        ("associate", "where a newcomer belongs", _fill_associate),
        ("evaluate", "how good predictions are as probabilities", _fill_evaluate),
        ("deploy", "a real federation, across processes and machines", _fill_deploy),
    ):
        commands.add_parser(name, help=summary, fill=fill)
    return parser


def _describe(parser: _Parser, description: str, examples: str) -> None:
    parser.description = textwrap.fill(description, 100)
    parser.epilog = examples


def _fill_run(parser: _Parser) -> None:
    _describe(parser, "Train one federation.", RUN_EXAMPLES)
    parser.add_argument(
        "config", nargs="?", type=_path, metavar="FILE.toml", help="settings (default: the bundled example)"
    )
    _add_settings(parser)
    parser.add_argument("--seed", type=int, metavar="N", help="the run's seed (experiment.seed)")
    parser.add_argument("--out", type=_path, metavar="DIR", help="the run's folder (default: runs/…)")
    _add_live(parser)
    _add_output(parser)


def _fill_resume(parser: _Parser) -> None:
    text = (
        "Continue a stopped run; or, with --rounds, go on from where a run has come to. That makes a new run, and the "
        "old one stays as it is. A folder says by name which functions make its clients and its model, and these are "
        "called: to resume a stranger's folder may run his code. They are not looked for in the working directory, "
        "unless PYTHONPATH=. says so."
    )
    _describe(parser, text, RESUME_EXAMPLES)
    parser.add_argument("run", type=_path, metavar="RUN", help="the run's folder")
    parser.add_argument("--rounds", type=int, metavar="N", help="more rounds in all than the run was set to")
    parser.add_argument(
        "--out", type=_path, metavar="DIR", help="with --rounds: the new run's folder (default: RUN-N-rounds)"
    )
    _add_data_path(parser)
    _add_live(parser)
    _add_output(parser)


def _fill_compare(parser: _Parser) -> None:
    text = (
        "Run several methods over several seeds and print mean ± standard deviation. What is already done is not run "
        "again; a stopped comparison goes on where it was."
    )
    _describe(parser, text, COMPARE_EXAMPLES)
    parser.add_argument("config", nargs="?", type=_path, metavar="FILE.toml", help="settings shared by all runs")
    _add_settings(parser)
    parser.add_argument("--methods", required=True, metavar="A,B,…", help="methods, as in `bcfl list methods`")
    parser.add_argument("--seeds", default="0", metavar="0,1,…", help="seeds (default: 0)")
    _add_many(parser)
    _add_output(parser)


def _fill_sweep(parser: _Parser) -> None:
    text = (
        "Run every combination that experiment files describe in their [sweep] sections, the first seed of all before "
        "the second of any. What is already done is not run again; a stopped sweep goes on where it was; several "
        "sweeps may share a folder."
    )
    _describe(parser, text, SWEEP_EXAMPLES)
    parser.add_argument("configs", nargs="+", type=_path, metavar="FILE.toml", help="experiment files")
    _add_settings(parser, "change one setting of all runs; if [sweep] varies it, only this value is run")
    _add_many(parser)
    parser.add_argument("--dry-run", action="store_true", help="only list the runs, and which of them are done")
    collected = "leave out runs with results in this folder, where experiments/collect.py keeps those of other machines"
    parser.add_argument("--without", type=_path, metavar="DIR", help=collected)
    _add_output(parser)


def _fill_list(parser: _Parser) -> None:
    _describe(parser, "What there is to choose from.", LIST_EXAMPLES)
    parser.add_argument("what", choices=("methods", "datasets", "models", "settings"))
    parser.add_argument("--json", action="store_true", help="print JSON")


def _fill_report(parser: _Parser) -> None:
    text = "One page with everything about a run, or about several side by side; it needs no network."
    _describe(parser, text, REPORT_EXAMPLES)
    _add_runs(parser)
    parser.add_argument("--out", type=_path, default="report.html", metavar="FILE", help="default: report.html")


def _fill_figures(parser: _Parser) -> None:
    _describe(parser, "Every figure of a run as PNG, SVG and PDF.", FIGURES_EXAMPLES)
    _add_runs(parser)
    parser.add_argument("--out", type=_path, default="figures", metavar="DIR", help="default: figures")
    parser.add_argument("--formats", default="png,svg,pdf", metavar="A,B,…", help="default: png,svg,pdf")


def _fill_table(parser: _Parser) -> None:
    text = "Mean ± standard deviation over seeds, a row a method and combination of settings that vary."
    _describe(parser, text, TABLE_EXAMPLES)
    _add_runs(parser)
    parser.add_argument("--format", choices=("markdown", "csv", "latex"), default="markdown", help="default: markdown")


def _fill_demo(parser: _Parser) -> None:
    _describe(parser, "A guided tour that ends with a report.", DEMO_EXAMPLES)
    parser.add_argument("--out", type=_path, metavar="DIR", help="a new folder (default: bcfl-demo, bcfl-demo-2 …)")
    parser.add_argument("--no-pause", action="store_true", help="do not wait for Enter between the parts")
    _add_workers(parser)


def _fill_associate(parser: _Parser) -> None:
    text = (
        "How likely a client that the run has never seen belongs to each cluster, by scoring a few of its examples; "
        "nothing is trained. FILE.npz holds x, (example, …) numbers prepared as the run's own data were, and y, "
        "(example,) whole-numbered labels. Where the run's model was given in Python, use result.associate there."
    )
    _describe(parser, text, ASSOCIATE_EXAMPLES)
    parser.add_argument("run", type=_path, metavar="RUN", help="the folder of a complete run")
    parser.add_argument(
        "--data", type=_path, required=True, metavar="FILE.npz", help="the newcomer's examples: x and y"
    )
    parser.add_argument("--examples", type=_positive, metavar="N", help="use the first N (default: all)")
    parser.add_argument(
        "--temperature",
        default="none",
        metavar="T",
        help="log-likelihoods are divided by it: none (1, the posterior; the default), per_example, or a number",
    )
    parser.add_argument(
        "--prior",
        choices=("uniform", "size"),
        default="uniform",
        help="before any example: all clusters alike (the default), or by their numbers of clients",
    )
    parser.add_argument("--save", type=_path, metavar="FILE.safetensors", help="write the most likely cluster's model")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _fill_evaluate(parser: _Parser) -> None:
    text = (
        "NLL, Brier score, ECE and accuracy at coverage over all clients' test data, of each client's best model and "
        "of its predictive mixture over hypotheses and, with --beliefs, over each belief. Needs the run's data; not "
        "for clients or a model that were given in Python."
    )
    _describe(parser, text, EVALUATE_EXAMPLES)
    parser.add_argument("run", type=_path, metavar="RUN", help="the folder of a complete run")
    _add_data_path(parser)
    kinds = ("mean", "samples", "sigma", "last_layer")
    parser.add_argument("--beliefs", choices=kinds, default="mean", help="what stands for a belief (default: its mean)")
    parser.add_argument("--samples", type=_positive, default=16, metavar="N", help="draws per belief (default: 16)")
    parser.add_argument(
        "--prior-precision",
        default="1000",
        metavar="X",
        help="added to the beliefs' precision (default: 1000); auto: chosen on validation data (data.validation)",
    )
    parser.add_argument("--out", type=_path, metavar="FILE.json", help="write all of it, with the coverage curve")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _fill_deploy(deploy: _Parser) -> None:
    text = "A federation of real processes: on this machine, or as a folder to be taken to several."
    _describe(deploy, text, DEPLOY_EXAMPLES)
    places = deploy.add_subparsers(dest="place", metavar="WHERE", required=True)
    local = places.add_parser("local", help="on this machine: server, clients and a run, until it is done")
    folder = places.add_parser("init", help="a folder for several machines: settings, certificates, keys, scripts")
    folder.add_argument("folder", type=_path, metavar="DIR", help="a new folder")
    for parser in (local, folder):
        parser.add_argument("config", nargs="?", type=_path, metavar="FILE.toml", help="settings")
        number = "number of clients (default: deploy.num_clients, or 4)"
        parser.add_argument("--clients", type=_positive, metavar="N", help=number)
        parser.add_argument("--seed", type=int, metavar="N", help="the run's seed (experiment.seed)")
        parser.add_argument("--insecure", action="store_true", help="no TLS and no keys; refused beyond this machine")
        _add_settings(parser, sections="data, model, method, training, experiment, deploy")
    local.add_argument("--out", type=_path, metavar="DIR", help="the run's folder (default: runs/…)")
    local.add_argument("--json", action="store_true", help="print JSON instead of tables")
    local.add_argument("--quiet", action="store_true", help="no progress")
    _add_live(local)
    folder.add_argument("--server", default="127.0.0.1", metavar="HOST", help="the server's name or IP address")
    port = "the server's port for clients, up to 65535 (default: 9093); not with --insecure"
    folder.add_argument("--port", type=_positive, metavar="N", help=port)
    folder.add_argument("--data-factory", metavar="MODULE:FUNCTION", help="returns a client's data, on its own machine")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=_path, metavar="RUN", help="run folders, or folders of run folders")


def _add_data_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-path", type=_path, metavar="DIR", help="where the run's data lie now (data.path)")


def _add_live(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensorboard", type=_path, metavar="DIR", help="follow it in TensorBoard: event files in DIR")
    parser.add_argument("--mlflow", metavar="URI|DIR", help="follow it in MLflow: a server, or a data base in DIR")


def _add_settings(
    parser: argparse.ArgumentParser,
    effect: str = "change one setting",
    sections: str = "data, model, method, training, experiment",
) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help=f"{effect}; sections: {sections}",
    )


def _add_many(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=_path, default="runs", metavar="DIR", help="folder of all runs (default: runs)")
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="runs side by side (default: what keeps all cores busy)"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    _add_workers(parser)
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="cpu (default), or cuda or cuda:N: many clients together on a GPU; stacked-cpu tries that without one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    text = "threads that train clients (default: all cores)"
    parser.add_argument("--workers", type=_positive, metavar="N", help=text)


def _path(text: str) -> "Path":
    from pathlib import Path

    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


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
    try:
        from bcfl.cli import commands
    except KeyboardInterrupt:  # torch takes a while to load
        return _complain("interrupted", 130)
    try:
        with commands.ended_in_order():
            code = commands.COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it flushes at exit
        return 141
    except (ValueError, OSError) as error:
        return _complain(str(error), 2)
    except commands.RunStoppedError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt as interruption:  # a run that can go on says how
        return _complain("; ".join(["interrupted", *map(str, interruption.args)]), 130)


def _complain(message: str, code: int) -> int:
    print("bcfl:", " ".join(message.split()), file=sys.stderr)  # one line, whatever a library had to say
    return code
