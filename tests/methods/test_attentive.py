"""FedAMP and FedSoft by hand, on clients whose local solutions are closed forms."""

import math
from dataclasses import replace

import pytest
import torch
from federation_fixtures import ConjugateClients, predictors, pulled_clients

from bcfl.belief.gaussian import flat
from bcfl.methods.attentive import FedAMP, FedSoft

OWN = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
TARGETS = torch.tensor([[3.0, 1.0], [-1.0, 2.0], [0.5, 0.5]], dtype=torch.float64)
SIZES = [10.0, 20.0, 40.0]
STARTS = torch.tensor([[[0.0, 0.0], [8.0, 8.0]]], dtype=torch.float64)


# --- FedAMP -----------------------------------------------------------------------------------------------------------


def test_attention_by_distance() -> None:
    weights = FedAMP(sigma=2.0, alpha=0.5).attention_weights(OWN)
    by_hand = {(0, 1): 1.0, (0, 2): 4.0, (1, 2): 5.0}  # squared distances
    for (i, j), distance in by_hand.items():
        expected = 0.5 * math.exp(-distance / 2) / 2  # α A′(x), A(x) = 1 − exp(−x/σ)
        assert float(weights[i, j]) == float(weights[j, i]) == pytest.approx(expected)
    assert float(weights[0, 0]) == pytest.approx(1 - 0.25 * (math.exp(-0.5) + math.exp(-2)))


def test_attention_by_cosine() -> None:
    own = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
    weights = FedAMP(attention="cosine").attention_weights(own)
    alike, unlike = math.exp(10), 1.0
    assert weights.diagonal().tolist() == pytest.approx([0.5] * 3)
    assert weights[0].tolist() == pytest.approx([0.5, 0.5 * alike / (alike + unlike), 0.5 * unlike / (alike + unlike)])
    assert weights[2].tolist() == pytest.approx([0.25, 0.25, 0.5])


@pytest.mark.parametrize("attention", ["distance", "cosine"])
@pytest.mark.parametrize("num_clients", [1, 2, 7])
def test_attention_is_a_share(attention: str, num_clients: int) -> None:
    own = torch.randn(num_clients, 5, generator=torch.Generator().manual_seed(0))
    for method in (FedAMP(attention=attention), FedAMP(attention=attention, sigma=1.0, alpha=1e6)):
        weights = method.attention_weights(own)
        assert weights.min() >= 0
        assert weights.sum(1).tolist() == pytest.approx([1] * num_clients)


