"""Many runs: in order, never twice, and on from where they stopped."""

import contextlib
import json
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import outcome, small_config
from torch import nn

from bcfl.data.manifest import save_partition
from bcfl.report.grouping import differences, mean_and_deviation, rows_in_order
from bcfl.runs import loop as run_module
from bcfl.runs import sweep as module
from bcfl.runs.loop import start
from bcfl.runs.observers import Observer
from bcfl.runs.planning import Planned, expand, plan
from bcfl.runs.problem import Split, load_data
from bcfl.runs.settings import Config
from bcfl.runs.store import RunFolder, TakenError
from bcfl.runs.sweep import sweep


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


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (["method.name=bcfl-mh-3", "method.num_clusters=50"], r"method\.num_clusters is 50"),
        (["experiment.joins=[[99, 2]]"], "99"),
        (["experiment.clients_per_round=9"], "experiment.clients_per_round is 9, but there are 8"),
        (["model.factory=nowhere:net"], r"model\.factory 'nowhere:net' cannot be imported"),
        (["model.name=cifar_cnn"], "model does not accept inputs of shape"),
    ],
)
def test_a_mistake_in_the_last_run_shows_before_the_first(
    tmp_path: Path, calls: list[tuple[str, str]], mistake: list[str], says: str
) -> None:
    wrong = small_config(*mistake)
    runs = plan([small_config(), *configs(), wrong], tmp_path / "runs")
    with pytest.raises(ValueError, match=rf"^run {runs[-1].path.name}: .*{says}"):
        sweep(runs, 1)
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def test_a_batch_that_the_model_cannot_take_shows_before_the_first_run(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    sizes = [small_config("model.factory=test_sweep:with_norm", f"training.batch_size={size}") for size in (32, 1)]
    with pytest.raises(ValueError, match="one example at a time"):
        sweep(plan(sizes, tmp_path / "runs"), 1)
    assert calls == []


def test_a_split_that_cannot_be_drawn_shows_before_the_first_run(
    tmp_path: Path, calls: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: Config) -> Any:
        if config.experiment.seed == 0:
            raise ValueError("none of 1000 draws gave each client enough")
        return load_data(config)

    monkeypatch.setattr(module, "load_data", load)
    with pytest.raises(ValueError, match="none of 1000 draws"):
        sweep(plan(configs()[:2], tmp_path / "runs"), 1)  # of seeds 1 and 0
    assert calls == []


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """For which configurations a sweep itself, not its runs, loaded data."""
    made: list[Config] = []

    def watched(config: Config) -> Any:
        made.append(config)
        return load_data(config)

    monkeypatch.setattr(module, "load_data", watched)
    return made


def runs_on_file(folder: Path) -> list[Planned]:
    """Two methods and two seeds on the split in split.npz, which has 8 clients."""
    split = folder / "split.npz"
    save_partition(split, load_data(small_config()))
    return plan(configs("data.partition=file", f"data.partition_file={split}")[:4], folder / "runs")


def test_a_complete_run_of_other_data_is_not_taken_for_done(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    runs = runs_on_file(tmp_path)
    done = sweep(runs[:1], 1)
    assert sweep(runs[:1], 1) == done
    calls.clear()
    save_partition(tmp_path / "split.npz", load_data(small_config("data.partition=feature(4,4)")))
    for asked in (runs[:1], list(reversed(runs))):  # whether something is left to run or not
        with pytest.raises(ValueError) as caught:
            sweep(asked, 1)
        message = str(caught.value)
        assert message.startswith(f"the run in {runs[0].path} does not fit the data at hand: ")
        assert "num_clients is 16, not 8; choose another folder with --out, or delete" in message
        assert "\n" not in message
    assert calls == []


def test_a_complete_run_of_data_from_another_path_is_not_taken_for_done(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    """The identity says nothing of data.path: the same data may lie elsewhere, but they must be the same."""

    def run_on(name: str, num_train: int) -> list[Planned]:
        path, rng = tmp_path / f"{name}.npz", np.random.default_rng(0)
        arrays = {f"x_{part}": rng.integers(0, 256, (size, 28, 28), np.uint8)
                  for part, size in (("train", num_train), ("test", 40))}  # fmt: skip
        labels = {key.replace("x", "y"): (np.arange(len(x)) % 10).astype(np.uint8) for key, x in arrays.items()}
        np.savez(path, allow_pickle=False, **arrays, **labels)
        data = ("data.name=fashion_mnist", f"data.path={path}", "data.partition=label(0,2,10.0)")
        return plan([small_config("experiment.rounds=1", "method.name=fedavg", *data)], tmp_path / "runs")

    done = sweep(run_on("here", 200), 1)
    assert sweep(run_on("a copy", 200), 1) == done
    assert len(calls) == 1
    with pytest.raises(ValueError, match=r"does not fit the data at hand: .* num_train of client 0"):
        sweep(run_on("others", 300), 1)


def test_an_unfinished_run_of_other_data_is_refused_before_any_run(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    runs = runs_on_file(tmp_path)
    sweep(runs[3:], 1)
    (runs[3].path / "result.json").unlink()
    calls.clear()
    save_partition(tmp_path / "split.npz", load_data(small_config("data.partition=feature(4,4)")))
    with pytest.raises(ValueError, match=f"the run in {runs[3].path} does not fit the data at hand"):
        sweep(runs, 1)
    assert calls == []


def test_data_are_loaded_once_however_many_complete_runs_have_them(tmp_path: Path, loads: list[Config]) -> None:
    runs = plan([*configs(), *configs("training.momentum=0.5")], tmp_path)
    sweep(runs, 1)
    loads.clear()
    sweep(runs, 1)
    assert sorted(config.experiment.seed for config in loads) == [0, 1]
    fixed = plan(configs("data.seed=3"), tmp_path)
    sweep(fixed, 1)
    loads.clear()
    sweep(fixed, 1)
    assert len(loads) == 1  # the run's seed has no part in that split


@pytest.mark.parametrize("absent", ["the split", "the data set", "the user's module"])
def test_complete_runs_are_read_where_their_data_are_absent(
    absent: str, tmp_path: Path, loads: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data.py").write_text("from bcfl.runs.problem import load_data\n"
        "from small_runs import small_config\n"
        "def clients():\n"
        "    data = load_data(small_config())\n"
        "    return [(data.x_train[held], data.y_train[held]) for held in data.train_of]\n")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    runs = runs_on_file(tmp_path)
    if absent == "the user's module":
        own = configs("data.factory=own_data:clients", "data.partition=feature(4,5)", "model.name=mlp")
        runs = plan(own[:2], tmp_path / "runs")
    done = sweep(runs[:2], 1)
    if absent == "the split":
        (tmp_path / "split.npz").unlink()
    elif absent == "the user's module":
        (tmp_path / "own_data.py").unlink()
        monkeypatch.delitem(module.sys.modules, "own_data")
    else:

        def missing(config: Config) -> Any:
            loads.append(config)
            raise FileNotFoundError("data set not found")

        monkeypatch.setattr(module, "load_data", missing)
    loads.clear()
    assert sweep(runs[:2], 1) == done
    assert len(loads) == 1  # not sought again for the other seed
    if absent != "the user's module":
        with pytest.raises(FileNotFoundError):
            sweep(runs, 1)  # two are left, and they need the data


def test_a_split_that_cannot_be_read_is_no_absent_one(tmp_path: Path) -> None:
    runs = runs_on_file(tmp_path)[:1]
    sweep(runs, 1)
    (tmp_path / "split.npz").write_text("something else")
    with pytest.raises(ValueError, match=r"split\.npz is damaged"):
        sweep(runs, 1)


def test_a_complete_run_without_a_manifest_is_read(tmp_path: Path) -> None:
    runs = runs_on_file(tmp_path)[:1]
    done = sweep(runs, 1)
    (runs[0].path / "manifest.json").unlink()
    assert sweep(runs, 1) == done


def test_a_sweep_file_stands_for_every_combination(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        '[experiment]\nrounds = 2\n[sweep]\nmethods = ["fedavg", "ifca"]\nseeds = [3, 4]\n'
        'vary = { "training.learning_rate" = [0.1, 0.2] }\n'
    )
    made = expand([path], ["experiment.rounds=5"])
    described = [(c.method["name"], c.training.learning_rate, c.experiment.seed, c.experiment.rounds) for c in made]
    assert described == [(m, rate, seed, 5) for seed in (3, 4) for m in ("fedavg", "ifca") for rate in (0.1, 0.2)]
    path.write_text("[experiment]\nrounds = 2\n")
    assert [config.experiment.rounds for config in expand([path])] == [2]


def test_an_override_of_what_varies_narrows_the_sweep_to_its_value(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        '[sweep]\nmethods = ["ifca", "bcfl-g"]\nseeds = [3, 4]\nvary = { "method.num_clusters" = [2, 3, 5] }\n'
    )

    def made(*overrides: str) -> list[tuple[Any, ...]]:
        return [(c.method["name"], c.experiment.seed, c.method["num_clusters"]) for c in expand([path], overrides)]

    assert len(made()) == 12
    assert made("experiment.seed=7", "method.name=fesem") == [("fesem", 7, k) for k in (2, 3, 5)]
    assert made("method.num_clusters=4") == [(name, seed, 4) for seed in (3, 4) for name in ("ifca", "bcfl-g")]
    assert made(" method.num_clusters = 4", "method.num_clusters=2", "method.name=ifca") == [
        ("ifca", 3, 2), ("ifca", 4, 2)
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"experiment\.seed must be a whole number"):
        made("experiment.seed=[1, 2]")


def test_a_method_may_have_options_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        '[method]\nproximal = 0.3\nnum_clusters = 3\n[sweep]\nmethods = ["fedamp", "fedsoft", "fesem"]\n'
        "[sweep.options.fedsoft]\nproximal = 0.01\n[sweep.options.fesem]\nproximal = 0.02\nnum_clusters = 2\n"
    )

    def made(*overrides: str) -> dict[str, tuple[Any, ...]]:
        return {
            c.method["name"]: (c.method["proximal"], c.method.get("num_clusters")) for c in expand([path], overrides)
        }

    assert made() == {"fedamp": (0.3, None), "fedsoft": (0.01, 3), "fesem": (0.02, 2)}
    assert made("method.proximal=1.0") == {"fedamp": (1.0, None), "fedsoft": (1.0, 3), "fesem": (1.0, 2)}
    assert made("method.name=fedsoft") == {"fedsoft": (0.01, 3)}
    path.write_text(path.read_text().replace("[sweep]", '[sweep]\nvary = { "method.num_clusters" = [5] }'))
    assert made()["fesem"] == (0.02, 5)


def test_the_first_seed_of_all_files_comes_before_the_second_of_any(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('[sweep]\nmethods = ["fedavg", "ifca"]\nseeds = [7, 1]\n')
    second.write_text('[sweep]\nmethods = ["local"]\nvary = { "experiment.seed" = [4, 7, 2] }\n')
    made = [(config.method["name"], config.experiment.seed) for config in expand([first, second])]
    assert made == [("fedavg", 7), ("ifca", 7), ("local", 4), ("fedavg", 1), ("ifca", 1), ("local", 7), ("local", 2)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sweep = 3", "sweep must be a section"),
        ("[sweep]\nvary = 3", "sweep must be a section"),
        ("[sweep]\nseed = [1]", r"unknown key sweep\.seed"),
        ("[sweep]\nseeds = 3", "sweep.seeds must be a list of at least one value, got 3"),
        ("[sweep]\nmethods = []", r"sweep.methods must be a list of at least one value, got \[\]"),
        ('[sweep]\nmethods = "bcfl-g"', "sweep.methods must be a list of at least one value, got 'bcfl-g'"),
        ('[sweep]\nvary = { "rounds" = [1] }', 'sweep.vary: rounds must be "section.key" with a list'),
        ("[sweep]\nvary = { experiment.rounds = [1] }", 'sweep.vary: experiment must be "section.key" with a list'),
        ('[sweep]\nvary = { "experiment.rounds" = 1 }', 'rounds must be "section.key" with a list .*, got 1'),
        ("[method]\nselction = 1", r"unknown key method\.selction"),
        ('[sweep]\nvary = { "experiment.round" = [1] }', "did you mean experiment.rounds?"),
        ('[sweep]\nmethods = ["fedavgg"]', "did you mean 'fedavg'"),
        ('[sweep]\nseeds = [1]\nvary = { "experiment.seed" = [2] }', "must not do so again"),
        ("method = 3", "method must be a section of settings, got 3"),
        ('[sweep]\nmethods = [3, "fedavg"]', "method.name must be a text, got 3"),
        ('[sweep]\nmethods = [["fedavg"]]', "method.name must be a text"),
        ("[sweep]\noptions = 3", r"sweep\.options must hold a section for each method"),
        ('[sweep]\nmethods = ["fedsoft"]\noptions = { fedsoft = 1 }', r"sweep\.options must hold a section"),
        (
            '[sweep]\nmethods = ["fedsoft"]\n[sweep.options.fedsof]\nproximal = 1',
            r"unknown method sweep\.options\.fedsof; did you mean sweep\.options\.fedsoft\?",
        ),
        (
            '[sweep]\nmethods = ["fedavg"]\n[sweep.options.fedavg]\nproximal = 1',
            r"unknown key sweep\.options\.fedavg\.proximal; allowed: ",
        ),
        (
            '[sweep]\nmethods = ["fedsoft"]\n[sweep.options.fedsoft]\nproximal = "far"',
            "method.proximal must be a number",
        ),
        ('[data]\nname = "digit"', r"unknown data set digit; did you mean digits\? allowed: .*cifar10"),
        ('[sweep]\nvary = { "data.name" = ["digits", "mnist5"] }', "unknown data set mnist5"),
        ('[data]\npartition = "feature(4)"', r"partition 'feature\(4\)' is not one of"),
        ('[model]\nname = "mpl"', "unknown model 'mpl'; did you mean 'mlp'"),
        ('[data]\nfactory = "mine:clients"\nshare_floor = 0.01', "data.share_floor is for named data sets"),
        ('[data]\nfactory = "mine:clients"', "model.name must be given for these data, one of: mlp"),
    ],
)
def test_a_sweep_file_with_a_mistake_is_refused(tmp_path: Path, text: str, says: str) -> None:
    first, path = tmp_path / "first.toml", tmp_path / "a.toml"
    first.write_text("")
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^{path}: .*{says}"):
        expand([first, path])


def test_settings_that_differ_tell_runs_apart() -> None:
    def described(*overrides: str) -> dict[str, dict[str, Any]]:
        return small_config(*overrides).as_dict()

    found = differences([
        described("method.name=bcfl-g", "method.fusion=exact"),
        described("method.name=bcfl-g", "experiment.seed=3", "data.seed=4"),  # other draws of the same settings
        described("method.name=bcfl-mh-3", "method.forgetting=0.0"),  # of this method there is no other forgetting
        described("method.name=fedavg", "training.momentum=0.5"),
    ])  # fmt: skip
    assert found == [
        {"method.fusion": "exact", "training.momentum": 0.9},
        {"method.fusion": "geometric", "training.momentum": 0.9},
        {"training.momentum": 0.9},
        {"training.momentum": 0.5},
    ]


def test_a_setting_that_is_written_down_only_where_it_is_on_tells_runs_apart() -> None:
    found = differences([
        small_config(*overrides).as_dict()
        for overrides in (["method.racing=0.01"], [], ["experiment.mixture=true"], ["method.name=fedavg"])
    ])  # fmt: skip
    assert found == [{"method.racing": 0.01}, {}, {"experiment.mixture": True}, {}]


def test_rows_are_in_the_order_of_methods_and_values() -> None:
    rows: list[tuple[str, dict[str, Any]]] = [
        ("b", {"m.k": 10, "t.x": "z"}),
        ("a", {"m.k": 3}),
        ("b", {"m.k": 9, "t.x": "z"}),
        ("a", {"m.k": "none"}),
        ("b", {"m.k": 10, "t.x": 0.5}),
        ("a", {}),
        ("b", {"m.k": 10, "t.x": [1, 2]}),
    ]
    assert rows_in_order(rows) == [2, 4, 6, 0, 5, 1, 3]
    assert rows_in_order(rows[::-1]) == [4, 2, 0, 6, 1, 5, 3]


@dataclass
class Watch(Observer):
    """A view, and the observer of every run, that remembers."""

    at_once: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    started_runs: list[str] = field(default_factory=list)
    on_wait: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def begin(self, run: Planned, at_once: int) -> Observer:
        self.at_once.append(at_once)
        return self

    def wait(self, at_once: int) -> None:
        self.waits.append(at_once)
        self.on_wait.close()

    def started(self, config: Config, data: Split, first_round: int) -> None:
        self.started_runs.append(config.label)

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        pass


def test_what_another_process_has_in_hand_is_left_to_it_and_taken_over_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    runs = plan(configs()[:3], tmp_path)
    RunFolder.create(runs[0].path, runs[0].config.as_dict())
    watch = Watch()
    watch.on_wait.enter_context(RunFolder(runs[0].path).locked())  # let go while the sweep waits for it
    summaries = sweep(runs, 1, watch)
    assert watch.started_runs == [runs[i].config.label for i in (1, 2, 0)]
    assert watch.waits == [1]
    assert watch.at_once == [1, 2, 2, 1]  # while the other is at work, two go on side by side
    assert [summary["seed"] for summary in summaries] == [run.config.experiment.seed for run in runs]


def test_a_run_that_another_process_completes_meanwhile_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = plan(configs()[:1], tmp_path)
    real = run_module.prepare

    def slow(*arguments: Any) -> Any:  # while the data are loaded, another process begins and ends the same run
        monkeypatch.setattr(run_module, "prepare", real)
        start(run.config, run.path, num_workers=1)
        return real(*arguments)

    monkeypatch.setattr(run_module, "prepare", slow)
    watch = Watch()
    assert sweep([run], 1, watch)[0]["method"] == "fedavg"
    assert watch.started_runs == []
    monkeypatch.setattr(run_module, "prepare", slow)
    with pytest.raises(TakenError, match="this run, complete"):
        start(run.config, run.path, num_workers=1)


def sweep_and_tell(runs: Sequence[Planned], barrier: Any, told: Any) -> None:
    watch = Watch()
    barrier.wait(120)
    sweep(runs, 1, watch)
    told.put(watch.started_runs)


def test_two_sweeps_at_once_share_the_runs(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["bcfl.cli.summary"])
    runs = plan(configs("experiment.rounds=8"), tmp_path)
    barrier, told = processes.Barrier(2), processes.Queue()
    both = [processes.Process(target=sweep_and_tell, args=(runs, barrier, told)) for _ in range(2)]
    for process in both:
        process.start()
    shares = [told.get(timeout=120) for _ in both]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert Counter(shares[0] + shares[1]) == Counter(run.config.label for run in runs)  # each run once
    assert all(shares)  # and neither only looked on
    assert all(len((run.path / "rounds.jsonl").read_text().splitlines()) == 9 for run in runs)


def test_several_jobs_give_the_same_results_as_one(tmp_path: Path) -> None:
    one, two = plan(configs()[:4], tmp_path / "one"), plan(configs()[:4], tmp_path / "two")
    watch = Watch()
    assert sweep(one, 2, watch, jobs=2) == sweep(two, 1)
    assert watch.at_once[0] == 2
    assert [outcome(run.path) for run in one] == [outcome(run.path) for run in two]


@pytest.mark.parametrize(("cores", "workers", "jobs"), [(1, None, 1), (8, None, 1), (16, 8, 2), (64, 10, 6)], ids=str)
def test_by_default_as_many_runs_at_once_as_keep_the_cores_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, workers: int | None, jobs: int
) -> None:
    """The small runs have 8 clients: one run cannot use more cores than that."""
    used: list[tuple[int | None, int]] = []

    @contextlib.contextmanager
    def helpers(runs: Sequence[Planned], how: dict[str, Any], count: int) -> Any:
        used.append((how["num_workers"], count + 1))
        yield

    monkeypatch.setattr(module.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(module, "_helpers", helpers)
    monkeypatch.setattr(module, "_work_off", lambda runs, how, view, jobs: None)
    with pytest.raises(ValueError, match="is not a run folder"):  # nothing was run
        sweep(plan(configs(), tmp_path), None)
    assert used == [(workers, jobs)]


def test_mean_and_sample_deviation() -> None:
    assert mean_and_deviation([1.0, 2.0, 3.0, None]) == (2.0, 1.0)
    assert mean_and_deviation([2.0]) == (2.0, 0.0)
    assert mean_and_deviation([None]) is None
