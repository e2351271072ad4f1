"""The benchmark's numbers against independent programs, to the third digit: statsmodels and scikit-learn."""

import numpy as np
import pytest
import statsmodels.api as sm
from sklearn.linear_model import LogisticRegression

from bcfl.benchmark.contestants import CONTESTANTS
from bcfl.benchmark.fitting import Setting, fit
from bcfl.benchmark.preparation import federation
from bcfl.benchmark.tasks import all_tasks

pytestmark = pytest.mark.slow
LONG = Setting(rounds=40, local_steps=25, batch_size=10_000, learning_rate=0.1)  # whole batches, to the optimum


def mean_loss(name: str, task: str) -> float:
    """Over sites, of the contestant with a linear model that is trained to the end."""
    return float(np.mean(fit(CONTESTANTS[name], "linear", federation(all_tasks()[task]), LONG, {}).nll))


def test_one_model_of_real_values_is_least_squares_by_statsmodels() -> None:
    data = federation(all_tasks()["exam"])
    x, y = sm.add_constant(np.concatenate(data.x)), np.concatenate(data.y)
    found = sm.OLS(y, x).fit()
    scale = np.sqrt(np.square(found.resid).mean())  # by maximum likelihood
    by_site = [
        (0.5 * np.square((y_test - found.predict(sm.add_constant(x_test, has_constant="add"))) / scale)).mean()
        + np.log(scale) + 0.5 * np.log(2 * np.pi)
        for x_test, y_test in zip(data.x_test, data.y_test, strict=True)
    ]  # fmt: skip
    assert mean_loss("pooled", "exam") == pytest.approx(np.mean(by_site), abs=5e-4)


def test_one_model_of_yes_and_no_is_logistic_regression_by_scikit_learn() -> None:
    data = federation(all_tasks()["contraception"])
    found = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(np.concatenate(data.x), np.concatenate(data.y))
    by_site = [
        -found.predict_log_proba(x_test)[np.arange(len(y_test)), y_test].mean()
        for x_test, y_test in zip(data.x_test, data.y_test, strict=True)
    ]
    assert mean_loss("pooled", "contraception") == pytest.approx(np.mean(by_site), abs=5e-4)


def test_each_site_alone_is_least_squares_alone() -> None:
    """The four education authorities with the most rows."""
    data = federation(all_tasks()["chem97"])
    largest = tuple(int(site) for site in np.argsort([len(y) for y in data.y])[-4:])
    data = data.only(largest)
    losses = fit(CONTESTANTS["local"], "linear", data, LONG, {}).nll
    for site in range(4):
        x, y = sm.add_constant(data.x[site]), data.y[site]
        found = sm.OLS(y, x).fit()
        scale = np.sqrt(np.square(found.resid).mean())
        stated = found.predict(sm.add_constant(data.x_test[site], has_constant="add"))
        loss = (0.5 * np.square((data.y_test[site] - stated) / scale)).mean() + np.log(scale) + 0.5 * np.log(2 * np.pi)
        assert losses[site] == pytest.approx(loss, abs=1e-3)
