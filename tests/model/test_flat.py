"""A module as one vector, and the models of the paper."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcfl.model import functional
from bcfl.model.flat import LARGE, FlatModel, SeededDropout, build
from bcfl.model.zoo import MODELS, look_up
from bcfl.randomness import generator


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 9, 2)
    )


def images(num_images: int = 6) -> Tensor:
    return torch.randn(num_images, 3, 5, 5, generator=generator(0, "images"))


def test_vector_holds_parameters_then_statistics() -> None:
    module = build(convolutional, 0)
    conv, norm, last = module[0], module[1], module[5]
    expected = [
        conv.weight.permute(0, 2, 3, 1), conv.bias, norm.weight, norm.bias, last.weight, last.bias,
        norm.running_mean, norm.running_var,
    ]  # fmt: skip
    expected = torch.cat([tensor.detach().clone().flatten() for tensor in expected])
    model = FlatModel(module)
    assert torch.equal(model.vector, expected)
    assert model.num_statistics == 8
    assert model.num_parameters == len(expected) - 8
    assert model.num_last_layer == 4 * 9 * 2 + 2


def test_running_variances_are_where_the_vector_says() -> None:
    for factory in (convolutional, lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2))):
        module = build(factory, 0)
        model = FlatModel(module)
        for part in model.variances:
            model.vector[part] = 7.0
        norms = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        assert all(norm.running_var.eq(7).all() for norm in norms)
        assert int(model.vector.eq(7).sum()) == sum(norm.num_features for norm in norms)
    assert FlatModel(build(lambda: nn.Linear(3, 2), 0)).variances == ()


def test_module_computes_the_same_after_it_is_flattened() -> None:
    module, again = build(convolutional, 0).eval(), build(convolutional, 0).eval()
    assert torch.allclose(FlatModel(again).module(images()), module(images()), atol=1e-6)


def test_load_makes_the_module_another_and_back() -> None:
    first, second = FlatModel(build(convolutional, 0)), FlatModel(build(convolutional, 1))
    first.module.eval()
    second.module.eval()
    before, vector = first.module(images()), first.vector.clone()
    first.load(second.vector)
    assert torch.equal(first.module(images()), second.module(images()))
    assert not torch.allclose(first.module(images()), before)
    first.load(torch.cat([vector, torch.ones(7)]))  # what follows, such as carried momentum, is not the module's
    assert torch.equal(first.module(images()), before)


def test_training_moves_the_vector_and_counters_start_afresh() -> None:
    model = FlatModel(build(convolutional, 0))
    before = model.vector.clone()
    model.module.train()
    model.seed(generator(0))
    model.module(images())
    assert torch.equal(model.vector[: model.num_parameters], before[: model.num_parameters])
    assert not torch.equal(model.vector[model.num_parameters :], before[model.num_parameters :])  # running statistics
    assert int(model.module[1].num_batches_tracked) == 1
    model.load(before)
    assert int(model.module[1].num_batches_tracked) == 0


def test_a_model_trains_where_it_lives_and_leaves_no_hand_on_it() -> None:
    model = FlatModel(build(convolutional, 0))
    own, end = model.vector.clone(), model.num_parameters
    elsewhere = torch.cat([2 * own, torch.ones(3)])  # what follows is not the model's
    before = elsewhere.clone()
    model.seed(generator(0))
    with model.living_in(elsewhere):
        model.module.train()
        model.module(images())  # statistics move
        for _, gradient in model.gradients(model.module(images()).sum()):
            model.parameters.add_(gradient)
        assert torch.equal(model.vector, elsewhere[: len(own)])
        assert int(model.module[1].num_batches_tracked) == 2
    assert not torch.equal(elsewhere[:end], before[:end])
    assert not torch.equal(elsewhere[end : len(own)], before[end : len(own)])
    assert torch.equal(elsewhere[len(own) :], torch.ones(3))
    assert torch.equal(model.vector, own)
    given_away = elsewhere.clone()
    model.load(3 * own)
    model.module(images())
    assert torch.equal(elsewhere, given_away)


def test_a_model_comes_home_after_a_failure() -> None:
    model = FlatModel(build(convolutional, 0))
    own = model.vector
    with pytest.raises(KeyboardInterrupt), model.living_in(torch.zeros_like(own)):
        raise KeyboardInterrupt
    assert model.vector is own
    assert model.replaced() is None


def test_gradients_are_views_of_one_vector() -> None:
    model = FlatModel(build(convolutional, 0).eval())
    plain = build(convolutional, 0).eval()
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    F.cross_entropy(model.module(images()), labels).backward()
    F.cross_entropy(plain(images()), labels).backward()
    views = model.parameter_views(model.gradient)
    for (name, own), (_, expected) in zip(model.module.named_parameters(), plain.named_parameters(), strict=True):
        assert own.grad is not None
        assert own.grad.data_ptr() == views[name].data_ptr()
        assert torch.allclose(views[name], expected.grad, atol=1e-6), name
    model.gradient.zero_()
    assert not any(p.grad.any() for p in model.module.parameters())


def test_large_gradients_are_taken_piece_by_piece() -> None:
    def with_large() -> nn.Module:
        layers = [nn.Conv2d(3, 4, 2), nn.Conv2d(4, 600, (11, 12)), nn.Flatten(), nn.Linear(600, 500), nn.Linear(500, 2)]
        return nn.Sequential(*layers)

    model, plain = FlatModel(build(with_large, 0)), build(with_large, 0)
    x, labels = torch.randn(3, 3, 12, 13, generator=generator(0)), torch.tensor([0, 1, 0])
    for _ in range(2):  # the second is not added to the first
        found = torch.full((model.num_parameters,), torch.nan)
        for place, gradient in model.gradients(F.cross_entropy(model.module(x), labels)):
            found[place] = gradient
            assert len(gradient) <= LARGE
    F.cross_entropy(plain(x), labels).backward()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(model.parameter_views(found)[name], parameter.grad, atol=1e-6), name
    assert len(model.gradient) == sum(p.numel() for p in plain.parameters() if p.numel() < LARGE)
    F.cross_entropy(model.module(x), labels).backward()  # a training that was interrupted before it took its gradients
    total = sum(float(gradient.sum()) for _, gradient in model.gradients(model.module[0].weight.sum()))
    assert total == model.module[0].weight.numel()  # parameters that have no part in the loss have no gradient


def test_convolution_weights_lie_channels_last() -> None:
    weight = FlatModel(build(convolutional, 0)).module[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_dropout_draws_from_the_stream_it_is_given() -> None:
    model = FlatModel(build(convolutional, 0))
    model.module.train()
    global_state = torch.get_rng_state()

    def forward(seed: int) -> Tensor:
        model.seed(generator(seed))
        return model.module(images())

    assert torch.equal(forward(1), forward(1))
    assert not torch.equal(forward(1), forward(2))
    assert torch.equal(torch.get_rng_state(), global_state)


def test_dropout_keeps_the_mean_and_rests_in_evaluation() -> None:
    dropout = SeededDropout(0.3)
    dropout.generator = generator(0)
    x = torch.ones(200_000)
    dropped = dropout(x)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert float(dropped.mean()) == pytest.approx(1, abs=0.01)
    assert torch.equal(dropout.eval()(x), x)


def test_a_dropout_layer_used_twice_is_seeded_in_both_places() -> None:
    shared = nn.Dropout(0.5)
    model = FlatModel(nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared))
    assert [type(child) for child in model.module] == [nn.Linear, SeededDropout, nn.Linear, SeededDropout]


class Tied(nn.Module):
    """An encoder whose weights are its decoder's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.middle(self.encode(x)).relu())


