"""How far a result can be trusted: who fits nowhere, sets that cover, and newcomers without labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bcfl.belief.gaussian import Gaussian, merge
from bcfl.federation import Hypotheses
from bcfl.likelihood import likelihood_of
from bcfl.model.flat import build
from bcfl.predict.conformal import Intervals, PredictionSets, prediction_intervals, prediction_sets
from bcfl.predict.metrics import Z
from bcfl.predict.predictors import Predictor


def members_of(history: Sequence[Mapping[str, Any]]) -> Tensor:
    """What each tested client last showed on its own test rows, which nobody trained on: NLL per row and its variance.

    The variance is read off the interval of the mean; a client with a single row shows none.
    """  # (tested client, [client, examples, mean, variance])
    last = next((record for record in reversed(history) if record.get("client_nll")), None)
    if last is None:
        return torch.zeros(0, 4, dtype=torch.float64)
    rows = []
    intervals = last.get("client_interval", {}).get("nll") or [None] * len(last["client_nll"])
    told = zip(last["client_nll"], last["client_examples"], intervals, strict=True)
    for client, (nll, count, interval) in enumerate(told):
        if nll is not None:
            half = 0.0 if interval is None else (interval[1] - interval[0]) / 2
            rows.append([client, count, nll, count * (half / Z) ** 2])
    return torch.tensor(rows, dtype=torch.float64).view(-1, 4)


def broad_belief(told: Hypotheses) -> Gaussian:
    """What a client that fits nowhere starts from: the moments of all clusters of the best hypothesis, by their sizes.

    A cluster without clients counts as one of half a client.
    """
    there = (told.model_of[0] >= 0).nonzero()[:, 0]
    size = (told.assignment[0][:, None] == there).sum(0).double().clamp(min=0.5)
    return merge(told.models[told.model_of[0, there]], size.log())


def conformal(predictor: Predictor, x: Any, alpha: float, calibration: tuple[Any, Any]) -> PredictionSets | Intervals:
    """Sets of classes, or intervals of real values, for new rows of the site that `calibration` rows (x, y) are of."""
    family = likelihood_of(build(predictor.factory, 0, "result")).family
    known, y = calibration
    labels = torch.as_tensor(y)
    if family.kind == "classes":
        return prediction_sets(predictor.predict_proba(known), labels, predictor.predict_proba(x), alpha)
    old, new = predictor.predict(known), predictor.predict(x)
    if family.kind == "labels" and family.num_outputs == 1:
        both = (torch.stack([1 - p, p], 1) for p in (old.flatten(), new.flatten()))
        return prediction_sets(next(both), labels, next(both), alpha)
    if family.kind not in ("real", "counts") or old.numel() != len(old):
        raise ValueError(f"conformal sets are for classes, one yes-or-no label, real values and counts, not for "
                         f"{family.name} of {family.num_outputs} outputs")  # fmt: skip
    return prediction_intervals(old.flatten(), labels.flatten(), new.flatten(), alpha)
