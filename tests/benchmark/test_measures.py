"""What is told of sites' numbers, against scipy, closed forms and sampling."""

import numpy as np
import pytest
from scipy.stats import bootstrap, friedmanchisquare

from bcfl.benchmark import measures


def test_the_interval_of_a_difference_is_that_of_an_independent_bootstrap() -> None:
    random = np.random.default_rng(0)
    first, second = random.normal(0, 1, 80), random.normal(0.1, 1, 80)
    found = measures.difference(first.tolist(), second.tolist())
    assert found is not None
    theirs = bootstrap((first - second,), np.mean, method="percentile", n_resamples=20_000, rng=random)
    assert found.mean == pytest.approx((first - second).mean())
    assert found.low == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert found.high == pytest.approx(theirs.confidence_interval.high, abs=0.02)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        found = measures.difference(random.normal(0.3, 1, 40).tolist(), [0.0] * 40)
        assert found is not None
        held += found.low <= 0.3 <= found.high
    assert 0.89 <= held / 200 <= 0.99


def test_no_verdict_is_given_below_ten_sites_or_where_the_interval_holds_zero() -> None:
    assert measures.Difference(-1, -1.2, -0.8, 9).verdict == "open"
    assert measures.Difference(-1, -1.2, -0.8, 10).verdict == "better"
    assert measures.Difference(1, 0.8, 1.2, 10).verdict == "worse"
    assert measures.Difference(-1, -2.2, 0.1, 100).verdict == "open"


def test_sites_without_a_number_are_left_out_of_pairs() -> None:
    found = measures.difference([1.0, None, 3.0], [0.0, 0.0, None])
    assert found is not None
    assert (found.mean, found.sites) == (1.0, 1)
    assert measures.difference([None], [1.0]) is None
    assert measures.mean([None, 2.0]) == 2.0
    assert measures.mean([None]) is None


def test_the_worst_tenth_is_of_the_sites_that_lose_most() -> None:
    assert measures.worst_tenth([float(value) for value in range(20)]) == 18.5
    assert measures.worst_tenth([1.0, 5.0]) == 5.0


def test_the_share_that_gains_counts_sites_that_lose_less_than_alone() -> None:
    assert measures.share_that_gains([1, 1, 3, None], [2, 1, 2, 2]) == pytest.approx(1 / 3)


def test_ranks_are_those_of_friedmans_test() -> None:
    table = {
        "a": {"t": 1.0, "u": 1.0, "v": 2.0},
        "b": {"t": 2.0, "u": 1.0, "v": 1.0},
        "c": {"t": 3.0, "u": 3.0, "v": 3.0},
    }
    ranks = measures.mean_ranks(table)
    assert ranks == {"a": pytest.approx(4.5 / 3), "b": pytest.approx(4.5 / 3), "c": 3.0}
    # Without ties the statistic is 12 n / (k (k + 1)) · Σ (rank − (k + 1) / 2)².
    untied = {"a": {"t": 1.0, "u": 1.0}, "b": {"t": 2.0, "u": 3.0}, "c": {"t": 3.0, "u": 2.0}}
    mean = np.array(list(measures.mean_ranks(untied).values()))
    statistic = 12 * 2 / (3 * 4) * ((mean - 2) ** 2).sum()
    assert statistic == pytest.approx(friedmanchisquare([1, 1], [2, 3], [3, 2]).statistic)


def test_the_critical_difference_is_that_of_the_published_table() -> None:
    """Demšar 2006, table 5: q at 5 % is 2.728 for five classifiers."""
    assert measures.critical_difference(5, 30) == pytest.approx(2.728 * np.sqrt(5 * 6 / (6 * 30)), abs=1e-3)


def test_honest_probabilities_have_no_calibration_error_and_vain_ones_have_theirs() -> None:
    random = np.random.default_rng(0)
    stated = random.random(200_000)
    true = (random.random(200_000) < stated).astype(float)
    assert measures.expected_calibration_error(stated, true) < 0.01
    assert measures.expected_calibration_error(np.full(1000, 0.9), np.full(1000, 0.0) + (np.arange(1000) < 600)) == (
        pytest.approx(0.3)
    )


def test_membership_is_judged_by_pairs_whatever_the_clusters_are_called() -> None:
    sure = np.eye(2)[[0, 0, 1, 1]]
    for membership in (sure, sure[:, ::-1]):
        assert measures.pair_calibration(membership, [0, 0, 1, 1])["right"] == 1.0
    doubtful = np.full((4, 2), 0.5)
    assert measures.pair_calibration(doubtful, [0, 0, 1, 1])["nll"] == pytest.approx(np.log(2))
