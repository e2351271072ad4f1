"""Clients that swap their data in mid-run."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcfl.data.drift import with_drift
from bcfl.data.manifest import groups_in, manifest, verify_manifest
from bcfl.data.partition import FederatedData, partition


def grouped(groups: list[int]) -> FederatedData:
    """One example a client."""
    held = torch.arange(len(groups)).split(1)
    x, y = torch.zeros(len(groups), 1), torch.zeros(len(groups), dtype=torch.int64)
    return FederatedData(x, y, x, y, held, held, torch.tensor(groups), 1, 0, "toy")


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.floats(0.01, 1), st.integers(0, 5))
def test_pairs_of_different_groups_swap(groups: list[int], share: float, seed: int) -> None:
    num_pairs = max(1, round(share * len(groups) / 2))
    if sum(min(groups.count(g), num_pairs) for g in set(groups)) < 2 * num_pairs:
        with pytest.raises(ValueError, match=r"data\.drift_"):
            with_drift(grouped(groups), 5, share, seed)
        return
    data = with_drift(grouped(groups), 5, share, seed)
    source = data.drift.source
    moved = (source != torch.arange(len(groups))).nonzero()[:, 0]
    assert len(moved) == 2 * num_pairs
    assert torch.equal(source[source], torch.arange(len(groups)))  # a swap: nobody's data are lost or held twice
    before, after = data.group_in(4), data.group_in(5)
    assert torch.equal((before != after).nonzero()[:, 0], moved)
    assert torch.equal(before, data.group)
    assert torch.equal(after, data.group[source])


def test_who_swaps_is_drawn_from_the_seed() -> None:
    draws = [with_drift(grouped([0, 1, 2, 3] * 5), 5, 0.3, seed).drift.source.tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_what_cannot_change_is_refused_in_one_line() -> None:
    for data, share, says in [
        (replace(grouped([0, 1]), group=None), 0.5, "data.drift_round = 5: the true groups of toy are not known"),
        (grouped([1, 1, 1]), 0.5, "data.drift_round = 5: there must be at least 2 groups"),
        (grouped([0, 0, 0, 1]), 1.0, "data.drift_share = 1: 4 of 4 clients would swap, but only 3 find partners"),
    ]:
        with pytest.raises(ValueError, match=says) as caught:
            with_drift(data, 5, share, 0)
        assert "\n" not in str(caught.value)


def test_a_manifest_tells_of_the_change_and_notices_another(pool) -> None:
    still = partition(pool, "label(4,5,0.1)", 0)
    data = with_drift(still, 7, 0.3, 0)
    record = manifest(data, "pool", "label(4,5,0.1)", 0)
    assert "drift" not in manifest(still, "pool", "label(4,5,0.1)", 0)
    assert record["drift"]["round"] == 7
    for index in (1, 6, 7, 8):
        assert torch.equal(groups_in(record, index), data.group_in(index))
    assert torch.equal(groups_in(manifest(still, "", "", 0), 9), still.group)
    verify_manifest(data, record)
    for other in (still, with_drift(still, 8, 0.3, 0), with_drift(still, 7, 0.3, 1)):
        with pytest.raises(ValueError, match="other clients change their data, or in another round"):
            verify_manifest(other, record)
