import json
import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import change_lines, keep_rounds, write_eventful_run

from bcfl.cli import main
from bcfl.report.html import report, to_toml
from bcfl.report.layout import FAINTEST, accumulated_co_association
from bcfl.report.reading import read_run, read_runs
from bcfl.runs.settings import load_config, parse_config

go = pytest.importorskip("plotly.graph_objects")

MakeRun = Callable[..., Path]


def figures_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    figures: dict[str, Any] = json.loads(text)
    return figures


def with_colours(value: Any) -> Any:
    """The figure with a real colour for each variable, as the browser puts in."""
    if isinstance(value, str) and value.startswith("--"):
        return "#123456"
    if isinstance(value, list):
        return [with_colours(one) for one in value]
    if isinstance(value, dict):
        return {key: with_colours(one) for key, one in value.items()}
    return value


def test_every_figure_is_valid_plotly(made_up: MakeRun) -> None:
    figures = figures_of(report(read_runs([made_up("a"), made_up("b", method="bcfl-g", hypotheses=1)])))
    names = {"accuracy", "macro_f1", "accuracy_by_work", "graph-0", "association-0", "trellis-0", "certainty-0",
             "calibration-0", "client_accuracy-0", "labels-0", "work-0"}  # fmt: skip
    assert names <= figures.keys()
    assert "trellis-1" not in figures  # one hypothesis has no trellis
    for name, figure in figures.items():
        if not name.startswith("graph"):
            figure = figure.get("figure", figure)
            go.Figure(with_colours(figure))  # raises for any property that Plotly does not know


def test_a_single_round_does_not_stretch_the_axis_beyond_one(made_up: MakeRun) -> None:
    for rounds, expected in ((1, "tozero"), (8, None)):
        runs = [made_up(f"{rounds}-{seed}", rounds=rounds, seed=seed) for seed in (0, 1)]
        assert figures_of(report(read_runs(runs)))["accuracy"]["layout"]["yaxis"].get("rangemode") == expected


def test_edges_are_the_accumulated_co_association(made_up: MakeRun) -> None:
    path = made_up()
    run = read_run(path)
    graph, expected = figures_of(report([run]))["graph-0"], accumulated_co_association(run)
    edges = {(graph["client"][a], graph["client"][b]): p for a, b, p in graph["edge"]}
    for a in range(run.num_clients):
        for b in range(a + 1, run.num_clients):
            drawn = edges.get((a, b), edges.get((b, a), 0))
            assert drawn == pytest.approx(expected[a, b] if expected[a, b] >= FAINTEST else 0, abs=5e-5)


def test_heat_map_is_the_marginals_in_every_round(made_up: MakeRun) -> None:
    run = read_run(made_up())
    heat = figures_of(report([run]))["association-0"]
    assert heat["rounds"] == list(range(1, 9))
    clients = [int(label) for label in heat["figure"]["data"][0]["x"]]
    for frame, expected in zip(heat["frames"], run.marginals, strict=True):
        np.testing.assert_allclose(np.array(frame).T, expected[clients], atol=5.1e-4)
    assert heat["figure"]["data"][0]["z"] == heat["frames"][-1]


def test_curves_are_the_log(made_up: MakeRun) -> None:
    path = made_up()
    records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()][1:]
    figures = figures_of(report([read_run(path)]))
    for name, key in (("accuracy", "accuracy"), ("macro_f1", "macro_f1"), ("agreement", "ari")):
        (line,) = figures[name]["data"]
        assert line["x"] == [r["round"] for r in records]
        assert line["y"] == pytest.approx([r[key] for r in records], abs=5e-5)
    down, up, steps, scored = figures["work-0"]["data"]
    for trace, key in ((down, "parameters_down"), (up, "parameters_up"), (steps, "local_steps"),
                       (scored, "scored_examples")):  # fmt: skip
        assert trace["y"] == [0] + [r["work"][key] for r in records]
    moved = figures["certainty-0"]["data"][2]
    assert moved["y"] == [r["changes"] for r in records]
    dots = figures["client_accuracy-0"]["data"][0]
    assert dots["y"] == pytest.approx([records[-1]["client_accuracy"][int(c)] for c in dots["x"]], abs=5e-5)
    reliability = figures["calibration-0"]["data"][1]
    count, confidence, correct = np.array(records[-1]["calibration"]).T
    assert reliability["x"] == pytest.approx(confidence / count, abs=5e-5)
    assert reliability["y"] == pytest.approx(correct / count, abs=5e-5)


