"""The fast forward pass gives the module's own scores, for every stack of layers that it takes, and keeps NaN."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from federation_fixtures import run, simulator
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bcfl.data.arrays import from_arrays
from bcfl.data.partition import FederatedData
from bcfl.methods.bcfl import BCFL
from bcfl.model.flat import FlatModel, ModelFactory, SharedModels
from bcfl.model.layout import FEWEST_ROWS, SparseInputs, convolutions_of, largest_input, sparse_inputs_of
from bcfl.model.zoo import amazon_mlp, cifar_cnn, digits_five_cnn, fashion_cnn, mlp

TOLERANCE = 1e-5  # of scores of size 1: the order of float32 sums


def _lived_in(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The module with BatchNorm that has seen data, scales of either sign among them."""
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d) and layer.affine:
                layer.weight.normal_()
                layer.bias.normal_()
        for _ in range(3):
            module.train()(torch.randn(16, *shape) * 2 + 1)
    return module.eval()


def _scores(modules: list[nn.Module], x: Tensor) -> Tensor:
    """Of modules of one kind, in one pass."""  # (model, example, class)
    fast = convolutions_of(modules[0])
    assert fast is not None
    return fast.scorer([module.state_dict() for module in modules])(x)


def _word_counts(num_rows: int, num_words: int = 600, share: float = 0.02) -> Tensor:
    """Rows of small whole numbers, mostly zeros; the first row has none other."""
    x = torch.where(torch.rand(num_rows, num_words) < share, torch.randint(1, 5, (num_rows, num_words)), 0).float()
    x[0] = 0
    return x


def _wide(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(600, 500, bias=bias), nn.ReLU(), nn.Linear(500, 3))


NETS = {
    "fashion": (fashion_cnn, (1, 28, 28)),
    "cifar": (cifar_cnn, (3, 32, 32)),
    "digits five": (digits_five_cnn, (3, 28, 28)),
    "pool, then ReLU": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)),
        (2, 8, 8),
    ),
    "strides, dilation, no bias": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 9, 3, stride=2, padding=(1, 0), dilation=2, bias=False), nn.BatchNorm2d(9, affine=False),
            nn.Conv2d(9, 4, 1), nn.Flatten(), nn.LazyLinear(3),
        ),
        (2, 15, 15),
    ),
    "padding by name, ceiling": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 5, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True),
            nn.Flatten(), nn.LazyLinear(3),
        ),
        (1, 9, 9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("num_models", [1, 2, 3, 6])
@pytest.mark.parametrize("name", NETS)
def test_the_scores_are_the_modules_own(name: str, num_models: int) -> None:
    factory, shape = NETS[name]
    modules = [_lived_in(factory(), shape) for _ in range(num_models)]
    x = torch.randn(7, *shape)
    with torch.inference_mode():
        for images in (x, x.to(memory_format=torch.channels_last)):
            scores = _scores(modules, images)
            own = torch.stack([module(images) for module in modules])
            assert (scores - own).abs().max() <= TOLERANCE * own.abs().max()


def test_a_model_scores_the_same_in_any_company() -> None:
    modules = [_lived_in(fashion_cnn(), (1, 28, 28)) for _ in range(4)]
    x = torch.randn(64, 1, 28, 28)
    with torch.inference_mode():
        together = _scores(modules, x)
        alone = torch.cat([_scores([module], x) for module in modules])
    assert (together - alone).abs().max() <= 1e-6 * alone.abs().max()  # here and for this net: to the bit


@pytest.mark.parametrize("num_models", [1, 5, 9])
@pytest.mark.parametrize(
    ("factory", "x"),
    [
        (fashion_cnn, torch.randn(3, 1, 28, 28)),
        (mlp, torch.randn(3, 64)),
        (_wide, _word_counts(64)),
    ],
    ids=["images", "numbers", "word counts"],
)
def test_scorers_are_of_all_models_in_their_order(factory: ModelFactory, x: Tensor, num_models: int) -> None:
    model, own = FlatModel(factory()), []
    vectors = torch.stack([FlatModel(factory()).vector for _ in range(num_models)])
    vectors = torch.cat([vectors, torch.full((num_models, 3), torch.nan)], 1)  # momentum may travel along
    with torch.inference_mode():
        found = torch.cat([scores(x) for scores in model.scorers(vectors)])
        for vector in vectors:
            model.load(vector)
            own.append(model.module(x))
    assert torch.allclose(found, torch.stack(own), atol=TOLERANCE)


def test_layers_that_share_their_parameters_are_found() -> None:
    twice = nn.Conv2d(2, 2, 3, padding=1)
    head = nn.Linear(32, 32)
    model = FlatModel(
        nn.Sequential(twice, nn.ReLU(), twice, nn.Flatten(), head, nn.ReLU(), head, nn.ReLU(), nn.Linear(32, 3))
    )
    x, before = torch.randn(3, 2, 4, 4), model.vector.clone()
    for other in (before + 0.1, before * 1e30):  # the second overflows
        with torch.inference_mode():
            model.load(before)
            found = torch.cat([scores(x) for scores in model.scorers([before, other])])
            own = model.module(x)  # still with what is loaded
            model.load(other)
            assert torch.allclose(found, torch.stack([own, model.module(x)]), atol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize(
    "module",
    [
        mlp(),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 2)),
        nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(72, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(128, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten(), nn.Linear(72, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, dilation=2), nn.Flatten(), nn.Linear(32, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, dilation=(1, 2)), nn.Flatten(), nn.Linear(32, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 4, padding="same"), nn.Flatten(), nn.Linear(128, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 8)),
        nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), nn.Flatten(), nn.Linear(72, 2)),
    ],
)
def test_other_modules_are_left_to_themselves(module: nn.Module) -> None:
    assert convolutions_of(module) is None


