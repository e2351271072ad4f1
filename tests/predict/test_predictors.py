"""Newcomers and predictive mixtures of finished runs: right where the answer is known, clear where input is wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_fixtures import METHOD_NAMES, OPTIONS
from safetensors.torch import load_file
from small_runs import small_config
from torch import Tensor, nn

import bcfl
from bcfl.cli import main
from bcfl.federation import RoundInfo
from bcfl.methods import entry_of
from bcfl.predict.predictors import Spread, mixtures, module_of
from bcfl.runs.evaluation import evaluate
from bcfl.runs.loop import load_result, start
from bcfl.runs.settings import load_config


def rows(kind: int, seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Points of the plane; what is class 1 for one kind of clients is class 0 for the other."""
    x = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
    return x, ((x[:, 0] > 0) == (kind == 0)).long()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


def trained(method: str = "bcfl-mh-3-w", rounds: int = 5, **options: Any) -> bcfl.Result:
    clients = [(*rows(j % 2, j, 60), *rows(j % 2, 100 + j, 20)) for j in range(6)]
    given = {key: value for key, value in {"num_clusters": 2, **options}.items() if key in entry_of(method).options}
    return bcfl.train(net, clients, method=method, rounds=rounds, num_workers=1, **given)


@pytest.fixture(scope="module")
def result() -> bcfl.Result:
    return trained()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    start(small_config("method.name=bcfl-mh-3-w", "data.validation=0.3"), path, num_workers=1)
    return path


# ---- newcomers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, 1])
def test_a_newcomer_goes_to_the_clients_of_its_kind(result: bcfl.Result, kind: int) -> None:
    newcomer = result.associate(*rows(kind, 50, 30))
    assert newcomer.cluster == int(result.assignment[kind])
    assert float(newcomer.probability.sum()) == pytest.approx(1)
    assert float(newcomer.hypothesis.sum()) == pytest.approx(1)
    assert float(newcomer.probability.max()) > 0.99
    assert newcomer.entropy < 0.1
    assert newcomer.resembles[kind::2].min() > 0.9
    assert newcomer.resembles[1 - kind :: 2].max() < 0.1
    x, y = rows(kind, 51, 200)
    assert (newcomer.predict_proba(x).argmax(1) == y).double().mean() > 0.9
    assert torch.equal(newcomer.module(x), result.predictor(kind)(x))


def test_a_newcomer_and_its_predictor_are_printed_in_a_line(result: bcfl.Result) -> None:
    newcomer = result.associate(*rows(0, 50, 30))
    assert f"cluster {newcomer.cluster} with probability" in str(newcomer)
    assert max(len(str(newcomer)), len(str(newcomer.predictor))) < 150
    assert "\n" not in f"{newcomer}{newcomer.predictor}"


def test_fewer_examples_say_less_and_numpy_is_as_good_as_torch(result: bcfl.Result) -> None:
    x, y = rows(0, 60, 40)
    unsure = [result.associate(x[:count].numpy(), y[:count].numpy()).entropy for count in (1, 5, 40)]
    assert unsure[0] > unsure[1] > unsure[2]
    by_tensor, by_array = result.associate(x, y), result.associate(x.double().numpy(), y.int().numpy())
    assert torch.equal(by_tensor.joint, by_array.joint)


def test_one_example_is_enough_for_a_model_with_batchnorm() -> None:
    """Nothing is trained on it: predictions are in evaluation mode."""

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    clients = [(*rows(j % 2, j, 60), *rows(j % 2, 100 + j, 20)) for j in range(4)]
    found = bcfl.train(normed, clients, method="bcfl-g-w", rounds=2, num_workers=1, num_clusters=2)
    x, y = rows(0, 62, 5)
    newcomer, alone = found.associate(x, y), found.associate(x[:1], y[:1])
    assert alone.num_examples == 1
    assert torch.allclose(newcomer.predict_proba(x[:1]), newcomer.predict_proba(x)[:1], atol=1e-6)


