import os

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from bcfl.data.datasets import DATASETS, DIGITS_FIVE, load
from bcfl.data.sources import cache_folder


@pytest.fixture
def folder(tmp_path, small_images):
    """Small files in place of the real image sets."""
    shapes = {"fashion_mnist": (28, 28), "cifar10": (32, 32, 3), "mnist": (28, 28), "mnistm": (32, 32, 3)}
    for name, shape in (shapes | {"usps": (16, 16)}).items():
        np.savez(tmp_path / f"{name}.npz", **small_images(*shape))
    return tmp_path


def test_digits_are_all_images_in_each_rotation():
    data = load("digits")
    assert data.x_train.shape[1:] == (1, 8, 8)
    assert len(data.x_train) + len(data.x_test) == 4 * 1797
    assert (data.x_train.min(), data.x_train.max()) == (0, 1)
    assert data.domain_names == ("rotation 0", "rotation 90", "rotation 180", "rotation 270")
    upright, quarter, half = (data.x_train[data.domain_train == domain, 0] for domain in range(3))
    assert torch.equal(quarter, torch.rot90(upright, 1, dims=(1, 2)))
    assert torch.equal(half, upright.flip(1, 2))
    found = {image.tobytes() for image in (load_digits().images / 16).astype(np.float32)}
    assert {image.numpy().tobytes() for image in upright.contiguous()} < found


def test_no_image_is_for_training_in_one_rotation_and_for_testing_in_another():
    data = load("digits", rotations=(0, 180))
    turned_back = torch.where(
        data.domain_train.reshape(-1, 1, 1) == 1, data.x_train[:, 0].flip(1, 2), data.x_train[:, 0]
    )
    train = {image.numpy().tobytes() for image in turned_back.contiguous()}
    upright = {image.numpy().tobytes() for image in data.x_test[data.domain_test == 0, 0].contiguous()}
    assert len(train & upright) == 0


def test_digits_are_cut_in_the_same_proportion_in_every_class():
    data = load("digits", rotations=[0])
    train, test = data.y_train.bincount(), data.y_test.bincount()
    assert ((test / (train + test)) - 0.25).abs().max() < 0.003


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [
        ("fashion_mnist", [0.2860], [0.3530]),
        ("cifar10", [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    ],
)
def test_pixels_are_normalised_per_channel(folder, small_images, name, mean, deviation):
    data = load(name, folder)
    raw = small_images(32, 32, 3)["x_train"] if name == "cifar10" else small_images(28, 28)["x_train"][..., None]
    expected = ((raw / 255 - mean) / deviation).transpose(0, 3, 1, 2)
    torch.testing.assert_close(data.x_train, torch.from_numpy(expected).float())
    assert data.x_train.is_contiguous(memory_format=torch.channels_last)
    assert data.y_train.tolist() == [*range(10)] * 2
    assert (data.num_classes, data.domain_train, data.domain_names) == (10, None, ())


def test_digits_five_gives_any_domains_one_shape(folder):
    domains = ["usps", "mnistm", "optdigits", "mnist"]
    data = load("digits_five", folder, domains=domains)
    assert data.domain_names == tuple(domains)
    assert data.name == "digits_five[usps,mnistm,optdigits,mnist]"  # a subset is not called Digits-Five
    assert data.x_train.shape[1:] == (3, 28, 28)
    assert data.x_train.is_contiguous(memory_format=torch.channels_last)
    assert data.domain_train.bincount().tolist() == [20, 20, 1347, 20]
    assert data.domain_test.bincount().tolist() == [10, 10, 450, 10]
    assert data.x_train.min() >= -1
    assert data.x_train.max() <= 1


def test_digits_five_keeps_pixels_and_labels_where_nothing_is_resized(folder, small_images):
    data = load("digits_five", folder / "mnist.npz", domains=["mnist"])
    raw = torch.from_numpy(small_images(28, 28)["x_test"])
    for channel in range(3):
        torch.testing.assert_close(data.x_test[:, channel], (raw / 255 - 0.5) / 0.5)
    assert data.y_test.tolist() == [*range(10)]


def test_resizing_keeps_a_constant_image_constant(tmp_path, small_images):
    flat = np.broadcast_to(np.arange(20, dtype=np.uint8)[:, None, None, None] * 10, (20, 32, 32, 3))
    np.savez(tmp_path / "svhn_small.npz", **(small_images(32, 32, 3) | {"x_train": flat}))
    data = load("digits_five", tmp_path, domains=["svhn_small"])
    expected = (torch.arange(20) * 10 / 255 - 0.5) / 0.5
    torch.testing.assert_close(data.x_train, expected.reshape(-1, 1, 1, 1).expand_as(data.x_train))


def test_optdigits_are_the_test_images_of_digits():
    data, digits = load("digits_five", domains=["optdigits"]), load("digits", rotations=[0])
    assert torch.equal(data.y_test, digits.y_test)
    ink, expected = ((x.mean(dim=(1, 2, 3))) for x in (data.x_test, digits.x_test))
    torch.testing.assert_close(ink / 2 + 0.5, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        *(("digits", {"rotations": wrong}, "rotations = ") for wrong in ((), (45,), (0, 360))),
        ("digits", {"path": "here"}, r"'digits' is bundled: data\.path \(in Python path=\) must not be given"),
        *(
            ("digits_five", {"domains": wrong}, "must be one or more of mnist, mnistm, .*, optdigits, each once")
            for wrong in ([], ["mnist", "mnist"], ["mnist", "emnist"])
        ),
        ("digits_five", {"path": __file__, "domains": ["mnist", "usps"]}, "give their directory"),
        ("fashon_mnist", {}, "unknown data set 'fashon_mnist'; .*did you mean 'fashion_mnist'"),
        ("zzz", {}, "there are digits, .*digits_five, heart, table$"),
        ("digits", {"rotation": 90}, "'digits' has no option 'rotation'; its options: rotations"),
        ("cifar10", {"seed": 1}, "'cifar10' has no option 'seed'; its options: none"),
    ],
)
def test_what_is_no_data_set_or_option_is_answered_with_what_is(name, options, says):
    with pytest.raises(ValueError, match=says):
        load(name, **options)