@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_that_is_watched_is_called(whole: bool) -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
    (module if whole else module[0]).register_forward_hook(lambda *_: None)
    assert convolutions_of(module) is None


def test_a_layer_with_a_forward_of_its_own_is_called() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
    module[0].forward = lambda x: 2 * x  # type: ignore[method-assign]
    assert convolutions_of(module) is None


def test_no_models_have_no_scores() -> None:
    assert list(FlatModel(fashion_cnn()).scorers([])) == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("where", ["weight", "input"])
def test_a_sick_model_scores_as_in_torch(value: float, where: str) -> None:
    """oneDNN's ReLU and maximum swallow NaN, so such passes are torch's."""
    modules = [fashion_cnn().eval() for _ in range(3)]  # the second is sick
    x = torch.randn(4, 1, 28, 28)
    with torch.inference_mode():
        (modules[1][4].weight if where == "weight" else x)[0, 0] = value
        for some in (modules, modules[1:2]):
            scores, own = _scores(some, x), torch.stack([module(x) for module in some])
            assert torch.equal(scores.isfinite(), own.isfinite())
            assert torch.allclose(scores.nan_to_num(), own.nan_to_num(), rtol=1e-4)


def test_inputs_up_to_the_stated_bound_overflow_nowhere() -> None:
    def layer(*weights: float) -> tuple[Tensor, Tensor]:
        return torch.tensor(weights).view(1, -1, 1, 1), torch.tensor([5.0])

    assert largest_input([layer(2.0, -3.0)]) == pytest.approx(1e37 / 5)
    assert largest_input([layer(2.0, -3.0), layer(1e20)]) == pytest.approx(1e17 / 5)
    assert largest_input([layer(0.0)]) == pytest.approx(1e37)
    assert not largest_input([layer(torch.nan)]) >= 0
    assert not largest_input([layer(1.0), layer(torch.inf)]) >= 0


