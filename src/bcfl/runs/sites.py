"""What a run knows of its clients beside their places: their names, how much they hold, how their table is prepared."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bcfl.data.lazy import Held
from bcfl.data.manifest import names_in
from bcfl.data.tables import Form

FORM_FILE = "table.json"


@dataclass(frozen=True)
class Sites:
    """The clients of a run, in their order; what is not known is None."""

    names: tuple[str, ...] | None = None  # (client,)
    num_train: tuple[int, ...] | None = None  # (client,) rows that each trains on
    form: Form | None = None  # how rows of their table become examples

    @staticmethod
    def of(data: Held) -> "Sites":
        return Sites(data.names, tuple(data.num_examples.tolist()), data.form)

    @staticmethod
    def kept(folder: Path, manifest: Mapping[str, Any]) -> "Sites":
        """As the run in that folder has written them down."""
        form, rows = folder / FORM_FILE, manifest.get("num_train")
        return Sites(
            names_in(manifest), None if rows is None else tuple(rows), Form.read(form) if form.exists() else None
        )

    def place_of(self, client: int | str, count: int) -> int:
        """The client's number, by its name or number."""
        if isinstance(client, str) and self.names is not None:
            if client not in self.names:
                raise ValueError(f"there is no client {client!r}; there are {', '.join(self.names)}")
            return self.names.index(client)
        if not hasattr(client, "__index__") or not 0 <= operator.index(client) < count:
            named = " or a client's name" if self.names else ""
            raise ValueError(f"client must be a number from 0 to {count - 1}{named}, got {client!r}")
        return operator.index(client)

    def name_of(self, client: int) -> str:
        return f"{client}" if self.names is None else self.names[client]

    def by_name(self, values: Tensor) -> Tensor:
        """The same tensor, whose axes of clients take names as well as numbers."""
        return values if self.names is None else ByName.of(values, self.names)


UNKNOWN = Sites()


class ByName(Tensor):
    """A tensor in which a client's name may stand for its place: `assignment["Zurich"]`. What is made of it is not."""

    names_of_clients: tuple[str, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(values: Tensor, names: tuple[str, ...]) -> "ByName":
        named = values.as_subclass(ByName)
        named.names_of_clients = names
        return named

    def __getitem__(self, place: Any) -> Tensor:
        found = tuple(map(self._number, place)) if isinstance(place, tuple) else self._number(place)
        return super().__getitem__(found)

    def _number(self, place: Any) -> Any:
        if isinstance(place, str):
            return Sites(self.names_of_clients).place_of(place, len(self))
        return place


class PerSite(Sequence[dict[str, Any]]):
    """A record for each site, shown as a table."""

    def __init__(self, records: Sequence[dict[str, Any]]):
        self._records = list(records)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, str):
            return self._records[Sites(tuple(one["site"] for one in self)).place_of(place, len(self))]
        return self._records[place]

    def __len__(self) -> int:
        return len(self._records)

    @property
    def rows(self) -> list[list[str]]:
        """The titles, and each site's values as short texts."""
        titles = list(self._records[0])
        written = [[_shown(one[title]) for title in titles] for one in self._records]
        return [[title.replace("_", " ") for title in titles], *written]

    def __repr__(self) -> str:
        rows = self.rows
        titles = rows[0]
        widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
        return "\n".join(
            "  ".join(
                text.rjust(width) if column else text.ljust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def _shown(value: Any) -> str:
    """A value of a record, short."""
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else f"{value}"


def per_site(sites: Sites, assignment: Tensor, probability: Tensor, last: Mapping[str, Any]) -> PerSite:
    """Each site's name, rows, cluster, the probability of that, and what was last measured on its own test rows."""
    count = len(assignment)
    measured = {key.removeprefix("client_"): values for key, values in last.items()
                if key.startswith("client_") and isinstance(values, list) and len(values) == count}  # fmt: skip
    tested = measured.pop("examples", None)
    records = []
    for client, cluster in enumerate(assignment.tolist()):
        record: dict[str, Any] = {"site": sites.name_of(client)}
        if sites.num_train is not None:
            record["train_rows"] = sites.num_train[client]
        if tested is not None:
            record["test_rows"] = tested[client]
        record["cluster"] = cluster if cluster >= 0 else None
        record["probability"] = float(probability[client, cluster]) if cluster >= 0 else None
        records.append(record | {key: values[client] for key, values in measured.items()})
    return PerSite(records)
