"""What a finished run is good for: where a newcomer belongs, and how good its predictions are as probabilities."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from bcfl.cli import options
from bcfl.cli.options import option, positive, usable_file

if TYPE_CHECKING:
    from bcfl.predict.predictors import Newcomer
    from bcfl.runs.result import Result

SHOWN_CLIENTS = 12
TEMPERATURE = "log-likelihoods are divided by it: none (1, the posterior; the default), per_example, or a number"
PRIOR = "before any example: all clusters alike (the default), or by their numbers of clients"
BELIEFS = "what stands for a belief (default: its mean)"
PRECISION = "added to the beliefs' precision (default: 1000); auto: chosen on validation data (data.validation)"


def _word_or_number(*words: str) -> Callable[[object], str | float]:
    def read(given: object) -> str | float:
        try:
            return str(given) if given in words else float(str(given))
        except ValueError:
            raise click.BadParameter(f"must be {', '.join(words)} or a number, got {given!r}") from None

    return read


@dataclass(frozen=True)
class Scored:
    """By what a newcomer is placed."""

    data: Annotated[Path, option("FILE.npz", "the newcomer's examples: x and y", options.PATH)]
    examples: Annotated[int | None, option("N", "use the first N (default: all)", positive)] = None
    temperature: Annotated[Any, option("T", TEMPERATURE, _word_or_number("none", "per_example"))] = "none"
    prior: Annotated[Any, option(None, PRIOR, click.Choice(["uniform", "size"]))] = "uniform"


def associate(
    *,
    run: options.RunPath,
    scored: Scored,
    save: Annotated[
        Path | None,
        option("FILE.safetensors", "write the most likely cluster's model", usable_file),
    ] = None,
    as_json: options.Json = False,
) -> int:
    """Where a client that was never seen belongs.

    How likely it belongs to each cluster, by scoring a few of its examples; nothing is trained. FILE.npz holds x,
    (example, …) numbers prepared as the run's own data were, and y, (example,) whole-numbered labels. Where the run's
    model was given in Python, use result.associate there.

    examples:
      bcfl associate runs/a --data mine.npz
      bcfl associate runs/a --data mine.npz --examples 32 --save mine.safetensors --json
    """
    from bcfl.console import console_for
    from bcfl.runs.loop import load_result

    result = load_result(run)
    x, y = _read_examples(scored.data, scored.examples)
    newcomer = result.associate(x, y, temperature=scored.temperature, prior=scored.prior)
    if as_json:
        print(json.dumps(_as_plain(newcomer)))
    else:
        _print_newcomer(newcomer, result, scored.data.name)
    if save:  # last, so that a full disk takes nothing that was found
        save.parent.mkdir(parents=True, exist_ok=True)
        newcomer.save(save)
        if not as_json:
            console_for().print(f"the model of cluster {newcomer.cluster} is in {save}", soft_wrap=True)
    return 0


def _print_newcomer(newcomer: "Newcomer", result: "Result", name: str) -> None:
    from rich.table import Table

    from bcfl.console import console_for

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


def _as_plain(newcomer: "Newcomer") -> dict[str, Any]:
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
    import numpy as np

    from bcfl.data.formats import load_npz

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


@dataclass(frozen=True)
class Beliefs:
    """What stands for the run's beliefs."""

    beliefs: Annotated[Any, option(None, BELIEFS, click.Choice(["mean", "samples", "sigma", "last_layer"]))] = "mean"
    samples: Annotated[int, option("N", "draws per belief (default: 16)", positive)] = 16
    prior_precision: Annotated[Any, option("X", PRECISION, _word_or_number("auto"))] = 1000.0


def evaluate(
    *,
    run: options.RunPath,
    data_path: options.DataPath = None,
    spread: Beliefs,
    out: Annotated[Path | None, option("FILE.json", "write all of it, with the coverage curve", usable_file)] = None,
    as_json: options.Json = False,
) -> int:
    """How good predictions are as probabilities.

    NLL, Brier score, ECE and accuracy at coverage over all clients' test data, of each client's best model and of its
    predictive mixture over hypotheses and, with --beliefs, over each belief. Needs the run's data; not for clients or a
    model that were given in Python.

    examples:
      bcfl evaluate runs/a
      bcfl evaluate runs/a --beliefs last_layer --prior-precision 100 --out predictive.json
    """
    from bcfl.files import write_atomically
    from bcfl.predict.predictors import Spread
    from bcfl.runs import evaluation
    from bcfl.runs.loop import load_result
    from bcfl.runs.store import to_json

    automatic = spread.prior_precision == "auto"
    added = math.inf if automatic else spread.prior_precision
    around = Spread(spread.beliefs, spread.samples, added)
    result = load_result(run)
    if data_path is not None:
        result = replace(result, config=result.config.with_data_path(str(data_path)))
    found = evaluation.evaluate(result, around, choose=automatic)
    if as_json:
        print(json.dumps(found))
    else:
        _print_evaluation(found, automatic)
    if out:  # last, so that a full disk takes nothing that was found
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, to_json(found))
    return 0


def _print_evaluation(found: Mapping[str, Any], automatic: bool) -> None:
    from rich.table import Table

    from bcfl.console import console_for

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
