"""The statistician's answer: a linear mixed-effects model of all rows in one place, by statsmodels."""

import warnings

import numpy as np
from scipy.stats import norm

from bcfl.benchmark.answers import Answer
from bcfl.benchmark.measures import Floats
from bcfl.benchmark.preparation import Federation

FIRST_VARIANCE = 0.05  # of each coefficient, in units of the noise's: from 1 the optimiser often ends far away
MOST_STEPS = 500


def mixed_model(data: Federation, asked: Federation) -> tuple[Answer, ...]:
    """The predictive distribution of every site that is asked for, by a model of these data.

    All coefficients differ by site, uncorrelated; their means and variances have maximum likelihood. A site's
    coefficients are normal given its training rows, so that its predictions are normal too.
    """
    design = [_with_intercept(x) for x in data.x]
    mean, variance, noise = fitted_by_statsmodels(design, [np.asarray(y, np.float64) for y in data.y])
    answers = []
    for x, y, x_test, y_test in zip(asked.x, asked.y, asked.x_test, asked.y_test, strict=True):
        x, x_test = _with_intercept(x), _with_intercept(x_test)
        spread = np.diag(variance)
        gain = spread @ x.T @ np.linalg.inv(x @ spread @ x.T + noise * np.eye(len(x)))
        own, left = mean + gain @ (y - x @ mean), spread - gain @ x @ spread
        deviation = np.sqrt(noise + np.einsum("rc,cd,rd->r", x_test, left, x_test))
        stated = norm(x_test @ own, deviation)
        answers.append(Answer(stated.logpdf(y_test), x_test @ own, stated.cdf(y_test)))
    return tuple(answers)


def fitted_by_statsmodels(design: list[Floats], y: list[Floats]) -> tuple[Floats, Floats, float]:
    """The coefficients' means, their variances over sites, and the variance of the noise."""
    from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

    x, count = np.concatenate(design), design[0].shape[1]
    site = np.repeat(np.arange(len(design)), [len(rows) for rows in design])
    values = np.concatenate(y)
    start = MixedLMParams.from_components(
        fe_params=np.linalg.lstsq(x, values, rcond=None)[0], cov_re=FIRST_VARIANCE * np.eye(count)
    )
    free = MixedLMParams.from_components(fe_params=np.ones(count), cov_re=np.eye(count))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of variances at their boundary, where they may well be
        found = MixedLM(values, x, site, exog_re=x).fit(
            reml=False, start_params=start, free=free, method=["bfgs", "lbfgs"], maxiter=MOST_STEPS
        )
    return np.asarray(found.fe_params), np.diag(np.asarray(found.cov_re)), float(found.scale)


def _with_intercept(x: Floats) -> Floats:
    return np.column_stack([np.ones(len(x)), x]).astype(np.float64)
