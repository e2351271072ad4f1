"""What a result says by cluster number, and modules that are their owner's: all made by hand, nothing is trained."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model
from small_runs import small_config
from torch import Tensor, nn

import bcfl
from bcfl.belief.gaussian import Gaussian
from bcfl.federation import Hypotheses
from bcfl.model.flat import FlatModel, ModelFactory, build
from bcfl.predict.predictors import examples_of, module_of


def made(factory: ModelFactory, model_of: list[list[int]], assignment: list[list[int]], *weight: float) -> bcfl.Result:
    """A run that ended with these stories; belief b is the factory's b-th draw."""
    means = torch.stack([FlatModel(build(factory, seed)).vector for seed in range(1 + max(map(max, model_of)))])
    state = Hypotheses(
        models=Gaussian(means, torch.zeros_like(means)),
        model_of=torch.tensor(model_of),
        log_weight=torch.tensor(weight or (1.0,), dtype=torch.float64).log(),
        assignment=torch.tensor(assignment),
        parent_of=torch.arange(len(means)),
        family=torch.zeros(len(model_of), dtype=torch.int64),
    )
    return bcfl.Result(small_config(), state, None, [], factory, None, None)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


def points(count: int = 5) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(0))


# ---- clusters by their numbers --------------------------------------------------------------------------------------


def test_a_clusters_model_is_found_by_its_number_where_others_are_missing() -> None:
    result = made(net, [[0, 1, -1, 2, -1]], [[3, 3, 0, 0, 1, 1]])
    assert list(result.models) == [0, 1, 3]
    for client, cluster in enumerate(result.assignment.tolist()):
        assert torch.equal(result.models[cluster](points()), result.predictor(client)(points()))
    assert result.probability.tolist() == torch.eye(5)[result.assignment].tolist()


def test_who_never_took_part_may_be_in_any_cluster_that_there_is() -> None:
    result = made(net, [[0, 1, -1, 2, -1], [0, 1, -1, 3, -1]], [[3, 0, -1, 1, -1], [3, 3, -1, 1, -1]], 0.75, 0.25)
    third = 1 / 3
    assert result.probability[2].tolist() == result.probability[4].tolist() == [third, third, 0, third, 0]
    assert result.entropy[2] == pytest.approx(math.log(3))
    together = result.co_association
    assert together.diagonal().tolist() == [1] * 5
    for unseen in (2, 4):
        assert [p for j, p in enumerate(together[unseen].tolist()) if j != unseen] == pytest.approx([third] * 4)
    assert together[0, 1] == pytest.approx(0.25)
    assert together[0, 3] == 0
    assert torch.equal(together, together.T)


def test_a_result_is_shown_in_a_few_lines_that_are_true(tmp_path: Path) -> None:
    clients = [(points(20) + j % 2, torch.arange(20) % 2) for j in range(6)]
    shown = repr(bcfl.train(net, clients, method="bcfl-mh-3", rounds=2, num_clusters=2, out=tmp_path / "run"))
    assert len(shown.splitlines()) <= 10
    assert len(shown) < 1000
    for part in (
        "bcfl-mh-3 on own clients, seed 0, 2 rounds",
        "clients: 6",
        "not tested",
        f"kept in {tmp_path / 'run'}",
    ):
        assert part in shown
    assert "digits" not in shown  # which a run of own clients has never seen
    assert "digits" in repr(made(net, [[0]], [[0]]))


# ---- predictions ----------------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """What is trained has no part in the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(3))
        self.backbone = nn.Linear(2, 8).requires_grad_(False)
        self.scores = nn.Linear(8, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.backbone(x).relu())


@pytest.mark.parametrize("beliefs", ["samples", "sigma", "last_layer"])
def test_frozen_parameters_are_certain(beliefs: str) -> None:
    result = made(Frozen, [[0]], [[0]])
    found = result.predict_proba(0, points(), beliefs=beliefs, prior_precision=1.0)
    assert torch.allclose(found, result.predict_proba(0, points()), atol=1e-6)
    free = made(lambda: Frozen().requires_grad_(True), [[0]], [[0]])
    assert not torch.allclose(free.predict_proba(0, points(), beliefs=beliefs, prior_precision=1.0), found, atol=0.01)


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x.log())


@pytest.mark.parametrize("beliefs", ["mean", "samples", "last_layer"])
def test_an_input_whose_scores_are_no_numbers_is_named(beliefs: str) -> None:
    result = made(Logarithm, [[0, 1], [2, 1]], [[0], [0]], 0.5, 0.5)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, -5.0], [0.0, 1.0]])
    assert torch.allclose(result.predict_proba(0, x[:2], beliefs=beliefs).sum(1), torch.ones(2))
    with pytest.raises(ValueError, match="data: the model's scores of example 2 are not finite"):
        result.predict_proba(0, x, beliefs=beliefs)


# ---- the most likely cluster of a newcomer --------------------------------------------------------------------------