def _turned_digits(seed: int, num_clients: int = 6, num_examples: int = 40) -> FederatedData:
    """Clients with real digits, half of them turned by a quarter."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).split(num_examples)
    y = torch.tensor(labels)
    return from_arrays(
        [(x[own].rot90(j % 2, (2, 3)), y[own], x[own], y[own]) for j, own in enumerate(order[:num_clients])]
    )


def _small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


@pytest.mark.parametrize("strategy", ["greedy", "consensus", "multi"])
def test_the_hypotheses_kept_are_those_of_the_modules_own_scores(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = BCFL(num_clusters=3, strategy=strategy, max_hypotheses=3)  # type: ignore[arg-type]
    for seed in range(10):
        _assert_the_same_is_kept(method, _turned_digits(seed), _small_cnn, seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fashion", "cifar"])
def test_the_papers_nets_keep_the_same_hypotheses_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factory, (channels, size, _) = NETS[name]
    method = BCFL(num_clusters=2, strategy="multi", max_hypotheses=3)
    for seed in range(3):
        small = _turned_digits(seed, num_clients=4, num_examples=100)
        x = F.interpolate(small.x_train, size=(size, size)).expand(-1, channels, -1, -1).contiguous()
        data = replace(small, x_train=x, x_test=x[:1], test_of=(torch.empty(0, dtype=torch.int64),) * 4)
        _assert_the_same_is_kept(method, data, factory, seed, monkeypatch)


def _assert_the_same_is_kept(
    method: BCFL, data: FederatedData, factory: ModelFactory, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulator(data, factory, seed=seed) as engine:
        fast = run(method, engine, 4)
    asked: list[nn.Module] = []
    with monkeypatch.context() as patch:
        for fast_pass in ("convolutions_of", "sparse_inputs_of"):
            patch.setattr(f"bcfl.model.flat.{fast_pass}", asked.append)  # which returns None
        with simulator(data, factory, seed=seed) as engine:
            plain = run(method, engine, 4)
    assert asked  # by the models that were then used
    assert torch.equal(fast.assignment, plain.assignment)
    assert torch.allclose(fast.log_weight, plain.log_weight, atol=1e-4)
    assert torch.allclose(fast.models.mean, plain.models.mean, atol=1e-4)


def _assert_scores_are_the_modules_own(module: nn.Module, parts: list[Tensor]) -> None:
    fast = sparse_inputs_of(module)
    assert fast is not None
    with torch.no_grad():
        scores = fast.scorer()
        for x in parts:
            own = module(x)
            assert torch.allclose(scores(x).nan_to_num(), own.nan_to_num(), atol=TOLERANCE)
            assert torch.equal(scores(x).isfinite(), own.isfinite())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [[64, 64, 3], [FEWEST_ROWS - 1], [FEWEST_ROWS], [1, 64]])
def test_zeros_are_left_out_and_the_scores_are_the_modules_own(rows: list[int], bias: bool) -> None:
    parts = [_word_counts(number) for number in rows]
    _assert_scores_are_the_modules_own(_wide(bias), parts)
    _assert_scores_are_the_modules_own(
        _wide(bias), [torch.cat([x, torch.randn(4, 600)]) for x in parts]
    )  # and few zeros


def test_a_sparse_pass_does_not_multiply_by_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _wide()
    fast, multiplied = sparse_inputs_of(module), []
    assert fast is not None
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: multiplied.append(layer) or F.linear(x, layer.weight))
    with torch.no_grad():
        scores = fast.scorer()
        scores(_word_counts(64))
        scores(_word_counts(2))  # the weights are turned around by now
        assert module[0] not in multiplied
        scores(torch.ones(64, 600))
        assert module[0] in multiplied


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1e30])
def test_a_sick_weight_is_seen_though_its_input_is_zero(value: float) -> None:
    module, x = _wide(), _word_counts(64)
    x[:, 7] = 0
    with torch.no_grad():
        module[0].weight[3, 7] = value
    _assert_scores_are_the_modules_own(module, [x])


@pytest.mark.parametrize(
    "module",
    [
        mlp(),
        nn.Sequential(),
        nn.Sequential(nn.Linear(64, 32)),
        nn.Sequential(nn.Flatten(), nn.Linear(600, 500)),
        nn.Linear(600, 500),
        fashion_cnn(),
    ],
)
def test_modules_without_a_wide_first_layer_are_left_to_themselves(module: nn.Module) -> None:
    assert sparse_inputs_of(module) is None


@pytest.mark.parametrize("whole", [False, True])
def test_a_wide_layer_that_is_watched_is_called(whole: bool) -> None:
    module = _wide()
    (module if whole else module[0]).register_forward_hook(lambda *_: None)
    assert sparse_inputs_of(module) is None


def test_no_inputs_and_inputs_of_another_width_are_the_modules_own_affair() -> None:
    module = _wide()
    fast = sparse_inputs_of(module)
    assert fast is not None
    with torch.no_grad():
        scores = fast.scorer()
        for rows in (64, 0):
            assert scores(_word_counts(64)[:rows]).shape == (rows, 3)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            scores(_word_counts(64, num_words=300))


def test_a_model_uses_its_sparse_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, used = FlatModel(_wide()), []
    own = SparseInputs._summed
    monkeypatch.setattr(SparseInputs, "_summed", lambda *given: used.append(len(given[1])) or own(*given))
    with torch.no_grad():
        for scores in model.scorers(model.vector[None]):
            scores(_word_counts(64))
    assert used == [64]


def test_models_that_are_shared_are_turned_around_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, turned = torch.stack([FlatModel(_wide()).vector for _ in range(3)]), []
    own = SparseInputs._turned
    monkeypatch.setattr(SparseInputs, "_turned", lambda fast: turned.append(fast) or own(fast))
    shared, x = SharedModels.of(vectors), _word_counts(64)

    def scores_of(models: Tensor | Sequence[Tensor], x: Tensor) -> Tensor:  # by a worker with a model of its own
        with torch.no_grad():
            return torch.cat([scores(x) for scores in FlatModel(_wide()).scorers(models)])

    first, again = scores_of(shared.only([2, 0]), x), scores_of(shared, x)
    assert len(turned) == 3
    assert torch.equal(again[[2, 0]], first)
    few = x[: FEWEST_ROWS - 1]  # too few to turn weights around, also where somebody else has done so
    assert torch.equal(scores_of(shared, few), scores_of(vectors, few))
    assert len(turned) == 3
    assert torch.equal(again, scores_of(vectors, x))
    assert len(turned) == 6  # those are not shared


def test_what_is_shared_is_nobodys_own() -> None:
    """A layer with one output, turned around, is the same numbers in the same order: it must be a copy all the same."""

    def narrow() -> nn.Module:
        return nn.Sequential(nn.Linear(1 << 18, 1), nn.Tanh(), nn.Linear(1, 2))

    vectors, x = torch.stack([FlatModel(narrow()).vector for _ in range(2)]), _word_counts(40, 1 << 18, 0.001)
    shared, workers = SharedModels.of(vectors), [FlatModel(narrow()) for _ in range(2)]
    with torch.no_grad():
        first, second = (torch.cat([scores(x) for scores in worker.scorers(shared)]) for worker in workers)
    assert len(shared.made) == 2
    assert torch.equal(first, second)


@pytest.mark.parametrize("method", [BCFL(num_clusters=2), BCFL(num_clusters=2, strategy="greedy", racing=0.05)])
def test_workers_that_share_models_answer_as_one_does(method: BCFL) -> None:
    x = _word_counts(320)
    x[160:, :20] = 1
    held = [(x[i : i + 40], (x[i : i + 40, 7] > 0).long()) for i in range(0, 320, 40)]
    states = []
    for num_workers in (1, 2):
        with simulator(from_arrays(held), _wide, num_workers=num_workers) as engine:
            states.append(run(method, engine, 3))
    assert torch.equal(states[0].models.mean, states[1].models.mean)
    assert torch.equal(states[0].log_weight, states[1].log_weight)


def test_of_many_models_only_some_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcfl.model.flat.MOST_MADE", 2)
    vectors, x = torch.stack([FlatModel(_wide()).vector for _ in range(3)]), _word_counts(64)
    shared = SharedModels.of(vectors)
    with torch.no_grad():
        found = [torch.cat([scores(x) for scores in FlatModel(_wide()).scorers(of)]) for of in (shared, vectors)]
    assert len(shared.made) == 2
    assert torch.equal(*found)


def test_shared_models_are_those_that_are_shared() -> None:
    vectors = torch.arange(12.0).view(6, 2)
    shared = SharedModels.of(vectors)
    assert SharedModels.of(shared) is shared
    assert torch.equal(torch.stack(list(shared)), vectors)
    assert torch.equal(torch.stack(list(shared[2:4])), vectors[2:4])
    assert torch.equal(torch.stack(list(shared.only([5, 1, 3])[1:])), vectors[[1, 3]])
    assert torch.equal(torch.stack(list(shared.only([5, 1, 3]).only([2, 0]))), vectors[[3, 5]])
    assert shared.only([5, 1])[0].data_ptr() == vectors[5].data_ptr()  # no copy


@pytest.mark.slow
def test_the_papers_net_of_word_counts_keeps_the_same_hypotheses(monkeypatch: pytest.MonkeyPatch) -> None:
    method = BCFL(num_clusters=2, strategy="multi", max_hypotheses=3)
    for seed in range(3):
        torch.manual_seed(seed)
        x = _word_counts(400, num_words=5000)
        clients = [
            (own, (own[:, j % 2 :: 2].sum(1) > own[:, 1 - j % 2 :: 2].sum(1)).long())
            for j, own in enumerate(x.split(100))
        ]
        _assert_the_same_is_kept(method, from_arrays(clients), amazon_mlp, seed, monkeypatch)