def test_labels_are_shares_of_the_manifest(made_up: MakeRun) -> None:
    run = read_run(made_up())
    held = np.array(run.manifest["train_labels"], dtype=float)
    (trace,) = figures_of(report([run]))["labels-0"]["data"]
    clients = [int(label) for label in trace["x"]]
    np.testing.assert_allclose(np.array(trace["z"]).T, (held / held.sum(1, keepdims=True))[clients], atol=5.1e-4)


def test_bands_are_one_deviation_over_seeds(made_up: MakeRun) -> None:
    runs = read_runs([made_up(f"s{seed}", seed=seed) for seed in range(3)])
    band, line = figures_of(report(runs))["accuracy"]["data"]
    values = np.array([[r["accuracy"] for r in run.rounds] for run in runs])
    assert line["y"] == pytest.approx(values.mean(0), abs=5e-5)
    assert line["name"].endswith("(3 seeds)")
    outline = [*(values.mean(0) + values.std(0, ddof=1)), *(values.mean(0) - values.std(0, ddof=1))[::-1]]
    assert band["y"] == pytest.approx(outline, abs=1e-4)


def test_methods_are_compared_at_equal_work(made_up: MakeRun) -> None:
    runs = read_runs([made_up("a"), made_up("b", method="bcfl-g", hypotheses=1)])
    traces = figures_of(report(runs))["accuracy_by_work"]["data"]
    for trace, run in zip(traces, runs, strict=True):
        assert trace["x"] == np.cumsum([r["work"]["local_steps"] for r in run.rounds]).tolist()


