"""Many runs: `bcfl compare`, and `bcfl sweep` over experiment files."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import bcfl.cli.options as options
from bcfl.cli.command import complain
from bcfl.cli.options import argument, flag, option, positive, repeated, usable_folder

if TYPE_CHECKING:
    from bcfl.runs.planning import Planned

NARROWS = "change one setting of all runs; if [sweep] varies it, only this value is run"
COLLECTED = "leave out runs with results in this folder, where experiments/collect.py keeps those of other machines"


@dataclass(frozen=True)
class Many:
    """How many runs are worked off, and shown."""

    out: Annotated[Path, option("DIR", "folder of all runs (default: runs)", usable_folder)] = Path("runs")
    jobs: Annotated[
        int | None,
        option("N", "runs side by side (default: what keeps all cores busy)", positive),
    ] = None
    as_json: options.Json = False
    quiet: options.Quiet = False


def compare(
    *,
    config: options.ConfigFile = None,
    overrides: options.Overrides = (),
    methods: Annotated[str, option("A,B,…", "methods, as in `bcfl list methods`")],
    seeds: Annotated[str, option("0,1,…", "seeds (default: 0)")] = "0",
    many: Many,
    machine: options.Machine,
) -> int:
    """Several methods and seeds side by side.

    Their quality is printed as mean ± standard deviation. What is already done is not run again; a stopped comparison
    goes on where it was.

    examples:
      bcfl compare --methods fedavg,bcfl-g,bcfl-mh-3 --seeds 0,1,2
      bcfl compare settings.toml --methods ifca,bcfl-mh-6-w --seeds 0,1,2,3,4 --out runs/mine --json
    """
    from bcfl.runs.planning import LISTED, plan
    from bcfl.runs.problem import look_here
    from bcfl.runs.settings import load_config, parse_override

    look_here()
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise ValueError("--methods must name at least one method")
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ValueError(f"--seeds must be whole numbers separated by commas, got {seeds!r}") from None
    changed = dict(map(parse_override, overrides))
    for name, key in LISTED.items():
        if key in changed:
            raise ValueError(f"a comparison takes {key} from --{name}, not from --set")
    configs = [
        load_config(config, [*overrides, f"method.name={name}"], seed=seed, compared=names)
        for name in names
        for seed in numbers
    ]
    return _work_off(plan(configs, many.out), many, machine)


def sweep(
    *,
    configs: Annotated[tuple[Path, ...], argument("FILE.toml...", "experiment files", many=True)],
    overrides: Annotated[tuple[str, ...], repeated("--set", options.SETTING, NARROWS)] = (),
    dry_run: Annotated[bool, flag("--dry-run", "only list the runs, and which of them are done")] = False,
    without: Annotated[Path | None, option("DIR", COLLECTED, options.PATH)] = None,
    many: Many,
    machine: options.Machine,
) -> int:
    """All runs that experiment files describe.

    Their [sweep] sections say what varies. The first seed of all comes before the second of any. What is already done
    is not run again; a stopped sweep goes on where it was; several sweeps may share a folder.

    examples:
      bcfl sweep experiments/*.toml --dry-run
      bcfl sweep experiments/a.toml --set experiment.rounds=5 --out runs/short
      bcfl sweep experiments/a.toml --set experiment.seed=7   one seed instead of those that the file lists
      bcfl sweep experiments/*.toml --without results          only what has not been collected there yet
    """
    from bcfl.runs.planning import expand, plan, without_results
    from bcfl.runs.problem import look_here

    look_here()
    runs = plan(expand(configs, overrides), many.out)
    if without is not None and not (runs := without_results(runs, without)):
        print("[]" if many.as_json else f"nothing is left to run: all results are in {without}")
    elif not dry_run:
        return _work_off(runs, many, machine)
    elif many.as_json:
        print(json.dumps([{"path": str(run.path), "done": run.complete} for run in runs]))
    else:
        for run in runs:
            print("done" if run.complete else "to do", run.path)
    return 0


def _work_off(runs: "Sequence[Planned]", many: Many, machine: options.Machine) -> int:
    """All runs are made that are not there yet, and what they have come to is printed; 1 if some of them failed."""
    from bcfl.report.grouping import differences, in_words
    from bcfl.runs.progress import SweepProgress
    from bcfl.runs.sweep import RunsFailedError, sweep

    settings = differences([run.config.as_dict() for run in runs])
    names = [in_words(run.config.method["name"], own) for run, own in zip(runs, settings, strict=True)]
    if not many.quiet and all(run.complete for run in runs):
        print(f"all {len(runs)} runs are complete: nothing is left to run", file=sys.stderr)
    failed: Mapping[Path, str] = {}
    with SweepProgress(runs, names) as progress:
        try:
            sweep(runs, view=None if many.quiet else progress, jobs=many.jobs, **machine.how)
        except RunsFailedError as error:
            failed = error.reasons
    done = [(run, own) for run, own in zip(runs, settings, strict=True) if run.path not in failed]
    if many.as_json:
        print(json.dumps([{**run.summary, "settings": own, "path": str(run.path)} for run, own in done]))
    elif done:
        from bcfl.cli.summary import print_comparison

        print_comparison([run.path for run, _ in done])
    sys.stdout.flush()
    for path, reason in failed.items():
        complain(f"failed: {path}: {reason}")
    return 1 if failed else 0
