"""Runs in this process: what resuming does, what stops them and what their user is told."""

import copy
import errno
import json
import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FEDERATIONS, files_in, outcome, small_config
from torch import nn

import bcfl
from bcfl.data.datasets import load
from bcfl.engines.simulator import Simulator
from bcfl.methods.bcfl import BCFL
from bcfl.model.zoo import mlp
from bcfl.runs import store
from bcfl.runs.environment import source_digest
from bcfl.runs.loop import (
    is_unfinished,
    load_result,
    prolong,
    resume,
    settings_of,
    start,
)
from bcfl.runs.observers import Observer
from bcfl.runs.planning import plan
from bcfl.runs.problem import Given, Split, prepare
from bcfl.runs.settings import Config
from bcfl.runs.stopping import RunStoppedError
from bcfl.runs.store import RunFolder, TakenError
from bcfl.runs.sweep import sweep


class Follower(Observer):
    """Remembers what it was told, and may stop the run."""

    def __init__(self, stop_after: int | None = None, error: BaseException | None = None):
        self.first_round: int | None = None
        self.rounds: list[int] = []
        self._stop_after, self._error = stop_after, error

    def started(self, config: Config, data: Split, first_round: int) -> None:
        self.first_round = first_round

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        self.rounds.append(record["round"])
        if record["round"] == self._stop_after and self._error:
            raise self._error


class PowerCutError(Exception):
    pass


def stopped_run(path: Path, after: int, *overrides: str) -> None:
    """The folder of a run that was stopped after that round."""
    with pytest.raises(PowerCutError):
        start(small_config(*overrides), path, num_workers=1, observers=[Follower(after, PowerCutError())])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("reference") / "run"
    start(small_config(), path, num_workers=1)
    return outcome(path)


def test_a_run_leaves_exactly_these_files(tmp_path: Path) -> None:
    start(small_config(), tmp_path / "run", num_workers=1)
    assert {str(path.relative_to(tmp_path / "run")) for path in files_in(tmp_path / "run")} == {
        *("config.json", "environment.json", "manifest.json", "lock", "result.json"),
        *("rounds.jsonl", "associations.jsonl", "timings.jsonl"),
        *("checkpoints/round-000002.safetensors", "checkpoints/round-000003.safetensors"),
    }
    folder = RunFolder.open(tmp_path / "run")
    assert [line["round"] for line in folder.lines("rounds.jsonl")] == [0, 1, 2, 3]
    assert [line["round"] for line in folder.lines("associations.jsonl")] == [1, 2, 3]
    for line in folder.lines("associations.jsonl"):
        weights = torch.tensor(line["log_weight"], dtype=torch.float64).exp()
        assert float(weights.sum()) == pytest.approx(1)
        assert len(line["assignment"]) == len(line["parent"]) == len(weights)
        assert {len(story) for story in line["assignment"]} == {8}


def test_any_number_of_workers_gives_the_same_run(tmp_path: Path, expected: dict[str, Any]) -> None:
    start(small_config(), tmp_path / "run", num_workers=3)
    assert outcome(tmp_path / "run") == expected


def test_a_run_without_a_folder_gives_the_same_numbers(expected: dict[str, Any]) -> None:
    assert start(small_config(), None, num_workers=1).summary() == json.loads(expected["result.json"])


@pytest.mark.parametrize("name", FEDERATIONS)
@pytest.mark.parametrize("after", [1, 2])
def test_a_stopped_run_goes_on_to_the_same_end(tmp_path: Path, name: str, after: int) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    start(small_config(*FEDERATIONS[name]), whole, num_workers=1)
    stopped_run(stopped, after, *FEDERATIONS[name])
    follower = Follower()
    result = resume(stopped, num_workers=1, observers=[follower])
    checkpoint_every = small_config(*FEDERATIONS[name]).experiment.checkpoint_every
    assert follower.first_round == after - after % checkpoint_every + 1
    assert outcome(stopped) == outcome(whole)
    again = load_result(whole)
    assert (result.summary(), result.history) == (again.summary(), again.history)
    assert torch.equal(result.probability, again.probability)


