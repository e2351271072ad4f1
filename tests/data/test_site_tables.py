"""Tables as clients: what goes into their preparation, what becomes of odd columns, what is refused and where."""

import datetime
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bcfl.data.frames import columns_of
from bcfl.data.preparation import CategorySums, NumberSums
from bcfl.data.tables import Form, table

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")


def patients(rows: int = 60, seed: int = 0) -> Any:
    """Three hospitals with numbers, texts, truths, and holes in all of these."""
    rng = np.random.default_rng(seed)
    age, pressure = rng.normal(60, 12, rows), rng.normal(130, 20, rows)
    pressure[rng.random(rows) < 0.2] = np.nan
    ward = rng.choice(["heart", "lung", None], rows, p=[0.6, 0.3, 0.1])
    smokes = rng.random(rows) < 0.5
    died = np.where(rng.random(rows) < 0.4, "yes", "no")
    hospital = np.resize(["Zurich", "Basel", "Bern"], rows)
    return pd.DataFrame({"hospital": hospital, "age": age, "pressure": pressure, "ward": ward, "smokes": smokes,
                         "died": died})  # fmt: skip


def made(frame: Any, **options: Any) -> Any:
    return table(frame, **{"site": "hospital", "target": "died", **options})


def alike(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[site][key], b[site][key]) for site in a for key in a[site])


def test_every_site_is_a_client_by_its_name() -> None:
    found = made(patients(), test=0.25)
    assert list(found) == ["Zurich", "Basel", "Bern"]
    assert [len(one["y"]) for one in found.values()] == [15, 15, 15]
    assert [len(one["y_test"]) for one in found.values()] == [5, 5, 5]
    assert found.form.preparation.inputs == (
        *("age", "pressure", "pressure missing", "ward lung", "ward missing", "smokes"),
    )
    assert found.form.target.classes == ("no", "yes")


@pytest.mark.parametrize("library", ["polars", "pyarrow", "mapping", "csv", "parquet"])
def test_a_frame_of_any_library_and_a_file_give_the_same_examples(library: str, tmp_path: Path) -> None:
    frame = patients()
    frame.to_csv(tmp_path / "patients.csv", index=False)
    frame.to_parquet(tmp_path / "patients.parquet")
    forms = {
        "polars": lambda: pl.from_pandas(frame),
        "pyarrow": lambda: pl.from_pandas(frame).to_arrow(),
        "mapping": lambda: {name: frame[name].tolist() for name in frame},
        "csv": lambda: tmp_path / "patients.csv",
        "parquet": lambda: str(tmp_path / "patients.parquet"),
    }
    found, expected = made(forms[library]()), made(frame)
    if library == "csv":  # its numbers are written in decimals
        assert all(torch.allclose(found[s][k].float(), expected[s][k].float()) for s in expected for k in expected[s])
    else:
        assert alike(found, expected)


def test_sums_that_sites_tell_add_up_to_those_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(1e9, 1, n) for n in (1, 7, 40)] + [np.array([np.nan, np.nan])]
    pooled = np.concatenate(parts)
    told = NumberSums()
    for part in parts:
        told = told + NumberSums.of(part)
    assert (told.count, told.missing) == (48, 2)
    assert told.mean == pytest.approx(np.nanmean(pooled), abs=1e-6)
    assert (told.squares / told.count) ** 0.5 == pytest.approx(np.nanstd(pooled), rel=1e-6)
    both = CategorySums.of(["a", None, "b"]) + CategorySums.of(["b"])
    assert (dict(both.counts), both.missing) == ({"a": 1, "b": 2}, 1)


def test_inputs_have_mean_0_and_deviation_1_over_all_training_rows() -> None:
    found = made(patients(), test=0.25)
    x = torch.cat([one["x"] for one in found.values()])
    age, smokes = x[:, 0], x[:, 5]
    for column in (age, smokes):
        assert float(column.mean()) == pytest.approx(0, abs=1e-6)
        assert float(column.std(correction=0)) == pytest.approx(1, abs=1e-6)
    missing = x[:, 2] == 1
    assert missing.any()
    assert (x[missing, 1] == 0).all()  # the mean


def test_test_rows_have_no_part_in_the_preparation() -> None:
    frame = patients()
    frame["tested"] = np.arange(60) % 4 == 0
    changed = frame.copy()
    changed.loc[changed.tested, ["age", "pressure"]] = 1e6
    changed.loc[changed.tested, "ward"] = "another"
    assert made(frame, test="tested").form == made(changed, test="tested").form


