"""What the commands do: settings in, a run or a table out."""

import importlib
import importlib.util
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bcfl.data.datasets import DATASETS
from bcfl.experiment.config import Config, load_config
from bcfl.experiment.problem import Split
from bcfl.experiment.result import Result
from bcfl.experiment.run import Observer, RunStoppedError, resume, start
from bcfl.experiment.sweep import Planned, by_method, expand, mean_and_deviation, plan, sweep
from bcfl.methods import METHODS
from bcfl.models import MODELS

__all__ = ["COMMANDS", "RunStoppedError"]


def _console(stderr: bool = False) -> Console:
    # Names of data sets and folders may hold brackets: they are text, not markup.
    console = Console(stderr=stderr, markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160  # a file has no width: tables need not be folded
    return console


class LiveProgress:
    """A bar with round, accuracy, changes and time left; plain lines where there is no terminal."""

    def __init__(self, label: str = ""):
        self._label = label
        self._console = _console(stderr=True)
        self._bar: Progress | None = None
        self._rounds = 0
        self._last_line = 0.0

    def started(self, config: Config, data: Split, first_round: int) -> None:
        self._rounds = config.experiment.rounds
        name = self._label or f"{config.method['name']} on {data.description}"
        if self._console.is_terminal:
            name_column = TextColumn("{task.description}", markup=False)
            columns = (name_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(name, total=self._rounds, completed=first_round - 1, note="")
        else:
            self._console.print(
                f"{name}, {data.num_clients} clients, rounds {first_round} to {self._rounds}", soft_wrap=True
            )

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        note = _progress_note(record)
        last = record["round"] == self._rounds
        if self._bar:
            self._bar.update(self._task, completed=record["round"], note=note)
            if last:
                self.close()
        elif last or time.monotonic() - self._last_line > 5:
            self._last_line = time.monotonic()
            self._console.print(f"round {record['round']}/{self._rounds}  {note}", soft_wrap=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


def _progress_note(record: dict[str, Any]) -> str:
    parts = [f"accuracy {record['accuracy']:.3f}"] if "accuracy" in record else []
    return "  ".join([*parts, f"{record['changes']} moved"])


def run(options: Namespace) -> int:
    config = load_config(options.config, options.overrides, seed=options.seed)
    out = options.out or _free_folder(Path("runs"), config)
    return _show(options, lambda observers: start(config, out, num_workers=options.workers, observers=observers))


def resume_run(options: Namespace) -> int:
    return _show(options, lambda observers: resume(options.run, num_workers=options.workers, observers=observers))


def _show(options: Namespace, execute: Callable[[Sequence[Observer]], Result]) -> int:
    from bcfl.report.live import live_view

    progress = LiveProgress()
    try:
        with live_view(options.tensorboard, options.mlflow) as loggers:
            result = execute([*loggers, *([] if options.quiet else [progress])])
    finally:
        progress.close()
    if options.json:
        probability = [[round(p, 6) for p in row] for row in result.probability.tolist()]
        print(json.dumps({**result.summary(), "probability": probability, "path": str(result.path)}))
    else:
        print_result(result)
    return 0


def _free_folder(parent: Path, config: Config) -> Path:
    candidates = (parent / (config.label if i == 1 else f"{config.label}-{i}") for i in range(1, sys.maxsize))
    return next(path for path in candidates if not path.exists())


def print_result(result: Result) -> None:
    """The summary for people: how good, who is where with what probability, what it cost."""
    console, summary = _console(), result.summary()
    figures = Table(
        title=f"{summary['method']}, seed {summary['seed']}, {summary['rounds']} rounds", title_justify="left"
    )
    names = {
        "accuracy": "accuracy",
        "macro_f1": "macro F1",
        "nll": "NLL",
        "ece": "calibration error",
        "ari": "agreement",
    }
    shown = {title: summary[key] for key, title in names.items() if summary[key] is not None}
    for title in shown:
        figures.add_column(title, justify="right")
    figures.add_row(*(f"{value:.3f}" for value in shown.values()))
    console.print(figures)
    if "agreement" in shown:
        console.print(
            "agreement: adjusted Rand index of the assignment with the true groups, 1 is perfect\n", style="dim"
        )

    probability = result.probability
    clusters = Table(title="who is where", title_justify="left")
    for title in ("cluster", "clients", "sure", "members (probability if below 0.995)"):
        clusters.add_column(title, justify="right" if title in ("clients", "sure") else "left")
    for cluster in range(probability.shape[1]):
        members = (result.assignment == cluster).nonzero()[:, 0].tolist()
        if not members:
            clusters.add_row(str(cluster), "0", "", "")
            continue
        sure = probability[members, cluster]
        names_of = [f"{c}" if p >= 0.995 else f"{c} ({p:.2f})" for c, p in zip(members, sure.tolist(), strict=True)]
        shown_names = ", ".join(names_of[:24]) + (f", … {len(members) - 24} more" if len(members) > 24 else "")
        clusters.add_row(str(cluster), str(len(members)), f"{float(sure.mean()):.2f}", shown_names)
    unseen = (result.assignment < 0).nonzero()[:, 0].tolist()
    if unseen:
        clusters.add_row("none", str(len(unseen)), "", "never took part")
    if probability.shape[1] < 50:
        console.print(clusters)

    work = summary["work"]
    console.print(
        f"work: {work['trainings']:,} local trainings, {work['local_steps']:,} steps, "
        f"{work['scored_examples']:,} scored examples\n"
        f"traffic: {work['parameters_down']:,} model numbers down, {work['parameters_up']:,} up, "
        f"{work['scalars_up']:,} scores up, {work['exchanges']:,} exchanges"
    )
    if "spared_examples" in work:
        in_full = work["scored_examples"] + work["spared_examples"]
        console.print(f"racing: {work['scored_examples']:,} scored examples instead of {in_full:,}")
    if work["rejected"] or work["late"]:
        console.print(f"left out: {work['rejected']} non-finite and {work['late']} late answers")
    if result.path:
        console.print(f"kept in {result.path}", soft_wrap=True)


def compare(options: Namespace) -> int:
    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        raise ValueError(f"--seeds must be whole numbers separated by commas, got {options.seeds!r}") from None
    if not methods:
        raise ValueError("--methods must name at least one method")
    configs = [
        load_config(options.config, [*options.overrides, f"method.name={name}"], seed=seed)
        for name in methods
        for seed in seeds
    ]
    return _show_all(options, plan(configs, options.out))


def sweep_files(options: Namespace) -> int:
    configs = [config for path in options.configs for config in expand(path, options.overrides)]
    runs = plan(configs, options.out)
    if options.dry_run:
        for run in runs:
            print("done" if run.complete else "to do", run.path)
        return 0
    return _show_all(options, runs)


def _show_all(options: Namespace, runs: Sequence[Planned]) -> int:
    bars: list[LiveProgress] = []

    def follow(position: int, run: Planned) -> Sequence[Observer]:
        seed = run.config.experiment.seed
        bars.append(LiveProgress(f"[{position + 1}/{len(runs)}] {run.config.method['name']} seed {seed}"))
        return () if options.quiet else bars[-1:]

    try:
        summaries = sweep(runs, options.workers, follow)
    finally:
        for bar in bars:
            bar.close()
    if options.json:
        print(json.dumps(summaries))
    else:
        print_comparison(summaries)
    return 0


def print_comparison(summaries: Sequence[dict[str, Any]]) -> None:
    """Mean ± standard deviation over seeds, one row a method."""
    table = Table(title="mean ± sd over seeds", title_justify="left")
    titles = {"accuracy": "accuracy", "macro_f1": "macro F1", "nll": "NLL", "ari": "agreement"}
    table.add_column("method")
    for title in (*titles.values(), "steps", "seeds"):
        table.add_column(title, justify="right")
    for method, runs in by_method(summaries).items():
        cells = []
        for key in titles:
            both = mean_and_deviation([summary[key] for summary in runs])
            spread = f" ± {both[1]:.3f}" if both and len(runs) > 1 else ""  # one seed has no spread
            cells.append("" if both is None else f"{both[0]:.3f}{spread}")
        steps = mean_and_deviation([summary["work"]["local_steps"] for summary in runs])
        table.add_row(method, *cells, f"{steps[0]:,.0f}" if steps else "", str(len(runs)))
    _console().print(table)


def list_things(options: Namespace) -> int:
    things = {
        "methods": {entry.name: entry.summary for entry in METHODS.values()},
        "datasets": {name: entry.description for name, entry in DATASETS.items()},
        "models": {name: (factory.__doc__ or "").split("\n")[0] for name, factory in MODELS.items()},
    }[options.what]
    if options.json:
        print(json.dumps(things))
        return 0
    table = Table(show_header=False, box=None)
    for name, description in things.items():
        table.add_row(name, description)
    console = _console()
    console.print(table)
    if options.what == "methods":
        console.print("\nM is the number of hypotheses, as in bcfl-mh-6; bcfl methods take -w for warm-up: bcfl-mh-6-w")
    return 0


def _of_report(module: str, name: str) -> Callable[[Namespace], int]:
    """A command of bcfl.report, imported when it is called."""

    def command(options: Namespace) -> int:
        code: int = getattr(importlib.import_module(f"bcfl.report.{module}"), name)(options)
        return code

    return command


def deploy(options: Namespace) -> int:
    if importlib.util.find_spec("flwr") is None:
        raise ValueError("bcfl deploy needs Flower: pip install 'bcfl[flower]'")
    from bcfl.deploy.folder import Site, init
    from bcfl.deploy.local import run_local
    from bcfl.deploy.settings import read_settings

    config, terms = read_settings(options.config, options.overrides, options.clients, options.seed)
    if options.place == "local":
        out = options.out or _free_folder(Path("runs"), config)
        own: dict[str, Any] = {"insecure": options.insecure, "terms": terms}
        return _show(options, lambda observers: run_local(config, options.clients, out, observers=observers, **own))
    site = Site(
        options.folder,
        options.clients,
        options.server,
        gate_port=None if options.insecure else options.port,
        insecure=options.insecure,
        data_factory=options.data_factory,
    )
    init(site, config, terms)
    _console().print(f"{options.folder} holds a federation of {options.clients} clients; {options.folder}/README.md "
                     "tells what goes where", soft_wrap=True)  # fmt: skip
    return 0


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "run": run,
    "resume": resume_run,
    "compare": compare,
    "sweep": sweep_files,
    "list": list_things,
    "deploy": deploy,
    "report": _of_report("commands", "write_report"),
    "figures": _of_report("commands", "write_figures"),
    "table": _of_report("commands", "print_table"),
    "demo": _of_report("demo", "demo"),
}
