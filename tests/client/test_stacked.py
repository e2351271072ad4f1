"""Stacked clients: the numbers of the plain simulator but for rounding, for every model, method and kind of job.

Where there is no GPU the same code runs on the CPU; the tests named cuda are for whoever has one.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_fixtures import NUM_CLASSES, NUM_FEATURES, client_data, linear, network, run, simulator
from small_runs import FEDERATIONS, outcome, small_config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

import bcfl
from bcfl.belief.gaussian import Gaussian, flat
from bcfl.client.examples import Examples, pool
from bcfl.client.score import Question
from bcfl.client.stacked import Stacked
from bcfl.client.trainer import Job, Training, fit
from bcfl.data.arrays import from_arrays
from bcfl.data.partition import FederatedData
from bcfl.engines.crew import find_device
from bcfl.engines.participation import Participation
from bcfl.engines.simulator import Simulator
from bcfl.federation import Jobs
from bcfl.likelihood.measures import Evaluation
from bcfl.methods import METHODS as REGISTERED
from bcfl.methods import make_method
from bcfl.methods.averaging import FedAvg
from bcfl.model.flat import FlatModel, ModelFactory, build
from bcfl.model.zoo import MODELS
from bcfl.runs.loop import resume, start
from bcfl.runs.observers import Observer
from bcfl.runs.result import Result

NO_GPU = not torch.cuda.is_available()
DEVICES = ["stacked-cpu", pytest.param("cuda", marks=pytest.mark.skipif(NO_GPU, reason="there is no GPU"))]
INPUTS = {
    "mlp": (64,),
    "fashion_cnn": (1, 28, 28),
    "cifar_cnn": (3, 32, 32),
    "amazon_mlp": (5000,),
    "digits_five_cnn": (3, 28, 28),
}
LARGE = {"amazon_mlp", "digits_five_cnn"}
Answers = tuple[list[Gaussian | None], Tensor, Tensor, list[Evaluation | None], dict[str, int]]


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may round convolutions to TF32; not here."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def far(first: Tensor, second: Tensor) -> float:
    """How far two vectors are from each other, by the length of the second."""
    return float((first - second).norm() / second.norm()) if len(second) and second.any() else float(first.abs().sum())


def same_evaluations(found: list[Evaluation | None], expected: list[Evaluation | None]) -> bool:
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a or b]
    return all(
        a is not None
        and b is not None
        and torch.equal(a.confusion, b.confusion)
        and a.log_likelihood == pytest.approx(b.log_likelihood, rel=1e-4)
        and torch.allclose(a.calibration, b.calibration, atol=1e-4)
        for a, b in pairs
    )


def answers(engine: Simulator, models: Gaussian, jobs: Jobs) -> Answers:
    """All that the clients of a round can be asked."""
    clients = engine.begin(1)
    posteriors = list(clients.fit(models, jobs))
    scores, shares = clients.score(models.mean, 10), clients.share_explained(models.mean)
    evaluations = engine.evaluate(models.mean, [{c % len(models): 1.0} for c in range(engine.num_clients)])
    return posteriors, scores, shares, evaluations, clients.work.as_dict()


def beliefs(engine: Simulator) -> Gaussian:
    """Two beliefs with priors of all strengths, statistics and momentum."""
    clients, draws = engine.begin(0), torch.Generator().manual_seed(1)
    mean = torch.stack([clients.draw_model(0, k) for k in range(2)])
    precision = 5 * torch.rand(mean.shape, generator=draws)
    precision[0, : clients.num_parameters // 2] = 0
    if engine.layout.length > engine.layout.num_evaluated:
        mean[:, engine.layout.num_evaluated :] = 0.01 * torch.randn(2, clients.num_parameters, generator=draws)
    return Gaussian(mean, precision)


def assert_alike(factory: ModelFactory, data: FederatedData, training: Training, jobs: Jobs, device: str) -> None:
    """Everything agrees with the plain simulator: vectors by 1e-4 of their length, scores by 1e-5, counts exactly."""
    with simulator(data, factory, training) as engine:
        models = beliefs(engine)
        expected = answers(engine, models, jobs)
        parts = [engine.layout.num_parameters, engine.layout.num_evaluated]
    with simulator(data, factory, training, device=device) as engine:
        found = answers(engine, models, jobs)
    for own, other in zip(found[0], expected[0], strict=True):
        assert own is not None
        assert other is not None
        for mine, plain in zip(own.mean.tensor_split(parts), other.mean.tensor_split(parts), strict=True):
            assert far(mine, plain) < 1e-4  # parameters, statistics, momentum
        assert far(own.precision, other.precision) < 1e-4
    assert torch.allclose(found[1], expected[1], rtol=1e-5, equal_nan=True)
    assert torch.allclose(found[2], expected[2], equal_nan=True)
    assert same_evaluations(found[3], expected[3])
    assert found[4] == expected[4]


def noise(name: str, sizes: tuple[int, ...]) -> FederatedData:
    draws, shape = torch.Generator().manual_seed(2), INPUTS[name]
    num_classes = 2 if name == "amazon_mlp" else 10
    clients = []
    for size in sizes:
        x = torch.randn(size + 5, *shape, generator=draws)
        y = torch.randint(num_classes, (size + 5,), generator=draws)
        clients.append((x[:size], y[:size], x[size:], y[size:]))
    return from_arrays(clients)


# --- every model, every kind of job -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in MODELS]
)
def test_every_model_is_trained_scored_and_evaluated_as_in_the_plain_simulator(
    name: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes, steps = ((9, 4), 1) if name in LARGE else ((20, 6, 20, 21), 3)  # 6, 4: less than a batch
    belief, client = ([0, 1], [0, 1]) if name in LARGE else ([0, 1, 0, 1, 0], [0, 1, 2, 3, 3])
    jobs = Jobs(torch.tensor(belief), torch.tensor(client), curvature=True)
    assert_alike(MODELS[name], noise(name, sizes), Training(local_steps=steps, batch_size=8), jobs, device)
    assert not caplog.records  # they are stacked, not trained one by one


ALL = {"belief": torch.tensor([0, 1, 0, 1, 0, 0]), "client": torch.tensor([0, 1, 2, 3, 4, 5])}
KINDS = {
    "plain": Jobs(**ALL),
    "curvature": Jobs(**ALL, curvature=True),
    "strengths": Jobs(**ALL, curvature=True, strength=torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0, 1e6])),
    "flat": Jobs(**ALL, strength=torch.zeros(6)),
    "steps": Jobs(**ALL, curvature=True, num_steps=7),
    "starts": Jobs(**ALL, start=0.1 * torch.ones(6, 1000)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fisher", ["auto", "exact", "examples"])
@pytest.mark.parametrize("state", ["fresh", "client", "belief"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_job_gives_the_plain_posterior(kind: str, state: str, fisher: str, device: str) -> None:
    training = Training(local_steps=3, batch_size=27, momentum_state=state, fisher=fisher, fisher_examples=20)
    jobs = KINDS[kind]
    if jobs.start is not None:
        with simulator(training=training) as engine:
            jobs = replace(jobs, start=jobs.start[:, : engine.layout.length])
    assert_alike(network, from_arrays(client_data()), training, jobs, device)


@pytest.mark.parametrize("device", DEVICES)
def test_clients_that_fit_into_a_batch_have_the_exact_fisher_beside_those_that_do_not(device: str) -> None:
    data = noise("mlp", (7, 8, 9, 8, 30))  # 8 and more have batches of one size
    jobs = Jobs(torch.tensor([0, 1, 0, 1, 0]), torch.arange(5), curvature=True)
    assert_alike(MODELS["mlp"], data, Training(local_steps=3, batch_size=8), jobs, device)


def test_clients_that_keep_their_momentum_go_on_with_it() -> None:
    training = Training(local_steps=3, batch_size=8, momentum_state="client")
    kept = []
    for device in ("cpu", "stacked-cpu"):
        with simulator(training=training, device=device) as engine:
            run(make_method("bcfl-mh-2", {"num_clusters": 2}), engine, 3)
            kept.append(engine.momentum)
    assert [list(of_client) for of_client in kept[0].values()] == [list(of_client) for of_client in kept[1].values()]
    for client, of_client in kept[0].items():
        for belief, momentum in of_client.items():
            assert far(kept[1][client][belief], momentum) < 1e-4


# --- whole runs -------------------------------------------------------------------------------------------------------

METHODS = [name.replace("-M", "-3") for name in REGISTERED] + ["bcfl-mh-3-w"]


def assert_same_story(found: Result, expected: Result) -> None:
    """The same associations and work in every round, and models that differ by rounding."""
    assert torch.equal(found.state.hypotheses.assignment, expected.state.hypotheses.assignment)
    assert torch.equal(found.state.hypotheses.model_of, expected.state.hypotheses.model_of)
    assert torch.allclose(found.state.hypotheses.log_weight, expected.state.hypotheses.log_weight, atol=1e-4)
    assert far(found.state.hypotheses.models.mean, expected.state.hypotheses.models.mean) < 1e-3
    assert far(found.state.hypotheses.models.precision, expected.state.hypotheses.models.precision) < 1e-3
    for own, other in zip(found.history, expected.history, strict=True):
        assert own["work"] == other["work"]
        assert own.get("changes") == other.get("changes")
        assert own.get("accuracy") == pytest.approx(other.get("accuracy"), abs=0.005)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", METHODS)
def test_a_run_of_every_method_is_the_plain_one(name: str, device: str) -> None:
    config = small_config(f"method.name={name}")
    assert_same_story(start(config, None, device=device), start(config, None, num_workers=1))


@pytest.mark.parametrize("name", ["bcfl-g", "bcfl-c-3", "bcfl-mh-3"])
def test_a_run_with_racing_is_the_plain_one(name: str) -> None:
    racing = (f"method.name={name}-w", "method.racing=0.2", "method.scoring_examples=160")
    found = start(small_config(*racing), None, device="stacked-cpu")
    assert_same_story(found, start(small_config(*racing), None, num_workers=1))
    work = [record["work"] for record in found.history[1:]]
    assert all(own["spared_examples"] >= 0 for own in work)  # there was a race, and nobody loses by it
    plain = start(small_config(*racing, "method.racing=0"), None, num_workers=1).history[1:]
    in_full = [own["scored_examples"] + own["spared_examples"] for own in work]
    assert in_full == [record["work"]["scored_examples"] for record in plain]


@pytest.mark.parametrize("name", [name for name in FEDERATIONS if name != "plain"])
def test_a_run_of_every_federation_is_the_plain_one(name: str) -> None:
    config = small_config(*FEDERATIONS[name])
    assert_same_story(start(config, None, device="stacked-cpu"), start(config, None, num_workers=1))


def test_a_stopped_run_goes_on_to_the_same_bits_and_on_another_device_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class PowerCut(Observer):
        def started(self, *_: Any) -> None: ...

        def round_done(self, record: dict[str, Any], seconds: float) -> None:
            if record["round"] == 2:
                raise RuntimeError("power cut")

    start(small_config(), tmp_path / "whole", device="stacked-cpu")
    for name in ("stopped", "moved"):
        with pytest.raises(RuntimeError, match="power cut"):
            start(small_config(), tmp_path / name, device="stacked-cpu", observers=[PowerCut()])
    resume(tmp_path / "stopped", device="stacked-cpu")
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    assert not caplog.records
    moved = resume(tmp_path / "moved")
    assert "device stacked-cpu is now cpu" in caplog.text
    assert_same_story(moved, start(small_config(), None, num_workers=1))


# --- bounded memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory", "jobs"), [(1, 1), (32_000, 4)])
def test_less_memory_means_fewer_jobs_at_a_time_and_the_same_answers(
    memory: int, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    with simulator(device="stacked-cpu") as engine:
        models = beliefs(engine)
        expected = answers(engine, models, KINDS["curvature"])
    monkeypatch.setattr("bcfl.client.stacked.MEMORY_ON_CPU", memory)
    with simulator(device="stacked-cpu") as engine:
        monkeypatch.setattr(
            "bcfl.client.client.fit", lambda network, asked: sizes.append(len(asked)) or fit(network, asked)
        )
        found = answers(engine, models, KINDS["curvature"])
        assert max(sizes) == engine.at_a_time == jobs
    for own, other in zip(found[0], expected[0], strict=True):
        assert far(own.mean, other.mean) < 1e-5
    assert torch.allclose(found[1], expected[1], rtol=1e-5)
    assert same_evaluations(found[3], expected[3])


# --- models that cannot be stacked ------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Takes its way by what it sees, so that the clients' ways part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(NUM_FEATURES, NUM_CLASSES), nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.mean() > 0 and self.training else self.second(x)


def touching() -> nn.Module:
    """BatchNorm without statistics of its own: what is said of an example depends on its batch, always."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, NUM_CLASSES), nn.BatchNorm1d(NUM_CLASSES, track_running_stats=False))


