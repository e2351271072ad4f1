"""Conformal sets and intervals: the quantile's rule, what they cover, and MAPIE beside them."""

import math

import numpy as np
import pytest
import torch

from bcfl.predict.conformal import (
    conformal_quantile,
    keep_aside,
    least_rows,
    prediction_intervals,
    prediction_sets,
)
from bcfl.randomness import generator, numpy_generator


@pytest.mark.parametrize(("count", "alpha"), [(19, 0.05), (20, 0.05), (37, 0.1), (9, 0.1), (100, 0.33)])
def test_the_quantile_covers_between_nominal_and_one_in_n_more(count: int, alpha: float) -> None:
    """A new number is below the quantile with probability ⌈(n + 1)(1 − α)⌉ / (n + 1) exactly, if none are equal."""
    draws = numpy_generator(count, "conformal quantile")
    exact = math.ceil((count + 1) * (1 - alpha) - 1e-9) / (count + 1)
    assert 1 - alpha - 1e-12 <= exact < 1 - alpha + 1 / (count + 1)
    numbers = draws.exponential(size=(20_000, count + 1))
    rank = (numbers[:, :-1] < numbers[:, -1:]).sum(1)  # covered: fewer than the quantile's rank are smaller
    found = conformal_quantile(torch.from_numpy(numbers[0, :-1]), alpha)
    assert sorted(numbers[0, :-1])[round(exact * (count + 1)) - 1] == found
    covered = float((rank < round(exact * (count + 1))).mean())
    assert abs(covered - exact) < 4 * math.sqrt(exact * (1 - exact) / len(numbers))


def test_with_too_few_rows_nothing_is_left_out_and_that_is_said() -> None:
    assert [least_rows(alpha) for alpha in (0.05, 0.1, 0.5, 0.3)] == [19, 9, 1, 3]
    for alpha in (0.05, 0.1, 0.3):
        enough = least_rows(alpha)
        assert math.isfinite(conformal_quantile(torch.rand(enough), alpha))
        assert conformal_quantile(torch.rand(enough - 1), alpha) == math.inf
    few = prediction_sets(torch.tensor([[0.2, 0.8]]), torch.tensor([1]), torch.rand(3, 2), 0.1)
    assert few.holds.all()
    assert not few.says_something
    assert not prediction_intervals(torch.zeros(1), torch.zeros(1), torch.zeros(2), 0.1).says_something


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, math.nan])
def test_an_alpha_that_is_no_share_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must be above 0 and below 1"):
        conformal_quantile(torch.rand(5), alpha)


def test_an_interval_is_wide_where_the_spread_is() -> None:
    draws = generator(0, "conformal intervals")
    scale = torch.rand(4000, generator=draws) + 0.1
    y = scale * torch.randn(4000, generator=draws)
    rows, new = slice(2000), slice(2000, None)
    found = prediction_intervals(
        torch.zeros(2000), y[rows], torch.zeros(2000), 0.2, scale=scale[rows], new_scale=scale[new]
    )
    assert torch.allclose(found.high - found.low, 2 * found.quantile * scale[new].double())
    assert float(found.covers(y[new]).double().mean()) == pytest.approx(0.8, abs=0.03)


class _Told:
    """A fitted classifier of scikit-learn's kind whose probabilities are the inputs."""

    def __init__(self, num_classes: int):
        self.classes_ = np.arange(num_classes)
        self.n_features_in_ = num_classes

    def fit(self, x: object, y: object) -> "_Told":
        return self

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        return x

    def predict(self, x: np.ndarray) -> np.ndarray:
        return x.argmax(1)

    def __sklearn_is_fitted__(self) -> bool:
        return True


def test_sets_are_mapies() -> None:
    mapie = pytest.importorskip("mapie.classification")
    from sklearn.base import BaseEstimator, ClassifierMixin  # mapie asks for one of these

    told = type("Told", (_Told, ClassifierMixin, BaseEstimator), {})(3)
    draws = generator(1, "mapie")
    p = torch.randn(60, 3, generator=draws, dtype=torch.float64).mul(2).softmax(1)
    y = torch.multinomial(p, 1, generator=draws)[:, 0]
    new = torch.randn(200, 3, generator=draws, dtype=torch.float64).mul(2).softmax(1)
    for alpha in (0.1, 0.25):
        theirs = mapie.SplitConformalClassifier(told, confidence_level=1 - alpha, conformity_score="lac", prefit=True)
        theirs.conformalize(p.numpy(), y.numpy())
        expected = theirs.predict_set(new.numpy())[1][:, :, 0]
        assert np.array_equal(prediction_sets(p, y, new, alpha).holds.numpy(), expected)


def test_intervals_are_mapies() -> None:
    mapie = pytest.importorskip("mapie.regression")
    from sklearn.dummy import DummyRegressor

    draws = generator(2, "mapie")
    y = torch.randn(50, generator=draws, dtype=torch.float64)
    zeros = np.zeros((50, 1))
    centre = DummyRegressor(strategy="constant", constant=0.3).fit(zeros, y.numpy())
    for alpha in (0.1, 0.2):
        theirs = mapie.SplitConformalRegressor(centre, confidence_level=1 - alpha, prefit=True)
        theirs.conformalize(zeros, y.numpy())
        low, high = theirs.predict_interval(zeros[:1])[1][0, :, 0]
        ours = prediction_intervals(torch.full((50,), 0.3), y, torch.tensor([0.3]), alpha)
        assert float(ours.low) == pytest.approx(low, abs=1e-6)
        assert float(ours.high) == pytest.approx(high, abs=1e-6)


def test_what_is_kept_aside_is_not_trained_on() -> None:
    clients = [(torch.arange(10.0), torch.arange(10), torch.zeros(2), torch.zeros(2)), (torch.rand(3), torch.arange(3))]
    left, aside = keep_aside(clients, 0.3, seed=4)
    assert [len(y) for _, y in aside] == [3, 1]
    assert [len(client[1]) for client in left] == [7, 2]
    assert sorted([*left[0][1].tolist(), *aside[0][1].tolist()]) == list(range(10))
    assert left[0][2] is clients[0][2]
    assert torch.equal(keep_aside(clients, 0.3, seed=4)[1][0][1], aside[0][1])
    with pytest.raises(ValueError, match="client 0: of one row"):
        keep_aside([(torch.zeros(1), torch.zeros(1))], 0.5)
