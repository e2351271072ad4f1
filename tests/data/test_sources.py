"""Raw data is found in the right order, read from the public formats, verified, and its absence explained."""

import gzip
import hashlib
import sys
import tracemalloc
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.io
from sklearn.datasets import dump_svmlight_file

from bcfl.data import formats, sources
from bcfl.data.formats import IMAGE_KEYS, REVIEW_DOMAINS, review_counts
from bcfl.data.sources import cache_folder, find

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value)


def write_npz(folder, name, arrays):
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{name}.npz", **arrays)
    return folder / f"{name}.npz"


def idx_bytes(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


def publish(monkeypatch, name, arrays):
    """Let these arrays be the published ones."""
    digest = hashlib.sha256(b"".join(arrays[key].tobytes() for key in IMAGE_KEYS)).hexdigest()
    monkeypatch.setitem(sources.SOURCES, name, replace(sources.SOURCES[name], sha256=digest))


def test_an_npz_file_is_found_by_its_path_and_in_its_directory(tmp_path, small_images):
    arrays = small_images(28, 28)
    path = write_npz(tmp_path, "fashion_mnist", arrays)
    assert_same(find("fashion_mnist", path), arrays)
    assert_same(find("fashion_mnist", str(tmp_path)), arrays)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("folder", ["", "fashion_mnist", "FashionMNIST/raw"])
def test_idx_files_are_read(tmp_path, small_images, folder, pack):
    arrays = small_images(28, 28)
    place = tmp_path / folder
    place.mkdir(parents=True, exist_ok=True)
    for key, file in zip(IMAGE_KEYS, IDX_FILES, strict=True):
        raw = idx_bytes(arrays[key])
        (place / (file + ".gz" * pack)).write_bytes(gzip.compress(raw) if pack else raw)
    assert_same(find("fashion_mnist", tmp_path), arrays)


@pytest.mark.parametrize(("name", "prefix"), [("svhn", ""), ("svhn", "svhn_"), ("synthetic_digits", "synth_")])
def test_stanfords_mat_files_are_read_with_ten_for_zero(tmp_path, small_images, name, prefix):
    arrays = small_images(32, 32, 3)
    for split in ("train", "test"):
        y = arrays[f"y_{split}"]
        content = {"X": arrays[f"x_{split}"].transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y)[:, None]}
        scipy.io.savemat(tmp_path / f"{prefix}{split}_32x32.mat", content)
    assert_same(find(name, tmp_path), arrays)


@pytest.mark.parametrize(
    ("name", "file", "keys", "shape", "one_hot"),
    [
        ("mnist", "mnist_data.mat", "train_28 label_train test_28 label_test", (28, 28, 1), True),
        ("mnistm", "mnistm_with_label.mat", "train label_train test label_test", (28, 28, 3), True),
        ("synthetic_digits", "syn_number.mat", "train_data train_label test_data test_label", (32, 32, 3), False),
    ],
)
def test_the_digits_five_bundle_is_read(tmp_path, small_images, name, file, keys, shape, one_hot):
    arrays = small_images(*shape)
    labels = {key: np.eye(10)[arrays[key]] if one_hot else arrays[key][:, None] for key in ("y_train", "y_test")}
    stored = arrays | labels
    scipy.io.savemat(tmp_path / file, dict(zip(keys.split(), (stored[key] for key in IMAGE_KEYS), strict=True)))
    found = find(name, tmp_path)
    grey = {key: arrays[key][..., 0] if shape[2] == 1 else arrays[key] for key in ("x_train", "x_test")}
    assert_same(found, arrays | grey)


def write_reviews(folder, num_terms):
    rng = np.random.default_rng(0)
    blocks = []
    for domain in REVIEW_DOMAINS:
        for split, size in (("train", 4), ("test", 8)):
            counts, labels = rng.poisson(0.5, size=(size, num_terms)), np.arange(size) % 2 * 2 - 1
            dump_svmlight_file(counts, labels, str(folder / f"{domain}_{split}.svmlight"), zero_based=True)
            blocks.append(counts)
    return np.concatenate(blocks)


def test_reviews_are_read_from_svmlight(tmp_path):
    counts = write_reviews(tmp_path, 300)
    found = find("amazon_review", tmp_path)
    dense = review_counts(found).toarray()
    assert dense.shape == (48, 5000)
    np.testing.assert_array_equal(dense[:, :300], counts)
    assert not dense[:, 300:].any()
    np.testing.assert_array_equal(found["domain"], np.repeat(np.arange(4), 12))
    np.testing.assert_array_equal(found["y"][:4], [0, 1, 0, 1])