def test_tied_parameters_stand_once_and_stay_tied() -> None:
    model = FlatModel(build(Tied, 0))
    assert model.num_parameters == 2 * 16 + 3 * 4
    assert model.num_last_layer == 4  # the decoder's bias: its weight already stands with the encoder
    model.load(torch.arange(model.num_parameters, dtype=torch.float32))
    assert model.module.decode.weight is model.module.encode.weight
    assert torch.equal(model.module.decode.weight.detach().flatten(), torch.arange(16.0))
    x = torch.randn(3, 4, generator=generator(0))
    plain = build(Tied, 0)
    plain.load_state_dict(model.module.state_dict())
    model.module(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert torch.allclose(model.gradient[:16].view(4, 4), plain.encode.weight.grad)  # the sum over both uses


def test_frozen_parameters_are_known_by_their_place() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))
    module[0].bias.requires_grad_(False)
    module[2].requires_grad_(False)
    assert FlatModel(module).frozen.tolist() == [False] * 6 + [True] * 3 + [False] * 6 + [True] * 6


def with_buffer(values: Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", values)
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ReLU(), "no parameters"),
        (nn.Linear(2, 2).double(), r"float32.*, weight is float64: use \.float\(\)"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).double()), r"float32.*, 1\.weight is float64"),
        (nn.Sequential(nn.Linear(2, 2), with_buffer(torch.zeros(2).half())), r"float32.*, 1\.mask is float16"),
    ],
)
def test_modules_that_cannot_be_flattened_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatModel(module)


