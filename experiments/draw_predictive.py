"""The pictures of docs/newcomers.md and docs/uncertainty.md, from what results/predictive/ holds.

python experiments/draw_predictive.py
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from newcomers import SIZES

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "digits": "rotated digits"}
COLOURS = {"fashion_mnist": "#0072b2", "cifar10": "#d55e00", "digits": "#009e73"}


def read(name: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((ROOT / "results/predictive" / name).read_text())
    return loaded


def by_size(records: list[dict[str, Any]], part: str, key: str, **where: Any) -> tuple[list[int], list[float]]:
    """The mean over runs of one figure, by the number of examples."""
    found = defaultdict(list)
    for record in records:
        for row in record[part]:
            if all(row[name] == value for name, value in where.items()):
                found[row["examples"]].append(row[key])
    return list(found), [fmean(values) for values in found.values()]


def dress(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)


def draw_newcomers() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
    for data in NAMES:
        records = read(f"newcomers-{data}.json")
        left.plot(
            *by_size(records, "table", "accuracy", temperature="n^0"), "o-", color=COLOURS[data], label=NAMES[data]
        )
        for temperature, style, name in (("n^0", "o-", "none"), ("n^1", "s:", "per_example")):
            sizes, errors = by_size(records, "table", "ece", temperature=temperature)
            right.plot(sizes, errors, style, color=COLOURS[data], label=f"{NAMES[data]}, {name}")
    left.axhline(0.95, color="0.6", lw=0.8, ls="--")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, SIZES)
    dress(left, "A newcomer's most likely cluster is the right one", "examples of the newcomer", "share of handfuls")
    dress(right, "Calibration error of its stated probability", "examples of the newcomer", "ECE")
    save(figure, "newcomers")


def draw_uncertainty() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
    for data in NAMES:
        records = read(f"newcomers-{data}.json")
        for key, style, name in (("mixture_nll", "o-", "mixture"), ("best_nll", "s:", "most likely model")):
            left.plot(*by_size(records, "predictions", key), style, color=COLOURS[data], label=f"{NAMES[data]}, {name}")
    for data in ("cifar10", "digits"):
        records = [r for r in read(f"{data}.json") if r["method"] == "bcfl-g-w"]
        for kind, key, style in (("mean", "point", "-"), ("samples", "mixture", ":")):
            curves = [record[key]["accuracy_at_coverage"] for record in records if record["beliefs"] == kind]
            mean = [fmean(values) for values in zip(*curves, strict=True)]
            name = "best model" if key == "point" else "mixture of 8 draws"
            right.plot(
                records[0]["point"]["coverage"], mean, style, color=COLOURS[data], label=f"{NAMES[data]}, {name}"
            )
    left.set_xscale("log", base=2)
    left.set_xticks(SIZES, SIZES)
    left.set_yscale("log")
    dress(left, "A newcomer's predictions: NLL", "examples it was placed by", "NLL per example")
    dress(right, "Known clients: accuracy when it may abstain", "share of examples that are answered", "accuracy")
    save(figure, "uncertainty")


def save(figure: Any, name: str) -> None:
    plt.rcParams["svg.hashsalt"] = name  # the same picture is the same file
    figure.savefig(ROOT / f"docs/img/{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw_newcomers()
    draw_uncertainty()
