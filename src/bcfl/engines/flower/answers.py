"""What clients said, once it is found sound: every reader refuses all else with a ValueError in one line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor

from bcfl.belief.gaussian import Gaussian
from bcfl.client.client import Layout
from bcfl.engines.flower.wire import (
    DOUBLE,
    FLOAT,
    INT,
    arrays_of,
    finite,
    list_of,
    name_in,
    only,
    read_array,
    settings_of,
    whole_number,
)
from bcfl.likelihood import Likelihood
from bcfl.likelihood.measures import FLOOR, VALUES, Evaluation, sums_of, tables_of

MOST_EXAMPLES = 2**31  # of one client: nobody's memory holds more
LARGEST = 1e30  # of a squared error: beyond it products overflow
NOT_KNOWN = 2.0  # of a measure that is at most 1, or of its error
ROUNDING = 1e-3  # relative, of sums in single precision


@dataclass(frozen=True)
class Sizes:
    """What a client said about the data that it holds from a round on."""

    num_train: int
    num_test: int
    group: int  # −1: it did not say
    first_round: int = 0


@dataclass(frozen=True)
class Member:
    """A client as it describes itself."""

    client: int
    num_classes: int
    sizes: Sizes
    later: Sizes | None = None  # where its data change in mid-run: only in simulations
    name: str = ""

    def sizes_in(self, round_index: int) -> Sizes:
        return self.sizes if self.later is None or round_index < self.later.first_round else self.later


def read_member(content: RecordDict, layout: Layout, num_clients: int) -> Member:
    only(content, ("answer", "later"))
    said = settings_of(content, "answer")
    only(said, ("client", "num-classes", "vector-length", "shapes", "layers", "num-train", "num-test", "group", "name"))
    client = whole_number(said, "client", 0, num_clients - 1)
    length = whole_number(said, "vector-length", 1, 2**62)
    shapes, layers = (list_of(said, key, str) for key in ("shapes", "layers"))
    if not (shapes and layers):
        raise ValueError("shapes and layers of the model must be told")
    layout.refuse_other(length, shapes, layers, "at the client")
    num_classes = whole_number(said, "num-classes", 1, 2**20)
    later = None
    if "later" in content:
        changed = settings_of(content, "later")
        only(changed, ("round", "num-train", "num-test", "group"))
        later = _read_sizes(changed, whole_number(changed, "round", 0, 2**31))
    return Member(client, num_classes, _read_sizes(said, 0), later, name_in(said))


def _read_sizes(said: Mapping[str, Any], first_round: int) -> Sizes:
    sizes = whole_number(said, "num-train", 1, MOST_EXAMPLES), whole_number(said, "num-test", 0, MOST_EXAMPLES)
    return Sizes(*sizes, whole_number(said, "group", -1, 2**20), first_round)


def read_scores(
    ask: Mapping[str, Any], content: RecordDict, num_examples: int, discrete: bool = True
) -> tuple[Tensor, ...] | None:
    """What a client says of its models; None where more of its models are to come first.

    A score is a row of log-likelihoods, of discrete targets none above 0, of others bounded; shares sum to one; a look
    gives mean log-likelihoods and their covariance. No example counts below FLOOR, as none of an honest client does:
    what is far beyond would drown everybody else's numbers in rounding.
    """
    kind, count, total = ask["kind"], ask["num-models"], ask["total"]
    complete = kind == "score" or ask["first"] + count == total
    only(content, ("answer", "privacy"))
    names = () if not complete else ("mean", "covariance") if kind == "look" else ("scores",)
    arrays = arrays_of(content, "answer", names)

    def numbers(name: str, *shape: int) -> Tensor:
        return finite(read_array(arrays.get(name), shape, DOUBLE, name), name)

    if not complete:
        return None
    if kind == "score":
        scores = numbers("scores", count)
        highest = 0.0 if discrete else -FLOOR * num_examples
        if float(scores.max()) > highest:
            raise ValueError(f"log-likelihoods must be ≤ {highest:g}")
        return (scores.clamp(min=FLOOR * num_examples),)
    if kind == "share":
        share = numbers("scores", total)
        if float(share.min()) < 0 or abs(float(share.sum()) - 1) > 1e-6:
            raise ValueError("shares must be ≥ 0 and sum to one")
        return (share,)
    mean, covariance = numbers("mean", total), numbers("covariance", total, total)
    if float(mean.max()) > (0.0 if discrete else -FLOOR) or float(covariance.diagonal().min()) < 0:
        raise ValueError("mean log-likelihoods must be ≤ 0 and their variances ≥ 0")
    if float(mean.min()) < FLOOR or float(covariance.abs().max()) > FLOOR**2:
        raise ValueError(f"mean log-likelihoods must be ≥ {FLOOR:g}, and covariances no larger than that allows")
    variance = covariance.diagonal()
    most = (variance[:, None] * variance).sqrt() * (1 + ROUNDING) + 1e-9
    if bool((covariance.abs() > most).any()) or not torch.allclose(covariance, covariance.T, ROUNDING, 1e-9):
        raise ValueError("a covariance must be the same both ways, and no larger than its variances allow")
    return mean, covariance


def read_choice(content: RecordDict, num_beliefs: int) -> tuple[int, int]:
    """The belief that a client has chosen, and how many (example, model) pairs it scored for that."""
    said = settings_of(content, "choice")
    only(said, ("choice", "scored"))
    return whole_number(said, "choice", 0, num_beliefs - 1), whole_number(said, "scored", 0, 2**62)


@dataclass(frozen=True)
class Trained:
    """What the server knows beforehand of one local training: enough to see what its posterior cannot be."""

    index: int  # in the answer
    prior: Tensor  # (parameter,): the precision that it began with
    num_examples: float
    curvature: bool


def read_posteriors(content: RecordDict, layout: Layout, trained: list[Trained], *records: str) -> list[Gaussian]:
    """The posteriors of an answer, which may not be finite, as of a training that diverged.

    Without curvature the precision counts examples, which the server knows; with it, it is never below the prior's.
    `records` may stand beside the answer.
    """
    only(content, ("answer", "privacy", *records))
    names = [f"{part}.{t.index}" for t in trained for part in ("mean", "precision") if t.curvature or part == "mean"]
    arrays = arrays_of(content, "answer", names)
    posteriors = []
    for one in trained:
        mean_name, name = f"mean.{one.index}", f"precision.{one.index}"
        mean = read_array(arrays.get(mean_name), (layout.length,), FLOAT, mean_name)
        precision = torch.full_like(mean, one.num_examples)
        if one.curvature:
            said = read_array(arrays.get(name), (layout.num_parameters,), FLOAT, name)
            if bool((said < one.prior * (1 - ROUNDING)).any()):
                raise ValueError(f"{name}: a precision must be ≥ 0, and not below the one that training began with")
            precision[: layout.num_parameters] = said
        posteriors.append(Gaussian(mean, precision))
    return posteriors


def read_evaluation(content: RecordDict, likelihood: Likelihood, num_classes: int, num_test: int) -> Evaluation:
    """A client's measures of its test data: sums that so many examples can have, values in their bounds, counts."""
    only(content, ("answer",))
    kind = likelihood.family.kind
    shapes, names = tables_of(kind, num_classes), sums_of(kind)
    arrays = arrays_of(content, "answer", ("sums", "values", *shapes))
    sums = finite(read_array(arrays.get("sums"), (len(names), 2), DOUBLE, "sums"), "sums")
    values = finite(read_array(arrays.get("values"), (len(VALUES[kind]), 2), DOUBLE, "values"), "values")
    values = torch.where(values == NOT_KNOWN, torch.nan, values)
    tables = {
        name: read_array(arrays.get(name), shape, INT if name == "confusion" else DOUBLE, name)
        for name, shape in shapes.items()
    }
    found = dict(zip(names, (tuple(row) for row in sums.tolist()), strict=True))
    for name, (total, squares) in found.items():
        least, most = _bounds(name, likelihood)
        if not least * num_test <= total <= most * num_test * (1 + ROUNDING):
            raise ValueError(f"{name} must be between {least:g} and {most:g} for each of the {num_test} test examples")
        if not total * total <= squares * num_test * (1 + ROUNDING) + 1e-6:
            raise ValueError(f"{name}: the squares must add up to no less than the sum allows")
    for name, (value, error) in zip(VALUES[kind], values.tolist(), strict=True):
        least = -math.inf if name == "r2" else 0.0
        if not (math.isnan(value) or least <= value <= 1 + ROUNDING) or error < 0 or math.isinf(value):
            raise ValueError(f"{name} must be at most 1, and at least {least:g}, and its error not negative")
    _check_tables(tables, num_test, kind)
    return Evaluation(num_test, found, dict(zip(VALUES[kind], map(tuple, values.tolist()), strict=True)), tables)


