"""A table of any library, or a file of one, as plain columns: numbers with NaN, or texts with None, where none is."""

import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
READERS = {".csv": "read_csv", ".parquet": "read_parquet"}
LIBRARIES = ("pandas", "polars", "pyarrow")  # which of them reads a file: the first that is there
DATE = re.compile(r"\d{4}-\d\d-\d\d($|[T ]\d\d:)")  # as files write them
MOST_LETTERS = 200  # of a column's name
MOST_TOLD = 300  # characters of what a library says
TABLES = "pip install 'bcfl[tables]'"


@dataclass(frozen=True)
class Column:
    """One column: of what is neither number nor text only the kind is known, until somebody wants it."""

    kind: str  # number, truth, text or what else it is called in a message
    values: Array  # (row,) float64 or objects

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        """Where there is no value."""  # (row,)
        if self.values.dtype == object:
            return np.array([value is None for value in self.values], bool)
        return np.isnan(self.values)

    def texts(self) -> Array:
        """The values as texts, None where there is none: 1 and 1.0 are the same."""  # (row,) object
        if self.values.dtype == object:
            return _objects([None if value is None else str(value) for value in self.values])
        truth = self.kind == "truth"
        return _objects([None if np.isnan(v) else str(bool(v)) if truth else f"{v:.15g}" for v in self.values])

    def __getitem__(self, rows: Any) -> "Column":
        return replace(self, values=self.values[rows])


Columns = dict[str, Column]


def columns_of(frame: Any, what: str = "data") -> Columns:
    """The columns of a pandas, polars or pyarrow frame, of a mapping name -> values, or of a .csv or .parquet file."""
    if isinstance(frame, str | Path):
        frame = _read(Path(frame), what)
    if isinstance(frame, Mapping):
        found = {str(name): _column(str(name), values, what) for name, values in frame.items()}
    else:
        found = dict(_of_frame(frame, what))
    if not found:
        raise ValueError(f"{what}: has no columns")
    for name in found:
        if not name.isprintable() or len(name) > MOST_LETTERS:
            raise ValueError(f"{what}: a column's name must be one line of at most {MOST_LETTERS} characters, got "
                             f"{name[:MOST_LETTERS]!r}")  # fmt: skip
    first, rows = next(iter(found)), num_rows(found)
    for name, column in found.items():
        if len(column.values) != rows:
            raise ValueError(f"{what}: column {name!r} has {len(column.values)} rows, column {first!r} {rows}")
    return found


def num_rows(columns: Columns) -> int:
    return len(next(iter(columns.values())).values)


def rows_of(columns: Columns, rows: Any) -> Columns:
    """The same columns with these rows only."""
    return {name: column[rows] for name, column in columns.items()}


def wanted(columns: Columns, name: str, purpose: str, what: str = "data") -> Column:
    """The column of that name, which must be there."""
    if name not in columns:
        raise ValueError(f"{what}: has no column {name!r}, which {purpose}; its columns: {', '.join(columns)}")
    return columns[name]


def _read(path: Path, what: str) -> Any:
    import narwhals as nw

    if path.suffix not in READERS:
        raise ValueError(f"{what} {path}: must be a file that ends in {' or '.join(READERS)}")
    if not path.is_file():
        raise FileNotFoundError(f"{what} {path}: no such file")
    for library in LIBRARIES:
        try:
            return getattr(nw, READERS[path.suffix])(str(path), backend=library)
        except ImportError:
            continue
        except Exception as error:  # of whichever library reads it
            raise ValueError(f"{what} {path} cannot be read: {told(error)}") from error
    raise ValueError(f"{what} {path}: reading it needs pandas: {TABLES}")


def told(error: Exception) -> str:
    """What a library says, in a line: it may quote what stands in the file."""
    text = "".join(letter if letter.isprintable() else " " for letter in f"{type(error).__name__}: {error}")
    return " ".join(text.split())[:MOST_TOLD]


