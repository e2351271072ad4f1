"""The page of results says what the numbers say, and nothing else."""

import csv
import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from beyond_page import how_many
from collect import WORK, compact, results_pages, write_results
from draw_results import COLOUR_OF, DASH_OF, WARMED, draw_curves, draw_graphs
from left import left_to_run
from measured import (
    MEASURES,
    PUBLISHED,
    Printed,
    client_work,
    holm,
    last_within,
    paired_p,
    paper_numbers,
    problem_of,
    rows_of,
)
from reasons import Reason, read_reasons
from results_page import (
    below_paper,
    defaults,
    equal_rounds,
    equal_work,
    order_of_methods,
    page,
    published_budget,
    sensitivity,
)
from small_runs import small_config
from standing import MISSED, NEAR, NOT_RUN, REACHED, STANDINGS, at_a_glance, in_short, shortfall, stands_for
from tables import show

from bcfl.data.datasets import DIGITS_FIVE
from bcfl.report.paper import STYLE
from bcfl.runs.loop import start
from bcfl.runs.settings import load_config
from bcfl.runs.sweep import draw_of, expand, plan

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "experiments").glob("*.toml"))
CIFAR = ("data.name=cifar10", "data.partition=file", "data.partition_file=experiments/splits/cifar10.npz")
PAPER = paper_numbers(
    [
        {"table": "sensitivity_K", "dataset": "cifar10", "setting": "label(4,10,0.1)", "K": "4", "method": "FedAvg",
         "accuracy": "1", "f1": "1", "accuracy_sd": "", "f1_sd": ""},
        {"table": "table1", "dataset": "cifar10", "setting": "label(4,10,0.1)", "K": "4", "method": "FedAvg",
         "accuracy": "40", "f1": "21.5", "accuracy_sd": ".5", "f1_sd": ""},
        {"table": "table1", "dataset": "cifar10", "setting": "label(4,10,0.1)", "K": "4", "method": "BCFL-MH-3",
         "accuracy": "50", "f1": "30", "accuracy_sd": "1", "f1_sd": "1"},
    ]
)  # fmt: skip


def record(
    method: str, accuracy: list[float | None], *, seed: int = 0, scored: int = 0, steps: int = 40, settings: Any = ()
) -> dict[str, Any]:
    """A run of four clients that reached these accuracies, round by round; F1 is half of it."""
    overrides = [*CIFAR, f"method.name={method}", f"experiment.rounds={len(accuracy)}", *settings]
    config = load_config(None, overrides, seed=seed)
    half = [None if value is None else value / 2 for value in accuracy]
    work = {key: [0, *[100] * len(accuracy)] for key in WORK}
    work |= {"local_steps": [0, *[steps] * len(accuracy)], "scored_examples": [0, *[scored] * len(accuracy)]}
    final = {"method": method, "seed": seed, "rounds": len(accuracy), "accuracy": accuracy[-1], "macro_f1": half[-1],
             "nll": 0.5, "ari": 1.0, "assignment": [0, 0, 1, 1]}  # fmt: skip
    return {"config": config.as_dict(), "result": final, "work_by_round": work,
            "by_round": {"accuracy": accuracy, "macro_f1": half}}  # fmt: skip


ONE_ROUND = {"experiment.rounds": 1}


def printed() -> Any:
    return PAPER["cifar10", "label(4,10,0.1)", 4]


def test_the_papers_main_tables_come_before_its_sensitivity_study() -> None:
    assert str(printed()["fedavg"]["accuracy"]) == "40.00 ± 0.50"
    assert str(printed()["fedavg"]["macro_f1"]) == "21.50"


def test_runs_are_averaged_over_seeds_only() -> None:
    rows = rows_of([
        record("bcfl-g", [0.4], seed=0), record("bcfl-g", [0.6], seed=1), record("fedavg", [0.2]),
        record("fedavg", [0.3], settings=["training.local_steps=20"]),
    ])  # fmt: skip
    assert [(row.label, show(row.finals("accuracy"))) for row in rows] == [
        ("bcfl-g", "50.00 ± 14.14"), ("fedavg, local_steps 10", "20.00"), ("fedavg, local_steps 20", "30.00")
    ]  # fmt: skip


def test_a_row_below_the_papers_says_by_how_much_and_why() -> None:
    rows = rows_of([record("fedavg", [0.396]), record("bcfl-mh-3", [0.4], seed=0), record("bcfl-mh-3", [0.5], seed=1)])
    lines = below_paper("Here", rows, printed(), [Reason("Here", "bcfl-mh-3", [0, 1], "It was raining.", ONE_ROUND)])
    assert lines[2:-1] == [
        "- fedavg: accuracy 39.60 is 0.40 below the paper's 40.00 ± 0.50 (within the paper's standard deviation, "
        "one seed here has none); macro F1 19.80 is 1.70 below the paper's 21.50 (the paper gives no standard "
        "deviation, one seed here has none); 1 seed. Why is not known yet.",
        "- bcfl-mh-3: accuracy 45.00 is 5.00 below the paper's 50.00 ± 1.00 (more than the paper's standard deviation, "
        "our own is 7.07); macro F1 22.50 is 7.50 below the paper's 30.00 ± 1.00 (more than the paper's standard "
        "deviation, our own is 3.54); 2 seeds. It was raining.",
    ]
    assert below_paper("Here", rows_of([record("fedavg", [0.43])]), printed(), []) == []  # as high is not below


