"""Ray: the simulator's bits on one node and on several, and a run that goes on when a node dies."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_fixtures import client_data, linear, network

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray", reason="could not import 'ray'", exc_type=ImportError)

import bcfl  # noqa: E402
from bcfl.cli import main  # noqa: E402
from bcfl.data.lazy import LazyClients  # noqa: E402
from bcfl.engines.ray import Cluster, RayWorkers  # noqa: E402
from bcfl.runs.observers import Observer  # noqa: E402
from bcfl.runs.result import Result  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SETTINGS: dict[str, Any] = {"num_clusters": 2, "rounds": 3, "num_workers": 2, "progress": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes in one machine, of one core each."""
    from ray.cluster_utils import Cluster as LocalCluster

    nodes = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def same(first: Result, second: Result) -> bool:
    one, two = (result.state.hypotheses for result in (first, second))
    return (
        torch.equal(one.models.mean, two.models.mean)
        and torch.equal(one.models.precision, two.models.precision)
        and torch.equal(one.assignment, two.assignment)
        and first.history == second.history
    )


@pytest.mark.parametrize("method", ["bcfl-mh-2", "bcfl-g", "ifca"])
def test_a_run_has_the_simulators_bits(cluster: Any, method: str) -> None:
    here = bcfl.train(network, client_data(num_clients=8), method=method, **SETTINGS)
    there = bcfl.train(network, client_data(num_clients=8), method=method, **SETTINGS, device="ray")
    assert same(here, there)


def test_lazy_clients_are_opened_where_their_jobs_are(cluster: Any, tmp_path: Path) -> None:
    data, log = client_data(num_clients=8), str(tmp_path / "opened")

    def opener(client: int) -> Any:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        return data[client]

    def clients() -> LazyClients:
        return bcfl.lazy(opener, [len(y) for _, y, *_ in data])

    here = bcfl.train(linear, clients(), method="bcfl-g", **SETTINGS)
    Path(log).unlink()
    there = bcfl.train(linear, clients(), method="bcfl-g", **SETTINGS, device="ray")
    assert same(here, there)
    opened = Path(log).read_text().split()
    assert opened.count(str(os.getpid())) == 8  # to see what the data are like
    assert len(opened) > 8


class Killing(Observer):
    """The observer that takes a node away once a round is done."""

    def __init__(self, nodes: Any, node: Any):
        self.nodes, self.node = nodes, node

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        if record["round"] == 1:
            self.nodes.remove_node(self.node, allow_graceful=False)


def test_a_run_goes_on_when_a_node_dies(cluster: Any) -> None:
    third = cluster.add_node(num_cpus=1)
    settings = {**SETTINGS, "num_workers": 3}
    here = bcfl.train(linear, client_data(num_clients=8), method="bcfl-g", together=1, **settings)
    there = bcfl.train(linear, client_data(num_clients=8), method="bcfl-g", together=1, **settings, device="ray",
                       observers=[Killing(cluster, third)])  # fmt: skip
    assert same(here, there)


def test_jobs_of_a_node_that_dies_while_it_works_are_done_elsewhere(cluster: Any) -> None:
    third = cluster.add_node(num_cpus=1)

    def slow(client: int) -> Any:
        time.sleep(0.3)
        return client_data(num_clients=8)[client]

    sizes = [len(y) for _, y, *_ in client_data(num_clients=8)]
    killed: list[float] = []
    stream = RayWorkers.stream

    def killing(self: RayWorkers, tasks: Any) -> Iterator[Any]:
        for place, answer in enumerate(stream(self, tasks)):
            if not killed and place == 1:  # others are under way
                killed.append(time.monotonic())
                cluster.remove_node(third, allow_graceful=False)
            yield answer

    settings = {**SETTINGS, "num_workers": 3, "rounds": 2}
    here = bcfl.train(linear, bcfl.lazy(slow, sizes), method="fedavg", together=1,
                      **{k: v for k, v in settings.items() if k != "num_clusters"})  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayWorkers, "stream", killing)
        there = bcfl.train(linear, bcfl.lazy(slow, sizes), method="fedavg", together=1, device="ray",
                           **{k: v for k, v in settings.items() if k != "num_clusters"})  # fmt: skip
    assert killed
    assert same(here, there)


def test_what_a_client_raises_is_told_as_by_the_simulator(cluster: Any) -> None:
    data = client_data(num_clients=40)

    def failing(client: int) -> Any:
        if client == 39:
            raise OSError("no such disk")
        return data[client]

    clients = bcfl.lazy(failing, [len(y) for _, y, *_ in data])
    with pytest.raises(ValueError, match="client 39 cannot be opened: OSError: no such disk"):
        bcfl.train(linear, clients, method="fedavg", rounds=1, num_workers=2, device="ray", progress=False)


def test_the_command_line_takes_an_engine(cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--set", "experiment.rounds=1", "--set", "data.partition='feature(4,1)'", "--quiet", "--workers", "2"]
    assert main(["run", *arguments, "--engine", "ray", "--out", str(tmp_path / "ray")]) == 0
    assert main(["run", *arguments, "--out", str(tmp_path / "here")]) == 0
    lines = [(tmp_path / name / "rounds.jsonl").read_text() for name in ("ray", "here")]
    assert lines[0] == lines[1]
    assert main(["run", "--address", "10.0.0.1:6379"]) != 0
    assert "--address and --gpus-per-worker are for --engine ray" in capsys.readouterr().err


def test_the_name_of_a_cluster() -> None:
    for name in ("ray", "ray:10.0.0.1:6379", "ray,gpus=0.5", "ray:auto,gpus=1"):
        assert str(Cluster.parse(name)) == name
    assert Cluster.parse("cpu") is None
    assert Cluster.parse("rays") is None
    with pytest.raises(ValueError, match="gpus must be a number"):
        Cluster.parse("ray,gpus=many")