def test_a_statistic_that_is_not_finite_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), with_buffer(torch.tensor([0.0, -torch.inf])))
    with pytest.raises(
        ValueError, match=r"finite parameters and statistics, 1\.mask does not: .* boolean, or .* forward"
    ):
        FlatModel(module)
    with torch.no_grad():
        module[0].bias[1] = torch.nan
    with pytest.raises(ValueError, match=r"finite parameters and statistics, 0\.bias does not"):
        FlatModel(module)
    FlatModel(nn.Sequential(nn.Linear(2, 2), with_buffer(torch.tensor([True, False]))))


def test_build_is_a_function_of_its_path_and_leaves_the_global_generator() -> None:
    before = torch.get_rng_state()
    vectors = [FlatModel(build(convolutional, *path)).vector for path in ((0, 1, 2), (0, 1, 2), (0, 2, 1), (1, 1, 2))]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])
    assert not torch.equal(vectors[0], vectors[3])


def test_build_refuses_a_module_that_it_was_given_before() -> None:
    module = nn.Linear(2, 2)
    assert build(lambda: module, 0) is module
    with pytest.raises(ValueError, match="must return a new module whenever it is called"):
        build(lambda: module, 0)
    assert build(lambda: copy.deepcopy(module), 0) is not module


def test_frozen_parameters_get_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    model, x = FlatModel(module), torch.ones(5, 3)
    gradient = torch.func.grad(lambda flat: functional.call(module, model.parameter_views(flat), x).sum())(model.vector)
    assert not gradient[:16].any()
    assert gradient[16:].all()