def averaging() -> nn.Module:
    """BatchNorm with a plain average over all batches, which reads its counter of batches as a number."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, NUM_CLASSES)
    )


class Drawing(nn.Module):
    """Draws from torch's global generator while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(NUM_FEATURES, 8), nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.dropout(self.first(x).relu(), 0.5, self.training))


def repeating() -> nn.Module:
    layer = nn.Linear(NUM_FEATURES, NUM_FEATURES)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(NUM_FEATURES, NUM_CLASSES))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.ReLU(), nn.Linear(8, NUM_CLASSES))
    module[0].requires_grad_(False)
    return module


class Resting(nn.Module):
    """Keeps its first part in evaluation mode, as one does with a part that was trained before."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.after = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, NUM_CLASSES))

    def train(self, mode: bool = True) -> "Resting":
        super().train(mode)
        self.before.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.before(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("fisher", ["auto", "exact", "examples"])
@pytest.mark.parametrize("factory", [repeating, frozen, Resting])
def test_models_of_many_kinds_are_stacked(factory: ModelFactory, fisher: Any, caplog: pytest.LogCaptureFixture) -> None:
    data, training = from_arrays(client_data()), Training(local_steps=3, batch_size=8, fisher=fisher)
    assert_alike(factory, data, training, KINDS["curvature"], "stacked-cpu")
    assert not caplog.records


class _Reversal(torch.autograd.Function):
    """Turns the gradient round; in the form that torch.func cannot do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class Reversing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return _Reversal.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


