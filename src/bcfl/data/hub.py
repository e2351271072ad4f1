"""A Hugging Face dataset as clients: rows are dicts, and columns may be images or texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcfl.randomness import numpy_generator

TEST_SHARE = 0.25
Read = Callable[[list[Any]], Any]  # a column's values -> numbers, a row for each


def from_datasets(
    dataset: Any,
    *,
    x: str,
    y: str,
    by: str | None = None,
    test: Any = TEST_SHARE,
    read: Read | None = None,
    seed: int = 0,
) -> dict[str, dict[str, Tensor]]:
    """A dataset's rows as one client for each value of the column `by`, by its name.

    `dataset` is a `datasets.Dataset`, a DatasetDict with "train" and perhaps "test", or, without `by`, a mapping from
    name to one of these. `x` and `y` are columns. Images become (channel, height, width) from 0 to 1; texts need
    `read`, which makes numbers of a list of values: a tokenizer, say. Texts as `y` are classes, in the order of
    their names. `test` is the share of each client's rows to test on, or a second dataset; "test" of a DatasetDict
    goes before a share.
    """
    parts = _clients(dataset, by, test)
    classes = _classes([rows for pair in parts.values() for rows in pair if rows is not None], y)
    made = {}
    for name, (rows, tested) in parts.items():
        inputs, targets = _examples(rows, name, x, y, read, classes)
        if tested is None:
            held = np.zeros(len(targets), bool)
            share = float(test)
            count = min(round(share * len(targets)), len(targets) - 1)
            held[numpy_generator(seed, "hub", name).permutation(len(targets))[:count]] = True
            keep, away = torch.from_numpy(~held), torch.from_numpy(held)
            made[name] = {"x": inputs[keep], "y": targets[keep], "x_test": inputs[away], "y_test": targets[away]}
        else:
            x_test, y_test = _examples(tested, name, x, y, read, classes)
            x_test = x_test if len(y_test) else inputs[:0]
            made[name] = {"x": inputs, "y": targets, "x_test": x_test, "y_test": y_test}
    return made


def _clients(dataset: Any, by: str | None, test: Any) -> dict[str, tuple[Any, Any]]:
    """Each client's rows, and those to test on: None where they are yet to be drawn."""
    if by is None:
        if not isinstance(dataset, Mapping) or "train" in dataset:
            raise ValueError("dataset: by must name the column of clients, or give a mapping from name to dataset")
        return {str(name): _split(one, None) for name, one in dataset.items()}
    rows, tested = _split(dataset, None if isinstance(test, int | float) else test)
    of_train = _by_value(rows, by)
    of_test = None if tested is None else _by_value(tested, by)
    found = {}
    for name, places in of_train.items():
        own = None if of_test is None else tested.select(of_test.get(name, []))
        found[name] = (rows.select(places), own)
    return found


def _split(dataset: Any, test: Any) -> tuple[Any, Any]:
    if isinstance(dataset, Mapping):
        return _checked(dataset["train"]), _checked(dataset["test"]) if "test" in dataset and test is None else test
    return _checked(dataset), None if test is None else _checked(test)


def _checked(rows: Any) -> Any:
    if not hasattr(rows, "features") or not hasattr(rows, "select"):
        raise ValueError(f"dataset: must be a datasets.Dataset with rows in reach, not {type(rows).__name__}")
    return rows


def _by_value(rows: Any, by: str) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    names = getattr(rows.features.get(by), "names", None)
    for place, value in enumerate(_column(rows, by, "dataset")):
        if value is None:
            raise ValueError(f"dataset: column {by!r} says which client a row is of, but has no value in row {place}")
        places.setdefault(str(names[value] if names else value), []).append(place)
    return places


def _column(rows: Any, name: str, who: str) -> list[Any]:
    if name not in rows.column_names:
        raise ValueError(f"{who}: has no column {name!r}; its columns: {', '.join(rows.column_names)}")
    return list(rows[name])


def _classes(parts: Sequence[Any], y: str) -> dict[str, int] | None:
    """The numbers of the classes that are texts; None where targets are numbers."""
    texts = {value for rows in parts for value in _column(rows, y, "dataset") if isinstance(value, str)}
    return {name: number for number, name in enumerate(sorted(texts))} or None


def _examples(
    rows: Any, name: str, x: str, y: str, read: Read | None, classes: Mapping[str, int] | None
) -> tuple[Tensor, Tensor]:
    who = f"client {name!r}"
    values, targets = _column(rows, x, who), _column(rows, y, who)
    if not values:
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    if any(target is None for target in targets):
        raise ValueError(f"{who}: column {y!r} has no value in some rows")
    if classes is not None:
        targets = [classes[target] for target in targets]
    made = _numbers(values, who, x) if read is None else torch.as_tensor(np.asarray(read(values)))
    if len(made) != len(values):
        raise ValueError(f"{who}: read made {len(made)} rows of the {len(values)} of column {x!r}")
    return made, torch.as_tensor(np.asarray(targets))


def _numbers(values: list[Any], who: str, column: str) -> Tensor:
    """Images as (channel, height, width) from 0 to 1; numbers as they are."""
    if isinstance(values[0], str):
        raise ValueError(f"{who}: column {column!r} holds texts: read= must make numbers of them, as a tokenizer does")
    images = hasattr(values[0], "getbands")  # as Pillow's have it
    arrays = [np.asarray(value) for value in values]
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(f"{who}: the rows of column {column!r} differ in shape, such as {arrays[0].shape} and "
                         f"{next(a.shape for a in arrays if a.shape != arrays[0].shape)}: read= must bring them to one"
                         )  # fmt: skip
    stacked = torch.as_tensor(np.stack(arrays))
    if not images:
        return stacked
    stacked = stacked.float() / 255
    return stacked[:, None] if stacked.dim() == 3 else stacked.permute(0, 3, 1, 2)
