"""What clients said, once it is found sound: every reader refuses all else with a ValueError in one line."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor

from bcfl.belief.gaussian import Gaussian
from bcfl.client.client import Layout
from bcfl.client.score import FLOOR, NUM_BINS, Evaluation
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

MOST_EXAMPLES = 2**31  # of one client: nobody's memory holds more
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


def read_scores(ask: Mapping[str, Any], content: RecordDict, num_examples: int) -> tuple[Tensor, ...] | None:
    """What a client says of its models; None where more of its models are to come first.

    A score is a row of log-likelihoods of discrete labels, so none is above 0; shares sum to one; a look gives mean
    log-likelihoods and their covariance. No example counts below FLOOR, as none of an honest client does: what is
    far beyond would drown everybody else's numbers in rounding.
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
        if float(scores.max()) > 0:
            raise ValueError("log-likelihoods must be ≤ 0")
        return (scores.clamp(min=FLOOR * num_examples),)
    if kind == "share":
        share = numbers("scores", total)
        if float(share.min()) < 0 or abs(float(share.sum()) - 1) > 1e-6:
            raise ValueError("shares must be ≥ 0 and sum to one")
        return (share,)
    mean, covariance = numbers("mean", total), numbers("covariance", total, total)
    if float(mean.max()) > 0 or float(covariance.diagonal().min()) < 0:
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


def read_evaluation(content: RecordDict, num_classes: int, num_test: int) -> Evaluation:
    only(content, ("answer",))
    arrays = arrays_of(content, "answer", ("confusion", "calibration", "log-likelihood", "brier"))

    def one(name: str) -> float:
        return float(finite(read_array(arrays.get(name), (1,), DOUBLE, name), name))

    confusion = read_array(arrays.get("confusion"), (num_classes, num_classes), INT, "confusion")
    calibration = finite(read_array(arrays.get("calibration"), (NUM_BINS, 3), DOUBLE, "calibration"), "calibration")
    total, brier, counted = one("log-likelihood"), one("brier"), calibration[:, :1]
    if int(confusion.min()) < 0 or int(confusion.max()) > num_test or int(confusion.sum()) != num_test:
        raise ValueError(f"confusion must count the client's {num_test} test examples")
    if not FLOOR * num_test <= total <= 0:
        raise ValueError(f"log-likelihood must be between {FLOOR:g} and 0 for each test example")
    if float(calibration.min()) < 0 or float(counted.sum()) != num_test:
        raise ValueError(f"calibration must count the client's {num_test} test examples")
    if bool((calibration > counted * 1.001 + 1e-6).any()):
        raise ValueError("calibration: confidence and successes must not be above what is counted")
    if not 0 <= brier <= 2.001 * num_test:
        raise ValueError(f"brier must be between 0 and 2 for each of the client's {num_test} test examples")
    return Evaluation(confusion, total, calibration, brier)
