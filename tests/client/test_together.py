"""How many jobs are done together: a function of sizes, and nothing but rounding hangs on it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from federation_fixtures import client_data, examples_of, linear, network, simulator, tiny_federation
from torch import nn

import bcfl
from bcfl.belief.gaussian import flat
from bcfl.client.together import CACHED, LARGEST, MOST, jobs_together
from bcfl.client.trainer import Training
from bcfl.engines.crew import crew_for
from bcfl.federation import Jobs
from bcfl.model.flat import FlatModel, ModelFactory, build
from bcfl.model.zoo import amazon_mlp, cifar_cnn, fashion_cnn, mlp


def together(factory: ModelFactory, *shape: int, batch_size: int = 32) -> int:
    examples = examples_of(torch.randn(40, *shape), torch.randint(2, (40,)))
    return jobs_together(FlatModel(build(factory, 0)), examples, Training(batch_size=batch_size))


def wide(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def test_small_networks_are_trained_many_at_a_time_and_large_ones_one_by_one() -> None:
    assert together(mlp, 64) > 32
    assert together(linear, 4) == MOST
    assert together(wide(2000), 64) == 2
    assert LARGEST < 5_000_000 < sum(p.numel() for p in amazon_mlp().parameters())
    assert together(amazon_mlp, 5000) == 1
    assert together(cifar_cnn, 3, 32, 32) == together(fashion_cnn, 1, 28, 28) == 1


def test_larger_models_and_batches_mean_fewer_at_a_time() -> None:
    counts = [together(wide(width), 64) for width in (32, 100, 300)]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 3
    assert together(mlp, 64, batch_size=8) > together(mlp, 64, batch_size=256)
    assert 4 * 2410 * together(mlp, 64) < 2 * CACHED


def test_what_has_no_kernels_is_stacked_where_it_is_small_and_can_be(caplog: pytest.LogCaptureFixture) -> None:
    assert together(network, 4) == MOST
    model = FlatModel(build(network, 0))
    before = model.vector.clone()
    jobs_together(model, examples_of(torch.randn(40, 4), torch.randint(2, (40,))), Training())
    assert torch.equal(model.vector, before)  # BatchNorm's statistics among it

    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    with simulator(factory=lambda: Branching(4, 3), together="auto") as engine:
        assert engine.at_a_time == 1
    assert not caplog.records  # nobody asked for more


def test_a_hook_on_a_parameter_is_heeded() -> None:
    def clamping() -> nn.Module:
        module = linear()
        next(module.parameters()).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return module

    with simulator(factory=clamping, together="auto") as engine:
        assert engine.at_a_time == 1


@pytest.mark.parametrize("factory", [linear, network])
def test_jobs_done_together_have_the_answers_of_jobs_done_alone(factory: ModelFactory) -> None:
    jobs, answers = Jobs(torch.zeros(6).long(), torch.arange(6), curvature=True), []
    for count in (1, 4, 5, "auto"):
        with simulator(tiny_federation(), factory, together=count) as engine:
            assert engine.at_a_time == (MOST if count == "auto" else count)
            clients = engine.begin(1)
            models = flat(clients.draw_model(0, 0)[None])
            answers.append((list(clients.fit(models, jobs)), clients.score(models.mean), clients.work.as_dict()))
    alone, *others = answers
    for fits, scores, work in others:
        for found, expected in zip(fits, alone[0], strict=True):
            assert torch.allclose(found.mean, expected.mean, atol=1e-5)
            assert torch.allclose(found.precision, expected.precision, rtol=1e-3, atol=1e-3)
        assert torch.allclose(scores, alone[1], rtol=1e-5)
        assert work == alone[2]


def test_several_workers_have_a_module_each() -> None:
    """In one module one worker would read what another has just written."""
    examples = examples_of(torch.randn(40, 4), torch.randint(2, (40,)))

    def another() -> FlatModel:
        return FlatModel(build(linear, 0))

    crew = crew_for(another(), [examples, examples], Training(), False, "cpu", "auto", another)
    assert crew.network is not None
    assert crew.several
    assert crew.network().template.module is not crew.network().template.module


def test_any_number_of_workers_gives_the_same_bits() -> None:
    found = []
    for workers in (1, 2):
        with simulator(tiny_federation(num_clients=20), linear, num_workers=workers, together=3) as engine:
            clients = engine.begin(1)
            models = flat(clients.draw_model(0, 0)[None])
            found.append([p.mean for p in clients.fit(models, Jobs(torch.zeros(20).long(), torch.arange(20)))])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_run_writes_down_how_many_it_has_trained_at_a_time(tmp_path: Path) -> None:
    for count, expected in (("auto", MOST), (1, 1), (7, 7)):
        path = tmp_path / str(count)
        bcfl.train(linear, client_data(), method="fedavg", rounds=1, together=count, out=path)
        assert json.loads((path / "environment.json").read_text())["together"] == str(expected)