@pytest.mark.parametrize("name", FEDERATIONS)
def test_a_run_goes_on_for_more_rounds_as_if_it_had_been_set_to_them(tmp_path: Path, name: str) -> None:
    whole, short, long = tmp_path / "whole", tmp_path / "short", tmp_path / "long"
    config = small_config(*FEDERATIONS[name])
    start(config, whole, num_workers=1)
    start(config.with_rounds(2), short, num_workers=1)
    before = {item: item.read_bytes() for item in files_in(short)}
    prolong(short, long, config)
    follower = Follower()
    resume(long, num_workers=1, observers=[follower])
    assert follower.rounds == [3]
    assert outcome(long) == outcome(whole)
    assert {item: item.read_bytes() for item in files_in(short)} == before


def test_a_stopped_run_is_prolonged_from_its_last_checkpoint(tmp_path: Path, expected: dict[str, Any]) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    with pytest.raises(PowerCutError):
        start(small_config().with_rounds(2), short, num_workers=1, observers=[Follower(1, PowerCutError())])
    with (short / "rounds.jsonl").open("a") as file:
        file.write('{"round":2, cut sho')
    prolong(short, long, small_config())
    resume(long, num_workers=1)
    assert outcome(long) == expected


def test_only_more_rounds_of_the_same_run_can_be_gone_on_with(tmp_path: Path) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    start(small_config().with_rounds(1), short, num_workers=1)
    with pytest.raises(ValueError, match=rf"the run in {short} has 1 rounds: more than these must be asked for, not 1"):
        prolong(short, long, small_config().with_rounds(1))
    with pytest.raises(ValueError, match="only the number of rounds may be another"):
        prolong(short, long, small_config("experiment.seed=5"))
    assert not long.exists()
    with pytest.raises(ValueError, match="already holds this run with 1 rounds"):
        prolong(short, short, small_config())
    for checkpoint in (short / "checkpoints").iterdir():
        checkpoint.unlink()
    with pytest.raises(ValueError, match="has trained nothing yet"):
        prolong(short, long, small_config())
    assert not long.exists()


def test_a_complete_run_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    first = start(small_config(), path, num_workers=1)
    before = {item: item.read_bytes() for item in files_in(path)}
    monkeypatch.setattr("bcfl.runs.loop.Simulator", None)  # whoever trains fails
    monkeypatch.setattr("bcfl.runs.problem.load", None)  # not even the data are needed
    follower = Follower()
    again = resume(path, observers=[follower])
    assert again.summary() == first.summary() == load_result(path).summary()
    assert (follower.first_round, follower.rounds) == (None, [])
    assert {item: item.read_bytes() for item in files_in(path)} == before


def test_a_run_stopped_before_its_summary_only_writes_that(tmp_path: Path, expected: dict[str, Any]) -> None:
    path = tmp_path / "run"
    start(small_config(), path, num_workers=1)
    (path / "result.json").unlink()
    follower = Follower()
    resume(path, num_workers=1, observers=[follower])
    assert outcome(path) == expected
    assert (follower.first_round, follower.rounds) == (None, [])


def test_a_complete_run_with_a_damaged_end_is_repaired_and_never_read_as_if_sound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, expected: dict[str, Any]
) -> None:
    path = tmp_path / "run"
    start(small_config(), path, num_workers=1)
    os.truncate(path / "checkpoints" / "round-000003.safetensors", 100)
    with pytest.raises(ValueError, match=rf"round-000003.safetensors is damaged.*`bcfl resume {path}`"):
        load_result(path)
    resume(path, num_workers=1)
    assert "round-000003.safetensors is damaged" in caplog.text
    assert "going on from round 2" in caplog.text
    assert outcome(path) == expected
    assert load_result(path).summary() == json.loads(expected["result.json"])


def test_a_repair_that_was_stopped_leaves_a_run_that_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
) -> None:
    path = tmp_path / "run"
    start(small_config(), path, num_workers=1)
    (path / "checkpoints" / "round-000003.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"no checkpoint of its last round; repair it with `bcfl resume {path}`"):
        load_result(path)
    with monkeypatch.context() as patch:
        patch.setattr("bcfl.runs.loop._rounds", stop)
        with pytest.raises(KeyboardInterrupt):
            resume(path, num_workers=1)
    with pytest.raises(ValueError, match="is not complete"):
        load_result(path)
    resume(path, num_workers=1)
    assert outcome(path) == expected


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_stopped_run_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcfl.runs.loop._rounds", stop)
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match=rf"continue the run with `bcfl resume {path}`$"):
        start(small_config(), path, num_workers=1)
    moved, problem = small_config("data.path=else where"), prepare(small_config())
    monkeypatch.setattr("bcfl.runs.loop.prepare", lambda *_: problem)
    with pytest.raises(KeyboardInterrupt, match=rf"`bcfl resume {path} --data-path 'else where'`$"):
        resume(path, config=moved, num_workers=1)
    with pytest.raises(KeyboardInterrupt, match="continue the run with the same command"):
        sweep(plan([small_config()], tmp_path), 1)