@pytest.mark.parametrize(
    ("accuracy", "stands"),
    [
        ([0.60], REACHED),
        ([0.58], NEAR),  # F1 29.00, by its deviation of 1 below
        ([0.57], MISSED),
        ([0.57, 0.60], NEAR),  # over two seeds
        ([], NOT_RUN),
    ],
)
def test_a_row_of_the_paper_stands_where_its_mean_over_seeds_does(accuracy: list[float], stands: str) -> None:
    paper = {("here", "so", 4): {"bcfl-mh-3": printed()["bcfl-mh-3"]}}
    rows = rows_of([record("bcfl-mh-3", [value], seed=seed) for seed, value in enumerate(accuracy)])
    line = in_short(paper, {("here", "so", 4): rows})[-2]
    found = line.split(" | ")[1 + STANDINGS.index(stands)].strip(" |")
    seeds = {1: "¹", 2: "²"}.get(len(accuracy), "")
    assert found == (f"bcfl-mh-3{seeds} (rounds 1)" if accuracy else "all 1")


@pytest.mark.parametrize(("accuracy", "gap"), [(0.42, 0.0), (0.39996, 0.0), (0.39994, 0.01), (0.39, 1.0)])
def test_a_row_falls_short_by_what_is_printed(accuracy: float, gap: float) -> None:
    assert shortfall(rows_of([record("fedavg", [accuracy])])[0].finals("accuracy"), Printed(40.0, None)) == gap


def standings(*runs: dict[str, Any]) -> str:
    """The line of the paper's table, after its name."""
    lines = in_short(PAPER, {("cifar10", "label(4,10,0.1)", 4): rows_of(runs)})
    return next(line for line in lines if line.startswith("| cifar10")).partition("K = 4 | ")[2]


def test_the_stated_work_counts_and_more_of_it_is_only_told() -> None:
    more = record("bcfl-mh-3", [0.7], settings=["training.local_steps=20"])
    # Without a deviation in the paper nothing is near: FedAvg's F1 is 0.25 below it.
    assert standings(record("bcfl-mh-3", [0.2]), more, record("fedavg", [0.425])) == (
        " |  | fedavg¹ (rounds 1), bcfl-mh-3¹ (rounds 1; at or above it with local_steps 20¹) |  |"
    )
    assert standings(more) == "bcfl-mh-3¹ (local_steps 20, rounds 1) |  |  | fedavg |"


@pytest.mark.parametrize(
    ("stated", "more", "told"),
    [
        ([0.2, 0.2], [0.7], True),
        ([0.2, 0.7], [0.7], True),  # by its mean it is below, and with the seed of the other, too
        ([0.7, 0.2], [0.7], False),  # the seed that the other was run with is the lucky one
        ([0.2, 0.2], [0.6, 0.7], True),
    ],
)
def test_other_work_is_told_where_it_is_better_with_the_same_seeds(
    stated: list[float], more: list[float], told: bool
) -> None:
    runs = [record("bcfl-mh-3", [accuracy], seed=seed) for seed, accuracy in enumerate(stated)]
    runs += [record("bcfl-mh-3", [a], seed=s, settings=["training.local_steps=20"]) for s, a in enumerate(more)]
    assert ("with local_steps 20" in standings(*runs)) == told


def test_other_work_is_not_told_for_a_lucky_last_round() -> None:
    lucky = record("bcfl-mh-3", [0.2, 0.2, 0.7], settings=["training.local_steps=20"])
    assert "with local_steps 20" not in standings(record("bcfl-mh-3", [0.2, 0.2, 0.2]), lucky)
    lasting = record("bcfl-mh-3", [0.2, 0.7, 0.9], settings=["training.local_steps=20"])
    assert "with local_steps 20" in standings(record("bcfl-mh-3", [0.2, 0.2, 0.2]), lasting)
    untested = record("bcfl-mh-3", [0.2, None, 0.7], settings=["training.local_steps=20"])
    assert "with local_steps 20" in standings(record("bcfl-mh-3", [0.2, None, 0.2]), untested)


def test_of_equal_rows_the_better_one_does_not_stand_for_its_method() -> None:
    ten, five = (record("fedsoft", [a], settings=[f"method.selection={n}"]) for a, n in ((0.2, 10), (0.7, 5)))

    def chosen(*runs: dict[str, Any]) -> str:
        row = stands_for("fedsoft", rows_of(runs))
        return "" if row is None else row.label

    for clients, usual in ((40, 10), (10, 5), (8, 5)):  # where ten would be all of them, five
        for run in (ten, five):
            run["result"]["assignment"] = [0] * clients
        assert chosen(ten, five) == chosen(five, ten) == f"fedsoft, selection {usual}"


def test_settings_that_are_not_as_usual_are_told_at_a_glance() -> None:
    here = ("cifar10", "label(4,10,0.1)", 4)
    hundred, pooled = [0.7] * 100, ["method.fusion=pooled"]
    usual = record("bcfl-mh-3", [0.2] * 100)
    rows = rows_of([usual, *(record("bcfl-mh-3", hundred, seed=seed, settings=pooled) for seed in range(3))])
    lines = at_a_glance({"Table 1": [here]}, PAPER, {here: rows})
    assert "| bcfl-mh-3 | ✓ 70.00 / 35.00 (50.00 / 30.00) |" in lines
    assert lines[-2] == (
        "cifar10, label(4,10,0.1), the published split: fusion pooled for all of BCFL; "
        "with the defaults: bcfl-mh-3 ✗ 20.00 / 10.00¹."
    )