@pytest.mark.parametrize(
    ("clients", "rounds"), [(40, 100), (1000, 100)], ids=["100 rounds × 40 clients", "1000 clients"]
)
def test_size_and_time(made_up: MakeRun, clients: int, rounds: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_up(clients=clients, rounds=rounds, hypotheses=6, clusters=4)
    began = time.perf_counter()
    page = report(read_runs([path])).encode()
    seconds = time.perf_counter() - began
    with capsys.disabled():
        print(
            f"\nreport of {clients} clients, {rounds} rounds, 6 hypotheses: {seconds:.1f} s, {len(page) / 1e6:.2f} MB"
        )
    assert len(page) < 8e6
    assert seconds < 60  # far above what it takes: only a freeze fails


def test_sixteen_methods_still_fit(made_up: MakeRun) -> None:
    paths = [
        made_up(f"m{i}", clients=40, rounds=60, hypotheses=2, overrides=(f"training.local_steps={i}",))
        for i in range(1, 19)
    ]
    page = report(read_runs(paths))
    assert len(page.encode()) < 8e6
    assert "The first 16 methods are offered" in page


def test_nothing_on_the_page_points_outside(made_up: MakeRun) -> None:
    from plotly.offline import get_plotlyjs

    page = report([read_run(made_up())]).replace(get_plotlyjs(), "")
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "default-src 'none'" in page


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


def test_unfinished_runs_are_shown_as_far_as_they_are(made_up: MakeRun) -> None:
    path = made_up(complete=False)
    for name, kept in {"rounds": 4, "associations": 3, "timings": 3}.items():
        lines = (path / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (path / f"{name}.jsonl").write_text("".join(lines[:kept]))
    page = report([read_run(path)])
    assert "3 of 8 rounds" in page
    assert figures_of(page)["accuracy"]["data"][0]["x"] == [1, 2, 3]
    for name in ("rounds", "associations", "timings"):
        (path / f"{name}.jsonl").unlink()
    assert "No round is finished yet" in report([read_run(path)])


def test_a_comparison_can_be_looked_at_while_it_runs(made_up: MakeRun) -> None:
    begun = keep_rounds(made_up("a0", seed=0), 1)
    just_started = keep_rounds(made_up("a1", seed=1), 0)
    runs = read_runs([begun, just_started, made_up("b0", method="bcfl-g", hypotheses=1)])
    page = report(runs)
    (line, _) = figures_of(page)["accuracy_by_work"]["data"]
    assert line["x"] == [runs[0].rounds[0]["work"]["local_steps"]]
    assert "the band one standard deviation" not in page
    (row,) = re.findall(r"<tr><th>[^\n]*?bcfl-mh-3</th>(.*?)</tr>", page)
    assert row.endswith("<td>1</td>")  # the seed that has something to tell
    assert "±" not in row
    assert "±" not in report(runs[:2]).split('<div class="tiles">')[1].split("<section")[0]


def test_the_run_that_has_got_furthest_stands_for_its_seeds(made_up: MakeRun) -> None:
    behind = keep_rounds(made_up("a0"), 3)
    runs = read_runs([behind, made_up("a1", seed=1), made_up("a2", seed=2)])
    page = report(runs)
    assert re.findall(r"<option[^>]*>(.*?)</option>", page) == ["bcfl-mh-3, seed 1"]
    assert "After 8 rounds the best hypothesis" in page


def test_what_is_told_of_a_method_is_of_its_complete_runs(made_up: MakeRun) -> None:
    complete, unfinished = made_up("a0"), keep_rounds(made_up("a1", seed=1), 3)
    change_lines(complete / "rounds.jsonl", lambda record: record.update(accuracy=0.9))
    change_lines(unfinished / "rounds.jsonl", lambda record: record.update(accuracy=0.1))
    page = report(read_runs([complete, unfinished]))
    assert '<div class="tile"><b>0.900</b>' in page
    assert figures_of(page)["accuracy"]["data"][0]["y"] == [0.9] * 8
    said = "Unfinished runs, not counted: bcfl-mh-3 1 of 2."
    assert f'<p class="note">Not finished yet: a1: 3 of 8 rounds. {said}</p>' in page

    other = made_up("b", method="bcfl-g", hypotheses=1)
    change_lines(other / "rounds.jsonl", lambda record: record.update(accuracy=0.8))
    page = report(read_runs([complete, unfinished, other]))
    assert "bcfl-mh-3 ends with the highest mean accuracy, 0.900; bcfl-g with the lowest, 0.800" in page
    assert page.count(said) == 2  # at the top and under the table
    page = report(read_runs([unfinished, other]))
    assert "So far bcfl-g has the highest mean accuracy, 0.800; bcfl-mh-3 the lowest, 0.100." in page
    assert "Unfinished runs, counted as far as they have got: bcfl-mh-3 1 of 1." in page


def test_not_all_of_many_unfinished_runs_are_named(made_up: MakeRun) -> None:
    paths = [made_up(f"s{seed}", seed=seed, rounds=2, complete=False) for seed in range(7)]
    assert "s4: 2 of 2 rounds; 2 more. Unfinished runs, counted" in report(read_runs(paths))


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
    titles = re.findall(r"<th>(.*?)</th>", page.split("<thead>")[1].split("</thead>")[0])
    rows = [row.split("</th>")[1] for row in re.findall(r"<tr>(.*?)</tr>", page.split("<tbody>")[1])]
    bold = [[title for title, cell in zip(titles[1:], re.findall(r"<td([^>]*)>", row), strict=True) if "best" in cell]
            for row in rows]  # fmt: skip
    quality = ["accuracy", "macro F1", "NLL", "ECE", "agreement", "false switches", "rounds until found"]
    assert bold == [quality, []]


def test_seeds_that_are_not_tested_yet_have_no_place_in_the_work(made_up: MakeRun) -> None:
    tested, untested = keep_rounds(made_up("a0"), 5), keep_rounds(made_up("a1", seed=1), 1)
    other = made_up("b0", method="bcfl-g")
    change_lines(untested / "rounds.jsonl", lambda record: record.pop("accuracy", None))
    runs = read_runs([tested, untested, other])
    line = figures_of(report(runs))["accuracy_by_work"]["data"][1]  # after its band
    assert line["x"] == np.cumsum([record["work"]["local_steps"] for record in runs[0].rounds]).tolist()


def test_clients_that_were_never_associated_are_in_no_cluster(made_up: MakeRun) -> None:
    path = made_up(rounds=2)
    placed = [-1, -1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    change_lines(path / "associations.jsonl", lambda line: line.update(assignment=[placed] * 3))
    page = report([read_run(path)])
    assert "After 2 rounds the best hypothesis places 10 of 12 clients in 3 clusters" in page
    doubt = f"{np.log(3) * 2 / 12:.3f} nats of doubt are left per client"
    assert f"at the end {doubt} (2 of 12 were never placed and may be anywhere), and" in page
    placed[:2] = 1, 2
    change_lines(path / "associations.jsonl", lambda line: line.update(assignment=[placed] * 3))
    page = report([read_run(path)])
    assert "After 2 rounds the best hypothesis places 12 clients in 3 clusters" in page
    assert "never placed" not in page


def test_a_run_in_which_nobody_ever_moves_is_shown(made_up: MakeRun) -> None:
    path = made_up()
    change_lines(path / "rounds.jsonl", lambda record: record.update(changes=0))
    assert "nobody has ever moved" in report([read_run(path)])
    change_lines(path / "rounds.jsonl", lambda record: record.update(changes=int(record["round"] == 3)))
    assert "nobody has moved since round 3" in report([read_run(path)])
    change_lines(path / "rounds.jsonl", lambda record: record.update(changes=1))
    assert "clients still move" in report([read_run(path)])


def test_without_groups_and_without_test_data(made_up: MakeRun) -> None:
    path = made_up(grouped=False)
    records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    measured = ("accuracy", "macro_f1", "nll", "ece", "client_accuracy", "calibration")
    kept = [{key: value for key, value in r.items() if key not in measured} for r in records]
    (path / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    page = report([read_run(path)])
    assert {"graph-0", "association-0", "labels-0"} <= figures_of(page).keys()
    assert not {"accuracy", "calibration-0"} & figures_of(page).keys()
    assert "colours are the final clusters" in page


def test_a_real_federation_tells_less_of_its_clients(made_up: MakeRun) -> None:
    path = made_up()
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({"num_clients": manifest["num_clients"], "group": None}))
    page = report([read_run(path)])
    assert "graph-0" in figures_of(page)
    assert "labels-0" not in figures_of(page)
    assert "kept their data to themselves" in page


def test_one_model_for_all_has_nothing_to_associate(made_up: MakeRun) -> None:
    run = read_run(made_up(method="fedavg", hypotheses=1, clusters=1))
    page = report([run])
    assert not {"graph-0", "association-0", "trellis-0"} & figures_of(page).keys()
    assert "nothing to associate" in page


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


def test_missing_extra_is_named(made_up: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs plotly.*pip install 'bcfl\[report\]'"):
        report([read_run(made_up())])


def test_what_happened_is_in_the_trellis_and_in_words(tmp_path: Path) -> None:
    page = report([read_run(write_eventful_run(tmp_path / "run"))])
    figure = figures_of(page)["trellis-0"]
    go.Figure(with_colours(figure))
    drawn = {trace["name"]: trace for trace in figure["data"]}
    assert {"born", "merged", "given up", "newcomer", "changes group", "found again"} <= drawn.keys()
    assert drawn["born"]["x"] == [3, 3]
    assert drawn["born"]["y"] == [0.7, 2.7]  # above their hypotheses' dots
    assert drawn["given up"]["y"] == [0.48, 1.7]  # above what else happened to the first in round 9
    assert drawn["newcomer"]["text"] == ["round 5<br>client 4 joins cluster 1"]
    assert figure["layout"]["yaxis"]["range"][1] < 0.48  # nothing is cut off
    assert "2 clients changed group in round 7; 2 of them were found with their new one, 2 rounds after" in page
    assert "of the clients at rest leave their group in a round" in page


def test_one_hypothesis_has_a_trellis_where_something_happened(tmp_path: Path, made_up: MakeRun) -> None:
    path = made_up("g", method="bcfl-g", hypotheses=1)
    assert "trellis-0" not in figures_of(report([read_run(path)]))
    lines = [json.loads(line) for line in (path / "associations.jsonl").read_text().splitlines()]
    for line in lines[:3]:
        line["assignment"][0][0] = -1
    (path / "associations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = [trace["name"] for trace in figures_of(report([read_run(path)]))["trellis-0"]["data"]]
    assert "newcomer" in drawn
