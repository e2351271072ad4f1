import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bcfl.data.datasets import Dataset
from bcfl.data.manifest import manifest, save_partition
from bcfl.data.partition import partition
from bcfl.data.validation import with_validation
from bcfl.runs.problem import load_data
from bcfl.runs.settings import load_config


def held(data):
    return torch.cat(data.train_of), torch.cat(data.test_of)


def label_shares(data, pool="train"):
    """Each client's distribution over the classes, (client, class)."""
    indices, labels = (data.train_of, data.y_train) if pool == "train" else (data.test_of, data.y_test)
    counts = torch.stack([labels[one].bincount(minlength=data.num_classes) for one in indices]).double()
    return counts / counts.sum(1, keepdim=True)


def assert_disjoint_and_counted(data):
    train, test = held(data)
    assert len(train.unique()) == len(train)
    assert len(test.unique()) == len(test)
    assert len(train) + len(test) + data.num_unused == len(data.y_train) + len(data.y_test)


@pytest.mark.parametrize("spec", ["feature(4,5)", "label(4,5,0.1)", "label(0,20,0.5)"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_example_goes_to_exactly_one_client(pool, spec, seed):
    data = partition(pool, spec, seed)
    assert data.num_clients == 20
    assert data.num_unused == 0
    assert_disjoint_and_counted(data)
    assert data.num_examples.tolist() == [len(one) for one in data.train_of]
    assert data.description == f"pool {spec} seed {seed}"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.integers(0, 4),
    clients=st.integers(1, 8),
    alpha=st.floats(0.3, 100),
    seed=st.integers(0, 10**6),
    floor=st.sampled_from([0.0, 0.01, 0.1]),
)
def test_whatever_is_drawn_is_disjoint_counted_and_large_enough(pool, groups, clients, alpha, seed, floor):
    data = partition(pool, f"label({groups},{clients},{alpha!r})", seed, share_floor=floor)
    assert_disjoint_and_counted(data)
    assert data.num_unused == 0 or floor > 0
    assert min(map(len, data.train_of)) >= 10
    assert min(map(len, data.test_of)) >= 1


def test_feature_clients_hold_equal_random_parts_of_one_domain(pool):
    data = partition(pool, " feature( 4, 7 ) ", 0)
    assert data.group.tolist() == [client // 7 for client in range(28)]
    for client, (train, test) in enumerate(zip(data.train_of, data.test_of, strict=True)):
        assert set(pool.domain_train[train].tolist()) == {client // 7}
        assert set(pool.domain_test[test].tolist()) == {client // 7}
    for sizes in (data.num_examples, torch.tensor([len(test) for test in data.test_of])):
        assert sizes.max() - sizes.min() <= 1
    assert data.train_of[0].max() > 5000  # a random part, not the first one


def test_groups_differ_in_their_labels_while_clients_of_a_group_agree(pool):
    shares = label_shares(partition(pool, "label(4,5,0.1)", 0))
    distance = torch.cdist(shares, shares, p=1) / 2  # total variation, (client, client)
    same = (torch.arange(20) // 5).unsqueeze(1) == torch.arange(20) // 5
    off_diagonal = ~torch.eye(20, dtype=torch.bool)
    assert distance[same & off_diagonal].mean() < 0.2
    assert distance[~same].mean() > 0.6
    assert distance[same].max() < distance[~same].min()


def test_without_groups_the_clients_differ_and_no_group_is_claimed(pool):
    data = partition(pool, "label(0,20,0.1)", 0)
    assert data.group is None
    shares = label_shares(data)
    assert (torch.cdist(shares, shares, p=1) / 2)[~torch.eye(20, dtype=torch.bool)].mean() > 0.6


@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_training_and_test_data_are_cut_in_the_same_proportions(pool, floor):
    data = partition(pool, "label(4,3,0.1)", 2, share_floor=floor)
    for label in range(10):
        for indices, labels in ((data.train_of, data.y_train), (data.test_of, data.y_test)):
            total = int((labels == label).sum())
            part = torch.tensor([int((labels[one] == label).sum()) for one in indices]) / total
            if labels is data.y_train:
                train_part, train_total = part, total
        # Both are whole numbers within one of the same share.
        assert (train_part - part).abs().max() <= 1 / train_total + 1 / total


def test_each_group_has_a_fair_part_of_the_test_set(pool):
    for seed in range(20):
        data = partition(pool, "label(4,2,0.1)", seed)
        sizes = torch.tensor([len(test) for test in data.test_of]).reshape(4, 2).sum(1)
        assert sizes.min() >= 0.3 * 1500 / 4 - 10  # each of ten classes is rounded to whole examples


def test_share_floor_drops_small_class_shares_and_counts_what_is_unused(pool):
    plain, floored = (partition(pool, "label(4,10,0.1)", 0, share_floor=floor) for floor in (0.0, 0.01))
    assert_disjoint_and_counted(floored)
    assert 0.04 < floored.num_unused / 7500 < 0.09  # half a percent per client and class, and a little per group
    assert floored.num_unused > plain.num_unused == 0
    assert "share_floor 0.01" in floored.description


def test_floored_shares_are_whole_percents_of_whole_percents():
    """One class of 10⁶ examples shows the shares: each client has i % of its group's j %."""
    size = 10**6
    label = torch.zeros(size, dtype=torch.int64)
    empty = torch.empty(size, 0)
    data = partition(replace(make_pool(empty, label), num_classes=1), "label(2,3,1)", 0, share_floor=0.01)
    sizes = data.num_examples.reshape(2, 3).double() / size
    products = {round(i * j) for i in range(101) for j in range(101)}
    assert {round(float(share) * 10**4) for share in sizes.flatten()} <= products
    assert data.num_unused > 0


def make_pool(x, y):
    return Dataset("made", x, y, x, y, None, None, (), int(y.max()) + 1)


# The hash of a split must not change with the platform or the versions: runs are compared by seed.
@pytest.mark.parametrize(
    ("spec", "floor", "digest"),
    [
        ("feature(4,5)", 0.0, "1fdd8b2300814c15"),
        ("label(4,5,0.1)", 0.0, "8566537a59d7eb7d"),
        ("label(4,5,0.1)", 0.01, "e706b4d8e22b437c"),
        ("label(0,20,0.5)", 0.0, "a78b5ea8855ff620"),
    ],
)
def test_the_same_seed_gives_the_same_split_everywhere(spec, floor, digest):
    y_train, y_test = torch.arange(3000) * 7 % 10, torch.arange(800) * 3 % 10
    pool = replace(
        make_pool(torch.zeros(3000, 1), y_train),
        x_test=torch.zeros(800, 1),
        y_test=y_test,
        domain_train=torch.arange(3000) % 4,
        domain_test=torch.arange(800) % 4,
        domain_names=("a", "b", "c", "d"),
    )
    data = partition(pool, spec, 7, share_floor=floor)
    assert manifest(data, "made", spec, 7)["sha256"][:16] == digest
    other = partition(pool, spec, 8, share_floor=floor)
    assert manifest(other, "made", spec, 8)["sha256"][:16] != digest


@pytest.mark.parametrize("spec", ["feature(4,2500)", "label(10,1000,1)", "label(0,10000,10)"])
def test_ten_thousand_clients_take_seconds(pool, spec):
    size = 60000
    labels = torch.arange(size) % 10
    many = replace(pool, x_train=torch.zeros(size, 1), y_train=labels, domain_train=torch.arange(size) % 4)
    start = time.perf_counter()
    data = partition(many, spec, 0, least=(1, 0))
    assert time.perf_counter() - start < 30  # about 0.1 s; only a loop over clients × examples would fail
    assert data.num_clients == 10000
    assert_disjoint_and_counted(data)
    assert data.num_unused == 0


@pytest.mark.parametrize(
    "spec",
    [
        *("", "labels(4,5,0.1)", "feature", "feature(4)", "feature(4,5,6)", "feature(0,5)", "feature(4,0)"),
        *("feature(4,x)", "feature(4,5", "label(4,5)", "label(4,5,0)", "label(4,5,-1)", "label(4,5,nan)"),
        *("label(-1,5,1)", "label(4,5,inf)", "file(3)"),
    ],
)
def test_an_unknown_specification_is_answered_with_the_allowed_ones(pool, spec):
    with pytest.raises(ValueError, match=r"not one of feature\(G,n\), label\(G,n,alpha\), label\(0,n,alpha\), file"):
        partition(pool, spec, 0)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("feature(3,5)", {}, r"G must be 4, the number of domains of 'pool' \(a, b, c, d\)"),
        ("feature(4,1000)", {}, "equal parts leave a client with fewer than 10 training .* data.min_test_examples"),
        ("feature(4,10000000000000)", {}, "equal parts leave a client with fewer than 10 training"),
        ("label(0,1000,1)", {}, "too little data to give each of 1000 clients 10 training and 1 test examples"),
        ("label(0,300,0.1)", {}, "none of 1000 draws gave each of 300 clients .* larger alpha .* data.min_examples"),
        ("label(30,1,0.01)", {}, "none of 1000 draws .* each group 30% of an equal share"),
        ("label(4,5,0.1)", {"share_floor": 1.0}, "share_floor = 1.0: must be"),
        ("label(4,5,0.1)", {"share_floor": -0.1}, "share_floor = -0.1: must be"),
        ("feature(4,5)", {"share_floor": 0.01}, "only label"),
        ("feature(4,5)", {"least": (0, 1)}, "must be at least 1 and 0"),
        (
            "feature(4,5)",
            {"path": "split.npz"},
            r"data.partition_file \(in Python path=\) .* belong to partition 'file'",
        ),
        ("label(4,5,1)", {"clients_per_group": 5}, "belong to partition 'file'"),
        ("file", {}, r"needs data.partition_file=FILE \(in Python path=\)"),
        ("file", {"least": (5, 1)}, "taken as it is, so it goes without data.min_examples and"),
        ("file", {"least": (10, 0)}, "taken as it is"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_clear_line(pool, spec, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        partition(pool, spec, 0, **options)
    assert "\n" not in str(caught.value)


def test_what_the_errors_advise_can_be_followed_from_the_settings():
    settings = ["data.partition=feature(4,480)", "data.min_examples=2"]
    with pytest.raises(ValueError, match=r"fewer than 2 training or 1 test examples; .* data\.min_test_examples"):
        load_data(load_config(None, settings))
    data = load_data(load_config(None, [*settings, "data.min_test_examples=0"]))
    assert min(map(len, data.train_of)) == 2
    assert min(map(len, data.test_of)) == 0


def test_data_without_domains_cannot_be_cut_by_feature(pool):
    with pytest.raises(ValueError, match="has no domains"):
        partition(replace(pool, domain_train=None, domain_test=None, domain_names=()), "feature(4,5)", 0)


@pytest.mark.parametrize("spec", ["feature(4,5)", "label(0,20,0.5)"])
def test_a_saved_split_comes_back_the_same(pool, tmp_path, spec):
    data = partition(pool, spec, 3)
    save_partition(tmp_path / "split.npz", data)
    again = partition(pool, "file", 0, path=tmp_path / "split.npz")
    assert all(
        torch.equal(a, b) for a, b in zip(data.train_of + data.test_of, again.train_of + again.test_of, strict=True)
    )
    assert (again.group is None) == (data.group is None)
    assert data.group is None or torch.equal(again.group, data.group)
    assert again.description == "pool file split.npz"


def write_split(path, **changes):
    arrays = {"train_client": np.arange(6000) % 8, "test_client": np.arange(1500) % 8} | changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def test_a_split_file_may_leave_examples_out_and_say_its_groups(pool, tmp_path):
    train = np.maximum(np.arange(6000) % 10 - 2, -1).astype(np.int8)  # two of ten examples belong to no client
    path = write_split(tmp_path / "split.npz", train_client=train)
    data = partition(pool, "file", 0, path=path, clients_per_group=2)
    assert data.num_unused == 1200
    assert data.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert partition(pool, "file", 0, path=path).group is None
    for four in (np.array(4), np.array([4])):
        stored = write_split(tmp_path / "stored.npz", clients_per_group=four)
        assert partition(pool, "file", 0, path=stored).group.tolist() == [0] * 4 + [1] * 4
    own = write_split(tmp_path / "own.npz", group=np.array([1, 0] * 4))
    assert partition(pool, "file", 0, path=own).group.tolist() == [1, 0] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_client": None}, "no key train_client, only test_client"),
        ({"train_client": np.zeros(10, int)}, "must be 6000 integers"),
        ({"test_client": np.zeros(1500)}, "must be 1500 integers.*float64"),
        ({"train_client": np.full(6000, -2)}, "holds -2"),
        ({"train_client": np.full(6000, 10**13)}, "holds 10000000000000"),
        ({"train_client": np.full(6000, -1), "test_client": np.full(1500, -1)}, "client 0 has no training"),
        ({"test_client": np.arange(1500) % 9}, "client 8 has no training"),
        ({"group": np.array([0, 1])}, "group must be 8 integers"),
        ({"clients_per_group": np.array(0)}, "must be at least 1"),
        ({"clients_per_group": np.array([2, 3])}, "clients_per_group must be one whole number"),
        ({"clients_per_group": np.array(2.7)}, "clients_per_group must be one whole number"),
    ],
)
def test_a_wrong_split_file_is_refused(pool, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        partition(pool, "file", 0, path=write_split(tmp_path / "split.npz", **changes))


def test_an_absent_split_file_and_one_that_is_none_are_refused(pool, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        partition(pool, "file", 0, path=tmp_path / "other.npz")
    (tmp_path / "text.npz").write_text("client\n0\n1\n")
    with pytest.raises(ValueError, match=r"text\.npz is damaged or not an \.npz file"):
        partition(pool, "file", 0, path=tmp_path / "text.npz")


# The size of the training set and the examples of either set that belong to no client; both test sets have 10000.
PUBLISHED = {"cifar10": (50000, 3062, 613), "fashion_mnist": (60000, 3690, 613)}
SPLITS = Path(__file__).parents[2] / "experiments" / "splits"


def test_every_committed_split_is_checked():
    without_groups = {"fashion_mnist-without_groups"}  # by tests/experiment/test_published_splits.py
    assert {path.stem for path in SPLITS.glob("*.npz")} == PUBLISHED.keys() | without_groups


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_split_gives_forty_clients_examples_of_their_own(name):
    num_train, unused_train, unused_test = PUBLISHED[name]
    pool = replace(
        make_pool(torch.zeros(num_train, 1), torch.zeros(num_train, dtype=torch.int64)),
        x_test=torch.zeros(10000, 1),
        y_test=torch.zeros(10000, dtype=torch.int64),
    )
    data = partition(pool, "file", 0, path=SPLITS / f"{name}.npz", clients_per_group=10)
    assert data.num_clients == 40
    assert data.group.bincount().tolist() == [10] * 4
    assert_disjoint_and_counted(data)
    train, test = held(data)
    assert (num_train - len(train), 10000 - len(test)) == (unused_train, unused_test)
    # The published scripts floor shares to whole percents, for training and testing alike.
    assert unused_train / num_train == pytest.approx(0.0615, abs=0.0005)
    assert unused_test / 10000 == pytest.approx(0.0615, abs=0.0005)
    # Training and test data are cut in the same proportions, so clients are of the same relative size in both.
    sizes = [torch.tensor([len(one) for one in held]) for held in (data.train_of, data.test_of)]
    torch.testing.assert_close(sizes[0] / num_train, sizes[1] / 10000, atol=2e-3, rtol=0)


def test_validation_data_comes_from_each_clients_own_training_data(pool):
    data = partition(pool, "label(4,5,0.1)", 0)
    cut = with_validation(data, 0.25, seed=1)
    assert cut.x_test is data.x_train
    for before, train, valid in zip(data.train_of, cut.train_of, cut.test_of, strict=True):
        assert torch.equal(torch.cat([train, valid]).sort().values, before)
        assert len(valid) == round(0.25 * len(before))
    assert torch.equal(cut.group, data.group)
    assert cut.num_unused == 0
    again, other = with_validation(data, 0.25, seed=1), with_validation(data, 0.25, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(cut.test_of, again.test_of, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(cut.test_of, other.test_of, strict=True))


def test_validation_leaves_every_client_something_to_train_and_to_test_on(pool):
    data = partition(pool, "feature(4,5)", 0)
    tiny = replace(data, train_of=tuple(one[:2] for one in data.train_of))
    cut = with_validation(tiny, 0.01, seed=0)
    assert {len(one) for one in cut.train_of + cut.test_of} == {1}
    with pytest.raises(ValueError, match="client 0: one training example cannot be cut"):
        with_validation(replace(data, train_of=tuple(one[:1] for one in data.train_of)), 0.5, seed=0)
    with pytest.raises(ValueError, match="share = 1"):
        with_validation(data, 1, seed=0)