def test_the_papers_tables_are_shown_at_a_glance() -> None:
    here, elsewhere = ("cifar10", "label(4,10,0.1)", 4), ("digits_five", "feature(5,2)", 5)
    more = record("bcfl-mh-3", [0.7], settings=["training.local_steps=20"])
    rows = rows_of([record("bcfl-mh-3", [0.2]), more, *(record("fedavg", [0.44], seed=seed) for seed in range(3))])
    paper = {**PAPER, here: {**PAPER[here], "wecfl": PAPER[here]["fedavg"]}, elsewhere: PAPER[here]}
    lines = at_a_glance({"Table 1": [elsewhere, here], "Table 2": [elsewhere]}, paper, {here: rows})
    assert lines[4:] == [
        "### Table 1",
        "",
        "| method | cifar10, label(4,10,0.1), the published split |",
        "| --- | --- |",
        "| fedavg | ✓ 44.00 / 22.00 (40.00 / 21.50) |",
        "| bcfl-mh-3 | ✗ 20.00 / 10.00¹ (50.00 / 30.00); ✓ 70.00 / 35.00¹ with local_steps 20 |",
        "| wecfl | not run (40.00 / 21.50) |",
        "",
        "Of these 3 rows, beside the paper's number: 1 at or above it, 1 below it, 1 not run.",
        "",
        "Not run: digits_five, feature(5,2).",
        "",
    ]
    assert at_a_glance({"Table 2": [elsewhere]}, paper, {here: rows}) == []  # a table of nothing


def test_the_clients_own_statistics_stand_beside_where_they_were_measured() -> None:
    here = ("cifar10", "label(4,10,0.1)", 4)
    rows = rows_of([record("bcfl-mh-3", [0.2]), record("fedavg", [0.3])])

    def test_of(method: str, clusters: int | None, learned: float, way: str, accuracy: float, f1: float) -> Any:
        own = {"problem": list(problem_of(rows[0].runs[0])), "seed": 0, "method": method, "clusters": clusters}
        return {**own, "learned": {"accuracy": learned}, way: {"accuracy": accuracy, "macro_f1": f1}}

    tested = [
        test_of("bcfl-mh-3", 4, 20.0, "of_training", 50.0, 30.0),
        test_of("fedavg", None, 30.0, "of_training", 40.0, 21.0),
        test_of("bcfl-mh-3", 2, 20.0, "of_training", 60.0, 40.0),
        test_of("bcfl-mh-3", 4, 20.0, "of_batches", 60.0, 40.0),
        test_of("bcfl-mh-3", 4, 21.0, "of_training", 60.0, 40.0),  # of a run with other settings
    ]
    lines = at_a_glance({"Table 1": [here]}, PAPER, {here: rows}, tested)
    assert "| fedavg | ✗ 30.00 / 15.00¹ (40.00 / 21.50) | ✗ 40.00 / 21.00¹ |" in lines
    assert "| bcfl-mh-3 | ✗ 20.00 / 10.00¹ (50.00 / 30.00) | ✓ 50.00 / 30.00¹ |" in lines
    (short,) = (line for line in in_short(PAPER, {here: rows}, tested) if line.startswith("| cifar10"))
    assert "bcfl-mh-3¹ (rounds 1; at or above it with the clients' own BatchNorm statistics¹)" in short
    assert "fedavg¹ (rounds 1)," in short  # still below the paper's
    joined = rows_of([record("bcfl-mh-3", [0.2], seed=seed) for seed in range(2)])
    assert "own BatchNorm" not in "".join(at_a_glance({"Table 1": [here]}, PAPER, {here: joined}, tested[:1]))


def test_the_page_begins_with_numbers_and_then_says_how_they_were_measured() -> None:
    with (ROOT / "experiments/paper.csv").open() as file:
        text = page([record("fedavg", [0.4])], list(csv.DictReader(file)), [], "First this.\n\nThen how.")
    places = [text.index(part) for part in ("First this.", "## At a glance", "## In short", "Then how.", "## cifar10")]
    assert places == sorted(places)


def test_settings_that_are_not_as_usual_are_told_in_short() -> None:
    at = ("cifar10", "label(4,10,0.1)", 4)
    slow = [record("fedavg", [0.3], seed=seed) for seed in range(2)]  # of fewer seeds
    fast = [record("fedavg", [0.5], seed=seed, settings=["training.learning_rate=0.1"]) for seed in range(3)]
    lines = in_short({at: {"fedavg": PAPER[at]["fedavg"]}}, {at: rows_of([*slow, *fast])})
    assert any("fedavg (rounds 1, learning_rate 0.1)" in line for line in lines)


def test_a_lucky_seed_with_other_settings_takes_no_place_of_several_seeds() -> None:
    seeds = [record("bcfl-mh-3", [0.1], seed=seed) for seed in (0, 1, 2)]
    lucky = record("bcfl-mh-3", [0.9], settings=["method.racing=0.01"])
    assert standings(*seeds, lucky) == " |  | bcfl-mh-3 (rounds 1) | fedavg |"
    assert standings(*seeds[:1], lucky) == " |  | bcfl-mh-3¹ (rounds 1) | fedavg |"  # nor of as usual a one
    assert standings(lucky) == "bcfl-mh-3¹ (racing 0.01, rounds 1) |  |  | fedavg |"