def _bounds(name: str, likelihood: Likelihood) -> tuple[float, float]:
    """What a measure of one example can be."""
    if name == "log_likelihood":
        return FLOOR, 0.0 if likelihood.discrete else -FLOOR
    if name == "brier":
        return 0.0, 2.0
    return 0.0, 1.0 if name == "correct" or name.startswith("within") else LARGEST


def _check_tables(tables: Mapping[str, Tensor], num_test: int, kind: str) -> None:
    """Nothing happens if the tables count the client's test examples, or the places within them."""
    if "confusion" in tables:
        confusion = tables["confusion"]
        counted = int(confusion.sum()) == num_test if kind == "classes" else True
        if int(confusion.min()) < 0 or (kind == "classes" and int(confusion.max()) > num_test) or not counted:
            raise ValueError(f"confusion must count the client's {num_test} test examples")
    if "calibration" in tables:
        calibration = finite(tables["calibration"], "calibration")
        counts = calibration[:, :1]
        counted = float(counts.sum()) == num_test if kind == "classes" else True
        if float(calibration.min()) < 0 or not counted:
            raise ValueError(f"calibration must count the client's {num_test} test examples")
        if bool((calibration > counts * 1.001 + 1e-6).any()):
            raise ValueError("calibration: confidence and successes must not be above what is counted")