def test_of_too_many_terms_the_most_frequent_are_kept_in_order(tmp_path):
    counts = write_reviews(tmp_path, 5100)
    kept = np.sort(np.argsort(-counts.sum(0), kind="stable")[:5000])
    np.testing.assert_array_equal(review_counts(find("amazon_review", tmp_path)).toarray(), counts[:, kept])


def test_a_users_path_goes_before_the_cache_and_is_not_verified(tmp_path, small_images):
    own, cached = small_images(28, 28), small_images(28, 28)
    cached["x_train"] = 255 - cached["x_train"]
    write_npz(cache_folder(), "mnistm", cached)
    write_npz(tmp_path / "own", "mnistm", own)
    write_npz(tmp_path / "own", "fashion_mnist", own)
    assert_same(find("mnistm", tmp_path / "own"), own)
    assert_same(find("mnistm"), cached)
    assert_same(find("fashion_mnist", tmp_path / "own"), own)


def test_a_path_that_does_not_hold_the_set_is_refused_whatever_the_cache_holds(tmp_path, small_images):
    write_npz(cache_folder(), "mnistm", small_images(28, 28, 3))
    (tmp_path / "figures").mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        find("mnistm", tmp_path / "figures")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"data set 'mnistm' not found in {tmp_path / 'figures'}: ")
    for part in ("put mnistm.npz or mnistm_with_label.mat there", "data.path=PATH (in Python path=", "--data-path"):
        assert part in message