def test_a_row_that_stands_elsewhere_by_its_last_rounds_is_told() -> None:
    lucky = record("fedavg", [*[0.3] * 9, 0.9])
    *_, line, _ = in_short(PAPER, {("cifar10", "label(4,10,0.1)", 4): rows_of([lucky])})
    assert line == "- cifar10, label(4,10,0.1), K = 4: fedavg below it (36.00, 18.00), not at or above it."
    steady = record("fedavg", [0.9] * 10)
    assert not any(
        "elsewhere" in line for line in in_short(PAPER, {("cifar10", "label(4,10,0.1)", 4): rows_of([steady])})
    )


def test_what_is_left_to_run_is_told_by_file_and_method(tmp_path: Path) -> None:
    sweep = '[sweep]\nmethods = ["fedavg", "bcfl-g", "wecfl"]\nseeds = [0, 1]\n'
    (tmp_path / "a.toml").write_text(sweep)
    (tmp_path / "newcomers-b.toml").write_text(sweep)  # measured elsewhere
    assert left_to_run(tmp_path, tmp_path)[-2] == "| `a.toml` | 6 of 6 | all |  |"
    planned = plan(expand([tmp_path / "a.toml"]), tmp_path)
    for run in planned[:4]:
        run.path.with_name(f"{run.path.name}.json").touch()
    assert [run.config.label for run in planned[4:]] == ["digits-bcfl-g-s1", "digits-wecfl-s1"]
    assert left_to_run(tmp_path, tmp_path)[-2] == "| `a.toml` | 2 of 6 |  | bcfl-g 1 of 2, wecfl 1 of 2 |"
    planned[0].path.with_name(f"{planned[0].path.name}.json").unlink()
    assert left_to_run(tmp_path, tmp_path)[-2].endswith("| 3 of 6 |  | fedavg 1 of 2, bcfl-g 1 of 2, wecfl 1 of 2 |")


def test_a_mean_of_the_last_rounds_is_told_only_where_all_of_them_were_tested() -> None:
    assert rows_of([record("fedavg", [0.9, 0.2, 0.4])])[0].lately("accuracy", 2) == [pytest.approx(30.0)]
    assert rows_of([record("fedavg", [0.2, None, 0.4])])[0].lately("accuracy", 2) == []


def test_a_reason_belongs_to_the_runs_about_which_it_was_written() -> None:
    reason = Reason("Here", "bcfl-g", [0], "It was raining.", {"training.local_steps": 20, **ONE_ROUND})
    more = record("bcfl-g", [0.1], settings=["training.local_steps=20"])
    (row,) = rows_of([more])
    assert reason.fits("Here", row)
    assert not reason.fits("There", row)
    usual, other = rows_of([record("bcfl-g", [0.1]), more])  # labels change, reasons stay where they are
    assert [reason.fits("Here", row) for row in (usual, other)] == [False, True]
    (joined,) = rows_of([more, record("bcfl-g", [0.2], seed=1, settings=["training.local_steps=20"])])
    assert not reason.fits("Here", joined)
    (pooled,) = rows_of([record("bcfl-g", [0.1], settings=["training.local_steps=20", "method.fusion=pooled"])])
    assert not reason.fits("Here", pooled)
    (longer,) = rows_of([record("bcfl-g", [0.1, 0.1], settings=["training.local_steps=20"])])
    assert not reason.fits("Here", longer)


def test_every_reason_is_told() -> None:
    """One that fits no row below the paper's any more was written about other runs: look at it again."""
    text = (ROOT / "RESULTS.md").read_text()
    reasons = read_reasons((ROOT / "results/reasons.toml").read_text())
    assert len(reasons) > 3
    assert [f"{reason.method}, {reason.problem}" for reason in reasons if reason.why.strip() not in text] == []


def test_a_run_that_was_only_looked_at_at_other_times_counts_once() -> None:
    runs = [record("fedavg", [0.1, 0.2], settings=[f"experiment.checkpoint_every={often}"]) for often in (1, 5)]
    (row,) = rows_of(runs)
    assert show(row.finals("accuracy")) == "20.00"
    splits = [record("fedavg", [value], settings=[f"data.seed={seed}"]) for seed, value in enumerate((0.1, 0.2))]
    (row,) = rows_of(splits)
    assert len(row.runs) == 2  # one seed, but other data


def test_with_how_much_work_a_number_is_reached() -> None:
    (row,) = rows_of([record("bcfl-mh-3", [0.3, None, 0.51, 0.62, 0.55], steps=60)])
    assert row.rounds_at("accuracy", 50.0) == [3, 4, 5]
    assert row.rounds_at("accuracy", 63.0) == []
    assert row.spent("local_steps") == [0, 15, 30, 45, 60, 75]  # of each of four clients
    *_, sentence, _ = published_budget([row], printed(), 4)
    # M(C+M−1)/C = 4.5 times 10 steps in each of 100 rounds.
    assert sentence == (
        "- bcfl-mh-3: about 4,500 there; here the paper's accuracy is reached with 45 (1% of that), "
        "the paper's macro F1 is reached with 60 (1% of that), in 1 of the 2 rounds from there on, not in the last."
    )
    (lucky,) = rows_of([record("bcfl-mh-3", [0.6, None, 0.4, 0.7])])
    *_, accuracy, _ = equal_rounds([lucky], printed())[2].removesuffix(" |").split(" | ")
    assert accuracy == "round 1, 10 steps, in 2 of the 3 rounds from there on"  # of those that were tested
    missed = published_budget(rows_of([record("bcfl-mh-3", [0.4], steps=60)]), printed(), 4)[2]
    assert "the paper's accuracy is not reached with 15," in missed
    assert published_budget(rows_of([record("fedavg", [0.4])]), printed(), 4) == []