def test_a_run_whose_data_are_gone_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    start(small_config(), path, num_workers=1)
    for checkpoint in (path / "checkpoints").iterdir():
        os.truncate(checkpoint, 100)
    before = {item: item.read_bytes() for item in files_in(path)}

    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("data set not found")

    monkeypatch.setattr("bcfl.runs.problem.load", absent)
    with pytest.raises(FileNotFoundError, match="data set not found"):
        resume(path, num_workers=1)
    assert {item: item.read_bytes() for item in files_in(path)} == before


def test_a_run_goes_on_where_its_data_lie_now_but_with_no_other_settings(
    tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    stopped_run(path, 1)
    with pytest.raises(ValueError, match=r"has other settings: only data\.path may be another"):
        resume(path, config=small_config("experiment.seed=1"))
    asked = []

    def load_from(name: str, where: str | None, **options: Any) -> Any:
        asked.append(where)
        return load(name, **options)

    monkeypatch.setattr("bcfl.runs.problem.load", load_from)
    resume(path, config=small_config("data.path=elsewhere"), num_workers=1)
    assert asked == ["elsewhere"]
    assert outcome(path) == expected


def test_with_no_sound_checkpoint_a_run_starts_again_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, expected: dict[str, Any]
) -> None:
    path = tmp_path / "run"
    stopped_run(path, 2)
    for checkpoint in (path / "checkpoints").iterdir():
        os.truncate(checkpoint, 100)
    resume(path, num_workers=1)
    assert caplog.text.count("is damaged") == 2
    assert "starting again from round 0" in caplog.text
    assert outcome(path) == expected


