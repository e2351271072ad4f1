"""A table with a column that says which site a row is from, as one client per site.

    table = bcfl.table(patients, site="hospital", target="died")
    result = bcfl.train(None, table)

Nothing that a site could not tell as sums goes into how its rows are prepared: see `bcfl.data.preparation`.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from bcfl.data.frames import Array, Column, Columns, columns_of, num_rows, rows_of, told, wanted
from bcfl.data.preparation import MOST_CATEGORIES, RARE, Number, Preparation, Sums, added, agreed, sums_of
from bcfl.data.target import Target, target_of
from bcfl.likelihood import EXTRAS, parse
from bcfl.randomness import numpy_generator

TEST_SHARE = 0.25
FARTHEST = 1e30  # deviations of a mean from 0, and of 1 from 0: beyond, inputs are no longer finite
TESTED = {"true": True, "1": True, "test": True, "false": False, "0": False, "train": False}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Form:
    """How rows of a table become examples: kept with a run, and applied to whatever rows come later."""

    site: str
    target: Target
    preparation: Preparation

    def inputs(self, frame: Any) -> Tensor:
        """The network's inputs for a frame, or for an array with a column for each feature, in their order."""
        if isinstance(frame, Tensor | np.ndarray | list):
            array = np.asarray(frame)
            features = [feature.name for feature in self.preparation.features]
            if array.ndim != 2 or array.shape[1] != len(features):
                raise ValueError(f"data: an array must have a column for each of {', '.join(features)}, but its shape "
                                 f"is {array.shape}")  # fmt: skip
            frame = {name: array[:, place] for place, name in enumerate(features)}
        return torch.from_numpy(self.preparation.apply(columns_of(frame)))

    def examples(self, frame: Any, who: str = "data") -> tuple[Tensor, Tensor]:
        """x and y of a frame that has the target, too: a newcomer's examples, or a site's in a real federation."""
        columns = columns_of(frame)
        return torch.from_numpy(self.preparation.apply(columns)), self.target.encode(columns, who)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"site": self.site, "target": self.target.as_dict(), "features": self.preparation.as_dict()}

    @staticmethod
    def from_dict(kept: Mapping[str, Any]) -> "Form":
        return Form(kept["site"], Target.from_dict(kept["target"]), Preparation.from_dict(kept["features"]))

    @staticmethod
    def read(path: str | Path) -> "Form":
        """The form that a run has kept as table.json: so that a site of a real federation prepares its rows alike."""
        try:
            form = Form.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
            form = TypeAdapter(Form).validate_python(dataclasses.asdict(form))  # somebody may have changed it
            classes = parse(form.target.likelihood).family.kind == "classes"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as a run's table.json: {told(error)}") from None
        if not form.target.columns or classes != bool(form.target.classes):
            raise ValueError(f"{path}: a target must have a column and, if it is a class, classes, and only then")
        numbers = [feature for feature in form.preparation.features if isinstance(feature, Number)]
        for feature in numbers:
            mean, deviation = feature.mean, feature.deviation
            if not (math.isfinite(mean) and 1 / FARTHEST <= deviation < math.inf and abs(mean) <= FARTHEST * deviation):
                raise ValueError(
                    f"{path}: column {feature.name[:100]!r} must have a finite mean and a deviation above 0"
                )
        return form