def test_a_scored_example_costs_a_third_of_a_trained_one() -> None:
    own = record("bcfl-g", [0.1, 0.2], steps=40, scored=4 * 96)  # of 32 to a batch: three batches, one step's worth
    assert client_work(own) == pytest.approx([0, 11, 22])


def test_methods_stand_side_by_side_where_their_clients_have_worked_alike() -> None:
    curve: list[float | None] = [i / 100 for i in range(1, 11)]
    dear = record("bcfl-mh-3", curve, steps=100)
    sparse = record("bcfl-g", [None, *curve[1:]], steps=40, scored=4 * 32 * 3 * 5)
    assert [last_within(dear, budget) for budget in (24, 25, 100, 1000)] == [None, 1, 4, 10]
    assert last_within(sparse, 15) is None  # not tested in its first round
    lines = equal_work(rows_of([record("fedavg", curve), dear, sparse]))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:-1]]
    assert cells[0][-2].startswith("at the work of fedavg (100 steps)")
    assert cells[0][-1].startswith("at the work of bcfl-g (150 steps)")
    assert {row[0]: row[-2:] for row in cells[2:]} == {
        "fedavg": ["10.00, 5.00 (round 10)", "10.00, 5.00 (round 10, all it ran)"],
        "bcfl-mh-3": ["4.00, 2.00 (round 4)", "6.00, 3.00 (round 6)"],
        "bcfl-g": ["6.00, 3.00 (round 6)", "10.00, 5.00 (round 10)"],
    }
    assert "neither FedAvg nor BCFL-G" in equal_work(rows_of([dear]))[0]


def test_no_order_is_claimed_from_two_seeds() -> None:
    rows = rows_of(
        [record(name, [value], seed=seed) for seed in (0, 1) for name, value in (("local", 0.1), ("ifca", 0.9))]
    )
    assert order_of_methods(rows) == ["Fewer than three common seeds: no order is claimed."]


def test_an_order_is_claimed_only_where_it_is_sure() -> None:
    noise = random.Random(0)
    values = {"local": 0.10, "ifca": 0.90, "fedavg": 0.901}
    rows = rows_of([
        record(name, [value + 0.01 * noise.random()], seed=seed) for seed in range(4) for name, value in values.items()
    ])  # fmt: skip
    _, _, accuracy, f1 = order_of_methods(rows)
    assert accuracy == "- accuracy (pairs: 3): ifca > local (p < 0.001); fedavg > local (p < 0.001)."
    assert f1.startswith("- macro F1 (pairs: 3): ifca > local (p < 0.001")
    close = order_of_methods([row for row in rows if row.method != "local"])
    assert close[2] == "- accuracy (pairs: 1): no difference with p < 0.05, no order is claimed."


def test_an_order_at_equal_work_is_that_of_what_the_work_has_bought() -> None:
    # BCFL methods work three times as much a round, and FedAvg has not spent at its end what BCFL-G has at its own.
    curves = {"fedavg": [0.1, 0.2, 0.3], "bcfl-g": [0.3, 0.6, 0.9], "bcfl-g-w": [0.2, 0.4, 0.6]}
    rows = rows_of([
        record(name, [value + seed / 1000 for value in curve], seed=seed, steps=40 if name == "fedavg" else 120)
        for name, curve in curves.items()
        for seed in range(3)
    ])  # fmt: skip
    lines = equal_work(rows)
    found = "fedavg > bcfl-g-w (p < 0.001); bcfl-g > bcfl-g-w (p < 0.001)"
    assert f"- at the work of fedavg, accuracy (pairs: 3): {found}." in lines
    assert "- at the work of bcfl-g, accuracy (pairs: 1): bcfl-g > bcfl-g-w (p < 0.001)." in lines


def test_rows_with_other_steps_are_not_ordered_at_equal_rounds() -> None:
    more = ["training.local_steps=20"]
    rows = rows_of([
        record(name, [value + seed / 1000], seed=seed, settings=settings)
        for seed in range(3)
        for name, value, settings in (("ifca", 0.1, []), ("ifca", 0.9, more), ("fedavg", 0.5, []))
    ])  # fmt: skip
    assert order_of_methods(rows)[2] == "- accuracy (pairs: 1): fedavg > ifca, local_steps 10 (p < 0.001)."


def test_work_is_measured_by_the_row_with_the_stated_work_and_most_seeds() -> None:
    racing = [record("bcfl-g", [0.3], seed=seed, steps=4, settings=["method.racing=0.01"]) for seed in range(3)]
    plain = [record("bcfl-g", [0.3], seed=seed) for seed in range(2)]
    (line,) = [line for line in equal_work(rows_of([*racing, *plain])) if "at the work of" in line and "method" in line]
    assert "at the work of bcfl-g (10 steps)" in line