def _of_frame(frame: Any, what: str) -> Iterator[tuple[str, Column]]:
    import narwhals as nw

    names = [str(name) for name in getattr(frame, "column_names", getattr(frame, "columns", ()))]
    repeated = [name for index, name in enumerate(names) if name in names[:index]]
    if repeated:
        raise ValueError(f"{what}: has two columns named {repeated[0]!r}: rename one of them")
    try:
        seen = nw.from_native(frame, eager_only=True)
    except TypeError:
        raise ValueError(f"{what}: must be a pandas, polars or pyarrow frame, a mapping of columns or a file's name, "
                         f"not {type(frame).__name__}") from None  # fmt: skip
    for name, series in zip(names, seen.iter_columns(), strict=True):
        yield name, _of_series(name, series, what)


def _of_series(name: str, series: Any, what: str) -> Column:
    import narwhals as nw

    kind = series.dtype
    if kind.is_temporal():
        return Column("dates", _objects(series.to_list()))
    if kind == nw.Boolean:
        return Column("truth", _floats(series.to_list()))
    if kind.is_numeric() and not kind.is_decimal():
        numbers_found = Column("whole" if kind.is_integer() else "number", _floats(series.to_list()))
        return _infinite_refused(name, numbers_found, what)
    return _column(name, series.to_list(), what)


def _column(name: str, values: Any, what: str) -> Column:
    """By what its values are, as the column's own type does not say."""
    array = np.asarray(values) if not isinstance(values, Sequence) else _objects(list(values))
    if array.ndim != 1:
        raise ValueError(f"{what}: column {name!r} must hold one value a row, but is of shape {array.shape}")
    if array.dtype.kind == "b":
        return Column("truth", array.astype(np.float64))
    if array.dtype.kind in "iuf":
        numbers_found = Column("number" if array.dtype.kind == "f" else "whole", array.astype(np.float64))
        return _infinite_refused(name, numbers_found, what)
    if array.dtype.kind == "M":
        return Column("dates", _objects(array.tolist()))
    given = [None if _is_missing(value) else value for value in array.tolist()]
    there = [value for value in given if value is not None]
    kinds = {kind: next((v for v in there if _kind_of(v) == kind), None) for kind in map(_kind_of, there)}
    if len(kinds) > 1 and kinds.keys() != {"truth", "number"}:
        one, other = list(kinds.values())[:2]
        both = " and ".join(f"{kind}s" for kind in sorted(kinds))
        raise ValueError(f"{what}: column {name!r} mixes {both}, such as {one!r} and {other!r}: make it one kind, and "
                         "leave what is not known empty")  # fmt: skip
    kind = "number" if kinds.keys() == {"truth", "number"} else next(iter(kinds), "number")
    if kind == "text":
        dates = all(map(DATE.match, there))
        return Column("dates" if dates else "text", _objects([None if v is None else str(v) for v in given]))
    if kind in ("number", "truth"):
        return _infinite_refused(name, Column(kind, _floats(given)), what)
    return Column(kind + "s", _objects(given))


def _kind_of(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "truth"
    if isinstance(value, numbers.Real) or type(value).__name__ == "Decimal":
        return "number"
    return "text" if isinstance(value, str) else type(value).__name__


def _is_missing(value: Any) -> bool:
    """None, NaN, pandas' NA and NaT, and a text of nothing but spaces."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return (isinstance(value, float | np.floating) and np.isnan(value)) or (
        isinstance(value, str) and not value.strip()
    )


def _floats(values: Sequence[Any]) -> Array:
    return np.array([np.nan if _is_missing(value) else float(value) for value in values], np.float64)


def _infinite_refused(name: str, column: Column, what: str) -> Column:
    if np.isinf(column.values).any():
        row = int(np.isinf(column.values).nonzero()[0][0])
        raise ValueError(f"{what}: column {name!r} holds a number that is not finite, in row {row}")
    return column


def _objects(values: Sequence[Any]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = list(values)
    return array
