import csv
import html
import io
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_runs import keep_rounds

from bcfl.cli import main
from bcfl.cli.summary import print_comparison
from bcfl.methods import METHODS, remarks
from bcfl.report.page import report
from bcfl.report.reading import group_runs, read_run, read_runs
from bcfl.report.tables import FORMATS, comma_separated, latex, markdown

MakeRun = Callable[..., Path]


def two_methods(made_up: MakeRun) -> list[Path]:
    return [
        made_up("a0", seed=0),
        made_up("a1", seed=1),
        made_up("b0", method="bcfl-g", hypotheses=1),
    ]


def test_csv_holds_means_and_deviations_in_full(made_up: MakeRun) -> None:
    runs = read_runs(two_methods(made_up))
    first, second = csv.DictReader(io.StringIO(comma_separated(group_runs(runs))))
    accuracy = [run.rounds[-1]["accuracy"] for run in runs]
    assert float(first["accuracy_mean"]) == statistics.fmean(accuracy[:2])
    assert float(first["accuracy_sd"]) == statistics.stdev(accuracy[:2])
    assert first["seeds"] == "2"
    assert second["method"] == "bcfl-g"
    assert float(second["accuracy_mean"]) == accuracy[2]
    assert float(second["accuracy_sd"]) == 0
    steps = sum(record["work"]["local_steps"] for record in runs[2].rounds)
    assert float(second["total_steps_mean"]) == steps


def test_markdown_rows_align_with_the_head(made_up: MakeRun) -> None:
    groups = group_runs(read_runs(two_methods(made_up)))
    head, rule, *rows = markdown(groups).splitlines()
    assert len(rows) == 2
    assert {line.count("|") for line in (head, rule, *rows)} == {head.count("|")}
    mean = statistics.fmean(run.rounds[-1]["accuracy"] for run in groups[0].runs)
    assert f"{mean:.3f} ± " in rows[0]
    assert "±" not in rows[1]  # one seed has no deviation


def test_latex_is_a_booktabs_table_with_escaped_names(made_up: MakeRun) -> None:
    paths = [*two_methods(made_up), made_up("c", overrides=("training.local_steps=3",))]
    text = latex(group_runs(read_runs(paths)))
    assert r"method & local\_steps & accuracy" in text
    body = text.split("\\midrule\n")[1].split("\\bottomrule")[0].splitlines()
    assert [line.split(" & ")[:2] for line in body] == [["bcfl-mh-3", "3"], ["bcfl-mh-3", "10"], ["bcfl-g", "10"]]
    columns = len(text.split("{tabular}{")[1].split("}")[0])
    assert {line.replace(r"\&", "").count("&") + 1 for line in body} == {columns}


def test_what_varies_has_a_column_of_its_own(made_up: MakeRun) -> None:
    paths = [
        made_up(f"{method}-{fusion}", method=method, overrides=(f"method.fusion={fusion}", "training.local_steps=4"))
        for method in ("bcfl-mh-3", "bcfl-g")
        for fusion in ("geometric", "exact")
    ]
    paths.append(made_up("fedavg", method="fedavg", overrides=("training.local_steps=4",)))
    rows = list(csv.DictReader(io.StringIO(comma_separated(group_runs(read_runs(paths))))))
    assert list(rows[0])[:3] == ["method", "fusion", "accuracy_mean"]  # all have the same steps: no column for them
    assert [(row["method"], row["fusion"]) for row in rows] == [
        *((method, fusion) for method in ("bcfl-mh-3", "bcfl-g") for fusion in ("exact", "geometric")), ("fedavg", "")
    ]  # fmt: skip
    head = markdown(group_runs(read_runs(paths))).splitlines()[0]
    assert head.startswith("| method | fusion | accuracy |")


