"""The metrics against scikit-learn and against sums by hand."""

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, confusion_matrix, f1_score

from bcfl.experiment.metrics import agreement, calibration_error, macro_f1, summarise
from bcfl.local import Evaluation


def evaluation(true: list[int], predicted: list[int], log_likelihood: float = 0.0) -> Evaluation:
    confusion = torch.tensor(confusion_matrix(true, predicted, labels=range(4)))
    calibration = torch.zeros(15, 3, dtype=torch.float64)
    calibration[7] = torch.tensor(
        [len(true), 0.5 * len(true), sum(t == p for t, p in zip(true, predicted, strict=True))]
    )
    return Evaluation(confusion, log_likelihood, calibration, 0.3 * len(true))


@pytest.mark.parametrize("seed", range(5))
def test_macro_f1_is_scikit_learns(seed: int) -> None:
    draws = np.random.default_rng(seed)
    true, predicted = draws.integers(3, size=20), draws.integers(1, 4, size=20)  # class 0 never predicted, 3 never true
    confusion = torch.tensor(confusion_matrix(true, predicted, labels=range(5)))  # class 4 never occurs
    assert macro_f1(confusion) == pytest.approx(f1_score(true, predicted, average="macro", zero_division=0))


def test_calibration_error_weighs_bins_by_their_examples() -> None:
    table = torch.zeros(15, 3, dtype=torch.float64)
    table[14] = torch.tensor([3, 2.9, 2.0])  # 3 examples, surer than right
    table[5] = torch.tensor([1, 0.4, 1.0])
    assert calibration_error(table) == pytest.approx((0.9 + 0.6) / 4)


def test_accuracy_counts_examples_and_f1_is_averaged_by_examples() -> None:
    clients = [evaluation([0, 0, 1], [0, 1, 1], -3.0), None, evaluation([2], [2], -1.0)]
    summary = summarise(clients)
    assert summary["accuracy"] == pytest.approx(3 / 4)
    assert summary["macro_f1"] == pytest.approx((3 * (2 / 3) + 1 * 1.0) / 4)
    assert summary["nll"] == pytest.approx(1.0)
    assert summary["client_accuracy"] == [pytest.approx(2 / 3), None, 1.0]
    assert summary["ece"] == pytest.approx(abs(0.5 * 4 - 3) / 4)
    assert summary["brier"] == pytest.approx(0.3)


def test_without_test_data_nothing_is_claimed() -> None:
    assert summarise([None, None]) == {}


def test_agreement_is_the_adjusted_rand_index_whatever_the_numbers_of_the_clusters() -> None:
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    assert agreement(torch.tensor([2, 2, 0, 0, 1, 1]), group) == 1.0
    mixed = torch.tensor([0, 1, 0, 1, 0, 1])
    assert agreement(mixed, group) == pytest.approx(adjusted_rand_score(group.tolist(), mixed.tolist()))
