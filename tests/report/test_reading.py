import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import change_lines, keep_rounds, write_eventful_run

from bcfl.association.hypotheses import co_association
from bcfl.cli import main
from bcfl.report.drawing import FAINTEST, accumulated_co_association, client_graph, columns, marks, spread, trellis
from bcfl.report.page import report
from bcfl.report.reading import group_runs, read_run, read_runs
from bcfl.report.tables import markdown
from bcfl.runs.loop import load_result, start
from bcfl.runs.settings import load_config

MakeRun = Callable[..., Path]


def brute_force_co_association(path: Path) -> np.ndarray:
    """Pair by pair from the log's own lines, sharing nothing with the code under test."""
    lines = [json.loads(line) for line in (path / "associations.jsonl").read_text().splitlines()]
    clients = len(lines[0]["assignment"][0])
    shared = np.zeros((clients, clients))
    for line in lines:
        for log_weight, row in zip(line["log_weight"], line["assignment"], strict=True):
            for a in range(clients):
                for b in range(clients):
                    shared[a, b] += np.exp(log_weight) * (row[a] == row[b] and row[a] >= 0)
    return shared / len(lines)


def test_accumulated_co_association_is_that_of_the_log(made_up: MakeRun) -> None:
    path = made_up()
    assert accumulated_co_association(read_run(path)) == pytest.approx(brute_force_co_association(path))