def test_temperature_and_prior_are_as_told(result: bcfl.Result) -> None:
    x, y = rows(0, 61, 10)
    pure, mean = result.associate(x, y), result.associate(x, y, temperature="per_example")
    assert torch.equal(mean.joint, result.associate(x, y, temperature=10.0).joint)
    assert mean.entropy > pure.entropy
    hot = result.associate(x, y, temperature=1e9)
    assert hot.probability.tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
    assert torch.allclose(hot.hypothesis, result.state.log_weight.exp(), atol=1e-6)
    by_size, first = result.associate(x, y, temperature=1e9, prior="size"), result.state.assignment[0]
    members = torch.bincount(first, minlength=2).double() + 1
    assert torch.allclose(by_size.joint[0] / by_size.joint[0].sum(), members / members.sum(), atol=1e-6)
    with pytest.raises(ValueError, match="temperature must be"):
        result.associate(x, y, temperature=0.0)
    with pytest.raises(ValueError, match="prior must be one of uniform, size"):
        result.associate(x, y, prior="big")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            torch.ones(3, 2),
            torch.tensor([0, 1, 2]),
            "y holds the label 2, the run's model tells 2 classes apart, 0 to 1",
        ),
        (torch.ones(3, 2), torch.tensor([0, -1, 0]), "y holds the negative label -1"),
        (torch.ones(3, 2), torch.tensor([0.0, 1.5, 0.0]), "y must be one row of integer labels"),
        (torch.ones(3, 2), torch.tensor([0, 1]), "x has 3 rows but y has 2"),
        (torch.ones(3, 5), torch.tensor([0, 1, 0]), r"does not accept inputs of shape \(5,\)"),
        (torch.full((1, 2), torch.nan), torch.tensor([0]), "x holds values that are not finite"),
        (torch.ones(0, 2), torch.ones(0, dtype=torch.int64), "at least one example"),
        (torch.ones(3, 2), None, "y must hold the labels of x"),
        (torch.ones(3, 2), [0.5, 1.0, 0.0], "y must be one row of integer labels"),
        (torch.ones(3, 2), [None, 1, 0], "is not made of numbers"),
        (torch.ones(3, 2), np.ma.masked_equal([0, 1, 1], 1), "is a masked array"),
        (torch.ones(3, 2).to_sparse(), [0, 1, 1], "is a torch.sparse_coo tensor"),
        ("pictures", torch.tensor([0]), "is not made of numbers"),
    ],
)
def test_wrong_examples_are_named(result: bcfl.Result, x: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        result.associate(x, y)


def test_the_saved_model_needs_only_torch(result: bcfl.Result, tmp_path: Path) -> None:
    newcomer = result.associate(*rows(1, 50, 30))
    newcomer.save(tmp_path / "model.safetensors")
    module = net()
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x, _ = rows(1, 52, 5)
    assert torch.equal(module(x), newcomer.module(x))


# ---- mixtures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_every_methods_clients_have_a_predictive_distribution(name: str) -> None:
    name, *own = name.split()
    offered = {key: value for key, value in OPTIONS.items() if key in entry_of(name).options}
    run = trained(name, 2, **offered, **dict(option.split("=") for option in own))
    x, y = rows(0, 70, 9)
    for options in ({}, {"beliefs": "samples", "num_samples": 3}, {"beliefs": "last_layer"}):
        p = run.predict_proba(0, x, **options)
        assert p.shape == (9, 2)
        assert torch.allclose(p.sum(1), torch.ones(9), atol=1e-5)
    assert float(run.associate(x, y).probability.sum()) == pytest.approx(1)


def test_one_hypothesis_at_its_mean_is_the_clients_model() -> None:
    run, (x, _) = trained("bcfl-g", 2), rows(0, 71, 9)
    assert torch.equal(run.predict_proba(3, x), run.predictor(3)(x).log_softmax(1).exp())


def test_a_mixture_over_hypotheses_is_written_out() -> None:
    result, (x, _) = trained(hypotheses="all"), rows(0, 72, 9)
    state = result.state
    assert len(state.log_weight) == 3
    by_hand = torch.zeros(9, 2, dtype=torch.float64)
    for weight, beliefs, assignment in zip(state.log_weight.exp(), state.model_of, state.assignment, strict=True):
        belief = int(beliefs[assignment[2]])
        module = module_of(net, state.models.mean[belief])
        by_hand += weight * module(x).softmax(1).double()
    assert torch.allclose(result.predict_proba(2, x).double(), by_hand, atol=1e-5)


def test_a_merged_belief_is_mixed_by_the_hypotheses_before_the_merge(result: bcfl.Result) -> None:
    merged = trained("bcfl-c-3", 2)
    info = RoundInfo(torch.zeros(2), torch.tensor([[0] * 6, [1] + [0] * 5]), torch.tensor([0.6, 0.4]).log())
    _, shares = mixtures(merged.state, info)
    first, second = merged.state.model_of[0].tolist()
    assert shares[0] == {first: pytest.approx(0.6), second: pytest.approx(0.4)}
    assert shares[1] == {first: pytest.approx(1.0)}


def test_draws_repeat_and_statistics_and_options_are_checked(result: bcfl.Result) -> None:
    x, _ = rows(0, 73, 9)
    draw = {"beliefs": "samples", "num_samples": 4, "prior_precision": 1.0}
    assert torch.equal(result.predict_proba(0, x, **draw), result.predict_proba(0, x, **draw))
    assert not torch.equal(result.predict_proba(0, x, **draw), result.predict_proba(0, x, **draw, seed=1))
    nothing = result.predict_proba(0, x, **{**draw, "prior_precision": float("inf")})
    assert torch.allclose(nothing, result.predict_proba(0, x), atol=1e-6)
    for options, message in (
        ({"beliefs": "median"}, "beliefs must be one of mean, samples, sigma, last_layer"),
        ({"beliefs": "sigma", "num_samples": 3}, "even for sigma points"),
        ({"beliefs": "samples", "num_samples": 3.5}, "num_samples must be a whole number ≥ 1, .*, got 3.5"),
        ({"prior_precision": "auto"}, "prior_precision must be a number ≥ 0, got 'auto'"),
        ({"prior_precision": -1.0}, "prior_precision must be"),
    ):
        with pytest.raises(ValueError, match=message):
            result.predict_proba(0, x, **options)
    with pytest.raises(ValueError, match="client must be a number from 0 to 5, got 6"):
        result.predict_proba(6, x)


def test_a_run_with_mixture_records_it_beside_the_best_model(tmp_path: Path) -> None:
    config = small_config("method.name=bcfl-mh-3", "experiment.mixture=true")
    run = start(config, tmp_path / "run", num_workers=1)
    plain = start(small_config("method.name=bcfl-mh-3"), None, num_workers=1)
    last = run.history[-1]
    assert {key: value for key, value in last.items() if key != "mixture"} == plain.history[-1]
    assert set(run.summary()["mixture"]) == {"accuracy", "nll", "ece", "brier"}
    found = evaluate(load_result(tmp_path / "run"), Spread())
    for key in ("accuracy", "nll", "ece", "brier"):
        assert found["mixture"][key] == pytest.approx(last["mixture"][key], abs=1e-6)
        assert found["point"][key] == pytest.approx(last[key], abs=1e-6)
    assert "mixture" not in plain.config.as_dict()["experiment"]  # runs from before it existed keep their names


# ---- the commands ---------------------------------------------------------------------------------------------------


def examples_file(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def digits(count: int = 24) -> dict[str, Any]:
    from sklearn.datasets import load_digits

    return {"x": load_digits().images[:count, None] / 16, "y": load_digits().target[:count]}


def test_associate_prints_a_table_or_json_and_saves(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, saved = examples_file(tmp_path / "mine.npz", **digits()), tmp_path / "m.safetensors"
    assert main(["associate", str(run), "--data", str(data), "--examples", "8", "--save", str(saved)]) == 0
    printed = capsys.readouterr().out
    for text in ("by 8 examples", "probability", "entropy", "shares a cluster with clients", "NLL per example"):
        assert text in printed
    assert saved.exists()
    assert main(["associate", str(run), "--data", str(data), "--json", "--temperature", "4", "--prior", "size"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_examples"] == 24
    assert sum(found["probability"]) == pytest.approx(1)
    assert len(found["resembles"]) == 8


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"y": None}, [], "as an .npz file of plain arrays x and y: no key y, only x"),
        ({"y": np.full(24, 11)}, [], "y holds the label 11, the run's model tells 10 classes apart, 0 to 9"),
        ({"x": np.zeros((24, 3))}, [], "does not accept inputs of shape (3,)"),
        ({"x": np.array([{}] * 24)}, [], "cannot be read as an .npz file of plain arrays"),
        ({}, ["--examples", "25"], "--examples 25: "),
        ({}, ["--temperature", "warm"], "--temperature must be"),
    ],
)
def test_wrong_newcomers_are_refused_in_one_line(
    change: dict[str, Any],
    arguments: list[str],
    message: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arrays = {key: value for key, value in {**digits(), **change}.items() if value is not None}
    data = examples_file(tmp_path / "mine.npz", **arrays)
    assert main(["associate", str(run), "--data", str(data), *arguments]) == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1


def test_evaluate_compares_point_and_mixture_and_chooses_on_validation_data(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "predictive.json"
    arguments = ["evaluate", str(run), "--beliefs", "last_layer", "--prior-precision", "auto", "--out", str(out)]
    assert main(arguments) == 0
    assert "chosen on validation data" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["point"]["num_examples"] == found["mixture"]["num_examples"] == 1800  # 450 test digits in 4 rotations
    assert found["point"]["coverage"][-1] == 1.0
    assert found["point"]["accuracy_at_coverage"][-1] == pytest.approx(found["point"]["accuracy"])
    assert main(["evaluate", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["point"] == found["point"]
    assert main(["evaluate", str(run), "--prior-precision", "much"]) == 2
    assert "--prior-precision must be auto or a number" in capsys.readouterr().err


def test_without_validation_data_nothing_is_chosen(tmp_path: Path) -> None:
    run = start(small_config("experiment.rounds=1"), None, num_workers=1)
    with pytest.raises(ValueError, match=r"data.validation is 0"):
        evaluate(run, Spread("last_layer"), choose=True)


def test_a_run_is_not_evaluated_on_other_data(tmp_path: Path) -> None:
    run = start(small_config("experiment.rounds=1"), tmp_path, num_workers=1)
    assert evaluate(run, Spread())["point"]["num_examples"]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "sha256": "0"}))
    with pytest.raises(ValueError, match=r"the run in .* was made with other data: .* the examples are others"):
        evaluate(load_result(tmp_path), Spread())


def test_a_federations_run_is_not_evaluated_on_what_this_machine_has(tmp_path: Path) -> None:
    start(small_config("experiment.rounds=1"), tmp_path, num_workers=1)
    (tmp_path / "manifest.json").write_text(json.dumps({"num_clients": 8, "group": None}))
    with pytest.raises(ValueError, match="is a federation's: only its clients have the data"):
        evaluate(load_result(tmp_path), Spread())


def test_after_drift_the_data_of_the_end_are_predicted() -> None:
    drift = ["data.drift_round=2", "experiment.rounds=3", "method.name=bcfl-g-w", "data.partition=feature(4,2)"]
    run = start(load_config(None, drift), None, num_workers=1)
    found = evaluate(run, Spread())["point"]
    assert found["accuracy"] == pytest.approx(run.history[-1]["accuracy"])
    assert found["nll"] == pytest.approx(run.history[-1]["nll"], rel=1e-5)


@pytest.mark.parametrize(
    ("method", "taking_part"),
    [
        *((name, "joins=[[3, 1000], [5, 1000]]") for name in ("local", "fedavg", "fedamp", "bp-fedavg", "bcfl-g")),
        ("bcfl-g", "clients_per_round=0.2"),  # some are never associated
    ],
)
def test_those_are_tested_whom_the_run_tests(method: str, taking_part: str) -> None:
    run = start(small_config(f"method.name={method}", f"experiment.{taking_part}"), None, num_workers=1)
    found = evaluate(run, Spread())["point"]
    assert found["accuracy"] == pytest.approx(run.history[-1]["accuracy"])
    assert found["nll"] == pytest.approx(run.history[-1]["nll"], rel=1e-5)