def test_an_absent_domain_can_be_left_out_and_the_error_says_so(folder, small_images):
    cache_folder().mkdir()
    np.savez(cache_folder() / "svhn.npz", **small_images(32, 32, 3))  # which is not where the user says
    with pytest.raises(
        FileNotFoundError, match=r"digits_five: data set 'svhn' not found .* leave this domain out.* data\.domains"
    ):
        load("digits_five", folder)
    assert DATASETS["digits_five"].options == {"domains": DIGITS_FIVE}


@pytest.fixture
def reviews(tmp_path):
    """40 reviews in each of 4 domains; review r has one term, numbered r, r + 1 times."""
    np.savez(
        tmp_path / "amazon_review.npz",
        data=np.arange(1, 161, dtype=np.uint8),
        indices=np.arange(160, dtype=np.uint16),
        indptr=np.arange(161, dtype=np.int32),
        shape=np.array([160, 5000]),
        y=(np.arange(160) % 2).astype(np.uint8),
        domain=np.repeat(np.arange(4), 40).astype(np.uint8),
    )
    return tmp_path


def test_reviews_become_dense_counts_cut_per_domain(reviews):
    data = load("amazon_review", reviews)
    assert data.domain_names == ("books", "dvd", "electronics", "kitchen")
    assert data.domain_train.bincount().tolist() == [30] * 4
    assert data.domain_test.bincount().tolist() == [10] * 4
    assert data.x_train.shape == (120, 5000)
    assert data.x_train.dtype == torch.float32
    review = torch.cat([data.x_train, data.x_test]).argmax(dim=1)
    assert review.sort().values.tolist() == [*range(160)]
    assert torch.equal(torch.cat([data.x_train, data.x_test]).sum(1), review + 1.0)
    assert torch.equal(torch.cat([data.y_train, data.y_test]), review % 2)
    assert torch.equal(torch.cat([data.domain_train, data.domain_test]), review // 40)


def test_the_cut_of_the_reviews_follows_its_seed(reviews):
    first, again, other = (load("amazon_review", reviews, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.x_test, again.x_test)
    assert not torch.equal(first.x_test, other.x_test)


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [("fashion_mnist", (60000, 1, 28, 28), 10000), ("cifar10", (50000, 3, 32, 32), 10000)],
)
def test_the_published_data_matches_its_checksum(monkeypatch, name, train, test):
    """Runs where BCFL_TEST_DATA is a directory that holds the real sets; as the cache, it is verified."""
    folder = os.environ.get("BCFL_TEST_DATA")
    if folder is None or not os.path.exists(os.path.join(folder, f"{name}.npz")):
        pytest.skip(f"BCFL_TEST_DATA names no directory with {name}.npz")
    monkeypatch.setenv("BCFL_CACHE", folder)
    data = load(name)
    assert (tuple(data.x_train.shape), len(data.x_test)) == (train, test)
    deviation, mean = torch.std_mean(data.x_train, dim=(0, 2, 3))
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-3, rtol=0)
    torch.testing.assert_close(deviation, torch.ones_like(deviation), atol=1e-3, rtol=0)
