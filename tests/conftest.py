"""One thread for all tests: they are small, and several may run side by side. Puts this folder on the path as well."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from made_up_runs import write_run

from bcfl.runs.loop import start
from bcfl.runs.settings import load_config

pytest_plugins = ["browser_fixtures"]
torch.set_num_threads(1)

# A busy machine is not a failure, and a test that fails must fail again.
settings.register_profile("bcfl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bcfl")


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as they need: some library that a test imports may have set a terminal's width."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test that fails must fail again, whichever ran before it."""
    torch.manual_seed(7)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real federations first: they take minutes, during which another worker can steal the rest."""
    items.sort(key=lambda item: item.path.name != "test_federation.py")


# What a skipped test's reason speaks of -> what it needs, and where that comes from.
NEEDS = {
    "Chromium": "a browser (apt-get install chromium)",
    "GPU": "a GPU",
    "'ray'": "Ray, 360 MB (pip install -c constraints.txt '.[ray]')",
    "BCFL_TEST_DATA": "the published data sets (BCFL_TEST_DATA=a folder with their .npz files)",
    "'datasets'": "the datasets library (pip install '.[data]')",
    "peft": "peft and transformers (pip install peft transformers)",
    "could not import": "packages that `make test` installs",
    "namespace": "the right to make a network namespace",
    "mounting": "the right to mount a file system",
}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was not run, and how to get it, in one line."""
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
    needed = Counter(next((need for word, need in NEEDS.items() if word in told), told) for told in reasons)
    if needed:
        told = "; ".join(f"{count} want {need}" for need, count in needed.most_common())
        terminalreporter.write_line(f"{len(reasons)} tests were not run: {told}")


@pytest.fixture
def made_up(tmp_path: Path) -> Callable[..., Path]:
    """Write a made-up run folder: made_up(name, clients=…, rounds=…, …)."""
    return lambda name="run", **options: write_run(tmp_path / name, **options)


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "real"
    start(load_config(None, ["experiment.rounds=4", "data.partition='feature(4,2)'"]), path, num_workers=1)
    return path
