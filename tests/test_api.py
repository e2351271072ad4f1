"""The Python door: any clients, any model, one call."""

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import bcfl
from bcfl.client.trainer import Training
from bcfl.runs.observers import Observer
from bcfl.runs.stopping import RunStoppedError
from bcfl.runs.store import RunFolder

README = Path(__file__).parents[1] / "README.md"


def rows(kind: int, seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Points of the plane; what is class 1 for one kind of clients is class 0 for the other."""
    x = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
    return x, ((x[:, 0] > 0) == (kind == 0)).long()


def federation(num_clients: int = 6, size: int = 40) -> list[tuple[Tensor, ...]]:
    """Clients of two kinds in turn, with test data."""
    return [(*rows(j % 2, j, size), *rows(j % 2, 100 + j, 20)) for j in range(num_clients)]


def small_net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))


QUICK: dict[str, Any] = {"rounds": 3, "num_clusters": 2, "num_workers": 1}


@pytest.fixture(scope="module")
def result() -> bcfl.Result:
    return bcfl.train(small_net, federation(), method="bcfl-mh-3", rounds=15, num_clusters=2)


def same_models(a: bcfl.Result, b: bcfl.Result) -> bool:
    return torch.equal(a.state.models.mean, b.state.models.mean) and a.summary() == b.summary()


def test_the_lines_of_the_readme_do_what_they_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not README.exists():
        pytest.skip("there is no README.md")
    block = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(block[1], "README.md", "exec"), names)
    assert len([line for line in block[1].splitlines() if line.strip()]) <= 12
    result: bcfl.Result = names["result"]
    first, second = set(result.assignment[:5].tolist()), set(result.assignment[5:].tolist())
    assert len(first) == len(second) == 1  # the two kinds of clients are told apart
    assert first != second
    assert capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_clusters_are_found_and_their_models_work(result: bcfl.Result) -> None:
    assert result.assignment.tolist() in ([0, 1] * 3, [1, 0] * 3)
    assert result.accuracy is not None
    assert result.accuracy > 0.9
    for client, (_, _, x, y) in enumerate(federation()):
        predictor = result.predictor(client)
        assert not predictor.training
        assert float((predictor(x).argmax(1) == y).double().mean()) == pytest.approx(
            result.history[-1]["client_accuracy"][client]
        )
        model = result.models[int(result.assignment[client])]
        assert torch.equal(model(x), predictor(x))


def test_probabilities_say_how_sure_it_is(result: bcfl.Result) -> None:
    assert result.probability.shape == (6, 2)
    assert torch.allclose(result.probability.sum(1), torch.ones(6, dtype=torch.float64))
    assert torch.equal(result.probability.argmax(1), result.assignment)
    together = result.co_association
    assert torch.equal(together, together.T)
    assert torch.allclose(together.diagonal(), torch.ones(6, dtype=torch.float64))
    assert ((together >= 0) & (together <= 1 + 1e-12)).all()
    assert float(together[0, 2]) > float(together[0, 1])  # clients 0 and 2 are of one kind
    assert result.entropy.shape == (6,)
    assert ((result.entropy >= 0) & (result.entropy <= np.log(2) + 1e-12)).all()


def test_history_and_summary_tell_what_happened(result: bcfl.Result) -> None:
    assert [record["round"] for record in result.history] == list(range(16))
    assert len(result.models) == 2
    summary = result.summary()
    assert (summary["method"], summary["seed"], summary["rounds"]) == ("bcfl-mh-3", 0, 15)
    assert summary["accuracy"] == result.accuracy
    assert summary["ari"] is None  # nobody said what the true groups are
    assert summary["work"]["trainings"] == sum(record["work"]["trainings"] for record in result.history) > 0
    assert result.path is None


class Items(Dataset):  # type: ignore[type-arg]
    """A Dataset as people write them: single examples, labels as plain numbers."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


def as_arrays(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Any:
    return x.numpy(), y.numpy(), x_test.double().numpy(), y_test.int().numpy()


def as_mapping(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Any:
    return {"x": x, "y": y, "x_test": x_test, "y_test": y_test}


def as_datasets(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Any:
    return TensorDataset(x, y), Items(x_test, y_test)


@pytest.mark.parametrize("form", [as_arrays, as_mapping, as_datasets])
def test_every_form_of_client_is_the_same_client(form: Any) -> None:
    expected = bcfl.train(small_net, federation(), **QUICK)
    assert same_models(bcfl.train(small_net, [form(*client) for client in federation()], **QUICK), expected)


@pytest.mark.parametrize("form", [lambda x, y: (x, y), lambda x, y: {"x": x, "y": y}, Items])
def test_without_test_data_there_is_no_accuracy(form: Any) -> None:
    with_tests = bcfl.train(small_net, federation(), **QUICK)
    without = bcfl.train(small_net, [form(*client[:2]) for client in federation()], **QUICK)
    assert without.accuracy is None
    assert {without.summary()[key] for key in ("macro_f1", "nll", "ece")} == {None}
    assert torch.equal(without.state.models.mean, with_tests.state.models.mean)


def test_some_clients_may_have_test_data_and_others_none() -> None:
    clients = [client if j % 2 else client[:2] for j, client in enumerate(federation())]
    result = bcfl.train(small_net, clients, **QUICK)
    assert result.accuracy is not None
    assert [accuracy is None for accuracy in result.history[-1]["client_accuracy"]] == [True, False] * 3


def test_true_groups_are_compared_where_they_are_known() -> None:
    clients = [{**as_mapping(*client), "group": j % 2} for j, client in enumerate(federation())]
    result = bcfl.train(small_net, clients, method="bcfl-g-w", rounds=4, num_clusters=2)
    assert result.group is not None
    assert result.group.tolist() == [0, 1] * 3
    assert result.summary()["ari"] == 1.0


def test_any_callable_is_a_model() -> None:
    width = 8
    result = bcfl.train(
        lambda: nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)), federation(), **QUICK
    )
    assert same_models(result, bcfl.train(small_net, federation(), **QUICK))


def test_the_number_of_workers_changes_nothing() -> None:
    settings = {**QUICK, "method": "bcfl-mh-3-w"}
    one, three = (bcfl.train(small_net, federation(), **{**settings, "num_workers": n}) for n in (1, 3))
    assert same_models(one, three)


def test_the_callers_own_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    bcfl.train(small_net, federation(), **QUICK)
    assert torch.equal(torch.rand(1), expected)


def test_a_kept_run_is_read_back(tmp_path: Path) -> None:
    result = bcfl.train(small_net, federation(), out=tmp_path / "run", **QUICK)
    again = bcfl.load(tmp_path / "run", small_net)
    assert same_models(result, again)
    assert result.path == again.path == tmp_path / "run"
    assert torch.equal(result.probability, again.probability)
    assert result.history == again.history
    x = torch.randn(3, 2)
    assert torch.equal(result.predictor(1)(x), again.predictor(1)(x))
    with pytest.raises(ValueError, match=r"model\.factory was given in Python and must be given there again"):
        bcfl.load(str(tmp_path / "run"))


@pytest.mark.parametrize("momentum_state", ["belief", "fresh"])  # momentum stands in the vector, too, or does not
def test_a_kept_run_is_not_read_into_another_model(tmp_path: Path, momentum_state: Any) -> None:
    training = Training(momentum_state=momentum_state)
    bcfl.train(small_net, federation(), out=tmp_path, training=training, **{**QUICK, "rounds": 1})
    for width in (4, 16, 17):  # 16: the vector with its momentum would be long enough
        with pytest.raises(ValueError, match=f"the model's tensor 1 is {width}×2, but in the run in {tmp_path} 8×2"):
            bcfl.load(tmp_path, partial(small_net, width))
    with pytest.raises(ValueError, match=r"the model's tensor 1 is 6×2, but in the run in .* 8×2$"):
        bcfl.load(tmp_path, lambda: nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2), nn.Linear(2, 5, False)))
    with pytest.raises(ValueError, match=r"the model's layer 3 is 1: Sigmoid\(\), but in the run in .* 1: ReLU\(\)$"):
        bcfl.load(tmp_path, lambda: nn.Sequential(nn.Linear(2, 8), nn.Sigmoid(), nn.Linear(8, 2)))
    assert bcfl.load(tmp_path, small_net).accuracy is not None


