"""Clients that are opened when they are asked: the same run as with all data there, and never more open than asked."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_fixtures import client_data, linear
from torch import Tensor
from torch.utils.data import TensorDataset

import bcfl
from bcfl.data.lazy import LazyClients
from bcfl.runs import records
from bcfl.runs.observers import Observer

CLIENTS = client_data(num_clients=8)
SIZES = [len(client[1]) for client in CLIENTS]
SETTINGS: dict[str, Any] = {"method": "bcfl-g", "num_clusters": 2, "rounds": 3, "clients_per_round": 4}


def opened(asked: list[int]) -> LazyClients:
    def opener(client: int) -> tuple[Tensor, ...]:
        asked.append(client)
        return CLIENTS[client]

    return bcfl.lazy(opener, SIZES)


@pytest.mark.parametrize("evaluate", ["all", "present"])
@pytest.mark.parametrize("together", ["auto", None])
def test_a_run_is_the_one_with_all_data_there(evaluate: str, together: str | None) -> None:
    how = {**SETTINGS, "evaluate": evaluate, "together": together}
    there, lazy = bcfl.train(linear, CLIENTS, **how), bcfl.train(linear, opened([]), **how)
    assert torch.equal(there.state.hypotheses.models.mean, lazy.state.hypotheses.models.mean)
    assert torch.equal(there.assignment, lazy.assignment)
    assert there.history == lazy.history


def test_only_those_who_take_part_are_opened() -> None:
    asked: list[int] = []
    clients = bcfl.lazy(lambda c: asked.append(c) or CLIENTS[c % 8], [SIZES[c % 8] for c in range(400)])
    bcfl.train(linear, clients, method="fedavg", rounds=2, clients_per_round=4, evaluate="present")
    assert len(asked) == 32 + 2 * 4  # what the data are like, then four in each round, once for all that they do
    assert set(asked[:32]) == set(range(32))


def test_a_stopped_run_goes_on_and_other_data_are_refused(tmp_path: Path) -> None:
    whole = bcfl.train(linear, opened([]), **SETTINGS)
    kept = tmp_path / "run"

    class Stop(Observer):
        def round_done(self, record: dict[str, Any], seconds: float) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bcfl.train(linear, opened([]), **SETTINGS, out=kept, observers=[Stop()])
    others = bcfl.lazy(lambda c: CLIENTS[7 - c], SIZES[::-1])
    with pytest.raises(ValueError, match="the clients differ from those in the manifest"):
        bcfl.train(linear, others, **SETTINGS, out=kept)
    again = bcfl.train(linear, opened([]), **SETTINGS, out=kept)
    assert torch.equal(whole.state.hypotheses.models.mean, again.state.hypotheses.models.mean)
    assert json.loads((kept / "manifest.json").read_text())["opened"] == "when asked"


def test_clients_by_functions_of_their_own_are_counted_once() -> None:
    clients = bcfl.lazy([lambda c=c: TensorDataset(*CLIENTS[c][:2]) for c in range(8)])
    assert clients.num_examples.tolist() == SIZES


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bcfl.lazy([lambda: CLIENTS[0], CLIENTS[1]]), "client 1: must be a function"),
        (lambda: bcfl.lazy(lambda c: CLIENTS[c]), "lazy needs num_examples"),
        (lambda: bcfl.lazy(lambda c: CLIENTS[c], [3, 0]), "at least 1"),
        (lambda: bcfl.lazy(lambda c: CLIENTS[c], SIZES, group=[0]), "group of each of 8"),
        (
            lambda: bcfl.lazy(lambda c: CLIENTS[c], [SIZES[0], *[5] * 7]).open([1]),
            "client 1: holds 26 examples, but was to hold 5",
        ),
        (lambda: bcfl.lazy(lambda c: CLIENTS[c], [*SIZES, 5]).open([8]), "client 8 cannot be opened: IndexError"),
        (lambda: bcfl.rows("data.csv", 0, 3), "rows are read from"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_rows_of_files_and_data_sets(tmp_path: Path) -> None:
    x, y = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 3
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"a": x[:, 0], "label": y, "b": x[:, 1]})
    parquet.write_table(table, tmp_path / "all.parquet", row_group_size=6)
    sources = [
        bcfl.rows(tmp_path / "x.npy", 5, 13, target=tmp_path / "y.npy"),
        bcfl.rows(tmp_path / "all.parquet", 5, 13, target="label"),
        bcfl.rows(Columns({"x": x, "label": y}), 5, 13, target="label"),
    ]
    for source in sources:
        found_x, found_y = source()
        assert np.array_equal(found_x, x[5:13])
        assert np.array_equal(found_y, y[5:13])


class Columns(dict[str, Any]):
    """As a Hugging Face dataset is sliced."""

    def __getitem__(self, part: Any) -> Any:
        return {key: values[part] for key, values in self.items()} if isinstance(part, slice) else super()[part]


def test_of_very_many_clients_places_are_kept_as_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = bcfl.train(linear, opened([]), **SETTINGS, out=tmp_path / "plain")
    monkeypatch.setattr(records, "PACKED_FROM", 5)
    monkeypatch.setattr("bcfl.runs.observers.PACKED_FROM", 5)
    packed = bcfl.train(linear, opened([]), **SETTINGS, out=tmp_path / "packed")
    assert "packed" in (tmp_path / "packed" / "associations.jsonl").read_text()
    assert "client_accuracy" not in packed.history[-1]
    assert packed.history[-1]["accuracy"] == plain.history[-1]["accuracy"]
    first, second = (records.read_associations(tmp_path / name, 8, 2) for name in ("plain", "packed"))
    assert first == second
