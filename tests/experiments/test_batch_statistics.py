"""Runs tested by the statistics of test batches, as the published code does, beside the learned ones."""

from pathlib import Path

import pytest
import torch
from batch_statistics import measure
from small_runs import small_config
from torch import nn

from bcfl.predict.predictors import Spread
from bcfl.runs.evaluation import evaluate
from bcfl.runs.loop import start
from bcfl.runs.settings import load_config


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def test_only_the_statistics_differ(tmp_path: Path) -> None:
    config = small_config("model.factory=test_batch_statistics:with_norm", "method.name=fedavg")
    result = start(config, tmp_path / "run")
    found = measure(tmp_path / "run")
    own = result.history[-1]
    assert found["learned"] == pytest.approx({key: 100 * own[key] for key in ("accuracy", "macro_f1")})
    # After three rounds of three steps the learned statistics are still near their start: batches know better.
    assert found["of_batches"]["accuracy"] > found["learned"]["accuracy"]
    assert found["of_training"]["accuracy"] > found["learned"]["accuracy"]
    assert evaluate(result, Spread())["own_statistics"]["accuracy"] == pytest.approx(
        found["of_training"]["accuracy"] / 100
    )
    assert measure(tmp_path / "run") == found


def clients_of_one_and_many() -> list[tuple[torch.Tensor, ...]]:
    x, y = torch.randn(41, 3, generator=torch.Generator().manual_seed(0)), torch.arange(41) % 2
    return [(x[:1], y[:1], x, y), (x[1:], y[1:], x, y)]


def images_norm() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 1, 3)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(3, 2))


def test_a_client_with_a_single_example_keeps_the_learned_statistics(tmp_path: Path) -> None:
    own = "test_batch_statistics"
    settings = [f"model.factory={own}:images_norm", f"data.factory={own}:clients_of_one_and_many"]
    settings += ["experiment.rounds=1", "method.name=local", "training.local_steps=1"]
    result = start(load_config(None, settings), tmp_path / "run")
    assert evaluate(result, Spread())["own_statistics"]["num_examples"] == 82


def test_a_model_without_such_statistics_is_passed_over(tmp_path: Path) -> None:
    result = start(small_config(), tmp_path / "run")
    assert measure(tmp_path / "run") is None
    assert "own_statistics" not in evaluate(result, Spread())
