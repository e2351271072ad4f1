"""Gather finished runs into results/ (one small file each) and write RESULTS.md beside the paper's numbers.

python experiments/collect.py RUNS_FOLDER      take over the finished runs of a folder, then write RESULTS.md
python experiments/collect.py                  write RESULTS.md from what results/ holds
"""

import csv
import json
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import ttest_rel

ROOT = Path(__file__).resolve().parent.parent
PER_ROUND = ("accuracy", "macro_f1", "nll", "ece", "ari", "changes")
TITLES = {
    "label(4,10,0.1) published split": "label(4,10,0.1), the published split",
    "label(4,10,0.1)": "label(4,10,0.1), our own splits (one per seed)",
}


def compact(run: Path) -> dict[str, Any]:
    """What is kept of a run: its settings, its figures by round, what it cost and how long it took."""
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    seconds = [json.loads(line)["seconds"] for line in (run / "timings.jsonl").read_text().splitlines()]
    digits = {key: [_short(record.get(key)) for record in rounds[1:]] for key in PER_ROUND}
    return {
        "config": json.loads((run / "config.json").read_text()),
        "environment": json.loads((run / "environment.json").read_text()),
        "result": json.loads((run / "result.json").read_text()),
        "by_round": digits,
        "steps_by_round": [record["work"]["local_steps"] for record in rounds],
        "seconds": round(sum(seconds), 1),
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def setting(record: dict[str, Any]) -> tuple[str, str, int, bool]:
    """Data set, partition, K and whether it was tested on validation data."""
    data, method = record["config"]["data"], record["config"]["method"]
    partition = "label(4,10,0.1) published split" if data["partition"] == "file" else data["partition"]
    name = data["name"] if data["domains"] is None else f"{data['name']}[{','.join(data['domains'])}]"
    return name, partition, method.get("num_clusters", 4), bool(data["validation"])


def paper_numbers() -> dict[tuple[str, str, int, str], tuple[str, str]]:
    """(data set, setting, K, method) -> accuracy and F1 as printed, with their deviations."""
    found = {}
    with (ROOT / "experiments/paper.csv").open() as file:
        for row in csv.DictReader(file):
            cells = []
            for key in ("accuracy", "f1"):
                deviation = row[f"{key}_sd"]
                cells.append(f"{float(row[key]):.2f}" + (f" ± {float(deviation):.2f}" if deviation else ""))
            found[row["dataset"], row["setting"], int(row["K"]), row["method"].lower()] = (cells[0], cells[1])
    return found


def show(values: list[float], scale: float = 100.0) -> str:
    mean = f"{scale * fmean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ± {scale * stdev(values):.2f}"


def table(records: list[dict[str, Any]], key: tuple[str, str, int, bool]) -> list[str]:
    """One row a method, beside the paper's."""
    name, partition, clusters, _ = key
    printed = paper_numbers()
    by_method = defaultdict(list)
    for record in records:
        by_method[record["result"]["method"]].append(record)
    lines = [
        "| method | accuracy | paper | macro F1 | paper | agreement | steps per client and round | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, runs in by_method.items():
        accuracy, f1 = printed.get((name, partition.removesuffix(" published split"), clusters, method), ("", ""))
        finals = [run["result"] for run in runs]
        clients = len(finals[0]["assignment"])
        steps = fmean(
            sum(run["steps_by_round"]) / clients / final["rounds"] for run, final in zip(runs, finals, strict=True)
        )
        reached, reached_f1 = show([f["accuracy"] for f in finals]), show([f["macro_f1"] for f in finals])
        ari = [final["ari"] for final in finals if final["ari"] is not None]
        lines.append(
            f"| {method} | {reached} | {accuracy} | {reached_f1} "
            f"| {f1} | {show(ari, 1.0) if ari else ''} | {steps:.1f} | {len(runs)} |"
        )
    return [*lines, "", *significance(by_method)]


def significance(by_method: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Paired t-tests between methods that ran the same seeds, at least three; only differences with p < 0.05."""
    accuracy = {m: {r["result"]["seed"]: r["result"]["accuracy"] for r in runs} for m, runs in by_method.items()}
    found, tested = [], 0
    for first, second in combinations(accuracy, 2):
        seeds = sorted(accuracy[first].keys() & accuracy[second].keys())
        if len(seeds) < 3:
            continue
        tested += 1
        a, b = [accuracy[first][s] for s in seeds], [accuracy[second][s] for s in seeds]
        p = float(ttest_rel(a, b).pvalue)
        if p < 0.05:
            better, worse = (first, second) if fmean(a) > fmean(b) else (second, first)
            found.append(f"{better} > {worse} (p = {p:.3f})")
    if not tested:
        return ["Fewer than three common seeds: no order is claimed.", ""]
    return [
        f"Paired t-tests over seeds, {tested} pairs: " + ("; ".join(found) or "no difference with p < 0.05") + ".",
        "",
    ]


def write_results() -> None:
    groups: dict[tuple[str, str, int, bool], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted((ROOT / "results").glob("*.json")):
        record = json.loads(path.read_text())
        groups[setting(record)].append(record)
    lines = ["# Results", "", (ROOT / "experiments/results-preface.md").read_text().strip(), ""]
    for key, records in groups.items():
        name, partition, clusters, validation = key
        if validation:
            continue
        records.sort(key=lambda r: (r["result"]["method"], r["result"]["seed"]))
        lines += [f"## {name}, {TITLES.get(partition, partition)}, K = {clusters}", "", *table(records, key)]
    text = "\n".join(lines).rstrip() + "\n"
    (ROOT / "RESULTS.md").write_text(text)
    (ROOT / "docs/results.md").write_text(text.replace("# Results", "# How results compare with the paper", 1))


def main() -> None:
    for folder in sys.argv[1:]:
        for result in sorted(Path(folder).glob("*/result.json")):
            text = json.dumps(compact(result.parent), separators=(",", ":"))
            (ROOT / "results" / f"{result.parent.name}.json").write_text(text + "\n")
    write_results()


if __name__ == "__main__":
    main()