def test_large_sparse_gradients_are_those_of_dense_ones() -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.EmbeddingBag(LARGE // 8, 8, sparse=sparse), nn.Linear(8, 2))
        model = FlatModel(module)
        loss = F.cross_entropy(module(torch.tensor([[1, 2], [2, 5]])), torch.tensor([0, 1]))
        found.append(torch.cat([piece.clone() for _, piece in model.gradients(loss)]))
    assert torch.allclose(*found)
    assert found[0].any()


def test_a_dropout_that_is_watched_stays_and_one_that_drops_all_gives_zeros() -> None:
    watched = nn.Dropout()
    watched.register_forward_hook(lambda *_: None)
    model = FlatModel(nn.Sequential(nn.Linear(2, 2), watched, nn.Dropout(1.0, inplace=True)))
    assert model.module[1] is watched
    model.seed(generator(0))
    assert torch.equal(model.module.train()(torch.ones(3, 2)), torch.zeros(3, 2))
    assert not model.module[2].inplace  # what is there can be asked for all that nn.Dropout has


def test_build_refuses_what_is_not_a_module() -> None:
    with pytest.raises(ValueError, match=r"torch\.nn\.Module, got int"):
        build(lambda: 3, 0)  # type: ignore[arg-type, return-value]


# Parameters by hand: convolutions out·(in·k² + 1), linear layers out·(in + 1), BatchNorm 2 per channel.
SIZES = {
    "mlp": ((1, 8, 8), 10, 32 * 65 + 10 * 33, 0, 10 * 33),
    "fashion_cnn": ((1, 28, 28), 10, 16 * 26 + 32 + 32 * 401 + 64 + 10 * 1569, 2 * 48, 10 * 1569),
    "cifar_cnn": ((3, 32, 32), 10, 6 * 76 + 16 * 151 + 120 * 401 + 84 * 121 + 10 * 85, 0, 10 * 85),
    "digits_five_cnn": (
        (3, 28, 28),
        10,
        64 * 76 + 64 * 1601 + 128 * 1601 + 3072 * 6273 + 2048 * 3073 + 10 * 2049 + 2 * (64 + 64 + 128 + 3072 + 2048),
        2 * (64 + 64 + 128 + 3072 + 2048),
        10 * 2049,
    ),
    "amazon_mlp": ((5000,), 2, 1000 * 5001 + 500 * 1001 + 100 * 501 + 2 * 101, 0, 2 * 101),
}

# The paper's tables, layer by layer, with its slips put right: sizes alone do not show a missing ReLU or dropout, or a
# pooling of another kind. Convolutions are in, out, kernel, stride, padding; pooling is kernel, stride, padding.
LAYERS = {
    "mlp": "Flatten() Linear(64,32) ReLU() Linear(32,10)",
    "fashion_cnn": """
        Conv2d(1,16,5,1,2) BatchNorm2d(16) ReLU() MaxPool2d(2,2,0)
        Conv2d(16,32,5,1,2) BatchNorm2d(32) ReLU() MaxPool2d(2,2,0)
        Flatten() Linear(1568,10)""",
    "cifar_cnn": """
        Conv2d(3,6,5,1,0) ReLU() MaxPool2d(2,2,0)
        Conv2d(6,16,5,1,0) ReLU() MaxPool2d(2,2,0)
        Flatten() Linear(400,120) ReLU() Linear(120,84) ReLU() Linear(84,10)""",
    "digits_five_cnn": """
        Conv2d(3,64,5,1,2) BatchNorm2d(64) ReLU() MaxPool2d(3,2,1)
        Conv2d(64,64,5,1,2) BatchNorm2d(64) ReLU() MaxPool2d(3,2,1)
        Conv2d(64,128,5,1,2) BatchNorm2d(128) ReLU()
        Flatten() Linear(6272,3072) BatchNorm1d(3072) ReLU() Dropout(0.5)
        Linear(3072,2048) BatchNorm1d(2048) ReLU() Linear(2048,10)""",
    "amazon_mlp": "Linear(5000,1000) ReLU() Linear(1000,500) ReLU() Linear(500,100) ReLU() Linear(100,2)",
}
SHOWN = {
    nn.Conv2d: ("in_channels", "out_channels", "kernel_size", "stride", "padding"),
    nn.MaxPool2d: ("kernel_size", "stride", "padding"),
    nn.BatchNorm1d: ("num_features",),
    nn.BatchNorm2d: ("num_features",),
    nn.Linear: ("in_features", "out_features"),
    nn.Dropout: ("p",),
    nn.ReLU: (),
    nn.Flatten: (),
}


def described(layer: nn.Module) -> str:
    values = [getattr(layer, key) for key in SHOWN[type(layer)]]
    numbers = [value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value for value in values]
    return f"{type(layer).__name__}({','.join(map(str, numbers))})"


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_paper(name: str) -> None:
    shape, num_classes, num_parameters, num_statistics, num_last_layer = SIZES[name]
    module = build(look_up(name), 0)
    assert [described(layer) for layer in module.children()] == LAYERS[name].split()
    model = FlatModel(module)
    assert (model.num_parameters, model.num_statistics) == (num_parameters, num_statistics)
    assert model.num_last_layer == num_last_layer
    with torch.inference_mode():
        assert model.module.eval()(torch.zeros(2, *shape)).shape == (2, num_classes)


def test_digits_five_has_about_26_million_parameters() -> None:
    assert SIZES["digits_five_cnn"][2] == pytest.approx(26e6, rel=0.01)


def test_an_unknown_model_is_named_with_its_near_match() -> None:
    with pytest.raises(ValueError, match="unknown model 'fashion_cn'; did you mean 'fashion_cnn'"):
        look_up("fashion_cn")
