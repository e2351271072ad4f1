"""Clusters of every kind of target are found, and every engine finds the same."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from inprocess_grid import federate
from planted import PLANTED, clients, linear
from torch import Tensor, nn

import bcfl
from bcfl import likelihood
from bcfl.runs.loop import start
from bcfl.runs.settings import parse_config


def trained(name: str, **options: Any) -> bcfl.Result:
    planted = PLANTED[name]
    settings = {"num_clusters": 2, "rounds": 4, "progress": False, "training": planted.training, **options}
    return bcfl.train(linear(name), clients(name), likelihood=planted.likelihood, **settings)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_clusters_are_found(name: str) -> None:
    result = trained(name)
    last = result.history[-1]
    assert last["ari"] == 1.0
    lead = last["lead"]["measure"]
    assert math.isfinite(last[lead])
    assert len(last["client_nll"]) == len(last["client_examples"]) == len(last[f"client_{lead}"]) == 6
    assert result.summary()[lead] == last[lead]
    assert result.mixture(0).predict(clients(name)[0]["x_test"]).isfinite().all()
    newcomer = clients(name)[5]
    found = result.associate(newcomer["x_test"], newcomer["y_test"])
    assert found.cluster == int(result.assignment[5])


@pytest.mark.parametrize("name", ["normal", "exposure", "hazard", "ordinal", "bernoulli"])
def test_stacked_clients_learn_the_same(name: str) -> None:
    alone, stacked = trained(name, rounds=2), trained(name, rounds=2, device="stacked-cpu")
    assert torch.allclose(
        alone.state.hypotheses.models.mean, stacked.state.hypotheses.models.mean, atol=1e-3, rtol=1e-2
    )
    assert alone.history[-1]["nll"] == pytest.approx(stacked.history[-1]["nll"], abs=1e-3)


@pytest.mark.parametrize(
    ("data", "name"), [("normal", "normal"), ("counts", "negative_binomial"), ("times", "weibull")]
)
def test_a_federation_learns_the_same(data: str, name: str, tmp_path: Path) -> None:
    config = parse_config({
        "data": {"factory": f"planted:{data}_clients", "likelihood": PLANTED[name].likelihood},
        "model": {"factory": "planted:one_output"},
        "method": {"name": "bcfl-mh-3", "num_clusters": 2},
        "training": PLANTED[name].training,
        "experiment": {"rounds": 2, "together": 1},  # as clients of a federation are: one by one
    })  # fmt: skip
    simulated, federated = start(config, None), federate(config, 6, tmp_path / "run")
    assert torch.equal(simulated.state.hypotheses.models.mean, federated.state.hypotheses.models.mean)
    for one, other in zip(simulated.history[-1]["client_nll"], federated.history[-1]["client_nll"], strict=True):
        assert one == pytest.approx(other)
    assert simulated.history[-1]["over_clients"] == federated.history[-1]["over_clients"]
    assert bcfl.load(tmp_path / "run").factory().likelihood == likelihood.parse(PLANTED[name].likelihood)  # type: ignore[union-attr]


def test_a_federation_needs_a_likelihood_that_is_told_in_full(tmp_path: Path) -> None:
    config = parse_config({
        "data": {"factory": "planted:normal_clients", "likelihood": "normal"},
        "model": {"factory": "planted:one_output"},
        "method": {"name": "fedavg"},
        "experiment": {"rounds": 1},
    })  # fmt: skip
    with pytest.raises(Exception, match="told in full in a federation"):
        federate(config, 6, tmp_path / "run")


def test_what_is_left_open_is_taken_from_y_and_kept(tmp_path: Path) -> None:
    own = [{**one, "y": one["y"] * 1000} for one in clients("normal")]
    own = [{**one, "y_test": one["y_test"] * 1000} for one in own]
    result = bcfl.train(linear("normal"), own, num_clusters=2, rounds=3, progress=False, out=tmp_path / "run")
    assert result.history[-1]["ari"] == 1.0
    assert result.history[-1]["rmse"] < 2500  # of a standard deviation of 3000
    kept = bcfl.load(tmp_path / "run", linear("normal"))
    x = own[0]["x_test"]
    assert torch.equal(kept.mixture(0).predict(x), result.mixture(0).predict(x))


def test_unknowns_are_common_to_all_clusters_unless_each_has_its_own() -> None:
    common, own = trained("normal"), trained("per cluster")
    scales = common.state.hypotheses.models.mean[:, 0]
    assert float(scales.max() - scales.min()) == 0.0
    scales = own.state.hypotheses.models.mean[:, 0]
    assert float(scales.max() - scales.min()) > 0.0


def laplace(output: Tensor, y: Tensor) -> Tensor:
    return -(y - output[:, 0]).abs() / 2 - math.log(4)


def test_a_function_of_ones_own_is_a_likelihood(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_clusters": 2, "rounds": 4, "learning_rate": 0.1, "progress": False}
    result = bcfl.train(linear("normal"), clients("normal"), likelihood=laplace, out=tmp_path / "run", **settings)
    assert result.history[-1]["ari"] == 1.0
    assert result.history[-1]["lead"]["measure"] == "nll"
    kept = bcfl.load(tmp_path / "run", linear("normal"), laplace)
    assert torch.equal(kept.state.hypotheses.models.mean, result.state.hypotheses.models.mean)
    with pytest.raises(ValueError, match=r"must be a name, what likelihood\.of returns, or a function"):
        bcfl.train(linear("normal"), clients("normal"), likelihood=3, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must give one log-probability for an example"):
        bcfl.train(linear("normal"), clients("normal"), likelihood=lambda output, y: output.sum(), **settings)


def test_a_network_with_other_outputs_than_the_likelihood_needs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model must return 1 numbers for an example, as likelihood normal\(.*needs"):
        bcfl.train(lambda: nn.Linear(4, 2), clients("normal"), rounds=1, progress=False)


def test_pixels_are_classes_at_many_places() -> None:
    g, own = torch.Generator().manual_seed(0), []
    for client in range(4):
        x = torch.randn(24, 1, 6, 6, generator=g)
        y = ((x[:, 0] > 0) != (client >= 2)).long()
        own.append({"x": x[:16], "y": y[:16], "x_test": x[16:], "y_test": y[16:], "group": client // 2})
    settings: dict[str, Any] = {"num_clusters": 2, "rounds": 5, "learning_rate": 0.2, "progress": False}
    result = bcfl.train(lambda: nn.Conv2d(1, 2, 3, padding=1), own, likelihood="pixels", **settings)
    assert result.history[-1]["ari"] == 1.0
    assert result.history[-1]["mean_iou"] > 0.7