def test_cache_and_system_package_are_verified(tmp_path, small_images, monkeypatch):
    arrays = small_images(28, 28)
    package = tmp_path / "package"
    package.mkdir()
    for key, file in zip(IMAGE_KEYS, IDX_FILES, strict=True):
        (package / f"{file}.gz").write_bytes(gzip.compress(idx_bytes(arrays[key])))
    with pytest.raises(
        ValueError, match=r"'fashion_mnist' from .*package is not the published one \(sha256 .*data\.path=DIR"
    ):
        find("fashion_mnist")
    publish(monkeypatch, "fashion_mnist", arrays)
    assert_same(find("fashion_mnist"), arrays)
    changed = arrays | {"y_test": arrays["y_test"][::-1].copy()}
    cached = write_npz(cache_folder(), "fashion_mnist", changed)
    with pytest.raises(ValueError, match=r"cache is not the published one"):
        find("fashion_mnist")
    cached.unlink()
    assert_same(find("fashion_mnist"), arrays)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("BCFL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "bcfl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "bcfl"


def fake_hub(monkeypatch, arrays, image="image", calls=None):
    """A `datasets` module whose only data set holds these arrays."""

    def load_dataset(repository, config, *, split):
        if calls is not None:
            calls.append((repository, config, split))
        pairs = zip(arrays[f"x_{split}"], arrays[f"y_{split}"].tolist(), strict=True)
        return [{image: pixels, "label": label} for pixels, label in pairs]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_the_hub_is_asked_last_and_its_answer_is_cached(monkeypatch, small_images):
    arrays, calls = small_images(32, 32, 3), []
    fake_hub(monkeypatch, arrays, calls=calls)
    assert_same(find("svhn"), arrays)
    assert calls == [("ufldl-stanford/svhn", "cropped_digits", split) for split in ("train", "test")]
    assert [file.name for file in cache_folder().iterdir()] == ["svhn.npz"]
    assert_same(find("svhn"), arrays)
    assert len(calls) == 2


def test_what_the_hub_sends_is_verified_before_it_is_cached(monkeypatch, small_images):
    arrays = small_images(32, 32, 3)
    fake_hub(monkeypatch, arrays, image="img")
    with pytest.raises(ValueError, match="'cifar10' from the Hugging Face hub is not the published one"):
        find("cifar10")
    assert not cache_folder().exists()
    publish(monkeypatch, "cifar10", arrays)
    assert_same(find("cifar10"), arrays)


@pytest.mark.parametrize("where", ["hub", "path"])
def test_batches_in_another_order_are_put_into_the_published_one(monkeypatch, small_images, tmp_path, where):
    """As the hub's CIFAR-10, which begins with its fourth batch: the published splits name examples by their place."""
    arrays = small_images(32, 32, 3)
    size = len(arrays["y_train"]) // 5
    assert size >= 2
    arrays |= {key: arrays[key][: 5 * size] for key in ("x_train", "y_train")}
    publish(monkeypatch, "cifar10", arrays)
    parts = [slice(i * size, (i + 1) * size) for i in range(5)]
    batches = [
        hashlib.sha256(b"".join(arrays[key][part].tobytes() for key in ("x_train", "y_train"))).hexdigest()
        for part in parts
    ]
    monkeypatch.setitem(sources.SOURCES, "cifar10", replace(sources.SOURCES["cifar10"], batches=tuple(batches)))
    order = [3, 2, 1, 4, 0]
    mixed = arrays | {key: np.concatenate([arrays[key][parts[i]] for i in order]) for key in ("x_train", "y_train")}
    assert not np.array_equal(mixed["x_train"], arrays["x_train"])
    if where == "hub":
        fake_hub(monkeypatch, mixed, image="img")
        assert_same(find("cifar10"), arrays)
        assert_same(find("cifar10"), arrays)  # as it was cached
        return
    path = write_npz(tmp_path, "cifar10", mixed)
    assert_same(find("cifar10", path), arrays)
    within = mixed | {"x_train": mixed["x_train"][::-1].copy()}  # not the same batches: one's own data
    assert_same(find("cifar10", write_npz(tmp_path / "own", "cifar10", within)), within)


def test_an_alpha_channel_from_the_hub_is_dropped(monkeypatch, small_images):
    arrays = small_images(28, 28, 4)
    fake_hub(monkeypatch, arrays)
    found = find("mnistm")
    np.testing.assert_array_equal(found["x_train"], arrays["x_train"][..., :3])


def test_a_failed_download_is_an_absent_set_with_the_reason(monkeypatch, small_images):
    def load_dataset(*_, **__):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(FileNotFoundError, match="uoft-cs/cifar10 failed: ConnectionError: no route to the hub"):
        find("cifar10")
    fake_hub(monkeypatch, small_images(32, 32, 3), image="photo")
    with pytest.raises(FileNotFoundError, match="downloading uoft-cs/cifar10 failed: KeyError"):
        find("cifar10")
    assert not cache_folder().exists()


def test_a_failed_write_leaves_no_half_file_in_the_cache(monkeypatch, small_images):
    fake_hub(monkeypatch, small_images(28, 28, 3))

    def full(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(sources.np, "savez", full)
    with pytest.raises(OSError, match="disk full"):
        find("mnistm")
    assert list(cache_folder().iterdir()) == []


def test_processes_that_download_at_once_leave_one_whole_file_in_the_cache(monkeypatch, small_images):
    arrays, save = small_images(28, 28, 3), np.savez
    fake_hub(monkeypatch, arrays)

    def save_while_another_does(file, **options):
        monkeypatch.setattr(sources.np, "savez", save)
        find("mnistm")  # begins and ends in the middle of this one
        save(file, **options)

    monkeypatch.setattr(sources.np, "savez", save_while_another_does)
    find("mnistm")
    assert [file.name for file in cache_folder().iterdir()] == ["mnistm.npz"]
    assert_same(find("mnistm"), arrays)


def test_the_real_datasets_library_reads_a_local_copy(
    monkeypatch, small_images, tmp_path, nothing_but_what_a_test_makes
):
    monkeypatch.delitem(sys.modules, "datasets")
    if nothing_but_what_a_test_makes is not None:  # a second import would find only parts of it
        monkeypatch.setitem(sys.modules, "datasets", nothing_but_what_a_test_makes)
    hub = pytest.importorskip("datasets")
    images = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    arrays = small_images(28, 28, 3)
    (tmp_path / "local").mkdir()
    for split in ("train", "test"):
        content = {
            "image": [images.fromarray(pixels) for pixels in arrays[f"x_{split}"]],
            "label": arrays[f"y_{split}"].tolist(),
        }
        features = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(num_classes=10)})
        rows = hub.Dataset.from_dict(content, features=features)
        rows.to_parquet(str(tmp_path / "local" / f"{split}.parquet"))
    local = replace(sources.SOURCES["mnistm"], hub=sources.Hub(str(tmp_path / "local")))
    monkeypatch.setitem(sources.SOURCES, "mnistm", local)
    assert_same(find("mnistm"), arrays)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fashion_mnist", ["fashion_mnist.npz", *IDX_FILES, "system package dataset-fashion-mnist", "bcfl[data]"]),
        ("cifar10", ["cifar10.npz", "data_batch_1.bin", "test_batch.bin", "bcfl[data]", "uoft-cs/cifar10"]),
        ("amazon_review", ["amazon_review.npz", "books_train.svmlight", "cannot be downloaded"]),
        ("synthetic_digits", ["synthetic_digits.npz", "synth_train_32x32.mat", "syn_number.mat"]),
    ],
)
def test_an_absent_set_is_answered_with_what_to_do(name, parts):
    with pytest.raises(FileNotFoundError) as caught:
        find(name)
    message = str(caught.value)
    assert "\n" not in message
    for part in (*parts, f"in {cache_folder()}", f"into {cache_folder()}", "give data.path=DIR (in Python path=)"):
        assert part in message


