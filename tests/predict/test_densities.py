"""Newcomers without labels: placed where inputs tell clusters apart, and not placed where they do not."""

import pytest
import torch
from torch import Tensor

from bcfl.predict.densities import Densities, densities, input_sums
from bcfl.randomness import generator

NUM_FEATURES = 12


def federation(seed: int, apart: float, num_clients: int = 24, size: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """Sums and clusters of clients whose features hang together and whose clusters are `apart`; and newcomers' sums."""
    draws = generator(seed, "densities")
    centres = apart * torch.randn(3, NUM_FEATURES, generator=draws)
    mixing = torch.randn(NUM_FEATURES, NUM_FEATURES, generator=draws) / NUM_FEATURES**0.5

    def client(cluster: int) -> Tensor:
        own = centres[cluster] + 0.5 * torch.randn(NUM_FEATURES, generator=draws) @ mixing  # clients differ, too
        return input_sums(own + torch.randn(size, NUM_FEATURES, generator=draws) @ mixing)

    cluster = torch.arange(num_clients) % 3
    members = torch.stack([client(int(k)) for k in cluster])
    return members, cluster, torch.stack([client(k % 3) for k in range(24)])


def learned(sums: Tensor, cluster: Tensor) -> Densities:
    return densities(sums, torch.nn.functional.one_hot(cluster, 3).double())


def test_sums_are_counts_sums_and_squares() -> None:
    assert input_sums(torch.tensor([[1.0, 2.0], [3.0, -1.0]])).tolist() == [2, 4, 1, 10, 5]


def test_inputs_that_differ_place_a_newcomer_as_well_as_members_say() -> None:
    right, stated, said = 0, 0.0, 0.0
    for seed in range(10):
        sums, cluster, newcomers = federation(seed, apart=0.4)
        known = learned(sums, cluster)
        assert known.tells
        said += known.accuracy / 10
        for number, told in enumerate(newcomers):
            placed = known.place(told)
            right += placed.cluster == number % 3
            stated += float(placed.probability.max())
    assert right / 240 > 0.75
    assert said == pytest.approx(right / 240, abs=0.08)
    assert stated / 240 == pytest.approx(right / 240, abs=0.08)


def test_where_clusters_differ_only_in_what_follows_from_the_inputs_nothing_is_said() -> None:
    spoken = 0
    for seed in range(60):
        sums, cluster, newcomers = federation(seed, apart=0.0)
        known = learned(sums, cluster)
        placed = known.place(newcomers[0])
        spoken += not placed.abstains
        if placed.abstains:
            assert placed.cluster is None
            assert torch.allclose(placed.probability, torch.full((3,), 1 / 3, dtype=torch.float64))
    assert spoken <= 8  # of 60, where 5 % are let through


def test_a_member_is_placed_by_the_others() -> None:
    """Two clusters of which one has a single client: left out, its cluster is as wide as everybody."""
    sums, _, _ = federation(1, apart=2.0, num_clients=6)
    one = torch.nn.functional.one_hot(torch.tensor([0, 0, 0, 0, 0, 1]), 2).double()
    known = densities(sums, one)
    assert 0 <= known.accuracy <= 1
    assert known.guessing == pytest.approx(5 / 6)
    assert known.place(sums[0]).probability.sum() == pytest.approx(1)
