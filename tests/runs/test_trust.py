"""What a result says beyond its own clients: conformal sets, strangers, and newcomers without labels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcfl
from bcfl.predict.conformal import Intervals, PredictionSets, keep_aside
from bcfl.predict.densities import input_sums
from bcfl.randomness import generator
from bcfl.runs.trust import members_of


def network() -> nn.Module:
    return nn.Linear(3, 3)


def client(kind: int, seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Three classes by a linear rule with noise; kinds have other rules and look at other inputs."""
    draws = generator(seed, "trust")
    x = torch.randn(size, 3, generator=draws) + 0.8 * kind
    rule = torch.eye(3).roll(kind, 0) * 2
    return x, torch.multinomial((x @ rule).softmax(1), 1, generator=draws)[:, 0]


@pytest.fixture(scope="module")
def trained() -> tuple[bcfl.Result, list[Any]]:
    clients = [(*client(j % 2, j, 60), *client(j % 2, 100 + j, 40)) for j in range(24)]
    left, aside = keep_aside(clients, 0.4)
    how = {"method": "bcfl-mh-2-w", "num_clusters": 2, "rounds": 6, "num_workers": 1, "progress": False}
    return bcfl.train(network, left, **how), aside


def test_sets_cover_new_rows_of_a_site(trained: tuple[bcfl.Result, list[Any]]) -> None:
    result, aside = trained
    covered, alpha, count = [], 0.2, len(aside[0][1])
    for j in range(24):
        x, y = client(j % 2, 500 + j, 400)
        found = result.conformal(j, x, alpha, calibration=aside[j])
        assert isinstance(found, PredictionSets)
        assert found.num_rows == count
        covered.append(float(found.covers(y).double().mean()))
    mean = sum(covered) / 24
    error = torch.tensor(covered).std().item() / math.sqrt(24)
    assert 1 - alpha - 2.5 * error <= mean <= 1 - alpha + 1 / (count + 1) + 2.5 * error


def test_intervals_are_given_for_real_values() -> None:
    draws = generator(0, "real")
    x = [torch.randn(90, 2, generator=draws) for _ in range(4)]
    data = [(one, one.sum(1) + 0.3 * torch.randn(90, generator=draws)) for one in x]
    left, aside = keep_aside(data, 0.4)
    how: dict[str, Any] = {"likelihood": "normal", "method": "fedavg", "rounds": 5, "progress": False}
    result = bcfl.train(lambda: nn.Linear(2, 1), left, num_workers=1, **how)
    found = result.conformal(1, aside[0][0], 0.2, calibration=aside[1])
    assert isinstance(found, Intervals)
    assert 0.6 < float(found.covers(aside[0][1]).double().mean()) <= 1


def test_a_newcomer_of_an_unknown_kind_belongs_nowhere(trained: tuple[bcfl.Result, list[Any]]) -> None:
    result, _ = trained
    assert members_of(result.history).shape == (24, 4)
    alarms = [result.associate(*client(j % 2, 900 + j, 40)).belongs_nowhere(0.05) for j in range(40)]
    assert sum(alarms) <= 6
    x, y = client(0, 7, 40)
    strange = result.associate(x, (y + 1) % 3)
    assert strange.belongs_nowhere(0.05)
    beliefs = result.state.hypotheses
    low, high = beliefs.models.mean[beliefs.model_of[0]].aminmax(dim=0)
    weight = next(strange.start.parameters()).flatten()
    assert bool(((low[:9] - 1e-6 <= weight) & (weight <= high[:9] + 1e-6)).all())
    with pytest.raises(ValueError, match=r"alpha = 0\.01 can be promised with 99 members or more, and 24 were tested"):
        strange.belongs_nowhere(0.01)
    assert len(result.strangers(0.05)) <= 4


def test_newcomers_without_labels_are_placed_where_inputs_tell(trained: tuple[bcfl.Result, list[Any]]) -> None:
    result, _ = trained
    sums = torch.stack([input_sums(client(j % 2, j, 60)[0]) for j in range(24)])
    known = result.by_inputs(sums)
    placed = [known.place(input_sums(client(j % 2, 700 + j, 30)[0])) for j in range(20)]
    right = [one.cluster == int(result.assignment[j % 2]) for j, one in enumerate(placed)]
    assert sum(right) >= 18
    alike = torch.stack([input_sums(client(0, j, 60)[0]) for j in range(24)])
    assert result.by_inputs(alike).place(alike[0]).abstains
    with pytest.raises(ValueError, match="one row for each of 24 clients"):
        result.by_inputs(sums[:3])
