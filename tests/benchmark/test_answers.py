"""What is stated of held-out rows, against scikit-learn, lifelines, scipy and statsmodels."""

import numpy as np
import pytest
import torch
from lifelines.utils import concordance_index
from scipy.stats import multivariate_normal
from sklearn.metrics import accuracy_score, root_mean_squared_error

from bcfl.benchmark import answers
from bcfl.benchmark.answers import Answer
from bcfl.benchmark.mixed_model import fitted_by_statsmodels, mixed_model
from bcfl.benchmark.preparation import federation
from bcfl.benchmark.tasks import all_tasks
from bcfl.likelihood import attach, of

REAL, YES_NO, CLASSES, TIME = (all_tasks()[name] for name in ("radon", "contraception", "smartwatch", "cgd"))


def test_measures_are_scikit_learn_s() -> None:
    random = np.random.default_rng(0)
    y, stated = random.normal(size=50), random.normal(size=50)
    assert answers.measure_of(REAL, Answer(y, stated), y) == pytest.approx(root_mean_squared_error(y, stated))
    came, chance = random.integers(2, size=50), random.random(50)
    assert answers.measure_of(YES_NO, Answer(y, chance), came) == pytest.approx(accuracy_score(came, chance > 0.5))
    kind, chances = random.integers(3, size=50), random.dirichlet(np.ones(3), 50)
    assert answers.measure_of(CLASSES, Answer(y, chances), kind) == pytest.approx(
        accuracy_score(kind, chances.argmax(1))
    )


@pytest.mark.parametrize("seed", range(5))
def test_concordance_is_that_of_lifelines(seed: int) -> None:
    random = np.random.default_rng(seed)
    time, event = random.integers(1, 12, 40).astype(float), random.integers(2, size=40).astype(float)
    stated = random.integers(1, 8, 40).astype(float)
    ours = answers.concordance(stated, time, event)
    assert ours == pytest.approx(concordance_index(time, stated, event))


def test_one_row_has_no_concordance() -> None:
    assert answers.concordance(np.ones(1), np.ones(1), np.ones(1)) is None


def test_honest_intervals_cover_nine_tenths() -> None:
    below = np.random.default_rng(0).random(20_000)
    stated = Answer(below, below, below)
    found = answers.calibration_of(REAL, [stated], [below])
    assert found["coverage90"] == pytest.approx(0.9, abs=0.01)


def test_honest_times_have_as_many_ends_stated_as_came() -> None:
    """With −log S(t) summed up to where each was last seen, censored or not."""
    random = np.random.default_rng(0)
    ends, stops = random.exponential(size=20_000), random.exponential(2, size=20_000)
    time, event = np.minimum(ends, stops), (ends <= stops).astype(float)
    stated = Answer(time, time, 1 - np.exp(-time))
    found = answers.calibration_of(TIME, [stated], [np.stack([time, event], 1)])
    assert found["ends_stated_for_each"] == pytest.approx(1, abs=0.02)


def test_a_network_states_what_its_likelihood_says() -> None:
    module = attach(lambda: torch.nn.Linear(1, 1), of("normal"))()
    x, y = torch.randn(20, 1), torch.randn(20)
    found = answers.answer_of([(1.0, module)], x, y)
    distribution = torch.distributions.Normal(*[module.distribution(x).loc, module.distribution(x).scale])
    np.testing.assert_allclose(found.log_prob, distribution.log_prob(y).detach(), rtol=1e-5)
    np.testing.assert_allclose(found.below, distribution.cdf(y).detach(), rtol=1e-5)


def test_a_mixture_states_the_mean_of_its_parts_probabilities() -> None:
    one, other = (attach(lambda: torch.nn.Linear(2, 1), of("bernoulli"))() for _ in range(2))
    x, y = torch.randn(20, 2), torch.randint(2, (20,))
    found = answers.answer_of([(0.3, one), (0.7, other)], x, y)
    yes = 0.3 * one(x)[:, 0].sigmoid() + 0.7 * other(x)[:, 0].sigmoid()
    np.testing.assert_allclose(found.point, yes.detach(), rtol=1e-5)
    np.testing.assert_allclose(found.log_prob, torch.where(y == 1, yes, 1 - yes).log().detach(), rtol=1e-5)
    assert found.below is None


def test_the_statistician_s_predictions_are_the_conditional_normal_of_all_rows() -> None:
    """A site's training and test rows are jointly normal: the density of both over that of the first, row by row."""
    data = federation(all_tasks()["sleepstudy"]).only(tuple(range(6)))
    design = [np.column_stack([np.ones(len(x)), x]).astype(float) for x in data.x]
    mean, variance, noise = fitted_by_statsmodels(design, [y.astype(float) for y in data.y])
    found = mixed_model(data, data)
    for site in range(6):
        test = np.column_stack([np.ones(len(data.x_test[site])), data.x_test[site]]).astype(float)
        for row in range(len(test)):
            both = np.vstack([design[site], test[row]])
            covariance = both @ np.diag(variance) @ both.T + noise * np.eye(len(both))
            y = np.append(data.y[site], data.y_test[site][row]).astype(float)
            joint = multivariate_normal(both @ mean, covariance).logpdf(y)
            first = multivariate_normal(design[site] @ mean, covariance[:-1, :-1]).logpdf(y[:-1])
            assert found[site].log_prob[row] == pytest.approx(joint - first, abs=1e-6)


def test_the_statistician_finds_variances_that_were_planted() -> None:
    data = federation(all_tasks()["planted-spread"])
    design = [np.column_stack([np.ones(len(x)), x]).astype(float) for x in data.x]
    _, variance, noise = fitted_by_statsmodels(design, [y.astype(float) for y in data.y])
    unit = noise / 0.36  # of the standardised target, by the noise that was planted
    assert variance[0] / unit == pytest.approx(0.25, abs=0.08)
    assert variance[1] / unit == pytest.approx(0.25, abs=0.08)
