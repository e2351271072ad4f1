"""One thread for all tests: they are small, and several may run side by side. Puts this folder on the path as well."""

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# A busy machine is not a failure, and a test that fails must fail again.
settings.register_profile("bcfl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bcfl")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test that fails must fail again, whichever ran before it."""
    torch.manual_seed(7)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real federations first: they take minutes, during which another worker can steal the rest."""
    items.sort(key=lambda item: item.path.name != "test_deploy.py")