def test_runs_on_splits_of_several_draws_are_paired_by_both_seeds() -> None:
    names = {"local": 0.1, "ifca": 0.9}
    rows = rows_of([
        record(name, [value + draw / 100], settings=[f"data.seed={draw}"])
        for name, value in names.items()
        for draw in range(3)
    ])  # fmt: skip
    assert order_of_methods(rows)[2] == "- accuracy (pairs: 1): ifca > local (p < 0.001)."
    same = [record("local", [0.1]), record("local", [0.1], settings=["data.seed=0"])]  # the very same run
    assert [len(row.runs) for row in rows_of(same)] == [1]


def test_paired_t_test_and_holms_correction() -> None:
    assert paired_p([1.0, 2.0, 3.0]) == pytest.approx(0.0742, abs=1e-4)  # t = 2·√3 with 2 degrees of freedom
    assert paired_p([0.0, 0.0, 0.0]) == 1.0
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm's own way, by hand
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_splits_of_our_own_are_not_set_beside_the_papers() -> None:
    own = record("fedavg", [0.5], settings=["data.partition=label(4,10,0.1)"])
    text = page([own], [], [], "Preface.")
    assert "our own splits" in text
    assert "| paper |" not in text
    assert problem_of(record("fedavg", [0.5]))[1] == "label(4,10,0.1), the published split"
    elsewhere = record("fedavg", [0.5], settings=["data.partition_file=mine/split.npz"])
    assert problem_of(elsewhere)[1] == "the split in split.npz"


def test_the_published_split_of_table_2_is_set_beside_it() -> None:
    file = "data.partition_file=experiments/splits/fashion_mnist-without_groups.npz"
    published = record("fedavg", [0.5], settings=["data.name=fashion_mnist", file])
    own = record("fedavg", [0.6], settings=["data.name=fashion_mnist", "data.partition=label(0,40,0.1)"])
    row = {"table": "table2", "dataset": "fashion_mnist", "setting": "label(0,40,0.1)", "K": "4", "method": "FedAvg",
           "accuracy": "50", "f1": "25", "accuracy_sd": "", "f1_sd": ""}  # fmt: skip
    text = page([published, own], [row], [], "Preface.")
    assert "| fashion_mnist, label(0,40,0.1), K = 4 | fedavg¹" in text
    assert "## fashion_mnist, label(0,40,0.1), the published split without copies, K = 4" in text
    assert "## fashion_mnist, label(0,40,0.1), our own splits (one per seed)" in text


def test_a_method_without_clusters_stands_beside_every_k() -> None:
    runs = [record("bcfl-g", [k / 10], settings=[f"method.num_clusters={k}"]) for k in (2, 4)]
    with (ROOT / "experiments/paper.csv").open() as file:
        text = page([*runs, record("fedavg", [0.3])], csv.DictReader(file), [], "")
    head, by_clusters = text.split(", by K\n")
    assert "K = 4\n" in head
    assert "| bcfl-g | 40.00 | " in head
    assert "| bcfl-g | 20.00 |" not in head  # the numbers of K = 4 only
    assert "| bcfl-g | 20.00¹ | 40.00¹ (" in by_clusters
    assert "| fedavg | 30.00¹ | 30.00¹ (39.89 ± 0.18) |" in by_clusters


def test_rows_of_another_k_are_told_to_be_below_the_papers_too() -> None:
    runs = [record("bcfl-g", [0.7], settings=[f"method.num_clusters={k}"]) for k in (2, 4)]
    problem = problem_of(runs[0])
    numbers = {"accuracy": Printed(75.0, None), "macro_f1": Printed(30.0, None)}
    paper = {("cifar10", "label(4,10,0.1)", k): {"bcfl-g": numbers} for k in (4, 2)}
    reason = Reason(f"{', '.join(problem)}, K = 2", "bcfl-g", [0], "It was raining.", ONE_ROUND)
    lines = sensitivity(problem, runs, paper, [reason])
    # The rows of K = 4, the first of the paper's, are told of in a section of their own.
    assert [line for line in lines if line.startswith("Below")] == ["Below the paper's with K = 2:"]
    assert lines[-2].startswith("- bcfl-g: accuracy 70.00 is 5.00 below the paper's 75.00 (")
    assert lines[-2].endswith("1 seed. It was raining.")


def test_a_further_setting_at_one_k_takes_no_place_of_another() -> None:
    runs = [record("bcfl-g", [k / 10], settings=[f"method.num_clusters={k}"]) for k in (2, 3, 4)]
    more = record("bcfl-g", [0.9], settings=["method.num_clusters=4", "training.local_steps=20"])
    lines = sensitivity(problem_of(more), [*runs, more], {})
    assert "| bcfl-g, local_steps 10 | 20.00¹ | 30.00¹ | 40.00¹ |" in lines
    assert "| bcfl-g, local_steps 20 |  |  | 90.00¹ |" in lines
    once = record("ifca", [0.5], settings=["method.num_clusters=4"])
    assert not any(line.startswith("| ifca") for line in sensitivity(problem_of(more), [*runs, more, once], {}))


