"""A user's own clients, checked at the border and gathered into one federation."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from bcfl.data.partition import FederatedData
from bcfl.data.tables import Table
from bcfl.likelihood import CATEGORICAL, Likelihood, choose, parse


def gathered(clients: Iterable[Any]) -> Sequence[Any] | Mapping[str, Any]:
    """The clients as a list or, where they have names, as a mapping from name to client; what is neither is refused."""
    if isinstance(clients, Mapping):
        if "x" in clients and "y" in clients:
            raise ValueError("clients must be a list or a mapping from name to client, got a single client's x and y")
        odd = [name for name in clients if not (isinstance(name, str) and name.strip() and name.isprintable())]
        if odd:
            raise ValueError(f"clients: names must be texts, got {odd[0]!r}; without names, give a list")
        return clients
    try:
        one_by_one = iter(clients)
    except TypeError:
        raise ValueError(f"clients must be a list of clients or a mapping from name to client, "
                         f"got {type(clients).__name__}") from None  # fmt: skip
    return list(one_by_one)


def from_arrays(
    clients: Iterable[Any], *, description: str = "own clients", likelihood: Likelihood | None = None
) -> FederatedData:
    """A user's own clients, a list or a mapping from name to client, as one federation.

    A client is a tuple (x, y) or (x, y, x_test, y_test) of tensors or arrays; a mapping with the keys x, y and
    perhaps x_test, y_test, group; a torch Dataset of (x, y) items; or a tuple (train Dataset, test Dataset). What y may
    be, the likelihood says; without one it is chosen by the clients' y, and what it leaves open is taken from them.
    """
    found = gathered(clients)
    if not found:
        raise ValueError("clients: at least one client is needed")
    names = tuple(found) if isinstance(found, Mapping) else None
    called = [f"client {one!r}" for one in names] if names else [f"client {index}" for index in range(len(found))]
    held = list(found.values()) if isinstance(found, Mapping) else found
    if isinstance(found, Table) and likelihood is None:
        likelihood = parse(found.form.target.likelihood)
    parts = [_read_client(client, who, likelihood) for client, who in zip(held, called, strict=True)]
    shape = parts[0]["x"].shape[1:]
    for index, part in enumerate(parts):
        if part["x"].shape[1:] != shape or part["x_test"].shape[1:] != shape:
            other = part["x"] if part["x"].shape[1:] != shape else part["x_test"]
            raise ValueError(
                f"{called[index]}: features of shape {tuple(other.shape[1:])}, {called[0]} has {tuple(shape)}"
            )
        if part["y"].dtype != parts[0]["y"].dtype or part["y"].shape[1:] != parts[0]["y"].shape[1:]:
            raise ValueError(f"{called[index]}: y is {_told(part['y'])}, but of {called[0]} {_told(parts[0]['y'])}")
    groups = [part["group"] for part in parts]
    if any(group is None for group in groups) and any(group is not None for group in groups):
        raise ValueError(f"{called[groups.index(None)]}: has no group although other clients have one")
    said = (likelihood or choose(parts[0]["y"])).fitted(torch.cat([part["y"] for part in parts]))
    pool = {key: torch.cat([part[key] for part in parts]) for key in ("x", "y", "x_test", "y_test")}
    if len(shape) == 3:
        pool |= {key: pool[key].contiguous(memory_format=torch.channels_last) for key in ("x", "x_test")}
    return FederatedData(
        *(pool["x"], pool["y"], pool["x_test"], pool["y_test"]),
        train_of=torch.split(torch.arange(len(pool["y"])), [len(part["y"]) for part in parts]),
        test_of=torch.split(torch.arange(len(pool["y_test"])), [len(part["y_test"]) for part in parts]),
        group=None if groups[0] is None else torch.tensor(groups),
        num_classes=int(torch.cat([pool["y"], pool["y_test"]]).max()) + 1 if said.is_plain else 0,
        num_unused=0,
        description=description,
        names=names,
        form=found.form if isinstance(found, Table) else None,
        likelihood=said,
    )


def _told(y: Tensor) -> str:
    shape = f" in rows of {y.shape[1]}" if y.dim() == 2 else ""
    return ("real" if y.is_floating_point() else "whole numbers") + shape


def _read_client(client: Any, who: str, likelihood: Likelihood | None) -> dict[str, Any]:
    """x, y, x_test, y_test and group of one client, checked; without test data the last two are empty."""
    group = None
    if isinstance(client, Mapping):
        keys = ("x", "y", "x_test", "y_test")
        if not {"x", "y"} <= client.keys() <= {*keys, "group"} or ("x_test" in client) != ("y_test" in client):
            raise ValueError(f"{who}: keys must be x, y and perhaps x_test with y_test, group; not {', '.join(client)}")
        given = [client[key] for key in keys if key in client]
        group = client.get("group")
    elif isinstance(client, TorchDataset):
        given = list(_read_items(client, who))
    elif isinstance(client, tuple | list) and len(client) == 2 and isinstance(client[0], TorchDataset):
        given = [*_read_items(client[0], who), *_read_items(client[1], f"{who} (test)")]
    elif isinstance(client, tuple | list) and len(client) in (2, 4):
        given = list(client)
    else:
        raise ValueError(f"{who}: must be (x, y), (x, y, x_test, y_test), a mapping or a torch Dataset of (x, y) items")
    if group is not None and (not hasattr(group, "__index__") or operator.index(group) < 0):
        raise ValueError(f"{who}: group must be a whole number from 0, not {group!r}")
    likelihood = likelihood or choose(_tensor(given[1], who), who)
    x, y = checked(given[0], given[1], who, likelihood)
    if len(y) == 0:
        raise ValueError(f"{who}: has no training data")
    x_test, y_test = checked(given[2], given[3], f"{who} (test)", likelihood) if len(given) == 4 else (x[:0], y[:0])
    x_test = x_test if len(y_test) else x[:0]  # an empty Dataset cannot say what shape its items would have
    return {"x": x, "y": y, "x_test": x_test, "y_test": y_test, "group": group}


def _read_items(dataset: Any, who: str) -> tuple[Tensor, Tensor]:
    items = [dataset[index] for index in range(len(dataset))] if hasattr(dataset, "__len__") else list(dataset)
    if any(not isinstance(item, tuple | list) or len(item) != 2 for item in items):
        raise ValueError(f"{who}: its Dataset must yield (x, y) items")
    if not items:
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    x, y = ([_tensor(item[part], who) for item in items] for part in (0, 1))
    if len({one.shape for one in x}) > 1 or len({one.shape for one in y}) > 1:
        raise ValueError(f"{who}: the items of its Dataset differ in shape")
    return torch.stack(x), torch.stack(y)


def _tensor(values: Any, who: str) -> Tensor:
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_quantized or values.is_meta:
            raise ValueError(f"{who}: is a {values.layout} tensor of {values.dtype} on {values.device}, "
                             "but must be a plain one that holds its values")  # fmt: skip
        return values.detach().cpu()
    if np.ma.is_masked(values):
        raise ValueError(f"{who}: is a masked array: what its mask hides would be taken for data")
    try:
        return torch.tensor(np.asarray(values))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{who}: is not made of numbers ({error})") from error


def checked(x: Any, y: Any, who: str, likelihood: Likelihood = CATEGORICAL) -> tuple[Tensor, Tensor]:
    """Inputs as float32 and y as the likelihood has it, one row each per example; what does not fit is named."""
    x, y = _tensor(x, who), _tensor(y, who)
    y = likelihood.check(y, who)
    if x.dim() == 0 or len(x) != len(y):
        raise ValueError(f"{who}: x has {len(x) if x.dim() else 'no'} rows but y has {len(y)}")
    if x.is_complex():
        raise ValueError(f"{who}: x is complex, but must be real numbers")
    if not x.is_floating_point() and len(x) and not torch.equal(x.to(torch.float32).to(x.dtype), x):
        raise ValueError(f"{who}: x holds whole numbers that float32 cannot tell apart, such as {int(x.abs().max())}")
    x = x.to(torch.float32)
    if not torch.isfinite(x).all():
        raise ValueError(f"{who}: x holds values that are not finite")
    return x, y
