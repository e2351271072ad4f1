"""What a result says by cluster number, and modules that are their owner's: all made by hand, nothing is trained."""

import math

import pytest
import torch
from small_runs import small_config
from torch import Tensor, nn

import bcfl
from bcfl.federation import Hypotheses
from bcfl.gaussian import Gaussian
from bcfl.models import FlatModel, ModelFactory, build


def made(factory: ModelFactory, model_of: list[list[int]], assignment: list[list[int]], *weight: float) -> bcfl.Result:
    """A run that ended with these stories; belief b is the factory's b-th draw."""
    means = torch.stack([FlatModel(build(factory, seed)).vector for seed in range(1 + max(map(max, model_of)))])
    state = Hypotheses(
        models=Gaussian(means, torch.zeros_like(means)),
        model_of=torch.tensor(model_of),
        log_weight=torch.tensor(weight or (1.0,), dtype=torch.float64).log(),
        assignment=torch.tensor(assignment),
        parent_of=torch.arange(len(means)),
        family=torch.zeros(len(model_of), dtype=torch.int64),
    )
    return bcfl.Result(small_config(), state, None, [], factory, None, None)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


def points(count: int = 5) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(0))


# ---- clusters by their numbers --------------------------------------------------------------------------------------


def test_a_clusters_model_is_found_by_its_number_where_others_are_missing() -> None:
    result = made(net, [[0, 1, -1, 2, -1]], [[3, 3, 0, 0, 1, 1]])
    assert list(result.models) == [0, 1, 3]
    for client, cluster in enumerate(result.assignment.tolist()):
        assert torch.equal(result.models[cluster](points()), result.predictor(client)(points()))
    assert result.probability.tolist() == torch.eye(5)[result.assignment].tolist()


def test_who_never_took_part_may_be_in_any_cluster_that_there_is() -> None:
    result = made(net, [[0, 1, -1, 2, -1], [0, 1, -1, 3, -1]], [[3, 0, -1, 1, -1], [3, 3, -1, 1, -1]], 0.75, 0.25)
    third = 1 / 3
    assert result.probability[2].tolist() == result.probability[4].tolist() == [third, third, 0, third, 0]
    assert result.entropy[2] == pytest.approx(math.log(3))
    together = result.co_association
    assert together.diagonal().tolist() == [1] * 5
    for unseen in (2, 4):
        assert [p for j, p in enumerate(together[unseen].tolist()) if j != unseen] == pytest.approx([third] * 4)
    assert together[0, 1] == pytest.approx(0.25)
    assert together[0, 3] == 0
    assert torch.equal(together, together.T)
