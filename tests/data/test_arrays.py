import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from bcfl.data.arrays import from_arrays

X, Y = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 2, 1])


def test_each_form_of_a_client_gives_the_same_data():
    dataset = TensorDataset(X, Y)
    forms = [
        (X, Y),
        [X.numpy(), Y.numpy()],
        {"x": X, "y": Y},
        dataset,
        Subset(dataset, range(4)),
        (X.tolist(), Y.tolist()),
    ]
    data = from_arrays(forms)
    assert data.num_clients == len(forms)
    for train, test in zip(data.train_of, data.test_of, strict=True):
        assert torch.equal(data.x_train[train], X)
        assert torch.equal(data.y_train[train], Y)
        assert len(test) == 0
    assert data.x_train.dtype == torch.float32
    assert data.y_train.dtype == torch.int64
    assert data.num_classes == 3
    assert data.num_unused == 0
    assert data.group is None
    assert data.x_test.shape == (0, 3)


def test_each_form_of_test_data_is_kept_apart_from_training_data():
    x_test, y_test = torch.ones(2, 3), torch.tensor([5, 0])
    train, test = TensorDataset(X, Y), TensorDataset(x_test, y_test)
    mapping = {"x": X, "y": Y, "x_test": x_test, "y_test": y_test}
    data = from_arrays([(X, Y, x_test, y_test), mapping, (train, test), (X, Y)])
    assert [len(one) for one in data.test_of] == [2, 2, 2, 0]
    assert all(torch.equal(data.x_test[one], x_test) for one in data.test_of[:3])
    assert data.num_classes == 6


def test_an_iterable_dataset_and_an_empty_test_dataset_are_read():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(np.zeros(3, np.float32), 1), (np.ones(3, np.float32), 0)])

    data = from_arrays([(Stream(), TensorDataset(X[:0], Y[:0]))])
    assert data.y_train.tolist() == [1, 0]
    assert data.x_test.shape == (0, 3)


def test_true_groups_are_kept():
    assert from_arrays([{"x": X, "y": Y, "group": np.int64(g)} for g in (1, 0)]).group.tolist() == [1, 0]


def test_images_are_channels_last_in_memory():
    image = torch.rand(4, 3, 5, 5)
    data = from_arrays([(image, Y), (image, Y)])
    assert data.x_train.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(data.x_train[data.train_of[1]], image)


def test_a_read_only_array_is_taken():
    fixed = X.numpy().copy()
    fixed.flags.writeable = False
    assert torch.equal(from_arrays([(fixed, Y)]).x_train, X)


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ((X[:0], Y[:0]), "client 1: has no training data"),
        ((TensorDataset(X[:0], Y[:0])), "client 1: has no training data"),
        ((X / 0, Y), "client 1: x holds values that are not finite"),
        ((2**24 + X.long(), Y), "client 1: x holds whole numbers that float32 cannot tell apart, such as 16777227"),
        ((X, Y, X / 0, Y), r"client 1 \(test\): x holds values"),
        ((X, Y - 1), "client 1: y holds the negative label -1"),
        ((X, Y.float()), "client 1: y of float32, shape .* may be several things, so say which by likelihood="),
        ((X, Y.reshape(4, 1)), r"client 1: y of int64, shape \(4, 1\), may be several things"),
        ((X, Y[:3]), "client 1: x has 4 rows but y has 3"),
        ((torch.tensor(1.0), Y), "client 1: x has no rows but y has 4"),
        ((X[:, :2], Y), r"client 1: features of shape \(2,\), client 0 has \(3,\)"),
        ((X, Y, X[:, :2], Y), r"client 1: features of shape \(2,\), client 0 has \(3,\)"),
        ((X,), r"client 1: must be \(x, y\)"),
        ("data.csv", r"client 1: must be \(x, y\)"),
        ((np.array(["a"] * 4), Y), "client 1: is not made of numbers"),
        (([[1, 2], [3]], Y), "client 1: is not made of numbers"),
        ((X.to(torch.complex64), Y), "client 1: x is complex, but must be real numbers"),
        ((X, Y, X.numpy() * 1j, Y), r"client 1 \(test\): x is complex"),
        ({"x": X, "labels": Y}, "client 1: keys must be x, y .* not x, labels"),
        ({"x": X, "y": Y, "x_test": X}, "client 1: keys must be x, y and perhaps x_test with y_test"),
        ({"x": X, "y": Y, "group": "north"}, "client 1: group must be a whole number from 0, not 'north'"),
        ({"x": X, "y": Y, "group": -1}, "client 1: group must be a whole number"),
        ({"x": X, "y": Y, "group": 1}, "client 0: has no group although other clients have one"),
        (TensorDataset(X), r"client 1: its Dataset must yield \(x, y\) items"),
    ],
)
def test_a_wrong_client_is_named(client, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_arrays([(X, Y), client])
    assert "\n" not in str(caught.value)


def test_items_of_different_shapes_are_refused():
    class Ragged(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.zeros(index + 1), 0

    with pytest.raises(ValueError, match="client 0: the items of its Dataset differ in shape"):
        from_arrays([Ragged()])


def test_no_clients_are_no_federation():
    with pytest.raises(ValueError, match="at least one client"):
        from_arrays([])