def test_a_run_that_was_overtaken_before_its_first_round_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making a folder and locking it another process may come, and be done before this one goes on."""
    path, longer = tmp_path / "run", tmp_path / "longer"

    def overtaken(path: Path, config: Any) -> RunFolder:
        folder = create(path, config)
        resume(path, num_workers=1)
        return folder

    create = RunFolder.create
    monkeypatch.setattr(RunFolder, "create", overtaken)
    with pytest.raises(TakenError, match="has meanwhile been begun by another process"):
        start(small_config(), path, num_workers=1)
    assert [record["round"] for record in RunFolder(path).lines("rounds.jsonl")] == [0, 1, 2, 3]
    with pytest.raises(TakenError, match="has meanwhile been begun by another process"):
        prolong(path, longer, small_config("experiment.rounds=4"))
    assert [record["round"] for record in RunFolder(longer).lines("rounds.jsonl")] == [0, 1, 2, 3, 4]


def test_a_run_says_which_code_made_it(tmp_path: Path) -> None:
    stopped_run(tmp_path / "run", 1)
    assert RunFolder(tmp_path / "run").read("environment.json")["source"] == source_digest()
    found = set()
    for name, text in (("a.py", "x"), ("a.py", "y"), ("b.py", "y")):
        package = tmp_path / f"{name} {text}"
        package.mkdir()
        (package / name).write_text(text)
        found.add(source_digest(package))
    assert len(found | {source_digest()}) == 4


@pytest.mark.parametrize(("share", "told"), [(0.81, True), (0.79, False), (None, False)])
def test_who_asks_for_more_beliefs_than_there_is_room_for_is_told(
    share: float | None, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needed = 2 * 12 * 2410 * 2 * 4  # before and after, beliefs, parameters, mean and precision, bytes
    monkeypatch.setattr("bcfl.runs.observers.physical_memory", lambda: None if share is None else int(needed / share))
    start(small_config("method.name=bcfl-mh-3", "experiment.rounds=1", "training.momentum_state=fresh"), None)
    assert ("12 beliefs before and after a round take 0.0 GB" in caplog.text) == told


def test_a_run_that_goes_on_elsewhere_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run"
    stopped_run(path, 1)
    caplog.set_level(logging.WARNING)
    environment = json.loads((path / "environment.json").read_text())
    (path / "environment.json").write_text(json.dumps({**environment, "torch": "1.0"}))
    resume(path, num_workers=1)
    assert "results may differ: torch 1.0 is now" in caplog.text
    before = {**environment, "torch": "1.0"}
    assert json.loads((path / "environment.json").read_text()) == {**environment, "before": [before]}
    caplog.clear()
    resume(path)  # complete: nothing is computed, so nothing can differ
    assert caplog.text == ""


def test_an_unfinished_run_cannot_be_read_as_a_result(tmp_path: Path) -> None:
    path = tmp_path / "a run"
    stopped_run(path, 1)
    with pytest.raises(ValueError, match=f"not complete; continue it with `bcfl resume '{path}'`"):
        load_result(path)
    assert is_unfinished(path, small_config())
    assert not is_unfinished(path, small_config("experiment.seed=1"))
    assert not is_unfinished(tmp_path / "nowhere", small_config())


def test_a_run_goes_on_only_with_its_own_split(tmp_path: Path) -> None:
    path = tmp_path / "run"
    stopped_run(path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["num_train"][3] += 1
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"num_train of client 3"):
        resume(path, num_workers=1)


def test_a_federations_run_goes_on_only_in_the_federation(tmp_path: Path) -> None:
    path, longer = tmp_path / "run", tmp_path / "longer"
    stopped_run(path, 1)
    (path / "manifest.json").write_text(json.dumps({"num_clients": 8, "group": None}))
    with pytest.raises(ValueError, match="is a federation's, whose clients have its data"):
        resume(path, num_workers=1)
    with pytest.raises(ValueError, match="is a federation's, whose clients have its data"):
        prolong(path, longer, small_config().with_rounds(4))
    assert not longer.exists()


def test_a_run_goes_on_only_with_a_model_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "run"
    stopped_run(path, 1)

    def other() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    with pytest.raises(ValueError, match=r"the model's tensor 1 is 10×64, but in the run in .* 32×64"):
        resume(path, given=Given(factory=other), num_workers=1)


def test_nobody_else_may_write_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "run"
    stopped_run(path, 1)
    with RunFolder.open(path).locked(), pytest.raises(ValueError, match="in use by another process"):
        resume(path, num_workers=1)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """The n-th call finds the disk full, and so do all after it."""
    calls = iter(range(1_000_000))
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a: full() if next(calls) >= number else real(*a))


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (RunFolder, "append", 0),  # round 0
        (RunFolder, "append", 5),  # in the middle of round 2
        (store, "write_atomically", 1),  # environment.json
        (store, "write_atomically", 2),  # manifest.json
        (store, "write_atomically", 3),  # the first checkpoint
        (store, "write_atomically", 5),  # the third
        (store, "write_atomically", 7),  # result.json
    ],
)
def test_a_full_disk_stops_a_run_that_can_go_on(
    tmp_path: Path, owner: Any, name: str, number: int, expected: dict[str, Any]
) -> None:
    path = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, owner, name, number)
        with pytest.raises(RunStoppedError, match=rf"the disk is full; continue it with `bcfl resume {path}`"):
            start(small_config(), path, num_workers=1)
        if number > 3:  # still full
            with pytest.raises(RunStoppedError, match="the disk is full"):
                resume(path, num_workers=1)
    assert not list(path.rglob("*.tmp"))
    resume(path, num_workers=1)
    assert outcome(path) == expected


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 300 kB: room for the beginning of a run, not for two checkpoints."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_really_full(tiny_disk: Path, expected: dict[str, Any]) -> None:
    path = tiny_disk / "run"
    with pytest.raises(RunStoppedError, match=rf"the disk is full; continue it with `bcfl resume {path}`"):
        start(small_config(), path, num_workers=1)
    assert not list(path.rglob("*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=30m", str(tiny_disk)], check=True)
    resume(path, num_workers=1)
    assert outcome(path) == expected


def test_an_interrupted_run_says_how_it_goes_on(tmp_path: Path, expected: dict[str, Any]) -> None:
    path = tmp_path / "run"
    interruption: list[Observer] = [Follower(1, KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt, match=f"continue the run with `bcfl resume {path}`"):
        start(small_config(), path, num_workers=1, observers=interruption)
    resume(path, num_workers=1)
    assert outcome(path) == expected


def test_a_problem_that_is_not_sound_writes_nothing(tmp_path: Path) -> None:
    for overrides, says in [
        (("method.num_clusters=9",), "method.num_clusters is 9, but there are only 8 clients"),
        (("experiment.clients_per_round=9",), "experiment.clients_per_round is 9, but there are 8 clients"),
        (("method.name=bcfl-c-300", "method.num_clusters=2"), "300 hypotheses.* allow only 256"),
        (("method.cluster_size=[3,4]",), r"cluster_size \[3, 4\] with 4 clusters takes 12 to 16 clients"),
        (("method.cluster_size=[0,1]",), "takes 0 to 4 clients, but there are 8"),
        (("data.name=cifar10", "data.path=nowhere"), "path nowhere: no such file"),
        (("data.name=digit",), "unknown data set 'digit'.*did you mean 'digits'?"),
        (("model.name=mpl",), "unknown model 'mpl'; did you mean 'mlp'?"),
        (("model.name=cifar_cnn",), r"model does not accept inputs of shape \(1, 8, 8\)"),
        (("data.validation=0.5", "data.partition=feature(3,2)"), "G must be 4"),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=says):
            start(small_config(*overrides), tmp_path / "run", num_workers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["bcfl-g", "bcfl-c-3", "bcfl-mh-3"])
@pytest.mark.parametrize("federation", ["plain", "clients come and go", "one joins later"])
def test_clusters_of_a_given_size_are_kept_to(method: str, federation: str) -> None:
    named = (f"method.name={method}", "method.cluster_size=[2,2]", "experiment.rounds=6")
    result = start(small_config(*FEDERATIONS[federation], *named), None, num_workers=1)
    assert torch.bincount(result.assignment).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("scale", [1.0, 1e12])
def test_trainings_that_diverge_are_told_once(caplog: pytest.LogCaptureFixture, scale: float) -> None:
    data = prepare(small_config()).data
    clients = [(data.x_train[own], data.y_train[own]) for own in data.train_of]
    clients[0] = (scale * clients[0][0], clients[0][1])  # one client's units may be off
    start(small_config("method.name=fedavg"), None, given=Given(clients), num_workers=1)
    said = ["inputs are about", "round 1: 1 of 8 trainings did not stay finite and are left out"]
    found = [record.message for record in caplog.records]
    assert [message[: len(start)] for message, start in zip(found, said, strict=scale > 1)] == said * (scale > 1)


def test_a_run_that_never_learns_anything_says_so_every_round_and_ends_in_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, path = small_config("method.name=bcfl-g-w", "training.learning_rate=1e30"), tmp_path / "run"
    with pytest.raises(ValueError, match="nothing was ever learned: none of 32 trainings in 3 rounds stayed finite"):
        start(config, path, num_workers=1)
    told = [record.message for record in caplog.records]
    assert told[0].startswith("round 0: 8 of 8 trainings did not stay finite")
    assert [f"round {i}: nothing was learned" in message for i, message in enumerate(told[1:], 1)] == [True] * 3
    assert not RunFolder(path).complete
    with pytest.raises(ValueError, match="nothing was ever learned"):
        resume(path, num_workers=1)


def tabular(size: int = 40) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two clients with columns of very different scale."""
    y = torch.arange(size) % 2
    x = torch.randn(size, 3) * torch.tensor([1.0, 1e4, 0.01]) + y[:, None]
    return [(x, y), (x, 1 - y)]


