"""The commands that use a finished run: where a newcomer belongs, and how good its predictions are as probabilities."""

import json
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bcfl.belief.evidence import Temperature
from bcfl.console import console_for
from bcfl.data.formats import load_npz
from bcfl.files import make_way_for, write_atomically
from bcfl.predict.predictors import Newcomer, Spread
from bcfl.runs.evaluation import evaluate
from bcfl.runs.loop import load_result
from bcfl.runs.result import Result
from bcfl.runs.store import to_json

SHOWN_CLIENTS = 12


def associate_newcomer(options: Namespace) -> int:
    if options.save:
        make_way_for(options.save, "--save")
    result = load_result(options.run)
    x, y = _read_examples(options.data, options.examples)
    newcomer = result.associate(x, y, temperature=_temperature(options.temperature), prior=options.prior)
    if options.json:
        print(json.dumps(_as_plain(newcomer)))
    else:
        _print_newcomer(newcomer, result, options.data.name)
    if options.save:  # last, so that a full disk takes nothing that was found
        newcomer.save(options.save)
        if not options.json:
            console_for().print(f"the model of cluster {newcomer.cluster} is in {options.save}", soft_wrap=True)
    return 0


def _print_newcomer(newcomer: Newcomer, result: Result, name: str) -> None:
    members = [int((result.assignment == cluster).sum()) for cluster in range(len(newcomer.probability))]
    console = console_for()
    table = Table(title=f"where {name} belongs, by {newcomer.num_examples} examples", title_justify="left")
    for title in ("cluster", "probability", "clients of the run"):
        table.add_column(title, justify="right")
    for cluster, probability in enumerate(newcomer.probability.tolist()):
        likely = " ◄" if cluster == newcomer.cluster else ""
        table.add_row(f"{cluster}", f"{probability:.3f}{likely}", f"{members[cluster]}")
    console.print(table)
    most = math.log(len(members)) if len(members) > 1 else 0.0
    console.print(f"entropy {newcomer.entropy:.3f} nats (0 is certain, {most:.3f} is no idea)")
    usual = result.history[-1].get("nll")
    beside = "" if usual is None else f" (the run's own clients: {usual:.3f}; far above, it may belong nowhere)"
    console.print(f"NLL per example {newcomer.nll:.3f}{beside}", soft_wrap=True)
    alike = sorted(
        ((p, c) for c, p in enumerate(newcomer.resembles.tolist()) if p >= 0.05), key=lambda pc: (-pc[0], pc[1])
    )
    names = ", ".join(f"{client} ({p:.2f})" for p, client in alike[:SHOWN_CLIENTS])
    more = f", … {len(alike) - SHOWN_CLIENTS} more" if len(alike) > SHOWN_CLIENTS else ""
    console.print(f"shares a cluster with clients (probability): {names or 'none'}{more}", soft_wrap=True)


def _as_plain(newcomer: Newcomer) -> dict[str, Any]:
    return {
        "cluster": newcomer.cluster,
        "probability": newcomer.probability.tolist(),
        "entropy": newcomer.entropy,
        "hypothesis": newcomer.hypothesis.tolist(),
        "resembles": newcomer.resembles.tolist(),
        "num_examples": newcomer.num_examples,
        "nll": newcomer.nll,
    }


def _read_examples(path: Path, count: int | None) -> tuple[Any, Any]:
    """x and y of an .npz file, the first `count` rows of them."""
    try:
        arrays = load_npz(path, ("x", "y"))
    except Exception as error:  # of zipfile, zlib, numpy or tokenize, whichever meets the damage first
        raise ValueError(f"--data {path} cannot be read as an .npz file of plain arrays x and y: {error}") from None
    x, y = arrays["x"], arrays["y"]
    for name, values in (("x", x), ("y", y)):
        if np.ndim(values) == 0:
            raise ValueError(f"--data {path}: {name} must have one row for each example, but is a single value")
    if count is not None and count > len(y):
        raise ValueError(f"--examples {count}: {path} holds only {len(y)}")
    return x[:count], y[:count]


def _temperature(text: str) -> Temperature:
    if text in ("per_example", "none"):
        return "per_example" if text == "per_example" else "none"
    return _number(text, "--temperature", "per_example, none or a number > 0")


def _number(text: str, option: str, allowed: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} must be {allowed}, got {text!r}") from None


def evaluate_run(options: Namespace) -> int:
    automatic = options.prior_precision == "auto"
    allowed = "auto or a number ≥ 0"
    prior = math.inf if automatic else _number(options.prior_precision, "--prior-precision", allowed)
    spread = Spread(options.beliefs, options.samples, prior)
    if options.out:
        make_way_for(options.out, "--out")
    result = load_result(options.run)
    if options.data_path is not None:
        result = replace(result, config=result.config.with_data_path(str(options.data_path)))
    found = evaluate(result, spread, choose=automatic)
    if options.json:
        print(json.dumps(found))
    else:
        _print_evaluation(found, automatic)
    if options.out:  # last, so that a full disk takes nothing that was found
        write_atomically(options.out, to_json(found))
    return 0


def _print_evaluation(found: Mapping[str, Any], automatic: bool) -> None:
    table = Table(title=f"{found['method']}, seed {found['seed']}: predictions as probabilities", title_justify="left")
    titles = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
    shares = (0.5, 0.8, 0.9)
    for title in ("", *titles.values(), *(f"accuracy on the surest {share:.0%}" for share in shares)):
        table.add_column(title, justify="right" if title else "left")
    names = {"point": "best model", "mixture": f"mixture ({found['beliefs']})"}
    names |= {"own_statistics": "best, own statistics"} if "own_statistics" in found else {}
    for key, name in names.items():
        part = found[key]
        curve = dict(zip(part["coverage"], part["accuracy_at_coverage"], strict=True))
        table.add_row(name, *(f"{part[k]:.4f}" for k in titles), *(f"{curve[share]:.4f}" for share in shares))
    console = console_for()
    console.print(table)
    if found["beliefs"] != "mean":
        chosen = " (chosen on validation data)" if automatic else ""
        console.print(f"prior precision {found['prior_precision']}{chosen}")
