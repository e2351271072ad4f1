"""The Chinese-restaurant prior against seating one client after the other, over every grouping of a few clients."""

import math

import pytest
import torch

from bcfl.association.conceptual import partitions
from bcfl.association.seating import canonical, log_partition_prior, log_seat


def seated(grouping: tuple[int, ...], concentration: float) -> float:
    """The prior by its definition: client j joins n others with weight n, or opens a group with weight α."""
    weights = [grouping[:j].count(own) or concentration for j, own in enumerate(grouping)]
    return math.prod(weight / (concentration + j) for j, weight in enumerate(weights))


@pytest.mark.parametrize(("num_clients", "bell"), [(0, 1), (1, 1), (3, 5), (5, 52), (7, 877)])
def test_partitions_are_complete_and_distinct(num_clients: int, bell: int) -> None:
    found = list(partitions(num_clients))
    assert len(found) == len(set(found)) == bell
    assert all(canonical(torch.tensor(one, dtype=torch.int64)) == one for one in found)


@pytest.mark.parametrize("concentration", [0.1, 1.0, 3.5])
def test_the_prior_is_that_of_the_process_and_sums_to_one(concentration: float) -> None:
    groupings = list(partitions(6))
    prior = log_partition_prior(torch.tensor(groupings), concentration).exp()
    assert prior.tolist() == pytest.approx([seated(one, concentration) for one in groupings])
    assert float(prior.sum()) == pytest.approx(1)


def test_the_prior_sees_neither_names_nor_clients_without_a_group() -> None:
    one = float(log_partition_prior(torch.tensor([0, 0, 1, 2, 0]), 0.5))
    assert float(log_partition_prior(torch.tensor([4, 4, 0, 2, 4]), 0.5)) == pytest.approx(one)
    assert float(log_partition_prior(torch.tensor([-1, 0, 0, 1, -1, 2, 0]), 0.5)) == pytest.approx(one)
    assert float(log_partition_prior(torch.tensor([-1, -1]), 0.5)) == pytest.approx(0)


def test_seats_are_the_priors_conditional() -> None:
    """Moving one client changes the prior by exactly the difference of its seats."""
    own, concentration = torch.tensor([0, 0, 1, 2, 1, 0]), 0.3
    seat = log_seat(own, 4, concentration)
    for client in range(len(own)):
        for cluster in range(4):
            moved = own.clone()
            moved[client] = cluster
            change = log_partition_prior(moved, concentration) - log_partition_prior(own, concentration)
            expected = seat[client, cluster] - seat[client, own[client]]
            assert float(change) == pytest.approx(float(expected), abs=1e-12)


def test_canonical_is_equal_exactly_for_equal_partitions() -> None:
    assert canonical(torch.tensor([3, 1, 3, -1, 0])) == (0, 1, 0, -1, 2)
    assert canonical(torch.tensor([0, 2, 0, -1, 1])) == (0, 1, 0, -1, 2)
    assert canonical(torch.tensor([0, 2, 0, -1, 2])) != (0, 1, 0, -1, 2)
