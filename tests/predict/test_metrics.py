"""The metrics against scikit-learn and against sums by hand."""

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, confusion_matrix, f1_score

from bcfl.likelihood.measures import Evaluation
from bcfl.predict.metrics import (
    agreement,
    calibration_error,
    false_switches,
    follow_drift,
    macro_f1,
    rounds_until_associated,
    summarise,
    with_own_group,
)


def evaluation(true: list[int], predicted: list[int], log_likelihood: float = 0.0) -> Evaluation:
    confusion = torch.tensor(confusion_matrix(true, predicted, labels=range(4)))
    calibration = torch.zeros(15, 3, dtype=torch.float64)
    calibration[7] = torch.tensor(
        [len(true), 0.5 * len(true), sum(t == p for t, p in zip(true, predicted, strict=True))]
    )
    sums = {"log_likelihood": (log_likelihood, log_likelihood**2), "brier": (0.3 * len(true), 0.09 * len(true))}
    return Evaluation(len(true), sums, {}, {"confusion": confusion, "calibration": calibration})


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


# --- drift ------------------------------------------------------------------------------------------------------------

BEFORE, AFTER = [0, 0, 0, 1, 1, 1], [1, 0, 0, 1, 1, 0]  # clients 0 and 5 change places
GROUP = torch.tensor([BEFORE] * 4 + [AFTER] * 4)
PLACED = torch.tensor(
    [
        [0, 0, 0, 1, 1, 1],
        [0, 1, 0, 1, 1, 1],  # client 1 leaves for a round
        [1, 1, 1, 0, 0, 0],  # the same clusters under other numbers
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],  # client 0 is found at once
        [0, 1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0, 1],  # client 5 in the third round
        [0, 1, 1, 0, 1, 1],  # client 4 leaves
    ]
)


def test_who_is_with_its_group_whatever_the_cluster_is_called() -> None:
    right = with_own_group(PLACED, GROUP)
    wrong = [(1, 1), (4, 5), (5, 5), (7, 4)]
    assert [tuple(pair) for pair in (~right).nonzero().tolist()] == wrong


def test_members_that_never_change_alone_say_where_their_group_is() -> None:
    """Two clients that change to the group of one, and stay where they were: they are lost, however many they are."""
    group = torch.tensor([[0, 0, 0, 1], [1, 1, 0, 1]])
    placed = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 1]])
    assert with_own_group(placed, group)[1].tolist() == [False, False, True, True]
    assert rounds_until_associated(placed, group) == {0: None, 1: None}


def test_a_client_that_was_never_associated_is_with_nobody() -> None:
    placed = PLACED.clone()
    placed[:2, 3] = -1
    assert with_own_group(placed, GROUP)[:3, 3].tolist() == [False, False, True]
    assert not with_own_group(torch.full_like(PLACED, -1), GROUP).any()


def test_false_switches_are_counted_of_clients_at_rest() -> None:
    # Seven transitions of six clients; not at rest: client 1 once, client 0 and 5 at their change, 5 twice more.
    assert false_switches(PLACED, GROUP, settling=0) == pytest.approx(2 / (7 * 6 - 1 - 2 - 2))
    assert false_switches(PLACED, GROUP, settling=2) == pytest.approx(1 / (6 * 6 - 1 - 2 - 2))
    assert false_switches(PLACED[:2], GROUP[:2], settling=5) is None


def test_rounds_until_a_changed_client_is_with_its_new_group() -> None:
    assert rounds_until_associated(PLACED, GROUP) == {0: 1, 5: 3}
    assert rounds_until_associated(PLACED[:6], GROUP[:6]) == {0: 1, 5: None}
    assert rounds_until_associated(PLACED[:4], GROUP[:4]) == {}


def test_the_summary_of_a_drift() -> None:
    found = follow_drift(PLACED, GROUP)
    # Rounds 6 to 8 count; client 5 is still away before the first two of them.
    assert found == {"false_switches": pytest.approx(1 / 16), "changed": 2, "found_again": 2, "rounds_until_found": 2}
    lost = follow_drift(PLACED[:6], GROUP[:6])
    assert (lost["found_again"], lost["rounds_until_found"]) == (1, None)
    assert follow_drift(PLACED[:4], GROUP[:4]) is None


def test_where_nobody_is_told_apart_no_drift_is_followed() -> None:
    one_model = torch.zeros_like(PLACED)
    one_model[:3, 2] = -1  # a newcomer is nowhere yet, which is no second cluster
    assert follow_drift(one_model, GROUP) is None
    assert follow_drift(torch.arange(6).expand_as(PLACED), GROUP) is None  # one for each
    late = torch.zeros_like(PLACED)
    late[6:] = PLACED[6:]  # bcfl-auto may split its first cluster after the change
    assert follow_drift(late, GROUP) is not None
