"""What the default method tells: its choice, what joining brings, how sites differ, and what it has for a newcomer."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bcfl
from bcfl.runs.result import Result

NUM_SITES, NUM_ROWS = 24, 12


def line() -> nn.Module:
    return nn.Linear(1, 1)


def site(seed: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows about a line of the site's own."""
    random = np.random.default_rng(seed)
    intercept, slope = random.normal(size=2) * [1.5, 0.5] + [0.0, 1.0]
    x = random.normal(size=(num_rows, 1))
    y = intercept + slope * x[:, 0] + 0.5 * random.normal(size=num_rows)
    return torch.from_numpy(x).float(), torch.from_numpy(y).float()


@pytest.fixture(scope="module")
def result() -> Result:
    clients = []
    for seed in range(NUM_SITES):
        x, y = site(seed, 2 * NUM_ROWS)
        clients.append((x[:NUM_ROWS], y[:NUM_ROWS], x[NUM_ROWS:], y[NUM_ROWS:]))
    return bcfl.train(line, clients, method="bcfl", rounds=1, likelihood="normal", progress=False)


def test_it_says_what_was_chosen_and_what_each_site_gains_over_one_model(result: Result) -> None:
    benefit = result.benefit
    assert benefit is not None
    assert benefit.chosen in benefit.candidates
    gain = benefit.over_one
    assert gain is not None
    assert gain.of_site.shape == (NUM_SITES,)
    assert 0 < gain.low < gain.mean < gain.high
    assert float(gain.of_site.mean()) == pytest.approx(gain.mean)
    assert benefit.chosen in repr(result)


def test_sites_are_tested_with_their_own_last_layers(result: Result) -> None:
    """Nearly as well as the noise allows: one line for all is far behind."""
    noise = 0.5 * np.log(2 * np.pi * np.e * 0.25)
    assert result.history[-1]["nll"] < noise + 0.25
    assert len(result.history[-1]["client_nll"]) == NUM_SITES


def test_the_table_is_that_of_a_statistician(result: Result) -> None:
    slope, intercept = result.spread_table().coefficients[:2]
    assert (slope.name, intercept.name) == ("x1", "intercept")
    assert abs(slope.mean - 1.0) < 4 * slope.standard_error
    assert intercept.variance > slope.variance
    assert slope.intraclass is None
    assert intercept.intraclass is not None
    assert 0.5 < intercept.intraclass < 1


def test_a_newcomer_starts_from_the_prior_and_each_of_its_rows_helps(result: Result) -> None:
    """Whole sites that were kept out, at 0, 5 and 20 rows."""
    found = []
    for seed in range(100, 130):
        x, y = site(seed, 60)
        new = [result.own_model(x[:count], y[:count]).log_prob(x[20:], y[20:]).mean() for count in (0, 5, 20)]
        found.append(torch.stack(new))
    none, five, twenty = torch.stack(found).mean(0).tolist()
    assert none < five < twenty
    prior = result.own_model()
    assert prior.num_examples == 0
    assert float(prior.probability.sum()) == pytest.approx(1)
    assert prior.predict(torch.zeros(3, 1)).shape == (3,)


def test_other_methods_have_no_last_layers_of_their_own() -> None:
    clients = [site(seed, 8) for seed in range(3)]
    run = bcfl.train(line, clients, method="fedavg", rounds=1, likelihood="normal", progress=False)
    assert run.benefit is None
    with pytest.raises(ValueError, match="members of a cluster share one model"):
        run.own_model()
    with pytest.raises(ValueError, match="the method bcfl"):
        run.spread_table()
