"""A finished run's predictions as probabilities: each client's best model beside its predictive mixture."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from bcfl.client.examples import Examples, pool
from bcfl.client.score import batch_norms
from bcfl.data.manifest import verify_manifest
from bcfl.data.partition import FederatedData
from bcfl.federation import served
from bcfl.predict.predictors import Spread, predictor_of, quality
from bcfl.runs.problem import load_data
from bcfl.runs.result import Result
from bcfl.runs.settings import Config
from bcfl.runs.store import RunFolder

# Among these the prior precision of a belief's spread is chosen on validation data; ∞ is the point prediction.
PRIOR_PRECISIONS = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, math.inf)


def evaluate(result: Result, spread: Spread, *, choose: bool = False) -> dict[str, Any]:
    """NLL, Brier score, ECE, accuracy and accuracy at coverage, over all clients' test examples: point and mixture.

    A run with data.validation was not trained on its validation examples: it is tested on the real test data, and with
    `choose` the prior precision of its beliefs' spread is the one with the least NLL on the validation examples.
    Where the model has BatchNorm, point is also told with statistics of each client's own training examples.
    """
    config = result.config
    folder = None if result.path is None else RunFolder.open(result.path)
    if folder and folder.of_federation:
        raise ValueError(f"the run in {folder.path} is a federation's: only its clients have the data to evaluate it "
                         "on, and what they found is in result.json (experiment.mixture = true: of mixtures too)"
                         )  # fmt: skip
    data = load_data(config)
    if folder:
        _refuse_other_data(data, folder)
    if choose:
        if not config.data.validation:
            raise ValueError("prior precision 'auto' is chosen on validation data, and this run kept none apart "
                             "(data.validation is 0): give a number")  # fmt: skip
        nll = {
            p: quality(*_predictions(result, data, dataclasses.replace(spread, prior_precision=p)))["nll"]
            for p in PRIOR_PRECISIONS
        }
        spread = dataclasses.replace(spread, prior_precision=min(nll, key=lambda p: nll[p]))
    if config.data.validation:
        data = load_data(_on_test_data(config))
    has_norms = bool(batch_norms(result.predictor(0)))
    return {
        "method": config.method["name"],
        "seed": config.experiment.seed,
        "beliefs": spread.beliefs,
        "num_samples": spread.num_samples,
        "prior_precision": spread.prior_precision if math.isfinite(spread.prior_precision) else "infinite",
        "point": quality(*_predictions(result, data, None)),
        "mixture": quality(*_predictions(result, data, spread)),
        **({"own_statistics": quality(*_predictions(result, data, None, own_statistics=True))} if has_norms else {}),
    }


def _refuse_other_data(data: FederatedData, folder: RunFolder) -> None:
    """Nothing happens if the run was made with these data."""
    try:
        verify_manifest(data, folder.read("manifest.json"))
    except ValueError as error:
        raise ValueError(f"the run in {folder.path} was made with other data: {error}") from None


def _on_test_data(config: Config) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, validation=0.0))


def _predictions(
    result: Result, data: FederatedData, spread: Spread | None, own_statistics: bool = False
) -> tuple[Tensor, Tensor]:
    """log p(class | x) and the label of every client's test examples: by its mixture, or (None) by its best model."""
    # The run's last models are for what clients hold at its end, which is not what they began with if it drifted.
    test_of = data.test_of_at_the_end
    if len(test_of) != len(result.assignment):
        raise ValueError(f"the data have {len(test_of)} clients, the run had {len(result.assignment)}")
    experiment = result.config.experiment
    joined = experiment.participation().joined(len(test_of), experiment.rounds)  # whom the run itself tests at its end
    tested = [(client, own) for client, own in enumerate(test_of) if len(own) and joined[client]]
    if not tested:
        raise ValueError("no client of this run has test data")
    x_test, images = pool(data.x_test)
    x_train = pool(data.x_train)[0] if own_statistics else data.x_train
    models, points = served(result.state)
    log_p = []
    for client, own in tested:
        predictor = predictor_of(result.factory, models, points[client]) if spread is None else result.mixture(client)
        trained_on = data.train_of_at_the_end[client]
        if own_statistics and len(trained_on) > 1:  # of a single example there are none
            predictor = predictor.with_statistics_of(Examples(x_train, data.y_train, trained_on, images))
        log_p.append(predictor.log_probability(Examples(x_test, data.y_test, own, images), spread or Spread()))
    return torch.cat(log_p), torch.cat([data.y_test[own] for _, own in tested])  # (example, class), (example,)