@pytest.mark.parametrize("model", [small_net(), 3])
def test_a_model_is_given_as_a_function(tmp_path: Path, model: Any) -> None:
    says = f"model must be a function that returns a new torch.nn.Module, .*, got {type(model).__name__}"
    with pytest.raises(ValueError, match=says):
        bcfl.train(model, federation(), **QUICK)
    bcfl.train(small_net, federation(), out=tmp_path, **{**QUICK, "rounds": 1})
    with pytest.raises(ValueError, match=says):
        bcfl.load(tmp_path, model)


def test_a_kept_run_is_never_written_over(tmp_path: Path) -> None:
    bcfl.train(small_net, federation(), out=tmp_path / "run", **QUICK)
    path = tmp_path / "run"
    for changes, says in (
        (
            {},
            f"already holds this run, complete: read it with `bcfl resume {path}`, or bcfl.load('{path}', …) in Python",
        ),
        ({"seed": 1}, "already holds another run: experiment.seed is 0 there, 1 here; choose another folder"),
        ({"method": "bcfl-g"}, 'already holds another run: method.name is "bcfl-mh-3" there, "bcfl-g" here;'),
        ({"stay": 0.9}, "already holds another run: method.stay is off there, 0.9 here;"),
        ({"rounds": 2}, "already holds this run with 3 rounds: choose another folder for 2"),
        (
            {"rounds": 4},
            "already holds this run with 3 rounds: choose another folder for 4, into which "
            f"`bcfl resume {path} --rounds 4`, or go_on_from='{path}' in Python, takes them over",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            bcfl.train(small_net, federation(), out=str(path), **{**QUICK, **changes})


def test_an_unfinished_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    expected = bcfl.train(small_net, federation(), **QUICK)
    with pytest.MonkeyPatch.context() as patch:
        save, calls = RunFolder.save_checkpoint, iter(range(100))

        def full(folder: RunFolder, checkpoint: Any) -> None:
            if next(calls) == 2:
                raise OSError(28, "No space left on device")
            save(folder, checkpoint)

        patch.setattr(RunFolder, "save_checkpoint", full)
        with pytest.raises(RunStoppedError, match=re.escape(f"continue it with bcfl.train(…, out={str(path)!r})")):
            bcfl.train(small_net, federation(), out=path, **QUICK)
    with pytest.raises(ValueError, match=r"already holds this run with 3 rounds: .* for 4, into which"):
        bcfl.train(small_net, federation(), out=path, **{**QUICK, "rounds": 4})
    with pytest.raises(ValueError, match="split differs from its manifest: num_clients"):
        bcfl.train(small_net, federation(7), out=path, **QUICK)
    others = [(-x, *rest) for x, *rest in federation()]
    with pytest.raises(ValueError, match="the labels agree, but the examples are others"):
        bcfl.train(small_net, others, out=path, **QUICK)
    with pytest.raises(ValueError, match="the model's tensor 1 is 2×2, but in the run"):
        bcfl.train(lambda: nn.Linear(2, 2), federation(), out=path, **QUICK)
    assert same_models(bcfl.train(small_net, federation(), out=path, **QUICK), expected)
    assert same_models(bcfl.load(path, small_net), expected)


def test_a_longer_run_takes_over_the_rounds_of_a_shorter_one(tmp_path: Path) -> None:
    class Rounds(Observer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def started(self, *_: Any) -> None: ...

        def round_done(self, record: dict[str, Any], _: float) -> None:
            self.seen.append(record["round"])

    short, long, longer = tmp_path / "short", tmp_path / "long", {**QUICK, "rounds": QUICK["rounds"] + 2}
    bcfl.train(small_net, federation(), out=short, **QUICK)
    trained = Rounds()
    result = bcfl.train(small_net, federation(), out=long, go_on_from=short, observers=[trained], **longer)
    assert trained.seen == [longer["rounds"] - 1, longer["rounds"]]
    assert same_models(result, bcfl.train(small_net, federation(), **longer))
    with pytest.raises(ValueError, match="go_on_from needs out"):
        bcfl.train(small_net, federation(), go_on_from=short, **longer)
    with pytest.raises(ValueError, match="only the number of rounds may be another"):
        bcfl.train(small_net, federation(), out=tmp_path / "other", go_on_from=short, seed=1, **longer)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_clusters": 7}, "there are only 6 clients"),
        ({"num_cluster": 2}, "did you mean method.num_clusters"),
        ({"method": "bcfl-mh"}, "unknown method 'bcfl-mh'"),
        ({"rounds": 0}, "experiment.rounds must be ≥ 1"),
        ({"training": Training(learning_rate=-1.0)}, "training.learning_rate must be > 0"),
        ({"training": {"learning_rte": 0.1}}, "did you mean training.learning_rate?"),
        ({"training": 0.1}, "training must be a section of settings, got 0.1"),
        ({"learning_rate": -1}, "training.learning_rate must be > 0"),
        ({"local_steps": 2, "training": {"local_steps": 3}}, "training.local_steps is given as local_steps=… here"),
        ({"method": "fedavg"}, "method.num_clusters is an option of bcfl-g, "),
        ({"loss": torch.nn.MSELoss()}, "the likelihood of y says: data.likelihood"),
        ({"local_epochs": 2}, "training.local_epochs is for training.local = epochs"),
        (
            {"partition": "label(4,2)"},
            "data.partition is for files and --set: here clients and model are given as they are",
        ),
        ({"name": "fedavg"}, "the method's name is given as method=…"),
        ({"experiment": {"rounds": 3}}, "experiment.rounds is given as rounds=… here"),
        ({"experiment": {"evaluat_every": 3}}, "did you mean experiment.evaluate_every?"),
        ({"experiment": 3}, "experiment must be a section of settings, got 3"),
        ({"num_workers": 0}, "num_workers must be a whole number of at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be a whole number of at least 1, got -1"),
        ({"num_workers": 1.5}, "num_workers must be a whole number of at least 1, got 1.5"),
        ({"device": 0}, "device must be one of cpu, cuda, cuda:N, stacked-cpu, got '0'"),
    ],
)
def test_settings_are_checked_like_everywhere(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        bcfl.train(small_net, federation(), out=tmp_path / "run", **{**QUICK, **changes})
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_begin_leaves_its_folder_free(tmp_path: Path) -> None:
    net, path = small_net(), tmp_path / "run"
    settings: dict[str, Any] = {**QUICK, "out": path}
    for method in ("bcfl-g", "bcfl-mh-3", "ifca", "fedsoft"):
        with pytest.raises(ValueError, match="let it draw its own start, or take a method that starts from one model"):
            bcfl.train(lambda: copy.deepcopy(net), federation(), method=method, **settings)
        assert list(path.iterdir()) == []
    assert bcfl.train(lambda: copy.deepcopy(net), federation(), method="bcfl-g-w", **settings).path == path


def test_what_means_the_same_in_python_is_the_same() -> None:
    expected = bcfl.train(small_net, federation(), training=Training(local_steps=2), seed=1, temperature=2.0, **QUICK)
    named = {name: np.int64(value) for name, value in QUICK.items()}
    by_name = bcfl.train(small_net, federation(), local_steps=2, seed=1, temperature=2.0, **QUICK)
    assert same_models(by_name, expected)
    own: dict[str, Any] = {"seed": np.uint8(1), "temperature": np.float32(2), "device": torch.device("cpu")}
    result = bcfl.train(small_net, (c for c in federation()), training={"local_steps": np.int32(2)}, **own, **named)
    assert same_models(result, expected)
    assert result.config == expected.config
    json.dumps(result.summary())


def test_clients_with_names_are_called_by_them(tmp_path: Path) -> None:
    by_name: Any = {f"hospital {j}": client for j, client in enumerate(federation())}
    result = bcfl.train(small_net, by_name, out=tmp_path, **QUICK)
    expected = bcfl.train(small_net, federation(), **QUICK)
    assert torch.equal(result.state.models.mean, expected.state.models.mean)
    for found in (result, bcfl.load(tmp_path, small_net)):
        assert torch.equal(found.assignment["hospital 2"], expected.assignment[2])
        assert torch.equal(found.probability["hospital 2"], expected.probability[2])
        assert found.co_association["hospital 2", "hospital 2"] == 1
        x, _ = rows(0, 0, 5)
        assert torch.equal(found.predictor("hospital 2")(x), expected.predictor(2)(x))
        assert found.by_site()["hospital 2"]["cluster"] == int(expected.assignment[2])
        with pytest.raises(ValueError, match=r"^there is no client 'hospital 9'; there are hospital 0, hospital 1"):
            found.predictor("hospital 9")
    one = rows(0, 0, 5)
    for wrong, says in (
        (dict(zip("xy", one, strict=True)), "got a single client's x and y"),
        ({1: one}, "names must be"),
    ):
        with pytest.raises(ValueError, match=says):
            bcfl.train(small_net, wrong, **QUICK)


@pytest.mark.parametrize(("wrong", "kind"), [(None, "NoneType"), (3, "int")])
def test_clients_that_are_no_list_are_refused(wrong: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"^clients must be a list of clients or .*, got {kind}$"):
        bcfl.train(small_net, wrong, **QUICK)


def test_all_of_the_experiment_is_set_in_python() -> None:
    further = {"joins": [[1, 2]], "mixture": True}
    result = bcfl.train(small_net, federation(), experiment=further, evaluate_every=2, **QUICK)
    assert ["accuracy" in record for record in result.history] == [False, False, True, True]
    assert result.history[-1]["mixture"] is not None
    assert result.config.experiment.joins == ((1, 2),)
    assert further == {"joins": [[1, 2]], "mixture": True}


@pytest.mark.parametrize("client", [-1, 6, "0", 1.5])
def test_a_client_is_a_number_below_their_count(result: bcfl.Result, client: Any) -> None:
    says = re.escape(f"client must be a number from 0 to 5, got {client!r}")
    for ask in (result.predictor, result.mixture, lambda c: result.predict_proba(c, torch.zeros(1, 2))):
        with pytest.raises(ValueError, match=says):
            ask(client)
    assert result.predictor(np.int64(5)) is not None  # type: ignore[arg-type]


def test_a_newcomers_model_is_saved_where_a_text_says(result: bcfl.Result, tmp_path: Path) -> None:
    newcomer = result.associate(*rows(0, 50, 20))
    newcomer.save(str(tmp_path / "model.safetensors"))
    plain = small_net()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = torch.randn(3, 2)
    assert torch.equal(plain(x), newcomer.module(x))


def test_what_a_model_raises_reaches_its_author() -> None:
    def broken() -> nn.Module:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        bcfl.train(broken, federation(), **QUICK)


def test_training_is_set_in_python() -> None:
    result = bcfl.train(small_net, federation(), training=Training(local_steps=1, momentum_state="client"), **QUICK)
    assert result.config.training.local_steps == 1
    assert result.summary()["work"]["local_steps"] == result.summary()["work"]["trainings"]


def test_a_folder_that_cannot_be_made_is_named_in_a_line() -> None:
    with pytest.raises(ValueError, match=r"^output folder /dev/null/run cannot be made: Not a directory$"):
        bcfl.train(small_net, federation(), method="fedavg", rounds=1, out="/dev/null/run", progress=False)
