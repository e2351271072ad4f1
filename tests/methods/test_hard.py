"""IFCA, FeSEM and WeCFL by hand, on clients whose local solutions are closed forms."""

from dataclasses import replace

import pytest
import torch
from federation_fixtures import predictors, pulled_clients

from bcfl.methods.hard import IFCA, KMeansClustering

TARGETS = torch.tensor([[0.0, 1.0], [0.0, 2.0], [9.0, 0.0], [9.0, 3.0], [9.0, 9.0]], dtype=torch.float64)
SIZES = [10.0, 30.0, 10.0, 20.0, 30.0]
STARTS = torch.tensor([[[0.0, 0.0], [10.0, 0.0], [99.0, 99.0]]], dtype=torch.float64)


def test_ifca_clients_join_the_model_with_the_least_loss() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS)
    method = IFCA(num_clusters=3)
    state, _ = method.round(method.init(clients), clients)
    assert state.assignment.tolist() == [[0, 0, 1, 1, 1]]
    assert state.models.mean[0].tolist() == pytest.approx([0, 1.5])  # whatever the clients' sizes
    assert state.models.mean[1].tolist() == pytest.approx([9, 4])
    assert state.models.mean[2].tolist() == [99, 99]  # empty: it keeps its model
    assert len(clients.fitted) == 5  # each client trains the one it chose
    models, own = predictors(state)
    assert models[own][4].tolist() == pytest.approx([9, 4])


@pytest.mark.parametrize("weighted", [False, True])
def test_k_means_on_models_then_means(weighted: bool) -> None:
    clients = pulled_clients(TARGETS[:4], SIZES[:4], STARTS)
    method = KMeansClustering(num_clusters=2, weighted=weighted, space="all")
    state = method.init(clients)
    assert torch.equal(state.models.mean[0], state.models.mean[1])  # all start from one model
    for index in (1, 2, 3):
        clients.round = index
        before = state
        state, _ = method.round(state, clients)
    assert torch.equal(state.assignment, before.assignment)  # the centres are carried over: labels stay
    left, right = int(state.assignment[0, 0]), int(state.assignment[0, 2])
    assert sorted((left, right)) == [0, 1]
    assert state.assignment[0].tolist() == [left, left, right, right]
    by_hand = {False: (1.5, 1.5), True: ((10 + 60) / 40, 60 / 30)}[weighted]
    assert state.models.mean[left].tolist() == pytest.approx([0, by_hand[0]])
    assert state.models.mean[right].tolist() == pytest.approx([9, by_hand[1]])


def test_the_last_layer_alone_can_decide() -> None:
    """In the last coordinate the clients group otherwise than in all of them."""
    targets = torch.tensor([[0.0, 0.0], [0.0, 1.0], [90.0, 0.0], [90.0, 1.0]], dtype=torch.float64)
    clients = pulled_clients(targets, [1.0] * 4, STARTS, num_last_layer=1)
    groups = {}
    for space in ("last_layer", "all"):
        method = KMeansClustering(num_clusters=2, space=space)
        state, _ = method.round(method.init(clients), clients)
        row = state.assignment[0]
        groups[space] = (row == row[0]).tolist()
    assert groups == {"last_layer": [True, False, True, False], "all": [True, True, False, False]}


def test_the_proximal_term_shares_the_difference() -> None:
    """argmin ½‖θ − target‖² + λ/2 ‖θ − centre‖² = (target + λ centre) / (1 + λ)."""
    clients = pulled_clients(TARGETS[4:], SIZES[4:], STARTS)
    method = KMeansClustering(num_clusters=1, proximal=2.0)
    state, _ = method.round(method.init(clients), clients)
    assert state.models.mean[0].tolist() == pytest.approx([3, 3])


def test_fewer_clients_than_clusters_leave_the_other_models() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS, absent=frozenset({0, 1, 2}))
    method = KMeansClustering(num_clusters=3, space="all")
    state, _ = method.round(method.init(clients), clients)
    assert state.assignment.tolist() == [[-1, -1, -1, 0, 1]]
    assert torch.equal(state.models.mean, torch.stack([TARGETS[3], TARGETS[4], STARTS[0, 0]]))
    clients = pulled_clients(TARGETS, SIZES, STARTS, absent=frozenset({1, 2, 3, 4}), round=2)
    state, _ = method.round(state, clients)
    assert state.assignment.tolist() == [[2, -1, -1, 0, 1]]  # (0, 1) is nearest to the centre nobody has used


@pytest.mark.parametrize("weighted", [False, True])
def test_a_cluster_whose_clients_are_all_away_keeps_its_model_for_them(weighted: bool) -> None:
    targets = torch.tensor([[x, 0.1 * i] for x in (0.0, 9.0) for i in range(3)], dtype=torch.float64)
    everybody = pulled_clients(targets, [1.0] * 6, STARTS)
    method = KMeansClustering(2, weighted=weighted, space="all")
    before, _ = method.round(method.init(everybody), everybody)
    here, away = before.assignment[0, 0], before.assignment[0, 3]
    some = pulled_clients(targets, [1.0] * 6, STARTS, absent=frozenset({2, 3, 4, 5}), round=2)
    after, _ = method.round(before, some)
    assert torch.equal(after.assignment, before.assignment)
    assert torch.equal(after.models.mean[away], before.models.mean[away])
    assert after.models.mean[here].tolist() == pytest.approx([0, 0.05])
    # A centre that nobody needs is free to go where it is wanted.
    nobody = replace(before, assignment=torch.full_like(before.assignment, int(here)))
    after, _ = method.round(nobody, some)
    assert sorted(after.assignment[0, :2].tolist()) == [0, 1]


def test_clients_with_equal_models_are_no_trouble() -> None:
    """Fewer different models than clusters, in the first round and later."""
    clients = pulled_clients(TARGETS[[0, 0, 2, 2]], [1.0] * 4, STARTS)
    method = KMeansClustering(num_clusters=3, space="all")
    state = method.init(clients)
    for index in (1, 2):
        clients.round = index
        state, _ = method.round(state, clients)
    models, own = predictors(state)
    assert torch.allclose(models[own], TARGETS[[0, 0, 2, 2]])
