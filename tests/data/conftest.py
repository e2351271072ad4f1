import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from bcfl.data import sources
from bcfl.data.datasets import Dataset


@pytest.fixture(autouse=True)
def nothing_but_what_a_test_makes(monkeypatch, tmp_path):
    """An empty cache, no system package and no `datasets` library (which is returned), whatever the machine has."""
    hidden = sys.modules.get("datasets")
    monkeypatch.setenv("BCFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    fashion = replace(sources.SOURCES["fashion_mnist"], package=tmp_path / "package")
    monkeypatch.setitem(sources.SOURCES, "fashion_mnist", fashion)
    return hidden


@pytest.fixture(scope="session")
def pool():
    """4 domains and 10 classes, 6000 training and 1500 test examples; a feature is its example's index."""
    rng = np.random.default_rng(0)
    labels = [torch.from_numpy(rng.integers(10, size=size)) for size in (6000, 1500)]
    domains = [torch.arange(size) % 4 for size in (6000, 1500)]
    x_train, x_test = (torch.arange(size, dtype=torch.float32).unsqueeze(1) for size in (6000, 1500))
    return Dataset("pool", x_train, labels[0], x_test, labels[1], *domains, ("a", "b", "c", "d"), 10)


@pytest.fixture
def small_images():
    """Raw arrays of 20 training and 10 test images of the given shape, every class in both."""

    def make(*shape):
        rng = np.random.default_rng(1)
        return {
            "x_train": rng.integers(256, size=(20, *shape), dtype=np.uint8),
            "y_train": (np.arange(20) % 10).astype(np.uint8),
            "x_test": rng.integers(256, size=(10, *shape), dtype=np.uint8),
            "y_test": np.arange(10, dtype=np.uint8),
        }

    return make