def test_rare_categories_share_an_input_and_one_that_is_new_takes_part_in_it() -> None:
    frame = patients()
    frame["ward"] = ["heart"] * 30 + ["lung"] * 25 + ["skin", "skin", "eye", "eye", "eye"]
    form = made(frame, rare=5, test=0.0).form
    assert [name for name in form.preparation.inputs if name.startswith("ward")] == ["ward lung", "ward other"]
    rows = frame.head(4).assign(ward=["heart", "lung", "skin", "never seen"])
    assert form.inputs(rows)[:, 3:5].tolist() == [[0, 0], [1, 0], [0, 1], [0, 1]]
    kept = made(frame, rare=1, test=0.0).form
    assert kept.inputs(rows)[3, 3:6].tolist() == [0, 0, 0]  # without such an input it counts as the most frequent


def test_numbers_may_be_said_to_be_categories() -> None:
    frame = patients().assign(code=np.resize([1, 2, 3], 60))
    assert [name for name in made(frame, categories=["code"]).form.preparation.inputs if "code" in name] == [
        *("code 2", "code 3"),
    ]


def test_a_form_is_kept_as_json_and_prepares_alike() -> None:
    form = made(patients()).form
    again = Form.from_dict(json.loads(json.dumps(form.as_dict())))
    assert again == form
    frame = patients(seed=1)
    assert torch.equal(again.inputs(frame), form.inputs(frame))
    x, y = again.examples(frame)
    assert (len(x), y.tolist()) == (60, (frame.died == "yes").astype(int).tolist())
    columns = [feature.name for feature in form.preparation.features]
    assert torch.equal(form.inputs(frame[columns].to_numpy(dtype=object)), form.inputs(frame))


