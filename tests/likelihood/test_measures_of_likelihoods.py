"""Measures against scikit-learn, scipy and lifelines, and what clients tell of them."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import brier_score_loss, jaccard_score, mean_poisson_deviance, r2_score, roc_auc_score

from bcfl import likelihood
from bcfl.likelihood.measures import evaluate, measured
from bcfl.likelihood.ranks import auc, concordance, crps, integrated_brier, kaplan_meier, sensitivity
from bcfl.predict.metrics import mean_iou, measures_of, summarise

ONE = torch.zeros(1, dtype=torch.float64)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_auc_is_scikit_learns_also_with_draws() -> None:
    score = torch.randint(6, (80,), generator=draws()).double()
    positive = torch.rand(80, generator=draws(1)) < 0.3
    value, error = auc(score, positive)
    assert value == pytest.approx(roc_auc_score(positive.numpy(), score.numpy()))
    assert 0 < error < 0.1
    assert math.isnan(auc(score, torch.zeros(80, dtype=torch.bool))[0])


def test_sensitivity_is_where_so_many_of_the_others_are_left_alone() -> None:
    score, positive = torch.randn(400, generator=draws()), torch.rand(400, generator=draws(1)) < 0.5
    score[positive] += 1
    share, _ = sensitivity(score, positive, 0.9)
    threshold = np.quantile(score[~positive].numpy(), 0.9)
    assert share == pytest.approx(float((score[positive] > threshold).float().mean()), abs=0.02)


def test_concordance_is_lifelines() -> None:
    utils = pytest.importorskip("lifelines.utils")
    time = torch.randint(1, 12, (60,), generator=draws()).double()
    event = (torch.rand(60, generator=draws(1)) < 0.6).double()
    predicted = torch.randint(5, (60,), generator=draws(2)).double()
    expected = utils.concordance_index(time.numpy(), predicted.numpy(), event.numpy())
    # lifelines counts pairs of events at one time as half right, Harrell leaves them out: here there are none.
    time = time + torch.arange(60) * 1e-6
    expected = utils.concordance_index(time.numpy(), predicted.numpy(), event.numpy())
    assert concordance(time, event, predicted)[0] == pytest.approx(expected)


def test_survival_curves_are_lifelines() -> None:
    lifelines = pytest.importorskip("lifelines")
    time = torch.randint(1, 12, (60,), generator=draws()).double()
    event = (torch.rand(60, generator=draws(1)) < 0.6).double()
    theirs = lifelines.KaplanMeierFitter().fit(time.numpy(), event.numpy())
    at = torch.arange(1, 12).double()
    assert np.allclose(kaplan_meier(time, event)(at, before=False).numpy(), theirs.predict(at.numpy()).to_numpy())


def test_the_brier_score_of_times_without_censoring_is_the_mean_of_plain_ones() -> None:
    time = torch.rand(50, generator=draws()).double() + 0.1
    at = torch.linspace(0.2, 0.9, 30).double()
    survival = torch.rand(30, 50, generator=draws(1)).double()
    plain = torch.tensor([brier_score_loss((time > t).numpy(), s.numpy()) for t, s in zip(at, survival, strict=True)])
    expected = float(torch.trapezoid(plain.double(), at)) / 0.7
    assert integrated_brier(time, torch.ones(50), survival, at)[0] == pytest.approx(expected)


def test_the_score_of_a_continuous_prediction_is_its_closed_form() -> None:
    mean, scale, y = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.3, -2.0])
    levels = (torch.arange(400) + 0.5) / 400
    atoms = mean + scale * torch.special.ndtri(levels)[:, None]
    z = ((y - mean) / scale).numpy()
    normal = scipy.stats.norm
    expected = scale.numpy() * (z * (2 * normal.cdf(z) - 1) + 2 * normal.pdf(z) - 1 / np.sqrt(np.pi))
    assert np.allclose(crps(atoms, torch.full((400,), 1 / 400), y).numpy(), expected, atol=2e-3)


def test_real_values_and_counts_are_measured_as_scikit_learn_does() -> None:
    of, y = likelihood.of("normal", center=1.0, spread=2.0), 1 + 2 * torch.randn(300, generator=draws())
    output = torch.stack([0.1 * torch.randn(300, generator=draws(1)), torch.zeros(300)], 1)[None]
    found = summarise([measured(of, output, ONE, y, 1)], of)
    mean = of.mean(output)[0]
    assert found["rmse"] == pytest.approx(float((y - mean).square().mean().sqrt()), rel=1e-5)
    assert found["r2"] == pytest.approx(r2_score(y.numpy(), mean.numpy()), abs=1e-5)
    assert found["coverage_90"] == pytest.approx(0.9, abs=0.05)
    assert found["coverage_50"] == pytest.approx(0.5, abs=0.08)
    (low, high) = found["client_interval"]["rmse"][0]
    assert low < found["rmse"] < high
    of, y = likelihood.of("poisson"), torch.poisson(torch.full((300,), 3.0), generator=draws())
    found = summarise([measured(of, torch.full((1, 300, 1), math.log(3.0)), ONE, y, 1)], of)
    assert found["deviance"] == pytest.approx(mean_poisson_deviance(y.numpy(), np.full(300, 3.0)), rel=1e-5)
    assert found["coverage_90"] > 0.85


def test_a_mixture_of_two_beliefs_covers_what_either_alone_does_not() -> None:
    of, y = (
        likelihood.of("normal", center=0.0, spread=1.0),
        torch.cat([torch.full((50,), -5.0), torch.full((50,), 5.0)]),
    )
    outputs = torch.tensor([[[-5.0, 0.0]], [[5.0, 0.0]]]).expand(2, 100, 2)
    half = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    both = summarise([measured(of, outputs, half, y, 1)], of)
    one = summarise([measured(of, outputs[:1], ONE, y, 1)], of)
    assert both["coverage_90"] == 1.0
    assert one["coverage_90"] == 0.5
    assert both["nll"] < one["nll"]


def test_what_is_shared_over_clients_is_mean_worst_spread_and_an_interval() -> None:
    of = likelihood.CATEGORICAL
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]]).log()
    clients = [evaluate(p, torch.tensor(y), 2) for y in ([0, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1])]
    record = summarise([clients[0], None, *clients[1:]], of)
    assert record["client_examples"] == [4, None, 4, 4]
    assert record["client_nll"][1] is None
    told = record["over_clients"]["accuracy"]
    assert (told["mean"], told["worst"]) == (0.75, 0.5)
    expected = scipy.stats.t.interval(0.95, 2, 0.75, np.std([1, 0.75, 0.5], ddof=1) / np.sqrt(3))
    assert told["interval"] == pytest.approx(expected, rel=1e-3)
    wilson = scipy.stats.binomtest(3, 4).proportion_ci(method="wilson")
    assert record["client_interval"]["accuracy"][2] == pytest.approx(wilson, abs=1e-4)
    assert record["client_auc"][3] is None  # one class only
    assert measures_of(clients[0], "classes")["nll"].low < record["client_nll"][0]


def test_mean_iou_is_scikit_learns() -> None:
    true, guess = torch.randint(3, (90,), generator=draws()), torch.randint(3, (90,), generator=draws(1))
    confusion = torch.bincount(true * 3 + guess, minlength=9).view(3, 3)
    assert mean_iou(confusion) == pytest.approx(jaccard_score(true.numpy(), guess.numpy(), average="macro"))
