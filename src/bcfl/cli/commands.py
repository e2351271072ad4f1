"""What the commands do: settings in, a run or a table out."""

import contextlib
import importlib
import importlib.util
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bcfl.cli.progress import LiveProgress, SweepProgress
from bcfl.client.stacked import find_device
from bcfl.console import console_for
from bcfl.data.datasets import DATASETS
from bcfl.methods import METHODS, remarks
from bcfl.model.flat import MODELS
from bcfl.runs.loop import Observer, is_unfinished, prolong, resume, settings_of, start
from bcfl.runs.problem import look_here
from bcfl.runs.reference import all_settings
from bcfl.runs.result import Result
from bcfl.runs.settings import Config, load_config, parse_override
from bcfl.runs.stopping import RunStoppedError, ended_in_order
from bcfl.runs.store import RunFolder, new_folder
from bcfl.runs.sweep import (
    LISTED,
    Planned,
    RunsFailedError,
    alike,
    differences,
    draw_of,
    expand,
    mean_and_deviation,
    plan,
    sweep,
    text_of,
    title_of,
    without_results,
)

__all__ = ["COMMANDS", "RunStoppedError", "ended_in_order"]


def run(options: Namespace) -> int:
    look_here()
    config = load_config(options.config, options.overrides, seed=options.seed)
    how: dict[str, Any] = {"num_workers": options.workers, "device": options.device}
    with _folder_for(config, options.out) as out:
        return _show(options, lambda observers: start(config, out, **how, observers=observers))


def resume_run(options: Namespace) -> int:
    path: Path = options.run
    if options.rounds is not None:
        named = path if path.name not in ("", "..") else path.resolve()  # "." has no name to add to
        path = options.out or named.with_name(f"{named.name}-{options.rounds}-rounds")
        config = settings_of(options.run).with_rounds(options.rounds)
        find_device(options.device)  # nothing is written for a slip of the pen
        if not is_unfinished(path, config):  # else it was stopped, and the same command goes on
            prolong(options.run, path, config)
    elif options.out is not None:
        raise ValueError("--out is for --rounds: a stopped run goes on in its own folder")
    if not options.quiet and RunFolder(path).complete:
        print(f"the run in {path} is complete: nothing is left to do", file=sys.stderr)
    how: dict[str, Any] = {"num_workers": options.workers, "device": options.device}
    if options.data_path is not None:
        how["config"] = settings_of(path).with_data_path(str(options.data_path))
    return _show(options, lambda observers: resume(path, **how, observers=observers))


def _show(options: Namespace, execute: Callable[[Sequence[Observer]], Result]) -> int:
    from bcfl.report.trackers import live_view

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


@contextlib.contextmanager
def _folder_for(config: Config, given: Path | None) -> Iterator[Path]:
    """The run's folder: the given one, or a new one of its own, which no other process can take in the meantime."""
    if given is not None:
        yield given
        return
    parent = Path("runs")
    parent.mkdir(exist_ok=True)
    path = new_folder(parent / config.label)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # not empty, as it should be
            path.rmdir()  # the run was refused before it began
            parent.rmdir()


def print_result(result: Result) -> None:
    """The summary for people: how good, who is where with what probability, what it cost."""
    console, summary = console_for(), result.summary()
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
    console.print(figures if shown else f"{figures.title}: not tested, as no client has test data")
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
        if result.num_hypotheses == 1 < probability.shape[1]:
            console.print("sure: one hypothesis was kept, so this is 1 whatever the data say\n", style="dim")

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
    look_here()
    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        raise ValueError(f"--seeds must be whole numbers separated by commas, got {options.seeds!r}") from None
    if not methods:
        raise ValueError("--methods must name at least one method")
    changed = dict(map(parse_override, options.overrides))
    for name, key in LISTED.items():
        if key in changed:
            raise ValueError(f"a comparison takes {key} from --{name}, not from --set")
    configs = [
        load_config(options.config, [*options.overrides, f"method.name={name}"], seed=seed)
        for name in methods
        for seed in seeds
    ]
    return _show_all(options, plan(configs, options.out))


def sweep_files(options: Namespace) -> int:
    look_here()
    runs = plan(expand(options.configs, options.overrides), options.out)
    if options.without is not None and not (runs := without_results(runs, options.without)):
        print("[]" if options.json else f"nothing is left to run: all results are in {options.without}")
        return 0
    if options.dry_run:
        if options.json:
            print(json.dumps([{"path": str(run.path), "done": run.complete} for run in runs]))
        else:
            for run in runs:
                print("done" if run.complete else "to do", run.path)
        return 0
    return _show_all(options, runs)