class Checkpointed(nn.Module):
    """Computes a part again for its gradient, when its parameters are its own again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.ReLU(), nn.Linear(8, NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("fisher", ["auto", "exact", "examples"])
def test_what_only_plain_autograd_can_do_is_done_one_by_one(fisher: Any, caplog: pytest.LogCaptureFixture) -> None:
    data, training = from_arrays(client_data()), Training(local_steps=3, batch_size=8, fisher=fisher)
    assert_alike(Reversing, data, training, KINDS["curvature"], "stacked-cpu")
    assert [record.message[:50] for record in caplog.records] == ["the clients of this model are trained one by one, "]


class Listing(nn.Module):
    """Uses a parameter that it also holds where torch does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.weights = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weights[0], self.layer.bias)


def clamping() -> nn.Module:
    module = linear()
    next(module.parameters()).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return module


@pytest.mark.parametrize("factory", [Listing, Checkpointed, clamping])
def test_a_model_that_would_learn_something_else_is_refused(factory: ModelFactory) -> None:
    with pytest.raises(ValueError, match="this model runs on device = 'cpu' only: "):
        simulator(from_arrays(client_data()), factory, device="stacked-cpu")


def test_whether_examples_are_mixed_is_asked_of_the_largest_client() -> None:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(61, NUM_FEATURES, generator=draws), torch.randint(NUM_CLASSES, (61,), generator=draws)

    def mixing() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, NUM_FEATURES, 1)), nn.BatchNorm2d(1, track_running_stats=False),
            nn.Flatten(), nn.Linear(NUM_FEATURES, NUM_CLASSES),
        )  # fmt: skip

    parts = [slice(0, 1), *(slice(1 + 13 * i, 14 + 13 * i) for i in range(4)), slice(53, 61)]
    data = from_arrays([(x[own], y[own]) for own in parts])
    assert_alike(mixing, data, Training(local_steps=2, batch_size=8), KINDS["curvature"], "stacked-cpu")


