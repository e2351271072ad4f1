"""Inputs that nothing can be learned from are named; those as people have them are not."""

import pytest
import torch
from sklearn import datasets
from torch import Tensor, nn

from bcfl.data.datasets import load
from bcfl.data.scales import remark_on_scales, scales_itself


def table(name: str) -> Tensor:
    return torch.from_numpy(getattr(datasets, f"load_{name}")().data)


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-9)


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (table("wine"), "column 12 "),
        (table("breast_cancer"), "column 23 "),
        (1e6 * table("iris"), "inputs are about 4e+06"),
        (1e-6 * table("iris"), "inputs are about 4e-06"),
        (torch.randn(50, 20, 3) * torch.tensor([1.0, 1.0, 1e-3]), "position 1 of "),  # time and feature
        (torch.randn(50, 3, 8, 8) * torch.tensor([1.0, 1.0, 1e-3])[:, None, None], "position 0 of "),
        (torch.randint(65536, (20, 1, 8, 8)), "e+04 in size"),
    ],
)
def test_scales_that_nothing_can_be_learned_from_are_named(x: Tensor, named: str) -> None:
    remark = remark_on_scales(x)
    assert remark is not None
    assert named in remark
    assert "\n" not in remark


@pytest.mark.parametrize(
    "x",
    [
        *(standardised(table(name)) for name in ("wine", "breast_cancer")),
        *(table(name) for name in ("iris", "diabetes", "digits")),
        torch.poisson(3 * torch.rand(500, 3000, generator=torch.Generator().manual_seed(0)) ** 20),  # words
        torch.eye(50)[torch.arange(1000) % 50],
        torch.randint(256, (20, 3, 8, 8)),
        load("digits").x_train,
        load("digits_five", domains=("optdigits",)).x_train,
        torch.zeros(5, 3),
        torch.zeros(0, 3),
    ],
)
def test_what_people_have_is_not_remarked_on(x: Tensor) -> None:
    assert remark_on_scales(x) is None


def test_a_model_may_scale_by_itself() -> None:
    assert scales_itself(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    assert scales_itself(nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 2)))
    assert not scales_itself(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
