"""What the experiment files ask for and nobody has run yet."""

from collections import Counter
from pathlib import Path

from tables import table

from bcfl.runs.sweep import expand, plan, without_results

NOTE = (
    "What the files in `experiments/` ask for and `results/` does not hold, with just these settings, by the number of "
    "runs (on AmazonReview most of table 1 was run with fusion pooled instead); "
    "`bcfl sweep experiments/FILE.toml --without results` runs just these."
)
ELSEWHERE = ("newcomers-", "predictive-")  # their runs are measured into results/predictive


def left_to_run(experiments: Path, results: Path) -> list[str]:
    """One line for each file of which something is left: which methods were not run at all, and which in part."""
    lines = []
    for path in sorted(experiments.glob("*.toml")):
        planned = [] if path.name.startswith(ELSEWHERE) else plan(expand([path]), Path())
        asked = Counter(str(run.config.method["name"]) for run in planned)
        left = Counter(str(run.config.method["name"]) for run in without_results(planned, results))
        if left:
            none = [method for method in asked if left[method] == asked[method]]
            partly = [f"{name} {left[name]} of {asked[name]}" for name in asked if 0 < left[name] < asked[name]]
            nothing = "all" if len(none) == len(asked) > 1 else ", ".join(none)
            lines.append([f"`{path.name}`", f"{left.total()} of {asked.total()}", nothing, ", ".join(partly)])
    head = table(["file", "runs left", "methods not run so at all", "runs left of others"], lines)
    return ["## What has not been run", "", NOTE, "", *head, ""] if lines else []