@pytest.mark.parametrize("factory", [Branching, averaging])
def test_a_model_that_cannot_be_stacked_is_trained_one_by_one(
    factory: ModelFactory, caplog: pytest.LogCaptureFixture
) -> None:
    data, training = from_arrays(client_data()), Training(local_steps=3, batch_size=8)
    assert_alike(factory, data, training, KINDS["curvature"], "stacked-cpu")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("the clients of this model are trained one by one")


def test_a_model_that_mixes_examples_is_given_the_plain_batches() -> None:
    data, training = from_arrays(client_data(num_examples=70)), Training(local_steps=3, batch_size=8)
    assert_alike(touching, data, training, KINDS["plain"], "stacked-cpu")


def test_a_model_that_would_get_other_numbers_is_trained_one_by_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bcfl.model.vmapped.vmap", lambda function: lambda *rows: [r * 2 for r in rows])
    assert_alike(network, from_arrays(client_data()), Training(local_steps=2), KINDS["plain"], "stacked-cpu")
    assert "one by one" in caplog.text


def test_a_model_that_draws_globally_is_trained_alone_with_the_same_draws() -> None:
    data, training = from_arrays(client_data()), Training(local_steps=3, batch_size=8)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with simulator(data, Drawing, training, device="stacked-cpu") as engine:
        assert engine.at_a_time == 1
        assert torch.equal(torch.get_rng_state(), before)
    assert_alike(Drawing, data, training, KINDS["curvature"], "stacked-cpu")


# --- clients that are absent, late or broken --------------------------------------------------------------------------


def test_a_broken_client_is_left_out_and_harms_nobody() -> None:
    clients = client_data()
    clients[5] = (clients[5][0] * 1e38, *clients[5][1:])
    with simulator(from_arrays(clients), linear, device="stacked-cpu") as engine:
        broken, rejected = run(FedAvg(), engine, 1), engine.begin(1)
        list(rejected.fit(broken.models, Jobs(torch.zeros(6).long(), torch.arange(6))))
        assert rejected.work.rejected == 1
        broken = run(FedAvg(), engine, 3)
    with simulator(from_arrays(clients[:5]), linear, device="stacked-cpu") as engine:
        assert far(broken.models.mean, run(FedAvg(), engine, 3).models.mean) < 1e-5


