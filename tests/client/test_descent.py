"""Other optimisers than SGD: torch's own numbers, the optimum of the objective, and states that go along."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from federation_fixtures import client_data, examples_of
from planted import clients, linear
from torch import Tensor, nn

import bcfl
from bcfl.belief.gaussian import Gaussian, flat
from bcfl.client.descent import STATES
from bcfl.client.examples import batches
from bcfl.client.trainer import Alone, Job, Training, fit
from bcfl.model.flat import FlatModel, build

X, Y, *_ = client_data(1, 1, 60)[0]


def network() -> Alone:
    return Alone(FlatModel(build(lambda: nn.Linear(4, 3), 0)))


def job(training: Training, prior: Gaussian | None = None, **changes: Any) -> Job:
    start = torch.zeros(15)
    start = torch.cat([start, torch.zeros(training.num_carried(15) if training.momentum_state == "belief" else 0)])
    made = Job(start, prior or flat(torch.zeros(15)), examples_of(X, Y), torch.Generator().manual_seed(0), training)
    return replace(made, **changes)


def by_torch(make: Any, training: Training) -> Tensor:
    module = nn.Linear(4, 3)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    optimizer = make(module.parameters())
    for rows in batches(60, training.batch_size, training.local_steps, torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(X[rows]), Y[rows])
        loss.backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adam", lambda p: torch.optim.Adam(p, 0.1)),
        ("adamw", lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3)),
        ("adamax", lambda p: torch.optim.Adamax(p, 0.1)),
        ("rmsprop", lambda p: torch.optim.RMSprop(p, 0.1)),
        ("adagrad", lambda p: torch.optim.Adagrad(p, 0.1)),
        ("sgd", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.3)),
    ],
)
def test_steps_are_torchs(name: Any, make: Any) -> None:
    decay = 0.3 if name in ("adamw", "sgd") else 0.0
    training = Training(learning_rate=0.1, optimizer=name, weight_decay=decay, clip=0.5, local_steps=7, batch_size=16)
    ((found, _),) = fit(network(), [job(training)])
    assert torch.allclose(found.mean[:15], by_torch(make, training), atol=1e-5)


@pytest.mark.parametrize("name", STATES)
def test_a_training_in_two_parts_is_one_training(name: Any) -> None:
    """What an optimiser remembers comes back as it was: with the belief, or kept by the client."""
    whole = Training(learning_rate=0.05, optimizer=name, local_steps=6, batch_size=60, momentum_state="fresh")
    ((expected, _),) = fit(network(), [job(whole)])
    half = replace(whole, local_steps=3, momentum_state="belief")
    ((first, _),) = fit(network(), [job(half)])
    ((found, _),) = fit(network(), [job(half, start=first.mean)])
    assert torch.allclose(found.mean[:15], expected.mean[:15], atol=1e-5)
    half = replace(half, momentum_state="client")
    ((first, kept),) = fit(network(), [job(half)])
    ((found, _),) = fit(network(), [job(half, start=first.mean, momentum=kept)])
    assert torch.allclose(found.mean[:15], expected.mean[:15], atol=1e-5)


def optimum(prior: Gaussian) -> Tensor:
    """The least of mean NLL + ½ Σ precision (θ − mean)²/N."""
    theta = torch.zeros(15, dtype=torch.float64, requires_grad=True)
    best = torch.optim.LBFGS([theta], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def loss() -> Tensor:
        best.zero_grad()
        scores = X.double() @ theta[:12].view(3, 4).T + theta[12:]
        pull = (prior.precision.double() * (theta - prior.mean.double()).square()).sum() / 2 / 60
        value = nn.functional.cross_entropy(scores, Y) + pull
        value.backward()
        return value

    best.step(loss)  # type: ignore[no-untyped-call]
    return theta.detach().float()


PRIOR = Gaussian(torch.linspace(-1, 1, 15), torch.linspace(1, 300, 15))


def test_training_goes_on_until_it_converges() -> None:
    ((found, _),) = fit(network(), [job(Training(local="converge", local_steps=300), PRIOR, curvature=True)])
    assert torch.allclose(found.mean[:15], optimum(PRIOR), atol=1e-3)
    assert bool((found.precision[:15] >= PRIOR.precision).all())


@pytest.mark.parametrize("name", ["adam", "rmsprop", "adagrad", "sgd"])
def test_every_optimiser_comes_to_the_optimum_under_a_prior(name: Any) -> None:
    rate = {"adagrad": 0.3, "sgd": 0.1}.get(name, 0.05)
    training = Training(learning_rate=rate, optimizer=name, schedule="linear", local_steps=1500, batch_size=60)
    ((found, _),) = fit(network(), [job(training, PRIOR)])
    assert torch.allclose(found.mean[:15], optimum(PRIOR), atol=0.02)


def test_the_learning_rate_falls_from_round_to_round() -> None:
    training = Training(learning_rate=0.1, decay=0.5)
    assert [training.in_round(index).learning_rate for index in (0, 1, 2, 3)] == [0.1, 0.1, 0.05, 0.025]


def test_epochs_are_counted_by_each_clients_examples() -> None:
    training = Training(local="epochs", local_epochs=3, batch_size=32)
    assert [training.steps_of(count) for count in (10, 32, 60)] == [3, 3, 6]


@pytest.mark.parametrize("settings", [{"optimizer": "adam", "learning_rate": 0.02}, {"local": "converge"},
                                      {"local": "epochs", "local_epochs": 4}, {"clip": 1.0, "schedule": "cosine"}],
                         ids=str)  # fmt: skip
def test_clusters_are_found_by_any_optimiser_stacked_or_alone(settings: dict[str, Any]) -> None:
    means = []
    for device in ("cpu", "stacked-cpu"):
        given: dict[str, Any] = {"num_clusters": 2, "rounds": 3, "device": device, "progress": False, **settings}
        result = bcfl.train(linear("normal"), clients("normal"), **given)
        assert result.history[-1]["ari"] == 1.0
        means.append(result.state.hypotheses.models.mean[:, :6])
    assert torch.allclose(*means, atol=0.01)


def test_numbers_of_the_likelihood_and_frozen_weights_do_not_decay() -> None:
    def half_frozen() -> nn.Module:
        module = nn.Linear(4, 1)
        module.bias.requires_grad_(False)
        nn.init.constant_(module.bias, 2.0)
        return module

    result = bcfl.train(half_frozen, clients("normal"), method="fedavg", rounds=2, progress=False, learning_rate=1e-9,
                        weight_decay=10.0, optimizer="adamw")  # fmt: skip
    assert result.state.hypotheses.models.mean[0, 5].item() == 2.0