def test_all_rows_of_one_person_are_on_one_side() -> None:
    frame = patients(120).assign(person=np.repeat(np.arange(40), 3))
    frame["hospital"] = np.resize(["Zurich", "Basel"], 120)  # a person may be at two sites
    frame["number"] = np.arange(120.0)
    found = made(frame, person="person", test=0.3, drop=["age", "pressure", "ward", "smokes"])
    spread = found.form.preparation.features[0]
    sides = []
    for key in ("x", "x_test"):
        numbers = torch.cat([one[key][:, 0] for one in found.values()]) * spread.deviation + spread.mean
        sides.append({int(n) // 3 for n in numbers.round().tolist()})
    assert sides[0].isdisjoint(sides[1])
    assert sides[0] | sides[1] == set(range(40))
    assert 8 <= len(sides[1]) <= 16


def test_rows_are_drawn_by_the_seed_and_of_each_class_alike() -> None:
    frame = patients(120)
    assert alike(made(frame, seed=1), made(frame, seed=1))
    assert not alike(made(frame, seed=1), made(frame, seed=2))
    for one in made(frame, test=0.5).values():
        assert abs(float(one["y"].float().mean() - one["y_test"].float().mean())) <= 0.06


def test_rows_to_test_on_may_be_said_by_a_column_or_be_a_second_frame() -> None:
    frame = patients()
    frame["part"] = np.where(np.arange(60) < 45, "train", "test")
    by_column = made(frame, test="part")
    by_frame = made(frame.drop(columns="part")[:45], test=frame.drop(columns="part")[45:])
    assert alike(by_column, by_frame)
    assert [len(one["y_test"]) for one in by_column.values()] == [5, 5, 5]


@pytest.mark.parametrize(
    ("values", "options", "likelihood", "expected"),
    [
        ([True, False], {}, "categorical", [1, 0]),
        (["b", "a", "c"], {}, "categorical", [1, 0, 2]),
        ([0, 1], {}, "categorical", [0, 1]),
        ([0.0, 1.0], {}, "categorical", [0, 1]),
        ([7, 9, 12], {"likelihood": "categorical"}, "categorical", [0, 1, 2]),
        ([0, 3, 1], {"likelihood": "poisson"}, "poisson", [0.0, 3.0, 1.0]),
        ([1, 3, 2], {"likelihood": "ordinal"}, "ordinal(num_classes=3)", [0, 2, 1]),
        ([0.5, 1.5], {}, "normal(center=1.0, spread=0.5)", [0.5, 1.5]),
    ],
)
def test_the_target_becomes_what_its_likelihood_wants(
    values: list[Any], options: dict[str, Any], likelihood: str, expected: list[Any]
) -> None:
    frame = patients().assign(died=np.resize(values, 60))
    found = made(frame, test=0.0, **options)
    assert found.form.target.likelihood == likelihood
    first = torch.stack([found[site]["y"][0] for site in ("Zurich", "Basel", "Bern")])
    assert first.tolist() == np.resize(expected, 3).tolist()


def test_times_and_extra_columns_stand_beside_each_other() -> None:
    frame = patients().assign(days=np.arange(1, 61), event=np.resize([True, False], 60), w=2.0)
    found = made(frame, target=("days", "event"), drop=["died"], weight="w", test=0.0)
    assert found.form.target.likelihood == "weibull(unit=30.5, extras=weight)"
    assert found["Zurich"]["y"][:2].tolist() == [[1, 1, 2], [4, 0, 2]]
    assert found.form.preparation.inputs[0] == "age"  # none of them is a feature


def test_a_column_without_values_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    frame = patients().assign(empty=np.nan, fixed=3)
    with caplog.at_level(logging.WARNING):
        found = made(frame)
    assert found.left_out == {
        "empty": "no training row has a value",
        "fixed": "all training rows have the same value",
    }
    assert "column 'empty' is left out, as no training row has a value" in caplog.text
    assert "left out: empty" in repr(found)


def test_a_column_that_one_site_lacks_is_imputed_there() -> None:
    frame = patients()
    frame.loc[frame.hospital == "Bern", ["pressure", "ward"]] = None
    found = made(frame, test=0.0)
    assert (found["Bern"]["x"][:, 2] == 1).all()
    assert (found["Bern"]["x"][:, 4] == 1).all()


def test_a_site_with_one_row_or_one_class_is_a_client_like_others() -> None:
    frame = patients()
    frame = pd.concat([frame[frame.hospital != "Bern"], frame[frame.hospital == "Bern"][:1]])
    frame.loc[frame.hospital == "Basel", "died"] = "no"
    found = made(frame)
    assert (len(found["Bern"]["y"]), len(found["Bern"]["y_test"])) == (1, 0)
    assert found["Basel"]["y"].unique().tolist() == [0]


def _changed(**columns: Any) -> Any:
    return patients().assign(**columns)


DAY = datetime.date(2026, 1, 1)
BAD = {
    "no site": (lambda: patients().drop(columns="hospital"), {},
        "data: has no column 'hospital', which says which site"),
    "no target": (lambda: patients().drop(columns="died"), {},
        "site 'Zurich': has no column 'died', which is the target"),
    "a site is missing": (lambda: _changed(hospital=[None, *["Bern"] * 59]), {},
        "column 'hospital' .* no value in 1 rows"),
    "a target is missing": (lambda: _changed(died=["no", None, *["yes"] * 58]), {},
                            "site 'Basel': column 'died' is the target, but has no value in 1 of"),
    "one class": (lambda: _changed(died="no"), {}, "target 'died' is 'no' in every training row of every site"),
    "target of dates": (lambda: _changed(died=[DAY] * 60), {}, "target 'died' holds dates: it must be classes"),
    "free text target": (lambda: _changed(died=[f"note {i}" for i in range(60)]), {"test": 0.0},
                         "target 'died' holds 60 different texts in 60 training rows: no likelihood fits"),
    "ambiguous": (lambda: _changed(died=np.resize([0, 1, 2, 3], 60)), {},
                  "target 'died' holds whole numbers, 4 different ones from 0 to 3, .* say likelihood="),
    "negative count": (lambda: _changed(died=np.resize([0, -1, 3], 60)), {"likelihood": "poisson"},
                       "site 'Basel': target 'died' must hold whole numbers of at least 0"),
    "text for a normal": (patients, {"likelihood": "normal"},
        "site 'Zurich': target 'died' holds texts, but likelihood"),
    "dates": (lambda: _changed(admitted=[DAY] * 60), {},
        r"site 'Zurich': column 'admitted' holds dates: .*drop=\['adm"),
    "dates as texts": (lambda: _changed(admitted="2026-01-31"), {}, "column 'admitted' holds dates"),
    "free text": (lambda: _changed(notes=[f"note {i}" for i in range(60)]), {},
                  r"site 'Zurich': column 'notes' holds free text, 45 different texts in 45 rows: .*drop=\['notes'\]"),
    "mixed": (lambda: _changed(age=[*range(59), "?"]), {}, "column 'age' mixes numbers and texts, such as 0 and '\\?'"),
    "lists": (lambda: _changed(age=[[1]] * 60), {}, "site 'Zurich': column 'age' holds lists"),
    "infinite": (lambda: _changed(age=[np.inf, *range(59)]), {},
        "column 'age' holds a number that is not finite, in row 0"),
    "twice": (lambda: pd.concat([patients(), patients()[["age"]]], axis=1), {}, "has two columns named 'age'"),
    "no rows": (lambda: patients()[:0], {}, "data: has no rows"),
    "no features": (lambda: patients()[["hospital", "died"]], {}, "no column to learn from beside site and target"),
    "flag": (lambda: _changed(days=3.0, event=np.resize([2, 0], 60)), {"target": ("days", "event")},
             "site 'Zurich': event 'event' must be 1 where the event was seen and 0 .* holds '2'"),
    "time": (lambda: _changed(days=0.0, event=1), {"target": ("days", "event")},
        "holds the time 0: times must be above 0"),
    "two targets": (patients, {"target": ("age", "smokes"), "likelihood": "normal"}, "target must be two columns"),
    "all for testing": (lambda: _changed(tested=patients().hospital == "Bern"), {"test": "tested"},
                        "site 'Bern': has no training rows, as all of its 20 are for testing"),
    "odd test column": (lambda: _changed(tested="perhaps"), {"test": "tested"},
        "column 'tested' must say true.*'perhaps'"),
    "test share": (patients, {"test": 1.5}, "test must be a share of at least 0 and below 1"),
    "unknown test site": (patients, {"test": patients().assign(hospital="Chur")}, "site 'Chur' has no training rows"),
    "class only in test": (lambda: _changed(died=["maybe", *["no", "yes"] * 29, "no"], tested=[True, *[False] * 59]),
                           {"test": "tested"}, "site 'Zurich': target 'died' is 'maybe', which no training row has"),
    "weight": (lambda: _changed(w=-1.0), {"weight": "w"}, "site 'Zurich': weight 'w' must be at least 0, but holds -1"),
    "drop": (patients, {"drop": ["agee"]}, "has no column 'agee', which was asked for"),
    "no frame": (lambda: 3, {}, "must be a pandas, polars or pyarrow frame, a mapping .* not int"),
    "another ending": (lambda: "patients.xlsx", {}, r"must be a file that ends in \.csv or \.parquet"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_a_table_is_refused_in_one_line_with_its_place(case: str) -> None:
    build, options, says = BAD[case]
    with pytest.raises(ValueError, match=says) as refused:
        made(build(), **options)
    assert "\n" not in str(refused.value)


def test_a_frame_to_predict_for_must_have_the_columns_of_the_training() -> None:
    form = made(patients()).form
    with pytest.raises(ValueError, match="data: has no column 'age', which the run was trained with"):
        form.inputs(patients().drop(columns="age"))
    with pytest.raises(ValueError, match="column 'age' must hold numbers, as it did in training, but holds text"):
        form.inputs(patients().assign(age="old"))
    with pytest.raises(
        ValueError, match="must have a column for each of age, pressure, ward, smokes, but its shape is"
    ):
        form.inputs(np.zeros((3, 2)))


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data .*patients\.csv: no such file"):
        columns_of(tmp_path / "patients.csv")
    (tmp_path / "patients.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"patients\.parquet cannot be read: "):
        columns_of(tmp_path / "patients.parquet")


@pytest.mark.parametrize("huge", [1e200, 1e300])
def test_numbers_that_single_precision_cannot_hold_never_become_inputs(huge: float) -> None:
    frame = {"site": ["a", "b"] * 8, "x": [1.0, 2.0] * 8, "z": [*[1.0, 2.0] * 7, 1.0, huge], "y": ["no", "yes"] * 8}
    made = table(frame, site="site", target="y")
    assert all(bool(torch.isfinite(one["x"]).all()) for one in made.values())
    known = table({**frame, "z": [1.0, 2.0] * 8}, site="site", target="y")
    with pytest.raises(ValueError, match="column 'z' holds a number beyond what single precision can hold"):
        known.form.inputs(frame)


def test_a_changed_form_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    frame = {"site": ["a", "b"] * 8, "x": [1.0, 2.0] * 8, "y": ["no", "yes"] * 8}
    kept = table(frame, site="site", target="y").form.as_dict()
    changes: list[tuple[str, Any]] = [
        ("mean", "<b>"),
        ("deviation", 0),
        ("deviation", -1.0),
        ("mean", 1e300),
        ("name", []),
    ]
    for key, wrong in changes:
        path.write_text(json.dumps({**kept, "features": [{**kept["features"][0], key: wrong}]}))
        with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
            Form.read(path)
        assert str(refused.value).isprintable()
