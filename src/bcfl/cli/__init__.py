"""Bayesian clustered federated learning: which client belongs where, and how sure are we.

examples:
  bcfl run                                          the default: digits in 4 rotations, 20 clients, BCFL-MH-3
  bcfl run settings.toml --seed 1 --out runs/a      your own settings, kept in runs/a
  bcfl run --set method.name=fedavg --set experiment.rounds=50
  bcfl compare --methods fedavg,bcfl-g,bcfl-mh-3 --seeds 0,1,2
  bcfl resume runs/a                                go on after a stop, to the same result
  bcfl report runs                                  one page that shows what happened
  bcfl associate runs/a --data mine.npz             where does a client that was never seen belong?
  bcfl evaluate runs/a                              how good are a run's predictions as probabilities?
  bcfl benchmark --quick                            methods on real federations with natural sites
  bcfl demo                                         a guided tour
  bcfl deploy local --set experiment.rounds=5       a real federation of processes, on this machine
  bcfl list methods
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from bcfl.cli import benchmark, deploy, listing, predicting, reports, run, sweeps
from bcfl.cli.command import add, complain, told
from bcfl.runs.stopping import RunStoppedError, ended_in_order


def build() -> click.Group:
    """All commands, in the order in which they are met."""
    form = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    version = click.Option(["--version"], is_flag=True, help="print the version and exit")
    how: dict[str, Any] = {
        "callback": _first,
        "params": [version],
        "invoke_without_command": True,
        "context_settings": form,
    }
    commands = _InOrder("bcfl", **how, **told(__doc__))
    for function in (run.run, run.resume, sweeps.compare, sweeps.sweep, benchmark.benchmark, listing.list_,
                     reports.report, reports.figures, reports.table, reports.demo, predicting.associate,
                     predicting.evaluate):  # fmt: skip
        add(commands, function)
    federation = _InOrder("deploy", help=deploy.__doc__, no_args_is_help=False)
    add(federation, deploy.local)
    add(federation, deploy.init)
    commands.add_command(federation)
    return commands


def _first(version: bool) -> int:
    if version:
        from bcfl import __version__

        print(__version__)
    elif click.get_current_context().invoked_subcommand is None:
        print(click.get_current_context().get_help())
    return 0


class _InOrder(click.Group):
    """Lists its commands as they were added, not by the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0 for success, 2 for bad input, 1 for a stop that can be resumed."""
    try:
        with (
            ended_in_order(),
            build().make_context("bcfl", [*(sys.argv[1:] if arguments is None else arguments)]) as call,
        ):
            code: int = call.command.invoke(call)
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "bcfl"
        return _complain(f"{_in_words(error)} (see `{path} --help`)", 2, path)
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it flushes at exit
        return 141
    except (ValueError, OSError) as error:
        return _complain(str(error), 2)
    except RunStoppedError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt as interruption:  # a run that can go on says how
        return _complain("; ".join(["interrupted", *map(str, interruption.args)]), 130)


def _in_words(error: click.UsageError) -> str:
    """What is wrong with an option, by the option's name; else as click says it."""
    parameter = getattr(error, "param", None)
    if type(error) is not click.BadParameter or parameter is None:
        return error.format_message()
    name = parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.make_metavar(error.ctx)
    return f"{name} {error.message}"


def _complain(message: str, code: int, who: str = "bcfl") -> int:
    complain(message, who)
    return code