def test_steps_of_a_round_and_all_steps_cannot_be_mistaken(
    made_up: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # titles in one line, whatever the terminal is
    paths = [made_up(f"of {steps}", overrides=(f"training.local_steps={steps}",)) for steps in (3, 10)]
    groups = group_runs(read_runs(paths))
    titles = markdown(groups).splitlines()[0].strip("| ").split(" | ")
    assert [title for title in titles if "steps" in title] == ["local_steps", "total steps"]
    titles = comma_separated(groups).splitlines()[0].split(",")
    assert [title for title in titles if "steps" in title] == ["local_steps", "total_steps_mean", "total_steps_sd"]
    print_comparison(paths)
    printed = capsys.readouterr().out
    assert "local_steps" in printed
    assert "total steps" in printed


@pytest.mark.parametrize("form", FORMATS)
def test_rounds_that_vary_have_one_column(made_up: MakeRun, form: str) -> None:
    runs = read_runs([made_up(f"of {rounds}", rounds=rounds) for rounds in (12, 4)])
    groups = group_runs(runs)
    assert [group.settings for group in groups] == [{"experiment.rounds": 4}, {"experiment.rounds": 12}]
    for shown in (groups, group_runs(runs[:1])):  # as a setting, as a measure
        head = FORMATS[form](shown).split("seeds")[0].replace("rounds_sd", "")
        assert head.count("rounds") == 1


def test_unfinished_runs_are_told_and_count_only_where_none_is_complete(made_up: MakeRun) -> None:
    paths = [made_up("a0"), keep_rounds(made_up("a1", seed=1), 3)]
    paths += [keep_rounds(made_up(f"b{seed}", method="bcfl-g", hypotheses=1, seed=seed), 2) for seed in (0, 1)]
    paths += [made_up("c", method="fedavg", hypotheses=1)]
    runs = read_runs(paths)
    some, none, all_complete = csv.DictReader(io.StringIO(comma_separated(group_runs(runs))))
    assert [(row["seeds"], row["complete"], row["unfinished"]) for row in (some, none, all_complete)] == [
        ("1", "1", "1"), ("2", "0", "2"), ("1", "1", "0")
    ]  # fmt: skip
    assert (float(some["rounds_mean"]), float(none["rounds_mean"])) == (8, 2)
    assert float(some["accuracy_mean"]) == runs[0].rounds[-1]["accuracy"]
    assert float(some["accuracy_sd"]) == 0

    said = ["Unfinished runs, not counted: bcfl-mh-3 1 of 2.",
            "Unfinished runs, counted as far as they have got: bcfl-g 2 of 2."]  # fmt: skip
    assert markdown(group_runs(runs)).endswith(f"|\n\n{said[0]}\n\n{said[1]}\n")
    assert all(rf"{{\footnotesize {remark}}} \\" in latex(group_runs(runs)) for remark in said)
    for write in (markdown, latex):
        assert "nfinished" not in write(group_runs(runs[-1:]))


def test_agreement_is_left_out_where_no_groups_are_known(made_up: MakeRun) -> None:
    assert "agreement" not in markdown(group_runs(read_runs([made_up(grouped=False)])))


@pytest.mark.parametrize("form", FORMATS)
def test_command_prints_the_table(made_up: MakeRun, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_up()
    assert main(["table", str(path), "--format", form]) == 0
    assert capsys.readouterr().out == FORMATS[form](group_runs(read_runs([path])))


def test_what_must_be_known_about_a_method_stands_below_its_numbers(
    made_up: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    others = read_runs(two_methods(made_up))
    adapted = [*others, read_run(made_up("c", method="bp-fedavg", hypotheses=1))]
    remark = "bp-fedavg is tested after each client's adaptation."
    for write in (markdown, latex, lambda groups: report([run for group in groups for run in group.runs])):
        assert remark in html.unescape(write(group_runs(adapted)))
        assert remark not in html.unescape(write(group_runs(others)))
    assert markdown(group_runs(adapted)).endswith(f"|\n\n{remark}\n")
    assert latex(group_runs(adapted)).splitlines()[-2].startswith(r"\multicolumn{")
    print_comparison([run.path for run in adapted])
    assert remark[:-1] in capsys.readouterr().out


def test_every_method_that_has_a_remark_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "bcfl-mh-M", replace(METHODS["bcfl-mh-M"], remark="tested twice"))
    named = iter(["bp-fedavg", "bcfl-mh-3-w", "bcfl-g"])
    assert remarks(named) == ["tested twice", METHODS["bp-fedavg"].remark]