@dataclass(frozen=True)
class Table(Mapping[str, dict[str, Tensor]]):
    """Each site's examples by its name, prepared, and how that was done."""

    clients: Mapping[str, dict[str, Tensor]]
    form: Form
    left_out: Mapping[str, str]  # column -> why it is not among the features

    def __getitem__(self, site: str) -> dict[str, Tensor]:
        return self.clients[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def num_inputs(self) -> int:
        return len(self.form.preparation.inputs)

    def __repr__(self) -> str:
        target = self.form.target
        classes = f" ({', '.join(map(str, target.classes))})" if target.classes else ""
        rows = [f"{name}: {len(one['y'])} rows to train on, {len(one['y_test'])} to test" for name, one in self.items()]
        lines = [
            f"{len(self)} sites by {self.form.site!r}, {' and '.join(target.columns)}{classes}: {target.likelihood}"
        ]
        lines += [*rows[:12], *[f"… {len(rows) - 12} more"] * (len(rows) > 12)]
        lines.append(f"{self.num_inputs} inputs: {', '.join(self.form.preparation.inputs)}")
        return "\n  ".join([*lines, *(f"left out: {name}, as {why}" for name, why in self.left_out.items())])


def table(
    data: Any,
    site: str = "site",
    target: str | Sequence[str] = "target",
    *,
    test: Any = TEST_SHARE,
    likelihood: str | None = None,
    categories: Sequence[str] = (),
    drop: Sequence[str] = (),
    person: str | None = None,
    weight: str | None = None,
    offset: str | None = None,
    exposure: str | None = None,
    rare: int = RARE,
    seed: int = 0,
) -> Table:
    """A frame's rows as one client per site, prepared by sums that the sites could tell of their training rows.

    `data` is a pandas, polars or pyarrow frame, a mapping of columns, or the name of a .csv or .parquet file. `site`
    and `target` are names of columns; of times to an event, `target` is (time, event), where event is 0 for a row that
    was not followed until then. All columns are features but those named here and in `drop`.

    `test` is the share of each site's rows to test on, drawn by `seed`; or the name of a column that says which rows
    these are (true, 1 or "test"); or a second frame. With `person`, a column, all rows of one person are on one side.
    `likelihood` is said where the target may be several things. Numbers are brought to mean 0 and deviation 1; what
    is missing becomes the mean, with a 1 in a column of its own; texts and what `categories` names become columns of 0
    and 1, where categories with fewer than `rare` training rows in all share one. `weight`, `offset` and `exposure` are
    columns that the likelihood takes.
    """
    names = (target,) if isinstance(target, str) else tuple(target)
    extras = dict(zip(EXTRAS, (weight, offset, exposure), strict=True))
    used = {extra: name for extra, name in extras.items() if name is not None}
    trained, tested = _parts(columns_of(data), test, site, person, names, seed)
    kept_away = {site, *names, *used.values(), *drop, *([person] if person else []),
                 *([test] if isinstance(test, str) and not _is_file(test) else [])}  # fmt: skip
    for name in (*drop, *categories, *used.values(), *([person] if person else [])):
        wanted(next(iter(trained.values())), name, "was asked for")
    goal = target_of(names, likelihood, used, trained)
    features = {one: {name: column for name, column in rows.items() if name not in kept_away}
                for one, rows in trained.items()}  # fmt: skip
    preparation, left_out = agreed(_told(features, categories), rare)
    if not preparation.inputs:
        raise ValueError("data: there is no column to learn from beside site and target")
    for name, why in left_out.items():
        logger.warning(f"column {name!r} is left out, as {why}")
    form, clients = Form(site, goal, preparation), dict[str, dict[str, Tensor]]()
    for one in trained:
        train, test_part = (_examples(form, rows, one) for rows in (trained[one], tested[one]))
        clients[one] = {"x": train[0], "y": train[1], "x_test": test_part[0], "y_test": test_part[1]}
    return Table(clients, form, left_out)


def _examples(form: Form, rows: Columns, site: str) -> tuple[Tensor, Tensor]:
    x = torch.from_numpy(form.preparation.apply(rows, f"site {site!r}"))
    return x, form.target.encode(rows, site)


def _told(sites: Mapping[str, Columns], categories: Sequence[str]) -> Sums:
    """The sums of all sites; which columns are categories follows from what all sites have in them."""
    named = set(categories)
    for name in next(iter(sites.values())):
        held = [(rows[name].kind, one) for one, rows in sites.items() if not rows[name].missing.all()]
        kinds = dict(reversed(held))  # of each kind the first site that has it
        odd = [kind for kind in kinds if kind not in ("truth", "whole", "number", "text")]
        if odd:
            turn = ", or turn them into numbers, such as days since some event" if odd[0] == "dates" else ""
            raise ValueError(f"site {kinds[odd[0]]!r}: column {name!r} holds {odd[0]}: leave it out with "
                             f"drop=[{name!r}]{turn}")  # fmt: skip
        if "text" in kinds:
            named.add(name)
    blank = {one: {name: _blank(column) if name not in named else column for name, column in rows.items()}
             for one, rows in sites.items()}  # fmt: skip
    sums = added([sums_of(rows, named) for rows in blank.values()])
    for name in named - set(categories):
        _refuse_free_text(name, sites, sums)
    return sums


def _blank(column: Column) -> Column:
    """A site that has no value in a column of numbers may hold it as texts that are not there."""
    return Column("number", np.full(len(column.values), np.nan)) if column.values.dtype == object else column


def _refuse_free_text(name: str, sites: Mapping[str, Columns], sums: Sums) -> None:
    counts = getattr(sums[name], "counts", {})
    total = sum(counts.values())
    if 10 * len(counts) > total if len(counts) > MOST_CATEGORIES else len(counts) > 10 and 2 * len(counts) > total:
        one = next(one for one, rows in sites.items() if not rows[name].missing.all())
        raise ValueError(f"site {one!r}: column {name!r} holds free text, {len(counts)} different texts in {total} "
                         f"rows: leave it out with drop=[{name!r}], or say categories=[{name!r}]")  # fmt: skip


def _parts(
    columns: Columns, test: Any, site: str, person: str | None, target: tuple[str, ...], seed: int
) -> tuple[dict[str, Columns], dict[str, Columns]]:
    """Each site's rows to train on, and those to test on."""
    sites = _by_site(columns, site)
    if isinstance(test, bool) or (isinstance(test, int | float) and not 0 <= test < 1):
        raise ValueError(f"test must be a share of at least 0 and below 1, a column or a second frame, got {test!r}")
    if not isinstance(test, int | float) and not (isinstance(test, str) and not _is_file(test)):
        return sites, _of_second_frame(columns_of(test, "test"), sites, site, columns)
    if isinstance(test, str):
        wanted(columns, test, "says which rows are for testing")
        held = {one: _flags(rows[test], test, one) for one, rows in sites.items()}
    else:
        held = _drawn(sites, test, person, target[0], seed)
    for one, flags in held.items():
        if flags.all():
            raise ValueError(f"site {one!r}: has no training rows, as all of its {len(flags)} are for testing")
    return ({one: rows_of(rows, ~held[one]) for one, rows in sites.items()},
            {one: rows_of(rows, held[one]) for one, rows in sites.items()})  # fmt: skip


def _is_file(test: str) -> bool:
    return Path(test).suffix in (".csv", ".parquet")


def _by_site(columns: Columns, site: str) -> dict[str, Columns]:
    """The rows of every site, in the order in which sites come first."""
    if not num_rows(columns):
        raise ValueError("data: has no rows")
    column = wanted(columns, site, "says which site a row is from")
    if missing := int(column.missing.sum()):
        raise ValueError(f"data: column {site!r} says which site a row is from, but has no value in {missing} rows")
    texts = column.texts()
    return {str(one): rows_of(columns, texts == one) for one in dict.fromkeys(texts.tolist())}


def _of_second_frame(second: Columns, sites: Mapping[str, Columns], site: str, first: Columns) -> dict[str, Columns]:
    for name in first:
        wanted(second, name, "the training rows have", "test")
    found = _by_site(second, site) if num_rows(second) else {}
    unknown = [one for one in found if one not in sites]
    if unknown:
        raise ValueError(f"test: site {unknown[0]!r} has no training rows; the sites are {', '.join(sites)}")
    none = rows_of(second, np.zeros(num_rows(second), bool))
    return {one: found.get(one, none) for one in sites}


def _flags(column: Column, name: str, site: str) -> Array:
    """Which rows are for testing."""  # (row,) bool
    texts = [None if text is None else text.strip().lower() for text in column.texts()]
    odd = [text for text in texts if text not in TESTED]
    if odd:
        raise ValueError(f"site {site!r}: column {name!r} must say true, 1 or test for a row to test on, and false, 0 "
                         f"or train for one to train on, but says {odd[0]!r}")  # fmt: skip
    return np.array([TESTED[text] for text in texts if text is not None], bool)


def _drawn(sites: Mapping[str, Columns], share: float, person: str | None, target: str, seed: int) -> dict[str, Array]:
    """Which of each site's rows are for testing, by chance: of each class alike, or whole persons."""
    held, side = dict[str, Array](), dict[Any, bool]()
    for one, rows in sites.items():
        random, count = numpy_generator(seed, "table", one), num_rows(rows)
        if person is not None:
            persons = wanted(rows, person, "says whose row it is", f"site {one!r}").texts()
            if wanted(rows, person, "says whose row it is").missing.any():
                raise ValueError(f"site {one!r}: column {person!r} says whose row it is, but has missing values")
            new = [who for who in dict.fromkeys(persons.tolist()) if who not in side]
            chosen = set(random.permutation(len(new))[: min(round(share * len(new)), len(new) - 1)].tolist())
            side |= {who: place in chosen for place, who in enumerate(new)}
            held[one] = np.array([side[who] for who in persons], bool)
            continue
        shuffled, num_test = random.permutation(count), min(round(share * count), count - 1)
        texts = rows[target].texts()[shuffled] if target in rows else np.zeros(count)
        few = len(set(texts.tolist())) <= MOST_CATEGORIES
        order = shuffled[np.argsort(texts.astype(str), kind="stable")] if few else shuffled
        flags = np.zeros(count, bool)
        if num_test:
            flags[order[((np.arange(num_test) + 0.5) * count / num_test).astype(int)]] = True
        held[one] = flags
    return held
