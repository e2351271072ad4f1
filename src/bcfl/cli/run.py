"""One run: `bcfl run`, and `bcfl resume` after a stop or for more rounds."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import bcfl.cli.options as options
from bcfl.cli.options import option, usable_folder

if TYPE_CHECKING:
    from bcfl.runs.observers import Observer
    from bcfl.runs.result import Result
    from bcfl.runs.settings import Config


def run(
    *,
    config: options.ConfigFile = None,
    overrides: options.Overrides = (),
    seed: options.Seed = None,
    table: options.Table,
    out: options.RunOut = None,
    machine: options.Machine,
    follow: options.Follow,
) -> int:
    """Train one federation.

    examples:
      bcfl run
      bcfl run --data patients.csv --site hospital --target died     a table of your own, one client per hospital
      bcfl run settings.toml --seed 1 --out runs/a
      bcfl run --set data.partition='label(4,10,0.1)' --set method.name=bcfl-mh-6-w --set method.num_clusters=4
      bcfl run --set data.factory=mine:make_clients --set model.factory=mine:make_model   functions in mine.py
    """
    from bcfl.runs.loop import start
    from bcfl.runs.problem import look_here
    from bcfl.runs.settings import load_config

    look_here()
    settings = load_config(config, (*table.settings(), *overrides), seed=seed)
    with folder_for(settings, out) as folder:
        return show(follow, lambda observers: start(settings, folder, **machine.how, observers=observers))


def resume(
    *,
    run: options.RunPath,
    rounds: Annotated[int | None, option("N", "more rounds in all than the run was set to", int)] = None,
    out: Annotated[
        Path | None,
        option("DIR", "with --rounds: the new run's folder (default: RUN-N-rounds)", usable_folder),
    ] = None,
    data_path: options.DataPath = None,
    machine: options.Machine,
    follow: options.Follow,
) -> int:
    """Continue a stopped run, or add rounds to one.

    With --rounds the run goes on from where it has come to. That makes a new run, and the old one stays as it is. A
    folder says by name which functions make its clients and its model, and these are called: to resume a stranger's
    folder may run his code. They are not looked for in the working directory, unless PYTHONPATH=. says so.

    examples:
      bcfl resume runs/a          after a crash or a full disk, to the same result
      bcfl resume runs/a --json   a complete run is only read
      bcfl resume runs/a --rounds 60 --out runs/b   what it has learned so far, and on to round 60
      bcfl resume runs/a --data-path /data/elsewhere
    """
    from bcfl.runs import loop
    from bcfl.runs.store import RunFolder

    path = run
    if rounds is not None:
        path = out or _folder_for_more(run, rounds)
        _prolong(run, path, rounds, machine.where)
    elif out is not None:
        raise ValueError("--out is for --rounds: a stopped run goes on in its own folder")
    if RunFolder(path).complete and not follow.quiet:
        print(f"the run in {path} is complete: nothing is left to do", file=sys.stderr)
    elsewhere = None if data_path is None else loop.settings_of(path).with_data_path(str(data_path))
    return show(follow, lambda observers: loop.resume(path, config=elsewhere, **machine.how, observers=observers))


def _folder_for_more(run: Path, rounds: int) -> Path:
    named = run if run.name not in ("", "..") else run.resolve()  # "." has no name to add to
    return usable_folder(named.with_name(f"{named.name}-{rounds}-rounds"))


def _prolong(run: Path, out: Path, rounds: int, device: str) -> None:
    """The folder `out` holds what the run has come to, to go on from there; if it does already, it is left alone."""
    from bcfl.engines.crew import find_device
    from bcfl.runs.loop import is_unfinished, prolong, settings_of

    config = settings_of(run).with_rounds(rounds)
    find_device(device)  # nothing is written for a slip of the pen
    if not is_unfinished(out, config):  # else it was stopped, and the same command goes on
        prolong(run, out, config)


@contextlib.contextmanager
def folder_for(config: "Config", given: Path | None) -> "Iterator[Path]":
    """The run's folder: the given one, or a new one of its own, which no other process can take in the meantime."""
    if given is not None:
        yield given
        return
    from bcfl.runs.store import new_folder

    parent = usable_folder("runs")
    parent.mkdir(exist_ok=True)
    path = new_folder(parent / config.label)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # not empty, as it should be
            path.rmdir()  # the run was refused before it began
            parent.rmdir()


def show(follow: options.Follow, execute: "Callable[[Sequence[Observer]], Result]") -> int:
    """Run it, followed as it was asked for, and print what came out."""
    import json

    from bcfl.cli.summary import print_result
    from bcfl.report.trackers import live_view
    from bcfl.runs.progress import LiveProgress

    with live_view(follow.tensorboard, follow.mlflow) as loggers:
        result = execute([*loggers, *([] if follow.quiet else [LiveProgress()])])
    if follow.as_json:
        probability = [[round(p, 6) for p in row] for row in result.probability.tolist()]
        print(json.dumps({**result.summary(), "probability": probability, "path": str(result.path)}))
    else:
        print_result(result)
    return 0