def test_a_study_marks_the_default_and_says_how_it_stands() -> None:
    def tried(forgetting: float, values: list[float]) -> list[dict[str, Any]]:
        settings = ["data.validation=0.2", f"method.forgetting={forgetting}"]
        return [record("bcfl-g", [value], seed=seed, settings=settings) for seed, value in enumerate(values)]

    lines = defaults([*tried(0.5, [0.50, 0.54, 0.52]), *tried(0.9, [0.51, 0.52, 0.50]), *tried(1.0, [0.1, 0.15, 0.12])])
    rows = [line for line in lines if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["forgetting", "---", "**0.5**", "0.9", "1.0"]
    tests = "paired t-tests over common seeds with Holm's correction, p < 0.05"
    assert lines[-2] == f"The default is the best of 3 by accuracy; surely better than 1 of the others ({tests})."
    *_, verdict, _ = defaults([*tried(0.5, [0.50, 0.54, 0.52]), *tried(0.9, [0.61, 0.64, 0.63])])
    assert verdict.startswith("The best is 10.67 above the default (paired t-test over 3 seeds: p")
    thrice = [*tried(0.5, [0.50, 0.54, 0.52]), *tried(0.9, [0.61, 0.64, 0.63]), *tried(1.0, [0.1, 0.15, 0.12])]
    *_, verdict, _ = defaults(thrice)
    assert "(paired t-test over 3 seeds, corrected for 2 rivals: p" in verdict
    *_, verdict, _ = defaults([*tried(0.5, [0.50]), *tried(0.9, [0.41])])
    assert verdict == "The default is the best of 2 by accuracy; fewer than three common seeds, so no order is claimed."
    *_, verdict, _ = defaults([*tried(0.5, [0.50]), *tried(0.9, [0.61])])
    assert verdict == "The best is 11.00 above the default (fewer than three common seeds, so no order is claimed)."
    assert page(tried(0.5, [0.5]), [], [], "").startswith("\n\n## Defaults, chosen on validation data")


def test_what_is_kept_of_a_run_is_small_and_whole(tmp_path: Path) -> None:
    start(small_config("experiment.evaluate_every=2"), tmp_path / "run", num_workers=1)
    kept = json.loads(json.dumps(compact(tmp_path / "run")))
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert kept["by_round"]["accuracy"] == [None, round(rounds[2]["accuracy"], 6), round(rounds[3]["accuracy"], 6)]
    assert kept["split"] == json.loads((tmp_path / "run" / "manifest.json").read_text())["sha256"]
    for key in WORK:
        assert sum(kept["work_by_round"][key]) == kept["result"]["work"][key]
    for name in ("results", "docs", "experiments"):
        (tmp_path / name).mkdir()
    texts = ("results-preface.md", "results-pictures.md", "paper.csv")
    for name in ("results/reasons.toml", *(f"experiments/{text}" for text in texts)):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "results" / "a.json").write_text(json.dumps(kept))
    write_results(tmp_path)
    assert "## digits, feature(4,2), K = 4" in (tmp_path / "RESULTS.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_small_and_can_be_read(path: Path) -> None:
    assert path.stat().st_size < 100_000
    own = json.loads(path.read_text())
    assert len(own["work_by_round"]["local_steps"]) == own["result"]["rounds"] + 1
    assert client_work(own)[-1] > 0


def test_committed_results_of_one_split_have_the_same_clients() -> None:
    splits: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "results").glob("*.json"):
        own = json.loads(path.read_text())
        data = {key: value for key, value in own["config"]["data"].items() if key not in ("path", "seed")}
        validation = own["config"]["experiment"]["seed"] if data["validation"] else None
        drawn = None if data["partition"] == "file" else draw_of(own["config"])[1]
        if "split" in own:  # not in those of before it was kept
            splits[json.dumps([data, drawn, validation])].add(own["split"])
    assert all(len(own) == 1 for own in splits.values())


def test_client_graphs_are_drawn_of_finished_runs(tmp_path: Path) -> None:
    start(small_config(), tmp_path / "run", num_workers=1)
    with matplotlib.rc_context(STYLE):
        draw_graphs(tmp_path, tmp_path / "graphs.svg")
    assert ">digits: bcfl-mh-3<" in (tmp_path / "graphs.svg").read_text()