def test_rounds_with_absent_and_late_clients_cost_what_they_cost_in_the_plain_simulator() -> None:
    participation, results = Participation(0.7, dropout=0.2, straggling=0.4), []
    for device in ("cpu", "stacked-cpu"):
        with simulator(participation=participation, device=device) as engine:
            method = make_method("bcfl-g", {"num_clusters": 2})
            state, work = method.init(engine.begin(0)), []
            for index in range(1, 5):
                clients = engine.begin(index)
                state, _ = method.round(state, clients)
                work.append(clients.work)
            results.append((state, work))
    assert results[0][1] == results[1][1]
    assert torch.equal(results[0][0].assignment, results[1][0].assignment)


# --- one device only --------------------------------------------------------------------------------------------------


class OneDevice(TorchDispatchMode):
    """Lets no operation mix tensors of two devices; what comes back from "meta", which holds no numbers, is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elsewhere = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(function)
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.dim()]
        devices = {t.device.type for t in given}
        self.num_elsewhere += "meta" in devices
        if "meta" in devices and name.startswith("aten._to_copy") and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        if devices == {"meta", "cpu"} and name.startswith("aten.copy_") and args[0].device.type == "cpu":
            return args[0].zero_()
        assert len(devices) < 2 or "copy" in name, f"{name} mixes devices"
        return function(*args, **kwargs)


@pytest.mark.parametrize("fisher", ["auto", "exact", "examples"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_all_is_done_on_the_device(fisher: str, one_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that only knows shapes: a tensor left on the CPU would show, as it would on a GPU."""

    def module() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(72, 3))

    monkeypatch.setattr("bcfl.model.vmapped.near", lambda a, b: a.shape == b.shape)  # needs numbers
    monkeypatch.setattr("bcfl.client.fisher.agree", lambda a, b: a.shape == b.shape)
    monkeypatch.setattr("bcfl.client.trainer.proximal_pull", lambda precision, n, training: precision / (precision + 1))
    x, images = pool(torch.randn(20, 1, 8, 8))
    examples = [Examples(x, torch.zeros(20).long(), index, images) for index in torch.arange(20).split([5, 15])]
    training, model = Training(local_steps=2, batch_size=8, fisher=fisher), FlatModel(build(module, 0))
    start = torch.zeros(len(model.vector) + model.num_parameters)
    with OneDevice() as mode:
        network = Stacked(model, torch.device("meta"), examples[:1], training, draws_globally=one_by_one)
        jobs = [Job(start, flat(start), held, torch.Generator(), training, curvature=True) for held in examples]
        means = [posterior.mean for posterior, _ in fit(network, jobs)]
        values = network.log_likelihoods([Question(start[None], held, torch.arange(4)) for held in examples])
    assert [(answer.shape, answer.device.type) for answer in means] == [(start.shape, "cpu")] * 2
    assert [(answer.shape, answer.device.type) for answer in values] == [((1, 4), "cpu")] * 2
    assert mode.num_elsewhere > 300


# --- which device -----------------------------------------------------------------------------------------------------


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cpu") is None
    assert [find_device(name) for name in ("stacked-cpu", "cuda", "cuda:1")] == [
        torch.device(name) for name in ("cpu", "cuda", "cuda:1")
    ]
    for name in ("tpu", "cuda:", "cuda:x", "cuda:-1", ""):
        with pytest.raises(ValueError, match="device must be one of cpu, cuda, cuda:N, stacked-cpu, got"):
            find_device(name)
    with pytest.raises(ValueError, match="finds 2 CUDA devices; allowed here: cpu, cuda:0, cuda:1, stacked-cpu"):
        find_device("cuda:2")


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"device 'cuda' is not here.*allowed here: cpu, stacked-cpu"):
        start(small_config(), tmp_path / "run", device="cuda")
    with pytest.raises(ValueError, match="allowed here: cpu, stacked-cpu"):
        bcfl.train(network, client_data(), device="cuda", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_own_models_and_clients_can_be_stacked() -> None:
    settings: dict[str, Any] = {"method": "bcfl-g", "rounds": 2, "num_clusters": 2}
    plain, stacked = (bcfl.train(network, client_data(), **settings, device=d) for d in ("cpu", "stacked-cpu"))
    assert_same_story(stacked, plain)
