"""Strangers: false alarms come as often as is promised, and no more is promised than so many members can tell."""

import math

import pytest
import torch

from bcfl.predict.nowhere import plausibility, strangers
from bcfl.randomness import generator, numpy_generator


def members_of(nll: torch.Tensor) -> torch.Tensor:
    """(member, row) NLLs as (examples, mean, variance)."""
    count = torch.full((len(nll),), float(nll.shape[1]), dtype=torch.float64)
    return torch.stack([count, nll.mean(1), nll.var(1)], 1)


def test_with_as_many_rows_the_p_value_is_the_rank() -> None:
    members = members_of(torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], dtype=torch.float64))
    assert plausibility(2.5, 2, members).p_value == 2 / 4
    assert plausibility(9.0, 2, members).p_value == 1 / 4
    assert plausibility(0.0, 2, members).p_value == 1
    assert plausibility(math.nan, 2, members).p_value == 1 / 4


@pytest.mark.parametrize("rows", [4, 16, 60])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_clients_of_a_known_kind_are_rarely_called_strangers(rows: int, alpha: float) -> None:
    """Skewed losses, clients that differ, newcomers with fewer rows than members: alarms come at α or less."""
    draws, alarms, trials = numpy_generator(rows, "strangers"), 0, 600
    for _ in range(trials):
        level = draws.gamma(6.0, 0.05, size=25)
        losses = torch.from_numpy(draws.exponential(level[:, None], size=(25, 60)))
        newcomer = losses[24, :rows]
        alarms += plausibility(float(newcomer.mean()), rows, members_of(losses[:24])).belongs_nowhere(alpha)
    assert alarms / trials <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / trials)
    assert alarms / trials >= alpha / 8


def test_no_more_is_promised_than_the_members_can_tell() -> None:
    members = members_of(torch.rand(10, 5, generator=generator(0, "few members"), dtype=torch.float64))
    assert plausibility(99.0, 5, members).belongs_nowhere(0.1)
    with pytest.raises(ValueError, match=r"alpha = 0.05 can be promised with 19 members or more, and 10 were tested"):
        plausibility(99.0, 5, members).belongs_nowhere(0.05)
    assert plausibility(1.0, 5, members[:0]).p_value == 1


def test_a_member_unlike_all_others_is_named() -> None:
    losses = torch.rand(30, 40, generator=generator(1, "members"), dtype=torch.float64)
    losses[7] += 5
    told = torch.cat([torch.arange(30, dtype=torch.float64)[:, None], members_of(losses)], 1)
    assert strangers(told, 0.04) == [7]
