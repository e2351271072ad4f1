"""The four hospitals of UCI Heart Disease: who has the disease? Bundled; see ATTRIBUTION.md beside this file."""

import csv
from importlib.resources import files
from pathlib import Path

import numpy as np

from bcfl.data.frames import Array
from bcfl.data.tables import Table, table

HOSPITALS = {
    "cleveland": "Cleveland",
    "hungarian": "Hungary",
    "switzerland": "Switzerland",
    "va": "VA Long Beach",
}
OFTEN_MISSING = ("slope", "ca", "thal")
CODES = ("cp", "restecg", "thal")  # numbers that stand for kinds
ROWS = ("complete", "all")
TRAINED = 0.66  # of each hospital's patients, as FLamby has it
FLAMBYS_SEED = 43


def heart(path: str | Path | None, *, rows: str = "complete", likelihood: str | None = None) -> Table:
    """The hospitals as clients; the target is whether a patient has the disease.

    With `rows` "complete" as FLamby has them (du Terrail et al. 2022): without slope, ca, thal and then without those
    of whom something is missing, 303, 261, 46 and 130 patients are left; its split keeps 104, 89, 16 and 45 of them
    for testing. With "all" every patient and every column, and what is missing is imputed; split by that rule.
    """
    if path is not None:
        raise ValueError(f"data set 'heart' is bundled: data.path (in Python path=) must not be given, got {path}")
    if rows not in ROWS:
        raise ValueError(f"rows must be {' or '.join(ROWS)}, got {rows!r}")
    columns = _read()
    if rows == "complete":
        columns = {name: values for name, values in columns.items() if name not in OFTEN_MISSING}
        whole = np.all([~np.isnan(values) for name, values in columns.items() if name != "hospital"], axis=0)
        columns = {name: values[whole] for name, values in columns.items()}
    disease = columns.pop("num") > 0
    columns |= {"disease": disease, "test": _tested(columns["hospital"], disease)}
    codes = [name for name in CODES if name in columns]
    return table(columns, "hospital", "disease", test="test", likelihood=likelihood, categories=codes, rare=1)


def _read() -> dict[str, Array]:
    """The file's columns: hospitals' names, and numbers with NaN where there is none."""
    lines = files(__package__).joinpath("heart.csv").read_text(encoding="utf-8").splitlines()
    names, *rows = csv.reader(lines)
    found: dict[str, Array] = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if name == "hospital":
            found[name] = np.array([HOSPITALS[value] for value in values], dtype=object)
        else:
            found[name] = np.array([float(value) if value else np.nan for value in values])
    return found


def _tested(hospital: Array, disease: Array) -> Array:
    """Which patients are for testing, as FLamby draws them: where two or fewer are of a kind, not stratified."""
    from sklearn.model_selection import train_test_split  # here, because importing it takes a second

    held = np.zeros(len(hospital), bool)
    for name in HOSPITALS.values():
        own = np.flatnonzero(hospital == name)
        how = {"train_size": TRAINED, "test_size": 1 - TRAINED, "random_state": FLAMBYS_SEED, "shuffle": True}
        kinds = disease[own] if np.bincount(disease[own], minlength=2).min() > 2 else None
        _, tested = train_test_split(np.arange(len(own)), stratify=kinds, **how)
        held[own[tested]] = True
    return held
