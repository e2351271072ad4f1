import json
import re
import sys
import time
import tomllib
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import change_lines, keep_rounds, write_eventful_run

from bcfl.cli import main
from bcfl.report.page import report, to_toml
from bcfl.report.reading import read_run, read_runs
from bcfl.runs.settings import load_config, parse_config

MakeRun = Callable[..., Path]


def figures_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    figures: dict[str, Any] = json.loads(text)
    return figures


class _Words(HTMLParser):
    """The words of a page, without its scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._quiet = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._quiet = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._quiet:
            self.words += data.split()


def words_of(page: str) -> str:
    parser = _Words()
    parser.feed(page)
    return " ".join(parser.words)


def best_cells(page: str) -> list[list[str]]:
    """In each row of the table, the titles of the columns that it is best in."""
    titles = re.findall(r"<th>(.*?)</th>", page.split("<thead>")[1].split("</thead>")[0])[1:]
    rows = re.findall(r"<tr><th>.*?</tr>", page.split("<tbody>")[1].split("</tbody>")[0], re.DOTALL)
    found = [re.findall(r"<td([^>]*)>", row) for row in rows]
    return [[title for title, cell in zip(titles, row, strict=True) if "best" in cell] for row in found]


def test_every_figure_has_its_place_and_its_data(made_up: MakeRun) -> None:
    page = report(read_runs([made_up("a"), made_up("b", method="bcfl-g", hypotheses=1)]))
    details = ("graph", "association", "trellis", "certainty", "calibration", "client_measure", "labels", "work")
    expected = {"accuracy", "macro_f1", "agreement", "accuracy_by_work", *(f"{n}-{i}" for n in details for i in "01")}
    assert figures_of(page).keys() == expected - {"trellis-1"}  # one hypothesis has no trellis
    assert set(re.findall(r'data-figure="(.*?)"', page)) == figures_of(page).keys()


@pytest.mark.parametrize(
    ("clients", "most"), [(40, 400_000), (1000, 800_000)], ids=["100 rounds × 40 clients", "1000 clients"]
)
def test_size_and_time(made_up: MakeRun, clients: int, most: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_up(clients=clients, rounds=100, hypotheses=6, clusters=4)
    began = time.perf_counter()
    page = report(read_runs([path])).encode()
    seconds = time.perf_counter() - began
    with capsys.disabled():
        print(f"\nreport of {clients} clients, 100 rounds, 6 hypotheses: {seconds:.1f} s, {len(page) / 1e6:.2f} MB")
    assert len(page) < most
    assert seconds < 60  # far above what it takes: only a freeze fails


def test_nothing_on_the_page_points_outside(made_up: MakeRun) -> None:
    page = report([read_run(made_up())])
    assert not re.search(r"\b(src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "default-src 'none'" in page


def test_what_is_told_of_a_method_is_of_its_complete_runs(made_up: MakeRun) -> None:
    complete, unfinished = made_up("a0"), keep_rounds(made_up("a1", seed=1), 3)
    change_lines(complete / "rounds.jsonl", lambda record: record.update(accuracy=0.9))
    change_lines(unfinished / "rounds.jsonl", lambda record: record.update(accuracy=0.1))
    page = report(read_runs([complete, unfinished]))
    assert "0.900" in words_of(page)
    assert figures_of(page)["accuracy"][0]["series"][0]["y"] == [0.9] * 8
    assert "a1: 3 of 8 rounds" in words_of(page)
    assert "bcfl-mh-3 1 of 2" in words_of(page)

    other = made_up("b", method="bcfl-g", hypotheses=1)
    change_lines(other / "rounds.jsonl", lambda record: record.update(accuracy=0.8))
    assert best_cells(report(read_runs([complete, unfinished, other])))[0][0] == "accuracy"
    assert best_cells(report(read_runs([unfinished, other])))[1][0] == "accuracy"  # where none is complete, as it is


def test_a_comparison_can_be_looked_at_while_it_runs(made_up: MakeRun) -> None:
    begun, just_started = keep_rounds(made_up("a0"), 1), keep_rounds(made_up("a1", seed=1), 0)
    runs = read_runs([begun, just_started, made_up("b0", method="bcfl-g", hypotheses=1)])
    page = report(runs)
    line, _ = figures_of(page)["accuracy_by_work"][0]["series"]
    assert line["x"] == [runs[0].rounds[0]["work"]["local_steps"]]
    assert "low" not in line  # of the seed that has something to tell: no deviation
    assert figures_of(report(runs[1:2])) == {}


def test_the_run_that_has_got_furthest_stands_for_its_seeds(made_up: MakeRun) -> None:
    runs = read_runs([keep_rounds(made_up("a0"), 3), made_up("a1", seed=1), made_up("a2", seed=2)])
    page = report(runs)
    assert re.findall(r"<option[^>]*>(.*?)</option>", page) == ["bcfl-mh-3, seed 1"]
    assert figures_of(page)["work-0"][0]["series"][0]["x"] == list(range(9))


def test_not_all_of_many_unfinished_runs_are_named(made_up: MakeRun) -> None:
    page = report(read_runs([made_up(f"s{seed}", seed=seed, rounds=2, complete=False) for seed in range(7)]))
    assert "s4: 2 of 2" in words_of(page)
    assert "s5: 2 of 2" not in words_of(page)
    assert "2 more" in words_of(page)


def test_clients_that_were_never_associated_are_in_no_cluster(made_up: MakeRun) -> None:
    path = made_up(rounds=2)
    placed = [-1, -1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    change_lines(path / "associations.jsonl", lambda line: line.update(assignment=[placed] * 3))
    told = words_of(report([read_run(path)]))
    assert "10 of 12 clients in 3 clusters" in told
    assert f"{np.log(3) * 2 / 12:.3f} nats" in told
    placed[:2] = 1, 2
    change_lines(path / "associations.jsonl", lambda line: line.update(assignment=[placed] * 3))
    assert "12 clients in 3 clusters" in words_of(report([read_run(path)]))


def test_the_page_tells_since_when_nobody_has_moved(made_up: MakeRun) -> None:
    path, told = made_up(), []
    for moved in (lambda index: 0, lambda index: int(index == 3), lambda index: 1):
        change_lines(path / "rounds.jsonl", lambda record, moved=moved: record.update(changes=moved(record["round"])))
        told.append(words_of(report([read_run(path)])))
    assert "since round 3" in told[1]
    assert not any("since round" in other for other in (told[0], told[2]))


def test_a_real_federation_tells_less_of_its_clients(made_up: MakeRun) -> None:
    path = made_up()
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({"num_clients": manifest["num_clients"], "group": None}))
    page = report([read_run(path)])
    assert "graph-0" in figures_of(page)
    assert "labels-0" not in figures_of(page)
    assert "bcfl run settings.toml" not in unescape(page)  # nobody but its clients can repeat it


def test_one_model_for_all_has_nothing_to_associate(made_up: MakeRun) -> None:
    page = report([read_run(made_up(method="fedavg", hypotheses=1, clusters=1))])
    assert not {"graph-0", "association-0", "trellis-0"} & figures_of(page).keys()


def test_the_report_needs_no_drawing_package(made_up: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from bcfl.report.paper import save_figures

    run = read_run(made_up())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report([run])
    with pytest.raises(ValueError, match=r"matplotlib.*pip install 'bcfl\[report\]'"):
        save_figures([run], run.path)


def test_what_became_of_those_that_changed_group_is_told(tmp_path: Path) -> None:
    told = words_of(report([read_run(write_eventful_run(tmp_path / "run"))]))
    assert re.search(r"2 clients .* round 7", told)


def test_sixteen_methods_still_fit(made_up: MakeRun) -> None:
    paths = [
        made_up(f"m{i}", clients=40, rounds=60, hypotheses=2, overrides=(f"training.local_steps={i}",))
        for i in range(1, 19)
    ]
    page = report(read_runs(paths))
    assert len(page.encode()) < 3e6
    assert page.count("<option") == 16


def test_foreign_words_cannot_become_markup(made_up: MakeRun) -> None:
    hostile = "</script><!--<script><img src=x onerror=alert(1)>"
    paths = [made_up(name) for name in "ab"]
    for path in paths:
        for name, section, key in (("manifest", None, "dataset"), ("config", "method", "name")):
            content = json.loads((path / f"{name}.json").read_text())
            (content[section] if section else content)[key] = hostile + path.name
            (path / f"{name}.json").write_text(json.dumps(content))
    page = report(read_runs(paths))
    assert "<img" not in page
    (data,) = re.findall(r'id="figures">(.*?)</script>', page, re.DOTALL)
    assert "<" not in data
    assert hostile in json.dumps(json.loads(data))


def test_where_all_hold_the_same_classes_the_page_names_no_cause(made_up: MakeRun) -> None:
    path = made_up()
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["train_labels"] = [[20] * 10] * 12  # they may differ in p(x), or in p(y|x)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "it is in what the examples look like" not in report([read_run(path)])


def test_settings_on_the_page_repeat_the_run(real_run: Path) -> None:
    config = json.loads((real_run / "config.json").read_text())
    again = parse_config(tomllib.loads(to_toml(config)))
    assert again.identity() == parse_config(config).identity()


@pytest.mark.parametrize(
    "overrides",
    [
        ["method.scoring_examples=none"],
        ["method.name=bcfl-auto", "method.search_rounds=none", "method.scoring_examples=none"],
        ["method.name=ifca", "method.scoring_examples=none", "data.seed=4"],
        ["method.name=fedavg", "data.factory='mine:clients'", "model.factory='mine:model'"],
        ["method.stay=learn", "method.scoring_examples=100", "data.name=fashion_mnist", "experiment.joins=[[3, 2]]"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_settings_on_the_page_are_those_of_the_run(overrides: list[str]) -> None:
    config = load_config(None, overrides)
    assert parse_config(tomllib.loads(to_toml(config.as_dict()))) == config


def test_command_writes_the_page(real_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(real_run), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("report", "figures", "table"):
        assert main([command, str(tmp_path)]) == 2
        assert (
            capsys.readouterr().err
            == f"bcfl: {tmp_path} is not a run folder (it has no config.json and manifest.json)\n"
        )


def test_without_groups_and_without_test_data(made_up: MakeRun) -> None:
    path = made_up(grouped=False)
    records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    measured = ("accuracy", "macro_f1", "nll", "ece", "client_accuracy", "calibration")
    kept = [{key: value for key, value in r.items() if key not in measured} for r in records]
    (path / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    page = report([read_run(path)])
    assert {"graph-0", "association-0", "labels-0"} <= figures_of(page).keys()
    assert not {"accuracy", "calibration-0"} & figures_of(page).keys()


def test_the_best_of_each_column_is_bold_whichever_way_is_better(tmp_path: Path) -> None:
    """The second run is worse in everything: it also finds who changed group later, and loses one at rest."""
    better, worse = (write_eventful_run(tmp_path / name) for name in ("better", "worse"))
    change_lines(better / "rounds.jsonl", lambda r: r.update(accuracy=0.9, macro_f1=0.9, nll=0.1, ece=0.01, ari=0.9))
    change_lines(worse / "rounds.jsonl", lambda r: r.update(accuracy=0.8, macro_f1=0.8, nll=0.2, ece=0.02, ari=0.8))

    def mislead(line: dict[str, Any]) -> None:
        placed = line["assignment"][0]
        if line["round"] in (8, 9):
            placed[0], placed[11] = 0, 2  # where they were before they changed
        if line["round"] == 11:
            placed[5] = 2

    change_lines(worse / "associations.jsonl", mislead)
    settings = json.loads((worse / "config.json").read_text())
    settings["training"]["learning_rate"] = 1.0
    (worse / "config.json").write_text(json.dumps(settings))
    page = report(read_runs([better, worse]))
    quality = ["accuracy", "macro F1", "NLL", "ECE", "agreement", "false switches", "rounds until found"]
    assert best_cells(page) == [quality, []]