class Told(nn.Module):
    """Two classes, told apart with a confidence that is a parameter, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.odds = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.zeros(len(x)), self.odds.expand(len(x))], 1)


def test_a_newcomers_model_is_one_of_its_most_likely_cluster(tmp_path: Path) -> None:
    # Cluster 0 has another belief in every hypothesis, and the more probability; cluster 1 has the heaviest belief.
    result = made(Told, [[0, 3], [1, 3], [2, 3]], [[0, 1]] * 3, 1 / 3, 1 / 3, 1 / 3)
    odds = torch.tensor([[1.9], [2.0], [2.1], [1.5]])
    result = replace(result, state=replace(result.state, models=Gaussian(odds, torch.zeros_like(odds))))
    newcomer = result.associate(torch.zeros(3, 1), torch.ones(3, dtype=torch.int64))
    assert newcomer.cluster == 0
    assert int(newcomer.predictor.share.argmax()) == 3
    assert newcomer.module.odds.item() == pytest.approx(2.1)
    assert newcomer.nll == pytest.approx(math.log(1 + math.exp(-2.1)))
    newcomer.save(tmp_path / "its.safetensors")
    assert float(load_file(tmp_path / "its.safetensors")["odds"]) == pytest.approx(2.1)


# ---- modules as their owner made them -------------------------------------------------------------------------------


class Owned(nn.Module):
    """All that a copy can get wrong: layouts, dropout, counters, ties, frozen and unsaved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.2)
        self.encode = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.decode = nn.Linear(16, 16)
        self.decode.weight = self.encode.weight
        self.scores = nn.Linear(16, 3)
        self.register_buffer("scale", torch.rand(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        features = self.dropout(self.norm(self.convolution(x)).relu()).flatten(1) * self.scale
        return self.scores(self.decode(self.encode(features)))


def owned() -> tuple[nn.Module, Tensor]:
    """A module with numbers that its factory never drew, and those numbers."""
    vector = FlatModel(build(Owned, 1)).vector.abs()
    return module_of(Owned, vector), vector


def test_a_module_is_what_its_factory_makes_with_other_numbers(tmp_path: Path) -> None:
    module, vector = owned()
    fresh = build(Owned, 0)
    assert [type(layer) for layer in module.modules()] == [type(layer) for layer in fresh.modules()]
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in fresh.parameters()]
    assert module.encode.weight is module.decode.weight
    assert not module.training
    assert int(module.norm.num_batches_tracked) == 0
    tensors = [*module.parameters(), *module.buffers()]
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert torch.equal(FlatModel(copy.deepcopy(module)).vector, vector)
    save_model(module, str(tmp_path / "own.safetensors"))


def test_a_module_can_be_trained_further() -> None:
    module, vector = owned()
    frozen = module.encode.weight.clone()
    optimiser = torch.optim.SGD(module.parameters(), 0.1)
    nn.functional.cross_entropy(module.train()(torch.randn(8, 1, 4, 4)), torch.arange(8) % 3).backward()
    optimiser.step()
    assert torch.equal(module.encode.weight, frozen)
    after = FlatModel(copy.deepcopy(module)).vector
    assert after.isfinite().all()
    assert not torch.equal(after, vector)
    assert torch.equal(vector, FlatModel(build(Owned, 1)).vector.abs())  # what the result holds is its own


def test_tied_parameters_are_saved_under_both_names(tmp_path: Path) -> None:
    result = made(Owned, [[0]], [[0]])
    newcomer = result.associate(torch.randn(4, 1, 4, 4), torch.arange(4) % 3)
    newcomer.save(tmp_path / "its.safetensors")
    module = Owned()
    module.load_state_dict(load_file(tmp_path / "its.safetensors"))
    module.scale.copy_(newcomer.module.scale)  # a buffer that is not to be saved
    x = torch.randn(2, 1, 4, 4)
    assert torch.equal(module.eval()(x), newcomer.module(x))


# ---- BatchNorm with a client's own statistics -----------------------------------------------------------------------


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2))


def test_a_predictor_can_have_the_statistics_of_a_clients_inputs() -> None:
    result, x = made(normed, [[0, 1]], [[0, 1]]), 3 * points(1200) + 1
    learned, own = result.predictor(1), result.predictor(1, statistics_of=x)
    with torch.no_grad():
        seen = learned[0](x)
    assert torch.allclose(own[1].running_mean, seen.mean(0), atol=1e-5)  # three passes of equal sizes
    assert torch.allclose(own[1].running_var, seen.var(0), rtol=0.02)
    assert not any(layer.training for layer in own.modules())  # nor does dropout draw
    assert own[1].momentum == 0.3
    assert all(torch.equal(*pair) for pair in zip(own.parameters(), learned.parameters(), strict=True))
    assert torch.equal(result.predictor(1)[1].running_mean, torch.zeros(8))  # the run's own are as they were


def test_examples_may_be_sorted() -> None:
    result, x = made(normed, [[0]], [[0]]), torch.cat([points(600) - 5, points(600) + 5])
    with torch.no_grad():
        spread = result.predictor(0)[0](x).var(0)
    assert torch.allclose(result.predictor(0, statistics_of=x)[1].running_var, spread, rtol=0.05)


def test_a_mixture_can_have_them_too() -> None:
    result, x = made(normed, [[0, 1], [1, 0]], [[0, 1], [0, 1]], 0.75, 0.25), 3 * points(40) + 1
    own = result.mixture(0).with_statistics_of(examples_of(normed, x, None))
    first, second = (result.predictor(client, statistics_of=x)(points()).softmax(1) for client in (0, 1))
    assert torch.allclose(own.predict_proba(points()).float(), 0.75 * first + 0.25 * second, atol=1e-6)
    assert not torch.allclose(own.predict_proba(points()), result.predict_proba(0, points()), atol=1e-3)


def test_statistics_need_two_examples_and_batchnorm_to_take_them() -> None:
    with pytest.raises(ValueError, match="statistics from fewer than two examples"):
        made(normed, [[0]], [[0]]).predictor(0, statistics_of=points(1))
    plain = made(net, [[0]], [[0]])
    x = points()
    assert torch.equal(plain.predictor(0, statistics_of=points(1))(x), plain.predictor(0)(x))
