"""What is measured of predictions, by the kind of target: from a client's sums to numbers with plain names.

A client tells sums over its test examples (with the sums of their squares, for intervals), values that are no such sums
(with standard errors) and tables; of which kind which, `SUMS`, `VALUES` and `tables_of` say, so that a server knows
what to expect. Nothing is told of a single example.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bcfl.likelihood.contract import Likelihood
from bcfl.likelihood.ranks import UNKNOWN, Measured, auc, concordance, crps, integrated_brier, sensitivity

FLOOR = -1e6  # the least log-likelihood of an example: an overflow in the network must not become a score of NaN
NUM_BINS = 15  # of the calibration table
SPECIFICITY = 0.9
NUM_ATOMS = 99  # by which a continuous prediction is scored
NUM_TIMES = 50  # at which survival is scored
Sums = dict[str, tuple[float, float]]

OF_REAL = ("squared_error", "absolute_error", "crps", "within_50", "within_90")
SUMS: dict[str, tuple[str, ...]] = {  # log_likelihood comes first everywhere
    "classes": ("brier",),
    "labels": ("brier", "correct"),
    "real": OF_REAL,
    "counts": (*OF_REAL, "deviance"),
    "times": (),
    "pixels": ("correct",),
    "tokens": ("correct",),
    "own": (),
}
VALUES: dict[str, tuple[str, ...]] = {
    "classes": ("auc", "sensitivity"),
    "labels": ("auc", "sensitivity"),
    "real": ("r2",),
    "counts": ("r2",),
    "times": ("concordance", "integrated_brier"),
    "pixels": (),
    "tokens": (),
    "own": (),
}
LEADS = {  # the measure that tells most, and whether more of it is better
    "classes": ("accuracy", True),
    "labels": ("auc", True),
    "real": ("rmse", False),
    "counts": ("deviance", False),
    "times": ("concordance", True),
    "pixels": ("mean_iou", True),
    "tokens": ("perplexity", False),
    "own": ("nll", False),
}


TITLES = {  # every measure by its plain name, in the order in which they are told, and what people call it
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "auc": "AUC",
    "sensitivity": f"sensitivity at specificity {SPECIFICITY}",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
    "deviance": "deviance",
    "concordance": "concordance",
    "integrated_brier": "integrated Brier score",
    "mean_iou": "mean IoU",
    "perplexity": "perplexity",
    "nll": "NLL",
    "crps": "CRPS",
    "coverage_50": "coverage of 50 % intervals",
    "coverage_90": "coverage of 90 % intervals",
    "ece": "calibration error",
    "brier": "Brier score",
}


@dataclass(frozen=True)
class Evaluation:
    """Everything that the measures of one client are computed from."""

    num_examples: int
    sums: Mapping[str, tuple[float, float]]  # over test examples: of a number, and of its square
    values: Mapping[str, Measured] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def log_likelihood(self) -> float:
        return self.sums["log_likelihood"][0]

    @property
    def brier(self) -> float:
        return self.sums["brier"][0]

    @property
    def confusion(self) -> Tensor:
        return self.tables["confusion"]

    @property
    def calibration(self) -> Tensor:
        return self.tables["calibration"]


def tables_of(kind: str, num_classes: int) -> dict[str, tuple[int, ...]]:
    """The tables that a client of this kind tells, with their shapes."""
    confusion: dict[str, tuple[int, ...]] = (
        {"confusion": (num_classes, num_classes)} if kind in ("classes", "pixels") else {}
    )
    return confusion | ({"calibration": (NUM_BINS, 3)} if kind in ("classes", "labels") else {})


def sums_of(kind: str) -> tuple[str, ...]:
    return ("log_likelihood", *SUMS[kind])


def floored(log_p: Tensor) -> Tensor:
    """Log-likelihoods with the least that an example may have for those below it and for NaN."""
    return log_p.nan_to_num(nan=FLOOR).clamp(min=FLOOR)


def log_mixture(log_p: Tensor, log_weight: Tensor) -> Tensor:
    """log Σ_m weight_m p_m: the prediction of a mixture; of a single model, to the bit its own."""
    if len(log_p) == 1:
        return log_p[0]
    weighted = log_p.double() + log_weight.double().view(-1, *[1] * (log_p.dim() - 1))
    return weighted.logsumexp(0).to(log_p.dtype)  # (model, ...) -> (...)


def measured(likelihood: Likelihood, outputs: Tensor, log_weight: Tensor, y: Tensor, num_classes: int) -> Evaluation:
    """How the mixture of what models say of examples does on their targets."""  # (model, example, ...), (model,)
    target, extra = likelihood.parted(y)
    outputs = likelihood.shifted(outputs, extra)
    kind = likelihood.family.kind
    if kind == "classes":
        log_p = likelihood.family.log_probs(outputs)  # type: ignore[attr-defined]
        return evaluate(log_mixture(floored(log_p), log_weight), target.long(), max(num_classes, log_p.shape[-1]))
    plain = Likelihood(likelihood.family)  # every example counts once, whatever its weight
    log_p = log_mixture(floored(plain.of_models(outputs, target)), log_weight).double()
    sums, values, tables = _OF_KIND[kind](likelihood, outputs, log_weight.double().exp(), target)
    return Evaluation(len(target), {"log_likelihood": _sums(log_p), **sums}, values, tables)


def evaluate(log_p: Tensor, y: Tensor, num_classes: int) -> Evaluation:
    """How predictions log p(class|x) do on examples with these labels."""  # (example, class), (example,)
    p, predicted = log_p.double().exp(), log_p.argmax(1)
    confidence, likelihood = p.amax(1), log_p.gather(1, y[:, None]).double()
    brier = p.square().sum(1) - 2 * likelihood.exp()[:, 0] + 1
    confusion = torch.bincount(y * num_classes + predicted, minlength=num_classes**2).view(num_classes, num_classes)
    values = {"auc": UNKNOWN, "sensitivity": UNKNOWN}
    if num_classes == 2:
        values = {"auc": auc(p[:, 1], y == 1), "sensitivity": sensitivity(p[:, 1], y == 1, SPECIFICITY)}
    return Evaluation(
        len(y),
        {
            "log_likelihood": (float(likelihood.sum()), float(likelihood.square().sum())),
            "brier": (float(p.square().sum() - 2 * likelihood.exp().sum() + len(y)), float(brier.square().sum())),
        },
        values,
        {"confusion": confusion, "calibration": calibration_table(confidence, predicted == y)},
    )


def calibration_table(confidence: Tensor, correct: Tensor) -> Tensor:
    """How many examples fall into each bin of confidence, with what confidence in sum, and how many are correct."""
    bins = (confidence * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    rows = torch.stack([torch.ones_like(confidence), confidence, correct.double()], 1).double()
    return torch.zeros(NUM_BINS, 3, dtype=torch.float64).index_add(0, bins, rows)  # (bin, [examples, sum, correct])


Told = tuple[Sums, dict[str, Measured], dict[str, Tensor]]


def _sums(values: Tensor) -> tuple[float, float]:
    values = values.double()
    return float(values.sum()), float(values.square().sum())


def _of_labels(likelihood: Likelihood, outputs: Tensor, share: Tensor, y: Tensor) -> Told:
    p = torch.tensordot(share, outputs.double().sigmoid(), 1)  # (example, label)
    true = y.reshape(len(y), -1) > 0
    right = (p > 0.5) == true
    found = [(auc(p[:, i], true[:, i]), sensitivity(p[:, i], true[:, i], SPECIFICITY)) for i in range(p.shape[1])]
    sums = {"brier": _sums((p - true.double()).square().mean(1)), "correct": _sums(right.double().mean(1))}
    table = calibration_table(torch.maximum(p, 1 - p).flatten(), right.flatten())
    return sums, {"auc": _mean(a for a, _ in found), "sensitivity": _mean(s for _, s in found)}, {"calibration": table}


def _mean(found: "object") -> Measured:
    known = [one for one in found if not math.isnan(one[0])]  # type: ignore[attr-defined]
    if not known:
        return UNKNOWN
    return sum(v for v, _ in known) / len(known), math.sqrt(sum(e * e for _, e in known)) / len(known)


def _of_real(likelihood: Likelihood, outputs: Tensor, share: Tensor, y: Tensor) -> Told:
    family = likelihood.family
    values = y.double().reshape(len(y), -1)  # (example, value)
    mean = torch.tensordot(share, family.mean(outputs).double(), 1).reshape(values.shape)
    levels = (torch.arange(NUM_ATOMS, dtype=outputs.dtype) + 0.5) / NUM_ATOMS
    atoms = family.quantiles(outputs, levels).double()  # type: ignore[attr-defined]  # (atom, model, example, value)
    weight = (share / NUM_ATOMS).expand(NUM_ATOMS, -1).flatten()
    score = crps(atoms.flatten(0, 1).flatten(1), weight, values.flatten()).view_as(values)
    least = 1.0 if family.kind == "counts" else 0.0  # of counts, an interval has its ends too
    at = y.reshape(values.shape)
    upto, below = (
        torch.tensordot(share, family.cdf(outputs, at - less).double(), 1)  # type: ignore[attr-defined]
        for less in (0.0, least)
    )
    sums = {
        "squared_error": _sums((values - mean).square().mean(1)),
        "absolute_error": _sums((values - mean).abs().mean(1)),
        "crps": _sums(score.mean(1)),
    }
    for percent in (50, 90):
        tail = (100 - percent) / 200
        sums[f"within_{percent}"] = _sums(((upto >= tail) & (below <= 1 - tail)).double().mean(1))
    around = float((values - values.mean(0)).square().sum())
    r2 = (1 - float((values - mean).square().sum()) / around, math.nan) if around > 0 else UNKNOWN
    return sums, {"r2": r2}, {}


def _of_counts(likelihood: Likelihood, outputs: Tensor, share: Tensor, y: Tensor) -> Told:
    sums, values, tables = _of_real(likelihood, outputs, share, y)
    mean = torch.tensordot(share, likelihood.family.mean(outputs).double(), 1)
    deviance = likelihood.family.deviance(mean, y.double(), outputs[0].double())  # type: ignore[attr-defined]
    return {**sums, "deviance": _sums(deviance)}, values, tables


def _of_times(likelihood: Likelihood, outputs: Tensor, share: Tensor, y: Tensor) -> Told:
    time, event = y[:, 0].double(), y[:, 1].double()
    mean = torch.tensordot(share, likelihood.family.mean(outputs).double(), 1)
    came = time[event > 0]
    values = {"concordance": concordance(time, event, mean), "integrated_brier": UNKNOWN}
    if len(came) > 1:
        at = torch.linspace(0.1, 0.9, NUM_TIMES, dtype=torch.float64)
        at = came.quantile(at).unique()
        alive = likelihood.family.survival(outputs.double(), at)  # type: ignore[attr-defined]  # (time, model, example)
        values["integrated_brier"] = integrated_brier(time, event, torch.einsum("m,tme->te", share, alive), at)
    return {}, values, {}


def _of_pixels(likelihood: Likelihood, outputs: Tensor, share: Tensor, y: Tensor) -> Told:
    p = torch.tensordot(share, outputs.double().softmax(-3), 1).movedim(-3, -1)  # (example, height, width, class)
    predicted, count = p.argmax(-1), p.shape[-1]
    counted = y >= 0
    places = (y * count + predicted)[counted]
    confusion = torch.bincount(places, minlength=count**2).view(count, count)
    return {"correct": _sums(_share_right(predicted, y))}, {}, {"confusion": confusion}


def _of_tokens(likelihood: Likelihood, outputs: Tensor, share: Tensor, y: Tensor) -> Told:
    p = torch.tensordot(share, outputs.double().softmax(-1), 1)
    return {"correct": _sums(_share_right(p.argmax(-1), y))}, {}, {}


def _share_right(predicted: Tensor, y: Tensor) -> Tensor:
    """Of each example's places that count, the share that is right."""
    counted = y >= 0
    right = ((predicted == y) & counted).flatten(1).double().sum(1)
    return right / counted.flatten(1).sum(1).clamp(min=1)


def _of_own(likelihood: Likelihood, outputs: Tensor, share: Tensor, y: Tensor) -> Told:
    return {}, {}, {}


_OF_KIND: dict[str, Callable[[Likelihood, Tensor, Tensor, Tensor], Told]] = {
    "labels": _of_labels,
    "real": _of_real,
    "counts": _of_counts,
    "times": _of_times,
    "pixels": _of_pixels,
    "tokens": _of_tokens,
    "own": _of_own,
}