def test_equal_models_are_averaged_equally_by_default() -> None:
    weights = FedAMP().attention_weights(torch.ones(4, 3))
    assert torch.allclose(weights, torch.full((4, 4), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("proximal", [0.0, 1.0, 3.0])
def test_fedamp_minimises_loss_plus_distance_to_the_mixture(proximal: float) -> None:
    """argmin ½‖w − target‖² + λ/2 ‖w − u‖² = (target + λ u) / (1 + λ), whatever a client's number of examples."""
    clients = pulled_clients(TARGETS, SIZES, STARTS + 1, absent=frozenset({2}))  # all have left the start
    method = FedAMP(sigma=2.0, alpha=0.5, proximal=proximal)
    before = replace(method.init(clients), models=flat(OWN))
    state, _ = method.round(before, clients)
    mixture = method.attention_weights(OWN) @ OWN  # the absent client's model is there still
    expected = (TARGETS + proximal * mixture) / (1 + proximal)
    assert torch.allclose(state.models.mean[:2], expected[:2])
    assert torch.equal(state.models.mean[2], OWN[2])
    models, own = predictors(state)
    assert torch.equal(models[own], state.models.mean)  # a client's own model is what is tested


@pytest.mark.parametrize("attention", ["distance", "cosine"])
def test_fedamp_listens_only_to_those_who_have_trained(attention: str) -> None:
    clients = pulled_clients(TARGETS, SIZES, OWN[None, 2:], absent=frozenset({2}))  # client 2 is where all began
    method = FedAMP(attention=attention)
    before = replace(method.init(clients), models=flat(OWN))
    state, _ = method.round(before, clients)
    mixture = method.attention_weights(OWN[:2]) @ OWN[:2]
    assert torch.allclose(state.models.mean[:2], (TARGETS[:2] + mixture) / 2)
    assert torch.equal(state.models.mean[2], OWN[2])


def test_fedamp_gives_one_who_trains_for_the_first_time_the_mean_of_the_others() -> None:
    clients = pulled_clients(TARGETS, SIZES, OWN[None, 2:])
    method, fit, starts = FedAMP(), clients.fit, []
    clients.fit = lambda models, jobs: starts.append(jobs.start) or fit(models, jobs)
    state, _ = method.round(replace(method.init(clients), models=flat(OWN)), clients)
    mean = OWN[:2].mean(0)
    assert torch.allclose(state.models.mean[2], (TARGETS[2] + mean) / 2)
    assert torch.allclose(starts[0], torch.stack([OWN[0], OWN[1], mean]))
    method.round(state, clients)
    assert torch.equal(starts[1], state.models.mean)  # from now on it goes on from its own, as all do


def test_the_attentive_mean_starts_from_the_mixture_and_is_what_is_tested() -> None:
    clients = pulled_clients(TARGETS, SIZES, STARTS, absent=frozenset({2}))
    method, fit, beliefs = FedAMP(attention="cosine", variant="attentive_mean"), clients.fit, []
    clients.fit = lambda models, jobs: beliefs.append((models, jobs)) or fit(models, jobs)
    state, _ = method.round(replace(method.init(clients), models=flat(OWN)), clients)
    models, jobs = beliefs[0]
    assert torch.equal(models.mean, OWN)
    assert jobs.start is None
    assert not models.precision.any()  # no pull towards the mixture: only the start
    expected = method.attention_weights(TARGETS[:2]) @ TARGETS[:2]
    assert torch.allclose(predictors(state)[0][:2], expected)
    assert torch.equal(state.models.mean[2], OWN[2])


# --- FedSoft ----------------------------------------------------------------------------------------------------------

SHARES = torch.tensor([[1.0, 0.0], [0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)


def soft_clients(**options: object) -> ConjugateClients:
    return pulled_clients(TARGETS, SIZES, STARTS, shares=SHARES, **options)


def test_fedsoft_with_everybody_selected() -> None:
    clients = soft_clients()
    method = FedSoft(num_clusters=2, proximal=0.5, selection=10)  # more than there are
    state, _ = method.round(method.init(clients), clients)
    share = SHARES.clamp(min=1e-4)
    share = share / share.sum(1, keepdim=True)
    expected = (TARGETS + 0.5 * share @ STARTS[0]) / 1.5
    assert torch.allclose(state.personal, expected)
    assert torch.allclose(state.hypotheses.models.mean, expected.mean(0).expand(2, 2))  # divided by the number selected
    assert state.hypotheses.assignment.tolist() == [[0, 1, 0]]
    assert torch.equal(predictors(state)[0], state.personal)


def test_fedsoft_trains_and_averages_its_selection_only() -> None:
    for index in range(10):
        clients = soft_clients(round=index)
        method = FedSoft(num_clusters=2, proximal=0.0, selection=1)
        before = method.init(clients)
        state, _ = method.round(before, clients)
        trained = [client for _, client in clients.fitted]
        assert len(trained) == len(set(trained)) <= 2
        for centre in state.hypotheses.models.mean:  # with one client selected, a centre is that client's model
            assert any(torch.allclose(centre, TARGETS[j]) for j in trained)
        for j in set(range(3)) - set(trained):
            assert torch.equal(state.personal[j], before.personal[j])


def test_fedsoft_selects_by_share_and_examples() -> None:
    """v ∝ u·n: cluster 0 draws clients with 10·1, 20·¼ and 40·½."""
    method = FedSoft(num_clusters=2, selection=1)
    weight = SHARES * torch.tensor(SIZES)[:, None]
    counts = torch.zeros(2, 3)
    for index in range(600):
        for cluster, (row,) in enumerate(method._select(weight, soft_clients(round=index))):
            counts[cluster, row] += 1
    assert torch.allclose(counts[0] / 600, torch.tensor([10, 5, 20]) / 35, atol=0.06)
    assert torch.allclose(counts[1] / 600, torch.tensor([0, 15, 20]) / 35, atol=0.06)


def test_fewer_eligible_clients_than_the_selection_is_a_normal_case() -> None:
    weight = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 3.0]], dtype=torch.float64)
    selections = FedSoft(num_clusters=3, selection=2)._select(weight, soft_clients())
    assert [sorted(selection) for selection in selections] == [[0, 1], [], [1]]
    clients = soft_clients(absent=frozenset({0, 1}))
    method = FedSoft(num_clusters=2, proximal=0.0, selection=2, smoothing=0.0)
    state, _ = method.round(method.init(clients), clients)
    assert torch.allclose(state.hypotheses.models.mean, TARGETS[2].expand(2, 2))


def test_a_centre_whose_selection_is_lost_keeps_its_model() -> None:
    clients = soft_clients(silent=frozenset({0, 1, 2}))
    method = FedSoft(num_clusters=2)
    before = method.init(clients)
    state, _ = method.round(before, clients)
    assert torch.equal(state.hypotheses.models.mean, before.hypotheses.models.mean)
    assert torch.equal(state.personal, before.personal)