def test_unassigned_clients_share_nothing(made_up: MakeRun) -> None:
    path = made_up()
    lines = [json.loads(line) for line in (path / "associations.jsonl").read_text().splitlines()]
    for row in lines[0]["assignment"]:
        row[0] = row[1] = -1
    (path / "associations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(path)
    assert accumulated_co_association(run) == pytest.approx(brute_force_co_association(path))
    assert run.marginals[0, 0].sum() == 0
    assert run.marginals[1:, 0].sum(-1) == pytest.approx(1)


def test_last_round_agrees_with_the_result_of_the_run(real_run: Path) -> None:
    result, run = load_result(real_run), read_run(real_run)
    assert run.marginals[-1] == pytest.approx(result.probability.numpy())
    assert run.entropy[-1] == pytest.approx(result.entropy.numpy())
    assert result.info is not None
    expected = co_association(result.info.assignment, result.info.log_weight)
    assert result.co_association.numpy() == pytest.approx(expected.numpy())
    assert run.last("accuracy") == result.accuracy
    assert int(run.work("local_steps").sum()) == result.summary()["work"]["local_steps"]
    assert not run.work("spared_examples").any()  # a run without racing, or from before there was any


@pytest.mark.parametrize("method", ["bcfl-mh-3", "bcfl-auto"])
def test_who_never_took_part_is_as_unsure_as_in_the_result(tmp_path: Path, method: str) -> None:
    settings = [f"method.name={method}", "experiment.rounds=3", "experiment.clients_per_round=3"]
    result = start(load_config(None, [*settings, "data.partition='feature(4,2)'"]), tmp_path / "run", num_workers=1)
    assert (result.assignment < 0).any()
    assert read_run(tmp_path / "run").entropy[-1] == pytest.approx(result.entropy.numpy())


def test_who_was_never_placed_may_be_in_any_cluster_there_is(made_up: MakeRun) -> None:
    placed = [-1, -1, 0, 0, 0, 0, 1, 1, 1, 4, 4, 4]
    for method, there in (("bcfl-auto", 3), ("bcfl-mh-3", 5)):
        path = made_up(method, method=method, clusters=5, rounds=2)
        change_lines(path / "associations.jsonl", lambda line: line.update(assignment=[placed] * 3))
        assert read_run(path).entropy == pytest.approx(np.array([[np.log(there)] * 2 + [0] * 10] * 2))


def test_clusters_keep_their_number_when_a_round_renames_them(made_up: MakeRun) -> None:
    path = made_up(rounds=3)
    group = np.array(json.loads((path / "manifest.json").read_text())["group"])
    names = ([2, 0, 1], [1, 2, 0], [0, 2, 1])  # the same grouping under other numbers in every round and hypothesis
    lines = []
    for index in range(3):
        rows = [np.roll(names[index], h)[group].tolist() for h in range(3)]
        lines.append({"round": index + 1, "parent": [0, 1, 2], "log_weight": np.log([0.5, 0.3, 0.2]).tolist(),
                      "assignment": rows})  # fmt: skip
    (path / "associations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(path)
    certain = np.eye(3)[np.array(names[2])[group]]
    assert run.marginals == pytest.approx(np.stack([certain] * 3))
    assert run.entropy == pytest.approx(0)


def hand_made_tree(made_up: MakeRun) -> Path:
    path = made_up(rounds=4, hypotheses=3)
    parents = ([0, 1, 2], [1, 1, 0], [2, 0, 0], [0, 0, 1])
    lines = [json.loads(line) for line in (path / "associations.jsonl").read_text().splitlines()]
    for line, parent in zip(lines, parents, strict=True):
        line["parent"] = parent
    (path / "associations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_trellis_by_hand(made_up: MakeRun) -> None:
    tree = trellis(read_run(hand_made_tree(made_up)))
    # Nodes 0–2 are round 1, 3–5 round 2, 6–8 round 3, 9–11 round 4.
    assert tree.edges.tolist() == [[1, 3], [1, 4], [0, 5], [5, 6], [3, 7], [3, 8], [6, 9], [6, 10], [7, 11]]
    assert np.flatnonzero(tree.on_best_line).tolist() == [0, 5, 6, 9]
    assert np.flatnonzero(tree.pruned).tolist() == [2, 4, 8]
    assert tree.round.tolist() == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3


def test_long_trellis_skips_rounds_but_not_descent(made_up: MakeRun) -> None:
    tree = trellis(read_run(hand_made_tree(made_up)), most_rounds=2)
    assert tree.round.tolist() == [1] * 3 + [4] * 3
    assert tree.edges.tolist() == [[0, 3], [0, 4], [1, 5]]


def test_graph_holds_every_visible_edge(made_up: MakeRun) -> None:
    path = made_up()
    graph, expected = client_graph(read_run(path)), brute_force_co_association(path)
    found = np.zeros_like(expected)
    for (a, b), p in zip(graph.edges, graph.strength, strict=True):
        found[graph.client[a], graph.client[b]] = found[graph.client[b], graph.client[a]] = p
    np.fill_diagonal(expected, 0)
    assert found == pytest.approx(np.where(expected >= FAINTEST, expected, 0))
    assert graph.dropped == 0


def test_graph_places_those_who_are_together_near(made_up: MakeRun) -> None:
    graph = client_graph(read_run(made_up(rounds=40)))
    distance = np.linalg.norm(graph.place[:, None] - graph.place, axis=-1)
    same = graph.colour_of[:, None] == graph.colour_of
    assert distance[same].max() < distance[~same].min()
    assert np.linalg.norm(graph.place, axis=1).max() == pytest.approx(1)


def test_many_clients_are_thinned(made_up: MakeRun) -> None:
    run = read_run(made_up(clients=1000, rounds=3, clusters=4))
    lines = columns(run)
    assert len(lines.members) <= 170
    assert sorted(np.concatenate(lines.members).tolist()) == list(range(1000))
    assert all(len(set(run.colour_of[m].tolist())) == 1 for m in lines.members)
    graph = client_graph(run)
    assert len(graph.client) == 200
    assert len(graph.edges) == 2500
    assert graph.dropped > 0
    kept = set(map(tuple, graph.client[graph.edges].tolist()))
    strongest_left_out = max(
        p
        for (a, b), p in np.ndenumerate(np.triu(accumulated_co_association(run, graph.client), 1))
        if p and (graph.client[a], graph.client[b]) not in kept
    )
    assert graph.strength.min() >= strongest_left_out - 1e-12


def test_half_written_line_does_not_count(made_up: MakeRun) -> None:
    path = made_up(complete=False)
    text = (path / "rounds.jsonl").read_text()
    (path / "rounds.jsonl").write_text(text[:-30])
    run = read_run(path)
    assert len(run.rounds) == len(run.associations) == len(run.seconds) == 7
    assert not run.complete


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, made_up: MakeRun) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="not a run folder"):
        read_runs([tmp_path])
    path = made_up()
    (path / "associations.jsonl").write_text("{broken\n")
    with pytest.raises(ValueError, match=r"associations\.jsonl, line 1 "):
        read_runs([path])


def set_value(place: str, value: Any) -> Callable[[Path], Path]:
    """A change of a run folder: what stands at file/line/key/… (file/key/… of a file without lines)."""
    name, *keys = place.split("/")
    steps = [int(key) if key.isdecimal() else key for key in keys]

    def change(path: Path) -> Path:
        lines = (path / name).read_text().splitlines() if name.endswith("l") else [(path / name).read_text()]
        whole = [json.loads(line) for line in lines] if name.endswith("l") else json.loads(lines[0])
        inner = whole
        for step in steps[:-1]:
            inner = inner[step]
        if value is ...:
            del inner[steps[-1]]
        else:
            inner[steps[-1]] = value
        text = "\n".join([*map(json.dumps, whole), ""]) if name.endswith("l") else json.dumps(whole)
        (path / name).write_text(text)
        return path

    return change


WRONG = [
    ("config.json/method", 3),
    ("config.json/method/name", ...),
    ("config.json/method/name", "\x1b[2J"),
    ("config.json/method/nonsense", 1),
    ("config.json/experiment/rounds", "many"),
    ("config.json/data/seed", 1.5),
    ("config.json/training/learning_rate", "fast"),
    ("manifest.json/num_clients", ...),
    ("manifest.json/num_clients", 10**30),
    ("manifest.json/group", [0, 1]),
    ("manifest.json/train_labels/3", [1]),
    ("manifest.json/drift", {"round": 2}),
    ("rounds.jsonl/0/work", [1]),
    ("rounds.jsonl/2/work/local_steps", -1),
    ("rounds.jsonl/2/round", 7),
    ("rounds.jsonl/2/accuracy", float("nan")),
    ("rounds.jsonl/2/accuracy", "0.5"),
    ("rounds.jsonl/2/accuracy", 1.2),
    ("rounds.jsonl/2/changes", None),
    ("rounds.jsonl/2/num_hypotheses", True),
    ("rounds.jsonl/2/client_accuracy", [0.5]),
    ("rounds.jsonl/2/calibration/3", [1, 2]),
    ("associations.jsonl/1/parent", [0, 0]),
    ("associations.jsonl/1/parent/0", 3),
    ("associations.jsonl/1/log_weight/0", float("nan")),
    ("associations.jsonl/1/log_weight/0", 5.0),
    ("associations.jsonl/1/log_weight", []),
    ("associations.jsonl/1/assignment/0", [0]),
    ("associations.jsonl/1/assignment/0/0", 10**9),
    ("associations.jsonl/1/assignment/0/0", -2),
    ("associations.jsonl/1/events", [{"kind": "birth"}]),
    ("timings.jsonl/1/seconds", None),
    ("timings.jsonl/1/seconds", float("inf")),
]


@pytest.mark.parametrize(("place", "value"), WRONG, ids=lambda part: str(part)[:40])
def test_what_a_run_does_not_write_is_named_by_file_and_line(made_up: MakeRun, place: str, value: Any) -> None:
    path = set_value(place, value)(made_up())
    name, *keys = place.split("/")
    where = re.escape(str(path / name)) + (f", line {int(keys[0]) + 1}" if name.endswith("l") else "")
    with pytest.raises(ValueError, match=rf"\A{where}\W.*\Z") as told:
        read_run(path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"[]"),
        ("manifest.json", b"{"),
        ("manifest.json", "{}".encode("utf-16")),
        ("environment.json", b"null"),
        ("rounds.jsonl", b"3\n"),
        ("associations.jsonl", b"[" * 10**5 + b"\n"),
        ("timings.jsonl", b"\xff\n"),
        ("timings.jsonl", b"1" * 5000 + b"\n"),
    ],
    ids=lambda part: str(part)[:20],
)
def test_a_file_that_a_run_did_not_write_is_named_in_one_line(
    made_up: MakeRun, name: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made_up()
    (path / name).write_bytes(content)
    assert main(["table", str(path)]) == 2
    assert re.fullmatch(rf"bcfl: {re.escape(str(path / name))}\W.*\n", capsys.readouterr().err)


def test_logs_that_stop_before_the_end_of_a_complete_run_are_refused(made_up: MakeRun) -> None:
    path = keep_rounds(made_up(), 5)
    assert len(read_run(path).rounds) == 5
    (path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        read_run(path)


def test_a_run_that_cannot_be_read_never_spoils_the_others(tmp_path: Path, made_up: MakeRun) -> None:
    made_up("runs/a")
    (made_up("runs/b") / "manifest.json").write_text("{")
    told: list[str] = []
    assert [run.path.name for run in read_runs([tmp_path / "runs"], told.append)] == ["a"]
    assert len(told) == 1
    assert "b/manifest.json" in told[0]
    with pytest.raises(ValueError, match=r"b/manifest\.json"):
        read_runs([tmp_path / "runs"])
    with pytest.raises(ValueError, match=r"b/manifest\.json"):  # there are no others
        read_runs([tmp_path / "runs" / "b"], told.append)


def test_a_run_of_a_method_that_is_not_installed_is_shown_with_its_numbers(made_up: MakeRun) -> None:
    path = made_up()
    for key, value in {"name": "somebody-elses", "their_option": 0.5}.items():
        set_value(f"config.json/method/{key}", value)(path)
    runs = [read_run(path), read_run(made_up("ours"))]
    assert "| somebody-elses |" in markdown(group_runs(runs))
    assert "their_option = 0.5" in report(runs)


def test_what_overflowed_counts_as_not_measured(made_up: MakeRun) -> None:
    path = made_up()
    for key in ("nll", "ece"):
        set_value(f"rounds.jsonl/8/{key}", float("nan"))(path)
    set_value("rounds.jsonl/8/calibration/0", [1, float("nan"), 1])(path)
    run = read_run(path)
    assert run.rounds[-1]["nll"] is run.rounds[-1]["calibration"] is None
    report([run])


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path: Path, made_up: MakeRun) -> None:
    for seed in (0, 1):
        made_up(f"s{seed}", seed=seed)
    (tmp_path / "not_begun").mkdir()
    (tmp_path / "not_begun" / "config.json").write_text("{}")
    assert [run.seed for run in read_runs([tmp_path, tmp_path / "s1"])] == [0, 1]


def test_runs_are_averaged_only_over_seeds(made_up: MakeRun) -> None:
    paths = [
        made_up("a", seed=0),
        made_up("b", seed=1),
        made_up("c", seed=0, overrides=("training.local_steps=5",)),
        made_up("d", method="fedavg", hypotheses=1),
        made_up("e", seed=1, overrides=("experiment.evaluate_every=2",)),  # the second once more
    ]
    groups = group_runs(read_runs(paths))
    assert [len(group.runs) for group in groups] == [1, 2, 1]
    assert [group.label for group in groups] == [
        "bcfl-mh-3, local_steps 5", "bcfl-mh-3, local_steps 10", "fedavg, local_steps 10"
    ]  # fmt: skip


def test_band_is_mean_and_deviation_at_common_rounds(made_up: MakeRun) -> None:
    runs = read_runs([made_up("a", seed=0), made_up("b", seed=1)])
    (group,) = group_runs(runs)
    runs[1].rounds.pop()
    rounds, mean, deviation = group.band(lambda run: run.curve("accuracy"))
    assert rounds.tolist() == list(range(1, 8))
    first, second = (run.rounds[2]["accuracy"] for run in runs)
    assert mean[2] == pytest.approx((first + second) / 2)
    assert deviation[2] == pytest.approx(abs(first - second) / np.sqrt(2))


def test_bands_are_over_the_complete_runs_if_there_are_any(made_up: MakeRun) -> None:
    runs = read_runs([made_up("a", seed=0), keep_rounds(made_up("b", seed=1), 3), keep_rounds(made_up("c", seed=2), 2)])
    (group,) = group_runs(runs)
    rounds, mean, _ = group.band(lambda run: run.curve("accuracy"))
    assert dict(zip(rounds.tolist(), mean, strict=True)) == runs[0].curve("accuracy")
    assert group.label_and_seeds == "bcfl-mh-3 (1 seed)"
    (group,) = group_runs(runs[1:])
    assert group.band(lambda run: run.curve("accuracy"))[0].tolist() == [1, 2]
    assert group.label_and_seeds == "bcfl-mh-3 (2 seeds, unfinished)"


def test_spread_keeps_both_ends() -> None:
    assert spread(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert spread(100, 4).tolist() == [0, 33, 66, 99]
    assert spread(1, 4).tolist() == [0]


def test_marks_tell_what_happened_in_which_round_and_hypothesis(tmp_path: Path, made_up: MakeRun) -> None:
    happened = marks(read_run(write_eventful_run(tmp_path / "run")))
    told = [(mark.round, mark.rank, mark.kind, mark.text) for mark in happened]
    assert told == [
        (3, 0, "birth", "cluster 3 is born from cluster 1"),
        (3, 2, "birth", "cluster 3 is born"),
        (5, 0, "newcomer", "client 4 joins cluster 1"),
        (7, 0, "drift", "client 0 changes from group 0 to group 2; client 11 changes from group 2 to group 0"),
        (8, 0, "followed", "client 0 is found with group 2, in its round 2; "
                           "client 11 is found with group 0, in its round 2"),
        (9, 0, "merge", "clusters 1, 3 become cluster 1"),
        (9, 0, "death", "cluster 2 is given up"),
        (11, 1, "death", "cluster 2 is given up"),
    ]  # fmt: skip
    assert marks(read_run(made_up("plain"))) == []


def test_drift_is_measured_as_far_as_the_run_has_got(tmp_path: Path, made_up: MakeRun) -> None:
    path = write_eventful_run(tmp_path / "run")
    assert read_run(path).drift == {
        "false_switches": 0.0, "changed": 2, "found_again": 2, "rounds_until_found": 2
    }  # fmt: skip
    assert read_run(keep_rounds(path, 6)).drift is None  # before the change
    assert read_run(made_up("plain")).drift is None


@pytest.mark.parametrize("method", ["method.stay=0.9", "method.name=bcfl-auto"])
def test_the_reader_measures_drift_as_the_run_does(tmp_path: Path, method: str) -> None:
    settings = ["experiment.rounds=14", "data.partition='feature(4,2)'", "data.drift_round=12", method]
    result = start(load_config(None, settings), tmp_path / "run", num_workers=1)
    assert result.drift is not None
    assert read_run(tmp_path / "run").drift == result.drift == load_result(tmp_path / "run").drift
    assert json.loads((tmp_path / "run" / "result.json").read_text())["drift"] == result.drift
