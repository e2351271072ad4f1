"""Many runs: in order, never twice, and on from where they stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import outcome, small_config

from bcfl.experiment import sweep as module
from bcfl.experiment.config import Config
from bcfl.experiment.run import start
from bcfl.experiment.sweep import by_method, expand, mean_and_deviation, plan, sweep


def configs(*overrides: str) -> list[Config]:
    names, seeds = ("fedavg", "ifca", "bcfl-g"), (1, 0)
    return [small_config("experiment.rounds=1", f"method.name={name}", f"experiment.seed={seed}", *overrides)
            for name in names for seed in seeds]  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which runs were started and which resumed."""
    made: list[tuple[str, str]] = []

    def watched(name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append((name, Path(arguments[-1]).name))
            return real(*arguments, **options)

        return call

    for name in ("start", "resume"):
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    return made


def test_runs_keep_their_order_and_are_listed_once(tmp_path: Path) -> None:
    runs = plan([*configs(), *reversed(configs())], tmp_path)
    assert [run.config for run in runs] == configs()
    assert len({run.path for run in runs}) == 6
    assert runs[0].path.name.startswith("digits-fedavg-s1-")
    assert plan(configs("method.num_clusters=3"), tmp_path)[0].path == runs[0].path  # FedAvg has no clusters
    assert plan(configs("method.num_clusters=3"), tmp_path)[-1].path != runs[-1].path


def test_nothing_runs_twice(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    runs = plan(configs(), tmp_path)
    first = sweep(runs[:4], 1)
    assert [(summary["method"], summary["seed"]) for summary in first] == [
        *(("fedavg", 1), ("fedavg", 0), ("ifca", 1), ("ifca", 0))
    ]
    assert calls == [("start", run.path.name) for run in runs[:4]]
    calls.clear()
    again = sweep(list(reversed(runs)), 1)
    assert calls == [("start", run.path.name) for run in reversed(runs[4:])]
    assert list(reversed(again))[:4] == first
    calls.clear()
    assert sweep(list(reversed(runs)), 1) == again
    assert calls == []


def test_a_stopped_run_of_a_sweep_goes_on(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    runs = plan(configs()[:2], tmp_path)
    start(runs[1].config, runs[1].path, num_workers=1)
    expected = outcome(runs[1].path)
    (runs[1].path / "result.json").unlink()
    (runs[1].path / "checkpoints" / "round-000001.safetensors").unlink()
    sweep(runs, 1)
    assert calls == [("start", runs[0].path.name), ("resume", runs[1].path.name)]
    assert outcome(runs[1].path) == expected


def test_a_run_killed_before_its_first_round_goes_on(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    (run,) = plan(configs()[:1], tmp_path)
    run.path.mkdir()
    (run.path / "config.json").write_text(json.dumps(run.config.as_dict()))
    assert sweep([run], 1)[0]["method"] == "fedavg"
    assert calls == [("resume", run.path.name)]


def test_a_mistake_in_the_last_run_shows_before_the_first(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    wrong = small_config("method.name=bcfl-mh-3", "method.num_clusters=50")
    with pytest.raises(ValueError, match=r"method\.num_clusters is 50"):
        sweep(plan([*configs(), wrong], tmp_path / "runs"), 1)
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_file_stands_for_every_combination(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        '[experiment]\nrounds = 2\n[sweep]\nmethods = ["fedavg", "ifca"]\nseeds = [3, 4]\n'
        'vary = { "training.learning_rate" = [0.1, 0.2] }\n'
    )
    made = expand(path, ["experiment.rounds=5"])
    described = [(c.method["name"], c.training.learning_rate, c.experiment.seed, c.experiment.rounds) for c in made]
    assert described == [(m, rate, seed, 5) for m in ("fedavg", "ifca") for rate in (0.1, 0.2) for seed in (3, 4)]
    path.write_text("[experiment]\nrounds = 2\n")
    assert [config.experiment.rounds for config in expand(path)] == [2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sweep = 3", "sweep in .* must be a section"),
        ("[sweep]\nvary = 3", "sweep in .* must be a section"),
        ("[sweep]\nseed = [1]", r"unknown key sweep\.seed"),
        ("[sweep]\nseeds = 3", "experiment.seed must be section.key with a list"),
        ("[sweep]\nmethods = []", "method.name must be section.key with a list"),
        ('[sweep]\nvary = { "rounds" = [1] }', "rounds must be section.key"),
        ('[sweep]\nvary = { "experiment.round" = [1] }', "did you mean experiment.rounds?"),
        ('[sweep]\nmethods = ["fedavgg"]', "did you mean 'fedavg'"),
    ],
)
def test_a_sweep_file_with_a_mistake_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        expand(path)


def test_summaries_are_gathered_by_method() -> None:
    summaries = [{"method": name, "seed": seed} for seed in (0, 1) for name in ("b", "a")]
    assert by_method(summaries) == {name: [{"method": name, "seed": seed} for seed in (0, 1)] for name in ("b", "a")}


def test_mean_and_sample_deviation() -> None:
    assert mean_and_deviation([1.0, 2.0, 3.0, None]) == (2.0, 1.0)
    assert mean_and_deviation([2.0]) == (2.0, 0.0)
    assert mean_and_deviation([None]) is None