def test_a_path_that_does_not_exist_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such file or directory; .*--data-path"):
        find("cifar10", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_test": None}, "no key y_test, only x_train"),
        ({"x_train": np.zeros((20, 28, 28))}, "x_train must be uint8"),
        ({"x_train": np.zeros((20, 784), np.uint8)}, "x_train must be uint8"),
        ({"x_test": np.zeros((10, 32, 32), np.uint8)}, r"images of shape \(28, 28\), but holds \(32, 32\)"),
        ({"y_train": np.zeros(7, np.uint8)}, "y_train must be 20 integers, but is uint8"),
        ({"y_train": np.zeros(20)}, "y_train must be 20 integers, but is float64"),
        ({"y_train": np.full(20, 10)}, "y_train must hold labels 0 … 9"),
        ({"x_test": np.zeros((0, 28, 28), np.uint8), "y_test": np.zeros(0, int)}, "but is empty"),
        ({"y_train": np.array([None] * 20)}, "holds Python objects"),
    ],
)
def test_a_wrong_image_file_is_refused_with_its_name(tmp_path, small_images, change, message):
    arrays = {key: value for key, value in (small_images(28, 28) | change).items() if value is not None}
    write_npz(tmp_path, "fashion_mnist", arrays)
    with pytest.raises(ValueError, match=rf"fashion_mnist\.npz is damaged or of another format: .*{message}"):
        find("fashion_mnist", tmp_path)


def test_only_needed_arrays_are_unpacked_and_none_without_room(tmp_path, small_images, monkeypatch):
    arrays = small_images(28, 28)
    path = write_npz(tmp_path, "fashion_mnist", arrays)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("unused.npy", "w") as member:
        for _ in range(200):
            member.write(bytes(10**6))
    tracemalloc.start()
    assert_same(find("fashion_mnist", path), arrays)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()
    monkeypatch.setattr(formats, "room", lambda: 1000)
    for key, file in zip(IMAGE_KEYS, IDX_FILES, strict=True):
        (tmp_path / f"{file}.gz").write_bytes(gzip.compress(idx_bytes(arrays[key])))
    for name in ("fashion_mnist", "mnist"):
        with pytest.raises(ValueError, match=r"would take .* GB, more than this machine has free"):
            find(name, tmp_path)


@pytest.mark.parametrize("wrong", [np.nan, 0.5, -1, 256])
@pytest.mark.parametrize("key", ["train_data", "train_label"])
def test_numbers_that_bytes_cannot_hold_are_refused(tmp_path, small_images, key, wrong):
    arrays = small_images(32, 32, 3)
    keys = ("train_data", "train_label", "test_data", "test_label")
    content = {name: arrays[place].astype(float) for name, place in zip(keys, IMAGE_KEYS, strict=True)}
    content[key].flat[0] = wrong
    scipy.io.savemat(tmp_path / "syn_number.mat", content)
    with pytest.raises(ValueError, match="are not made of whole numbers 0 … 255"):
        find("synthetic_digits", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": np.array([1, np.nan, 2])}, "data must hold counts from 0"),
        ({"shape": np.array([3, 400])}, r"shape must be \(example, 5000\)"),
        ({"indices": np.array([0, 9000, 2])}, "damaged"),
        ({"indptr": np.array([0, 1, 2])}, "damaged"),
        ({"y": np.array([0, 1, 2])}, "y must be 3 integers below 2"),
        ({"domain": np.array([0, 1])}, "domain must be 3 integers below 4"),
    ],
)
def test_a_wrong_review_file_is_refused(tmp_path, change, message):
    arrays = {
        "data": np.ones(3),
        "indices": np.arange(3),
        "indptr": np.arange(4),
        "shape": np.array([3, 5000]),
        "y": np.array([0, 1, 0]),
        "domain": np.array([0, 1, 2]),
    }
    write_npz(tmp_path, "amazon_review", arrays | change)
    with pytest.raises(ValueError, match=message) as caught:
        find("amazon_review", tmp_path)
    assert "amazon_review.npz" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [("mnistm", "mnistm.npz", b"x_train,y_train\n0,1\n"), ("mnistm", "mnistm_with_label.mat", b"<html>" * 50)],
)
def test_a_foreign_file_is_no_reason_to_advise_trust(tmp_path, name, file, content):
    """Damaged ones, of every format: tests/fuzz/test_data_files.py."""
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} is damaged or of another format") as caught:
        find(name, tmp_path)
    assert "pickle" not in str(caught.value)