@pytest.mark.parametrize("first", [nn.Identity, nn.BatchNorm1d])
def test_features_of_very_different_scale_are_told_before_training(
    first: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    def net() -> nn.Module:
        return nn.Sequential(first(3), nn.Linear(3, 2))

    start(small_config("method.name=fedavg", "experiment.rounds=1"), None, given=Given(tabular(), net))
    told = [record.message for record in caplog.records]
    if first is nn.BatchNorm1d:  # scales by itself
        assert told == []
    else:
        assert re.match(r"inputs are about 5\.\de\+03|inputs differ in scale, column 1", told[0])


def test_what_a_model_raises_in_mid_run_names_the_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"

    def fail(error: Exception) -> Callable[..., None]:
        def evaluate(*_: object) -> None:
            raise error

        return evaluate

    with monkeypatch.context() as patch:
        patch.setattr(Simulator, "evaluate", fail(KeyError("own")))
        with pytest.raises(KeyError) as caught:
            start(small_config(), path, num_workers=1)
        assert caught.value.__notes__ == [f"The rounds until then are kept: continue the run with `bcfl resume {path}`"]
        full = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        patch.setattr(Simulator, "evaluate", fail(full))
        with pytest.raises(RunStoppedError, match=rf"not enough memory; .*with `bcfl resume {path}`$"):
            resume(path, num_workers=1)
        patch.setattr(BCFL, "init", fail(full))
        with pytest.raises(ValueError, match="not enough memory for the run's first models"):
            start(small_config(), tmp_path / "other", num_workers=1)
        assert list((tmp_path / "other").iterdir()) == []  # free for another
    assert resume(path, num_workers=1).history[-1]["round"] == 3


def test_precisions_that_grow_without_end_are_told(caplog: pytest.LogCaptureFixture) -> None:
    growing = ("method.name=bcfl-g", "method.num_clusters=1", "method.fusion=product", "experiment.rounds=60")
    start(small_config(*growing, "experiment.evaluate_every=60"), None, num_workers=1)
    said = next(record.message for record in caplog.records)
    assert said.endswith("or method.forgetting near 1: with method.fusion product precisions may grow without end")


def test_a_run_that_has_begun_keeps_its_folder_though_it_cannot_begin_again(tmp_path: Path) -> None:
    path, net = tmp_path / "run", mlp()
    start(small_config().with_rounds(1), path, num_workers=1)
    for checkpoint in (path / "checkpoints").iterdir():
        checkpoint.unlink()
    with pytest.raises(ValueError, match="clusters would stay alike"):
        resume(path, given=Given(factory=lambda: copy.deepcopy(net)), num_workers=1)
    assert settings_of(path) == small_config().with_rounds(1)


def test_some_digit_domains_are_never_called_digits_five(tmp_path: Path) -> None:
    domains = ("data.name=digits_five", 'data.domains=["optdigits"]', "data.partition=feature(1,4)")
    config = small_config(*domains, "method.name=local", "experiment.rounds=1")
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 10))
    start(config, tmp_path / "run", given=Given(factory=lambda: copy.deepcopy(net)), num_workers=1)
    assert RunFolder.open(tmp_path / "run").read("manifest.json")["dataset"] == "digits_five[optdigits]"


