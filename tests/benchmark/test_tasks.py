"""The tasks of the benchmark: what is frozen stays, nobody is on both sides, and nothing of test rows is learned."""

from dataclasses import replace

import numpy as np
import pytest

from bcfl.benchmark.preparation import federation, prepared
from bcfl.benchmark.sources import Rows, read
from bcfl.benchmark.splits import frozen, split, verify
from bcfl.benchmark.tasks import all_tasks, tasks_named

# Read in well under a second each.
SMALL = ("sleepstudy", "radon", "contraception", "guimmun", "heart", "cgd", "planted-kinds")
SITES = {"exam": 64, "hsb82": 160, "chem97": 131, "star": 80, "radon": 63, "insteval": 300, "sleepstudy": 18,
         "contraception": 58, "guimmun": 133, "verbagg": 316, "minority": 160, "cgd": 13, "leuksurv": 24,
         "heart": 4, "smartwatch": 10}  # fmt: skip


def test_there_are_at_least_twelve_tasks_of_ten_real_sources_and_three_controls() -> None:
    natural = [task for task in all_tasks().values() if not task.control]
    assert len(natural) >= 12
    assert len({task.source for task in natural}) >= 10
    assert len(all_tasks()) - len(natural) >= 3
    assert all(task.licence and task.citation and task.structure for task in natural)


def test_as_many_sites_take_part_as_were_frozen() -> None:
    assert {name: frozen()[name]["sites"] for name in SITES} == SITES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SMALL else pytest.mark.slow) for name in all_tasks()]
)
def test_data_and_splits_are_what_was_written_down(name: str) -> None:
    task = all_tasks()[name]
    verify(task, read(task))


def test_other_data_are_refused_by_the_name_of_their_task() -> None:
    task = all_tasks()["sleepstudy"]
    rows = read(task)
    with pytest.raises(ValueError, match="task sleepstudy: data is not what was frozen"):
        verify(task, replace(rows, target=rows.target + 1))


@pytest.mark.parametrize("name", ["guimmun", pytest.param("star", marks=pytest.mark.slow)])
@pytest.mark.parametrize("draw", [0, 2])
def test_nobody_is_both_trained_on_and_tested_on_not_even_at_another_site(name: str, draw: int) -> None:
    task = all_tasks()[name]
    rows = read(task)
    drawn = split(task, rows, draw)
    train, test = (np.concatenate(list(side.values())) for side in (drawn.train, drawn.test))
    assert len(set(rows.person)) < len(rows.person)
    assert not set(rows.person[train]) & set(rows.person[test])
    assert abs(len(train) - len(test)) < 0.1 * len(train)


def test_draws_differ_and_newcomers_are_a_fifth_of_the_sites() -> None:
    task = all_tasks()["contraception"]
    drawn = [split(task, read(task), draw) for draw in (0, 1)]
    assert drawn[0].newcomers != drawn[1].newcomers
    assert len(drawn[0].newcomers) == round(0.2 * len(drawn[0].train))
    assert set(drawn[0].newcomers) <= set(drawn[0].train)


def test_a_split_does_not_depend_on_the_order_of_rows() -> None:
    task = all_tasks()["guimmun"]
    rows = read(task)
    there, back = split(task, rows, 0), split(task, rows.of(np.arange(len(rows.site))[::-1]), 0)
    last = len(rows.site) - 1
    assert all(set(there.test[site]) == {last - row for row in back.test[site]} for site in there.test)


def test_preparation_learns_from_training_rows_alone() -> None:
    task = all_tasks()["contraception"]
    rows = read(task)
    drawn = split(task, rows, 0)
    before = prepared(task, rows, drawn, 0)
    touched = np.concatenate(list(drawn.test.values()))
    column = rows.inputs["age"].copy()
    column[touched] += 100
    category = rows.inputs["livch"].copy()
    category[touched] = "unheard of"
    inputs = rows.inputs | {"age": column, "livch": category}
    after = prepared(task, Rows(rows.site, rows.person, rows.target, inputs), drawn, 0)
    for ours, theirs in zip(before.x, after.x, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    training = np.concatenate(before.x)
    np.testing.assert_allclose(training.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(training.std(0), 1, atol=1e-5)
    assert training.shape[1] == 1 + 1 + 3  # urban, age, three of four levels of livch


def test_the_hospitals_have_the_published_numbers_of_patients_and_what_is_missing_is_no_number() -> None:
    task = all_tasks()["heart"]
    rows = read(task)
    assert dict(zip(*np.unique(rows.site, return_counts=True), strict=True)) == {
        "cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200
    }  # fmt: skip
    assert rows.target.sum() == 509  # the published count of those with the disease
    assert np.isnan(rows.inputs["chol"]).sum() > 100  # among them all of Switzerland, where it was never measured
    assert all(np.isfinite(x).all() for x in federation(task).x)


def test_targets_are_in_the_form_that_their_likelihood_wants() -> None:
    real, times, answers = (federation(all_tasks()[name]) for name in ("sleepstudy", "cgd", "contraception"))
    assert np.concatenate(real.y).std() == pytest.approx(1, abs=1e-5)
    assert times.y[0].shape[1] == 2
    assert set(np.concatenate(times.y)[:, 1]) == {0.0, 1.0}
    assert set(np.concatenate(answers.y)) == {0, 1}


def test_an_unknown_task_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="unknown task 'exams', known: exam, hsb82"):
        tasks_named("exams")


@pytest.mark.parametrize("name", ["planted-kinds", "planted-spread", "planted-answers"])
def test_planted_sites_have_kinds_of_equal_size(name: str) -> None:
    group = federation(all_tasks()[name]).group
    assert group is not None
    assert len(set(np.bincount(group))) == 1
