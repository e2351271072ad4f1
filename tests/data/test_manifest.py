import json
from dataclasses import replace

import pytest
import torch

from bcfl.data.manifest import manifest, verify_manifest
from bcfl.data.partition import partition


@pytest.fixture
def data(pool):
    return partition(pool, "label(4,5,0.1)", 0, share_floor=0.01)


@pytest.fixture
def record(data):
    return json.loads(json.dumps(manifest(data, "pool", "label(4,5,0.1)", 0, share_floor=0.01)))


def test_a_manifest_tells_sizes_labels_groups_and_origin(data, record):
    assert (record["dataset"], record["partition"], record["seed"]) == ("pool", "label(4,5,0.1)", 0)
    assert record["share_floor"] == 0.01
    assert record["num_train"] == data.num_examples.tolist()
    assert record["group"] == data.group.tolist()
    assert record["num_unused"] == data.num_unused > 0
    for client in (0, 19):
        train = data.y_train[data.train_of[client]].bincount(minlength=10)
        test = data.y_test[data.test_of[client]].bincount(minlength=10)
        assert record["train_labels"][client] == train.tolist()
        assert record["test_labels"][client] == test.tolist()


def test_the_same_split_is_accepted_and_another_seed_is_not(pool, data, record):
    verify_manifest(data, record)
    with pytest.raises(ValueError, match="the split differs from its manifest: num_train of client 0 is"):
        verify_manifest(partition(pool, "label(4,5,0.1)", 1, share_floor=0.01), record)
    with pytest.raises(ValueError, match="num_clients is 8, not 20"):
        verify_manifest(partition(pool, "feature(4,2)", 0), record)


def test_other_examples_of_the_same_labels_are_noticed_by_the_hash(data, record):
    first, second = data.train_of[0], data.train_of[1]
    label = next(y for y in range(10) if all((data.y_train[held] == y).any() for held in (first, second)))
    i, j = (int(torch.nonzero(data.y_train[held] == label)[0]) for held in (first, second))
    swapped_first, swapped_second = first.clone(), second.clone()
    swapped_first[i], swapped_second[j] = second[j], first[i]
    swapped = replace(data, train_of=(swapped_first, swapped_second, *data.train_of[2:]))
    with pytest.raises(ValueError, match="sha256"):
        verify_manifest(swapped, record)


def test_other_labels_on_the_same_indices_are_noticed(data, record):
    with pytest.raises(ValueError, match="train_labels of client 0"):
        verify_manifest(replace(data, y_train=(data.y_train + 1) % 10), record)


def test_other_examples_of_own_clients_are_noticed_by_their_content(data):
    record = manifest(data, "own", "own", 0, content=True)
    verify_manifest(data, record)
    with pytest.raises(ValueError, match="the labels agree, but the examples are others"):
        verify_manifest(replace(data, x_train=-data.x_train), record)
    other_test = data.x_test.clone()
    other_test[-1, -1] += 1
    with pytest.raises(ValueError, match="the labels agree, but the examples are others"):
        verify_manifest(replace(data, x_test=other_test), record)


def test_a_manifest_that_is_none_is_refused(data, record):
    with pytest.raises(ValueError, match="format must be 1, not None"):
        verify_manifest(data, {})
    with pytest.raises(ValueError, match="must hold a JSON object"):
        verify_manifest(data, [])
    del record["group"]
    with pytest.raises(ValueError, match="key 'group' is missing"):
        verify_manifest(data, record)
    with pytest.raises(ValueError, match=r"group is .*, not None"):
        verify_manifest(data, record | {"group": None})