def test_validation_takes_its_examples_from_the_training_data() -> None:
    whole = prepare(small_config()).data
    part = prepare(small_config("data.validation=0.25")).data
    assert int(part.num_examples.sum()) == pytest.approx(0.75 * int(whole.num_examples.sum()), abs=8)
    assert part.x_test is part.x_train


def test_who_never_took_part_may_be_anywhere() -> None:
    result = start(small_config("experiment.clients_per_round=2", "experiment.rounds=1"), None, num_workers=1)
    unseen = result.assignment < 0
    assert int(unseen.sum()) == 6
    assert torch.equal(result.probability[unseen], torch.full((6, 4), 0.25, dtype=torch.float64))
    assert torch.allclose(result.entropy[unseen], torch.tensor(4.0, dtype=torch.float64).log())
    assert torch.allclose(result.probability.sum(1), torch.ones(8, dtype=torch.float64))
    assert isinstance(result.predictor(int(unseen.nonzero()[0])), nn.Module)


def test_observers_hear_how_a_run_ends(tmp_path: Path) -> None:
    class Listener(Follower):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.heard: list[Any] = []

        def ended(self) -> None:
            self.heard.append("ended")

        def failed(self, error: BaseException) -> None:
            self.heard.append(error)

    cut = PowerCutError()
    stopped, whole = Listener(1, cut), Listener()
    with pytest.raises(PowerCutError):
        start(small_config(), tmp_path / "run", num_workers=1, observers=[stopped])
    resume(tmp_path / "run", num_workers=1, observers=[whole])
    assert (stopped.heard, whole.heard) == ([cut], ["ended"])


@pytest.mark.parametrize("terminal", [True, False])
def test_python_shows_a_bar_on_a_terminal_and_is_quiet_elsewhere(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")  # rich takes the first for a terminal
    data = prepare(small_config()).data
    clients = [(data.x_train[own], data.y_train[own]) for own in data.train_of]
    bcfl.train(mlp, clients, method="fedavg", rounds=2, num_workers=1)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("2/2" in shown.err) == terminal