def test_curves_are_drawn_of_all_methods_with_the_papers_figures(tmp_path: Path) -> None:
    methods = [*COLOUR_OF, *DASH_OF, *(f"{method}-w" for method in WARMED)]
    rows = rows_of(record(method, [0.5 + i / 100] * 22) for i, method in enumerate(methods))
    figures = {method: {key: Printed(50.0, None) for key in MEASURES} for method in methods}
    with matplotlib.rc_context(STYLE):
        draw_curves({row.method: row for row in rows}, figures, tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert [method for method in methods if f">{method}¹<" not in drawn] == []


def test_the_pages_are_what_the_results_give() -> None:
    for path, text in results_pages(ROOT).items():
        assert path.read_text() == text


def test_the_rows_that_the_readme_shows_are_those_of_the_page() -> None:
    shown = re.findall(r"^\| .*[✓≈✗] .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(shown) > 3
    assert set(shown) <= set((ROOT / "RESULTS.md").read_text().splitlines())


def test_what_goes_beyond_the_paper_has_tables_of_its_own() -> None:
    digits = ["data.name=digits", "data.partition=feature(2,2)"]
    auto = [record("bcfl-auto", [0.5, value], seed=seed, steps=60, settings=digits)
            for seed, value in enumerate((0.6, 0.8))]  # fmt: skip
    auto[1]["result"]["assignment"] = [0, 1, 2, 2]
    told = record("bcfl-g", [0.5, 0.7], scored=20, settings=digits)
    moving = record("bcfl-g", [0.4, 0.5], settings=[*digits, "data.drift_round=2"])
    moving["result"]["drift"] = {"false_switches": 0.02, "changed": 3, "found_again": 2, "rounds_until_found": 1.5}
    together = record("fedavg", [0.3, 0.4], settings=[*digits, "data.drift_round=2"])  # has nobody to follow
    text = page([*auto, told, moving, together], [], [], "")
    assert text.startswith("\n\n## Beyond the paper: how many clusters")  # no section as of the paper's problems
    first = (
        "| digits, feature(2,2) | bcfl-auto | 2 in 1 of 2, 3 in 1 of 2 | 1.00 ± 0.00 | 70.00 ± 14.14 | 35.00 ± 7.07 "
    )
    assert first + "| 1.50 | 0.00 | 2 | 2 |" in text
    assert "| digits, feature(2,2) | bcfl-g | 2.00 | 1.50 | 2 of 3 | 1.00 | 50.00 | 1 |" in text


def test_seeds_without_a_figure_of_drift_are_counted() -> None:
    moving = [record("bcfl-g", [0.3, 0.4], seed=seed, settings=["data.drift_round=2"]) for seed in range(2)]
    told = {"false_switches": None, "changed": 3, "found_again": 2, "rounds_until_found": 1.5}
    for run, rounds in zip(moving, (1.5, None), strict=True):
        run["result"]["drift"] = told | {"rounds_until_found": rounds}
    assert "| none (0 of 2 seeds) | 1.50 (1 of 2 seeds) | 4 of 6 |" in page(moving, [], [], "")


def test_bcfl_auto_stands_beside_methods_that_are_told_the_right_number_and_score_in_full() -> None:
    told = [record("bcfl-g", [0.5], scored=20, seed=seed) for seed in (0, 1)]
    wrong = record("bcfl-g", [0.4], scored=10, settings=["method.num_clusters=3"])
    raced = record("bcfl-g", [0.5], scored=5, settings=["method.racing=0.01"])
    beside = how_many([raced, wrong, *told, record("bcfl-auto", [0.5], scored=10)], PAPER)
    assert [line.split(" | ")[1:3] + line.split(" | ")[7:] for line in beside[6:-1]] == [
        ["bcfl-auto", "2 in 1 of 1", "0.50", "1", "1 |"], ["bcfl-g", "2 in 2 of 2", "1.00", "1", "2 |"]
    ]  # fmt: skip


def test_what_a_mixture_gains_stands_with_its_confidence_interval() -> None:
    best, other = ({"nll": nll, "ece": 0.1, "brier": 0.2, "accuracy": 0.9} for nll in (0.5, 0.4))
    runs = [{"data": "digits", "rounds": 20, "method": "bcfl-g", "beliefs": "mean", "point": best, "mixture": mixture}
            for mixture in (best, other)]  # fmt: skip
    # Student's t with one degree of freedom: 12.706 standard errors, of 0.05
    assert "| digits, 20 rounds | bcfl-g | mean | 0.5000 | 0.1000 | -0.0500 ± 0.6353 | +0.0000 ± 0.0000" in page(
        [], [], [], "", predictive=runs
    )
    asked = {"data": "digits", "method": "bcfl-g", "seed": 0, "held_out": True,
             "table": [{"examples": 4, "temperature": "n^0", "accuracy": 0.9, "confidence": 0.8, "ece": 0.1}],
             "predictions": [{"examples": 4, "mixture_nll": 0.3, "best_nll": 0.5, "mixture_ece": 0.2,
                              "best_ece": 0.1}]}  # fmt: skip
    text = page([], [], [], "", newcomers=[asked])
    assert "| digits | bcfl-g | placed rightly |  |  | 0.900 |  |  |  |  | 1 |" in text
    assert "| digits | bcfl-g | Δ NLL of predictions |  |  | -0.2000 |  |  |  |  | 1 |" in text


TABLES = [path for path in FILES if path.name.startswith(("table", "sensitivity"))]


def test_every_row_of_the_paper_has_an_experiment_file() -> None:
    planned = set()
    for config in expand(TABLES):
        data = config.data
        split = PUBLISHED[Path(data.partition_file).name][0] if data.partition == "file" else data.partition
        if data.name != "digits_five" or tuple(data.domains or DIGITS_FIVE) == DIGITS_FIVE:  # else the domains at hand
            planned.add((data.name, split, config.method.get("num_clusters"), config.method["name"]))
    with (ROOT / "experiments/paper.csv").open() as file:
        rows = [(row["dataset"], row["setting"], int(row["K"]), row["method"].lower()) for row in csv.DictReader(file)]
    assert len(rows) > 100
    missing = [row for row in rows if not {row, (*row[:2], None, row[3])} & planned]
    assert missing == []


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_have_the_papers_settings(path: Path) -> None:
    for config in expand([path]):
        training = config.training
        assert (training.learning_rate, training.momentum, training.batch_size) == (0.005, 0.9, 32)
        assert (training.local_steps, config.experiment.rounds) == (10, 100)
        if config.method["name"] == "fedsoft":
            assert config.method["proximal"] == (0.01 if config.data.name == "cifar10" else 0.1)


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name.startswith("defaults")], ids=lambda path: path.stem
)
def test_defaults_are_chosen_on_validation_data_only(path: Path) -> None:
    assert {config.data.validation for config in expand([path])} == {0.2}
