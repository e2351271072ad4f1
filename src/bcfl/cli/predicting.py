"""What a finished run is good for: where a newcomer belongs, and how good its predictions are as probabilities."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

import bcfl.cli.options as options
from bcfl.cli.options import option, positive, usable_file

if TYPE_CHECKING:
    from bcfl.predict.predictors import Newcomer

TEMPERATURE = "log-likelihoods are divided by it: none (1, the posterior; the default), per_example, or a number"
TEMPERATURES = "per_example, none or a number > 0"
PRIOR = "before any example: all clusters alike (the default), or by their numbers of clients"
BELIEFS = "what stands for a belief (default: its mean)"
PRECISION = "added to the beliefs' precision (default: 1000); auto: chosen on validation data (data.validation)"


def _word_or_number(allowed: str, *words: str) -> Callable[[object], str | float]:
    def read(given: object) -> str | float:
        try:
            return str(given) if given in words else float(str(given))
        except ValueError:
            raise click.BadParameter(f"must be {allowed}, got {given!r}") from None

    return read


@dataclass(frozen=True)
class Scored:
    """By what a newcomer is placed."""

    data: Annotated[Path, option("FILE.npz", "the newcomer's examples: x and y", options.PATH)]
    examples: Annotated[int | None, option("N", "use the first N (default: all)", positive)] = None
    temperature: Annotated[Any, option("T", TEMPERATURE, _word_or_number(TEMPERATURES, "none", "per_example"))] = "none"
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

    How likely it belongs to each cluster, by scoring a few of its examples; nothing is trained. For a run on a
    table, the file may be rows of it (.csv or .parquet) with the target. FILE.npz holds x,
    (example, …) numbers prepared as the run's own data were, and y, (example,) whole-numbered labels. Where the run's
    model was given in Python, use result.associate there.

    examples:
      bcfl associate runs/a --data mine.npz
      bcfl associate runs/a --data mine.npz --examples 32 --save mine.safetensors --json
    """
    from bcfl.cli.summary import print_newcomer
    from bcfl.data.frames import READERS
    from bcfl.runs.loop import load_result

    result = load_result(run)
    form = result.sites.form
    if form is not None and scored.data.suffix in READERS:
        x, y = (part[: scored.examples] for part in form.examples(scored.data, scored.data.name))
    else:
        x, y = _read_examples(scored.data, scored.examples)
    newcomer = result.associate(x, y, temperature=scored.temperature, prior=scored.prior)
    if as_json:
        print(json.dumps(_as_plain(newcomer)))
    else:
        print_newcomer(newcomer, result, scored.data.name)
    if save:  # last, so that a full disk takes nothing that was found
        save.parent.mkdir(parents=True, exist_ok=True)
        newcomer.save(save)
        if not as_json:
            print(f"the model of cluster {newcomer.cluster} is in {save}")
    return 0


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
    prior_precision: Annotated[Any, option("X", PRECISION, _word_or_number("auto or a number ≥ 0", "auto"))] = 1000.0


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
    from bcfl.cli.summary import print_evaluation
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
        print_evaluation(found, automatic)
    if out:  # last, so that a full disk takes nothing that was found
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, to_json(found))
    return 0