def _show_all(options: Namespace, runs: Sequence[Planned]) -> int:
    settings = differences([run.config.as_dict() for run in runs])
    names = [
        " ".join([run.config.method["name"], *(f"{title_of(key)} {text_of(value)}" for key, value in own.items())])
        for run, own in zip(runs, settings, strict=True)
    ]
    failed: Mapping[Path, str] = {}
    if not options.quiet and all(run.complete for run in runs):
        print(f"all {len(runs)} runs are complete: nothing is left to run", file=sys.stderr)
    with SweepProgress(runs, names) as progress:
        try:
            sweep(runs, options.workers, None if options.quiet else progress, options.jobs, options.device)
        except RunsFailedError as error:
            failed = error.reasons
    summaries = [
        {**run.summary, "settings": own, "path": str(run.path)}
        for own, run in zip(settings, runs, strict=True)
        if run.path not in failed
    ]
    if options.json:
        print(json.dumps(summaries))
    else:
        draws = [
            (run.config.method["name"], json.dumps(own), draw_of(run.config.as_dict()))
            for run, own in zip(runs, settings, strict=True)
            if run.path not in failed
        ]
        print_comparison([summary for i, summary in enumerate(summaries) if draws.index(draws[i]) == i])
    sys.stdout.flush()
    for path, reason in failed.items():
        print("bcfl: failed:", " ".join(f"{path}: {reason}".split()), file=sys.stderr)
    return 1 if failed else 0


def print_comparison(summaries: Sequence[dict[str, Any]]) -> None:
    """Mean ± standard deviation over seeds, one row a method and combination of what else was varied."""
    table = Table(title="mean ± sd over seeds", title_justify="left")
    titles = {"accuracy": "accuracy", "macro_f1": "macro F1", "nll": "NLL", "ari": "agreement"}
    varied = list(dict.fromkeys(key for summary in summaries for key in summary["settings"]))
    for title in ("method", *map(title_of, varied)):
        table.add_column(title)
    for title in (*titles.values(), "total steps", "seeds"):
        table.add_column(title, justify="right")
    for runs in alike(summaries):
        settings, cells = runs[0]["settings"], []
        for key in titles:
            both = mean_and_deviation([summary[key] for summary in runs])
            spread = f" ± {both[1]:.3f}" if both and len(runs) > 1 else ""  # one seed has no spread
            cells.append("" if both is None else f"{both[0]:.3f}{spread}")
        steps = mean_and_deviation([summary["work"]["local_steps"] for summary in runs])
        names = [runs[0]["method"], *(text_of(settings[key]) if key in settings else "" for key in varied)]
        table.add_row(*names, *cells, f"{steps[0]:,.0f}" if steps else "", str(len(runs)))
    console = console_for()
    console.print(table)
    for remark in remarks(summary["method"] for summary in summaries):
        console.print(remark, style="dim")


def list_things(options: Namespace) -> int:
    things = {
        "methods": {entry.name: entry.summary for entry in METHODS.values()},
        "datasets": {name: entry.description for name, entry in DATASETS.items()},
        "models": {name: (factory.__doc__ or "").split("\n")[0] for name, factory in MODELS.items()},
        "settings": {name: str(setting) for name, setting in all_settings().items()},
    }[options.what]
    if options.json:
        print(json.dumps(things))
        return 0
    table = Table(show_header=False, box=None)
    for name, description in things.items():
        table.add_row(name, description)
    console = console_for()
    console.print(table)
    if options.what == "methods":
        console.print("\nM is the number of hypotheses, as in bcfl-mh-6; bcfl methods take -w for warm-up: bcfl-mh-6-w")
    return 0


def _lazily(module: str, name: str) -> Callable[[Namespace], int]:
    """A command of a module of its own, imported when it is called."""

    def command(options: Namespace) -> int:
        code: int = getattr(importlib.import_module(f"bcfl.cli.{module}"), name)(options)
        return code

    return command


def deploy(options: Namespace) -> int:
    if importlib.util.find_spec("flwr") is None:
        raise ValueError("bcfl deploy needs Flower: pip install 'bcfl[flower]'")
    from bcfl.deploy.folder import GATE_PORT, Site, init
    from bcfl.deploy.processes import run_local
    from bcfl.deploy.terms import read_settings

    look_here()
    own_data = None if options.place == "local" else options.data_factory
    config, terms = read_settings(options.config, options.overrides, options.clients, options.seed, own_data)
    num_clients = terms["num_clients"]
    if options.place == "local":
        own: dict[str, Any] = {"insecure": options.insecure, "terms": terms}
        with _folder_for(config, options.out) as out:
            return _show(options, lambda observers: run_local(config, num_clients, out, observers=observers, **own))
    if options.insecure and options.port is not None:
        raise ValueError("--port is the gate's, and --insecure goes without a gate; leave one of them out")
    site = Site(
        options.folder,
        num_clients,
        options.server,
        gate_port=None if options.insecure else options.port or GATE_PORT,
        insecure=options.insecure,
        data_factory=own_data,
    )
    init(site, config, terms)
    console_for().print(f"{options.folder} holds a federation of {num_clients} clients; {options.folder}/README.md "
                     "tells what goes where", soft_wrap=True)  # fmt: skip
    return 0


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "run": run,
    "resume": resume_run,
    "compare": compare,
    "sweep": sweep_files,
    "list": list_things,
    "deploy": deploy,
    "report": _lazily("reporting", "write_report"),
    "figures": _lazily("reporting", "write_figures"),
    "table": _lazily("reporting", "print_table"),
    "demo": _lazily("demo", "demo"),
    "associate": _lazily("predicting", "associate_newcomer"),
    "evaluate": _lazily("predicting", "evaluate_run"),
}
