"""The unchanged Flower apps on an in-process grid: the simulator's numbers, and rounds that survive bad answers."""

import copy
import dataclasses
import json
import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from google.protobuf.message import DecodeError
from inprocess_grid import FIRST_NODE, InProcessGrid, federate, settings, when

from bcfl.deploy.app import client, client_data, read_run_config
from bcfl.engines.flower import questions
from bcfl.engines.flower.privacy import spent
from bcfl.engines.flower.wire import DESCRIBE, EVALUATE, FIT, FLOAT, SCORE, read_array
from bcfl.engines.participation import Participation
from bcfl.methods import METHODS
from bcfl.model.zoo import MODELS, mlp
from bcfl.runs.loop import start
from bcfl.runs.problem import load_data
from bcfl.runs.result import Result
from bcfl.runs.settings import Config, load_config, parse_config
from bcfl.runs.stopping import RunStoppedError
from bcfl.runs.store import RunFolder

NUM_CLIENTS = 4
NAMES = [name.replace("-M", "-3") for name in METHODS] + ["bcfl-mh-3-w"]


def config_of(name: str = "bcfl-mh-3", rounds: int = 3, racing: float = 0.0, **training: Any) -> Config:
    return parse_config(
        {
            "data": {"partition": "feature(2,2)", "rotations": [0, 90]},
            "method": {"name": name, "num_clusters": 2, "selection": 2, "racing": racing},
            "training": {"local_steps": 5, **training},
            "experiment": {"rounds": rounds, "together": 1},  # nodes train alone: the simulator must do so, too
        }
    )


def with_experiment(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, experiment=dataclasses.replace(config.experiment, **changes))


def grid_of(config: Config, tmp_path: Path, num_nodes: int = NUM_CLIENTS, **deploy: Any) -> InProcessGrid:
    return InProcessGrid(config, tmp_path / "run", num_nodes, **deploy)


def assert_same(result: Result, expected: Result) -> None:
    assert torch.equal(result.state.hypotheses.assignment, expected.state.hypotheses.assignment)
    assert torch.equal(result.state.hypotheses.models.mean, expected.state.hypotheses.models.mean)
    assert torch.equal(result.state.hypotheses.models.precision, expected.state.hypotheses.models.precision)
    assert torch.equal(result.state.hypotheses.log_weight, expected.state.hypotheses.log_weight)


def assert_simulated(config: Config, result: Result) -> None:
    """The simulator's bits, metrics, changes, agreement with the true groups, and work."""
    expected = start(config, None, num_workers=1)
    assert_same(result, expected)
    assert result.history == expected.history


@pytest.mark.parametrize("name", NAMES)
def test_every_method_gives_the_simulators_bits_and_costs(name: str, tmp_path: Path) -> None:
    assert_simulated(config_of(name), federate(config_of(name), NUM_CLIENTS, tmp_path / "run"))


@pytest.mark.slow
def test_last_layers_of_ones_own_are_the_simulators(tmp_path: Path) -> None:
    """What is asked of them, held out and tested: to the bit where jobs are done one by one."""
    own = dataclasses.replace(config_of("bcfl"), method={**config_of("bcfl").method, "search_rounds": 1})
    config = with_experiment(own, together=1)
    assert_simulated(config, federate(config, NUM_CLIENTS, tmp_path / "run"))


@pytest.mark.parametrize(("name", "robust"), [("bcfl-g", "clip"), ("bcfl-mh-3", "median"), ("wecfl", "trimmed")])
def test_robust_fusion_gives_the_simulators_bits(name: str, robust: str, tmp_path: Path) -> None:
    config = config_of(name)
    config = dataclasses.replace(config, method={**config.method, "robust": robust})
    assert_same(federate(config, NUM_CLIENTS, tmp_path / "run"), start(config, None, num_workers=1))


def test_soft_learning_without_oneself_gives_the_simulators_bits(tmp_path: Path) -> None:
    config = config_of("bcfl-soft")
    options = {"without_oneself": True, "prior_precision": 0.5, "evidence_points": 2}
    config = dataclasses.replace(config, method={**config.method, **options})
    assert_simulated(config, federate(config, NUM_CLIENTS, tmp_path / "run"))


def test_clusters_that_begin_alike_are_refused_as_by_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = mlp()
    monkeypatch.setitem(MODELS, "mlp", lambda: copy.deepcopy(net))
    for run in (start, lambda config, out: federate(config, NUM_CLIENTS, out)):
        with pytest.raises(ValueError, match="all 2 clusters would stay alike"):
            run(config_of("bcfl-mh-3"), tmp_path)
        assert list(tmp_path.iterdir()) == []  # the run has not begun


DRIFT = ["data.drift_round=3", "data.drift_share=0.5", "data.rotations=[0, 90]", "data.partition=label(2,2,0.5)"]


def drifting(name: str, stay: str) -> Config:
    method = [f"method.name={name}", f"method.stay={stay}", "method.num_clusters=2", "method.scoring_examples=none"]
    return load_config(
        None, [*DRIFT, *method, "training.local_steps=5", "experiment.rounds=4", "experiment.together=1"]
    )


@pytest.mark.parametrize(("name", "stay"), [("bcfl-g", "none"), ("bcfl-mh-3", "learn"), ("bcfl-g-w", "0.9")])
def test_drift_and_memory_are_the_simulators(name: str, stay: str, tmp_path: Path) -> None:
    config = drifting(name, stay)
    expected = start(config, tmp_path / "simulated", num_workers=1)
    result = federate(config, NUM_CLIENTS, tmp_path / "run")
    assert_same(result, expected)
    assert result.history == expected.history
    assert result.drift == expected.drift
    assert result.drift["changed"] == 2
    assert torch.equal(result.group, expected.group)
    simulated, told = (RunFolder(tmp_path / name).read("manifest.json") for name in ("simulated", "run"))
    assert told["deployed"]
    assert told["drift"] == {key: simulated["drift"][key] for key in ("round", "group")}
    sizes, source = simulated["num_train"], simulated["drift"]["source"]
    assert sizes != [sizes[client] for client in source]  # so that the server must learn the new sizes


def test_a_drifting_run_that_stops_after_the_change_goes_on_with_the_new_data(tmp_path: Path) -> None:
    config = drifting("bcfl-mh-3", "learn")
    grid = grid_of(config, tmp_path)

    def fall_silent(answer: Message) -> None:
        grid.offline = set(grid.contexts)

    with pytest.raises((RunStoppedError, ConnectionError)):
        grid.serve(when(fall_silent, round=4))
    result = federate(config, NUM_CLIENTS, tmp_path / "run")
    assert_simulated(config, result)
    assert result.drift == start(config, None, num_workers=1).drift


def test_a_node_with_data_of_its_own_cannot_simulate_a_change() -> None:
    with pytest.raises(ValueError, match="the true groups of own clients are not known"):
        load_data(drifting("bcfl-g", "none"), [(torch.zeros(20, 3), torch.zeros(20, dtype=torch.int64))])


@pytest.mark.parametrize("name", ["bcfl-g", "bcfl-c-3-w", "bcfl-mh-3-w"])
def test_a_race_gives_the_simulators_bits_and_costs(name: str, tmp_path: Path) -> None:
    config = config_of(name, rounds=6, racing=0.5)
    result = federate(config, NUM_CLIENTS, tmp_path / "run")
    assert_simulated(config, result)
    # Four clients may lose more by looking than they save; if nothing were dropped, they would lose all looks.
    assert result.summary()["work"]["spared_examples"] > -6 * NUM_CLIENTS * len(result.state.models) * (32 + 32)


@pytest.mark.parametrize("name", ["bcfl-g", "bcfl-mh-3"])
def test_momentum_that_clients_keep_is_the_simulators(name: str, tmp_path: Path) -> None:
    config = config_of(name, momentum_state="client")
    assert_same(federate(config, NUM_CLIENTS, tmp_path / "run"), start(config, None, num_workers=1))


@pytest.mark.parametrize(("name", "racing"), [("bcfl-g", 0), ("bcfl-mh-3", 0), ("bcfl-mh-3", 0.05), ("fedsoft", 0)])
def test_models_in_several_messages_give_the_same_numbers(name: str, racing: float, tmp_path: Path) -> None:
    config = config_of(name, 2, racing)
    whole = InProcessGrid(config, tmp_path / "whole", NUM_CLIENTS)
    parts = InProcessGrid(config, tmp_path / "parts", NUM_CLIENTS, message_bytes=10_000)
    assert_same(parts.serve(), whole.serve())
    count = [sum(asked.metadata.message_type == SCORE for asked in grid.asked) for grid in (parts, whole)]
    assert count[0] > count[1]


def test_the_straggler_and_the_dropout_that_are_drawn_are_the_simulators(tmp_path: Path) -> None:
    config = with_experiment(config_of("bcfl-mh-3", 4), clients_per_round=0.75, dropout=0.2, straggling=0.3)
    assert_simulated(config, federate(config, NUM_CLIENTS, tmp_path / "run", min_share=0.01))


# ---- bad answers: the readers meet many more in tests/fuzz/test_messages.py -----------------------------------------


def first_array(answer: Message, change: Callable[[np.ndarray[Any, Any]], Any]) -> Message:
    """The answer with its first array changed."""
    record = answer.content.array_records["answer"]
    key = next(iter(record))
    record[key] = Array(np.ascontiguousarray(change(record[key].numpy().copy())))
    return answer


def with_value(value: float) -> Callable[[Message], Message]:
    def change(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        values.flat[0] = value
        return values

    return lambda answer: first_array(answer, change)


def with_array(name: str, change: Callable[[Any], Any]) -> Callable[[Message], Message]:
    def spoil(answer: Message) -> Message:
        record = answer.content.array_records["answer"]
        record[name] = Array(np.ascontiguousarray(change(record[name].numpy())))
        return answer

    return spoil


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Message], Message]:
    """The right shape and type outside, and other bytes inside."""

    def spoil(answer: Message) -> Message:
        record = answer.content.array_records["answer"]
        key, array = next(iter(record.items()))
        record[key] = Array(array.dtype, tuple(array.shape), array.stype, change(array.data))
        return answer

    return spoil


def with_header(header: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[8:10], "little")
        return data[:10] + header.ljust(length - 1) + b"\n" + data[10 + length :]

    return change


def empty(answer: Message) -> Message:
    answer.content = RecordDict()
    return answer


def unknown_belief(answer: Message) -> Message:
    answer.content["choice"] = ConfigRecord({"choice": 99, "scored": 1})
    return answer


HEADERS = (b"{", b"'''", b"{[]: 1}", b"{1:1,'a':2}", b"{'descr': ('<f8',), 'fortran_order': False, 'shape': (1,)}")
UNSOUND: dict[str, Callable[[Message], Message | None]] = {
    "oversized": lambda answer: first_array(answer, lambda values: np.tile(values, 1000)),
    "truncated": with_bytes(lambda data: data[:-3]),
    "lying header": with_bytes(lambda data: re.sub(rb"\((\d)(\d*),\)", rb"(9\2,)", data, count=1)),
    "empty": empty,
}
CASES = [
    *(("bcfl-mh-3", kind, name, spoil) for kind in (SCORE, FIT) for name, spoil in UNSOUND.items()),
    *(("bcfl-mh-3", SCORE, f"header {header.decode()[:12]}", with_bytes(with_header(header))) for header in HEADERS),
    ("bcfl-mh-3", SCORE, "not finite", with_value(np.nan)),
    ("bcfl-mh-3", SCORE, "above zero", with_value(1.0)),
    ("bcfl-mh-3", FIT, "negative precision", with_array("precision.0", lambda values: -np.ones_like(values))),
    ("bcfl-g", FIT, "unknown belief", unknown_belief),
    ("fedavg", FIT, "infinite mean", with_value(np.inf)),
]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Result]:
    """Runs in which client 1 simply does not answer that kind of question in round 2."""
    done: dict[tuple[str, str], Result] = {}

    def result(method: str, kind: str) -> Result:
        if (method, kind) not in done:
            out = tmp_path_factory.mktemp("without") / "run"
            done[method, kind] = federate(config_of(method), NUM_CLIENTS, out, from_client_1(kind, lambda answer: None))
        return done[method, kind]

    return result


def from_client_1(kind: str, spoil: Callable[[Message], Message | None]) -> Any:
    return when(spoil, message=kind, client=1, round=2)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name == "bcfl" and record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records]


@pytest.mark.parametrize(
    ("method", "kind", "spoil"), [(c[0], c[1], c[3]) for c in CASES], ids=[f"{c[1]}: {c[2]}" for c in CASES]
)
def test_an_unsound_answer_is_as_if_none_had_come(
    method: str,
    kind: str,
    spoil: Callable[[Message], Message],
    tmp_path: Path,
    without: Callable[[str, str], Result],
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = federate(config_of(method), NUM_CLIENTS, tmp_path / "run", from_client_1(kind, spoil))
    assert result.history[2]["work"]["rejected"] >= 1
    assert sum(record["work"]["rejected"] for record in result.history) == result.history[2]["work"]["rejected"]
    lines = warnings_in(caplog)
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"round 2, {kind}, client 1: ")
    assert_same(result, without(method, kind))


def wrapped(confusion: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Counts whose sum is right only as it wraps around."""
    more = confusion.copy()
    more.flat[:4] += 2**62
    assert more.sum() == confusion.sum()
    return more


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, lambda values: values + 1000) for name in ("confusion", "calibration", "sums", "values")),
        ("confusion", wrapped),
        ("sums", lambda values: values * 1e300),
        ("calibration", lambda values: values * [1, 1e9, 1]),
        ("calibration", lambda values: values * [1, 1, 1e9]),
    ],
)
def test_an_unsound_evaluation_leaves_the_client_out(name: str, change: Callable[[Any], Any], tmp_path: Path) -> None:
    spoil = when(with_array(name, change), message=EVALUATE, client=1)
    result = federate(config_of("fedavg", 1), NUM_CLIENTS, tmp_path / "run", spoil)
    accuracy = result.history[1]["client_accuracy"]
    assert [one is None for one in accuracy] == [False, True, False, False]


LOOKS_UNSOUND: dict[str, Callable[[Message], Message | None]] = {
    "truncated": UNSOUND["truncated"],
    "empty": empty,
    "not finite": with_value(np.nan),
    "above zero": with_value(1.0),
    "a mean below what any is": with_value(-1e9),
    "negative variance": with_array("covariance", lambda values: np.full_like(values, -1.0)),
    "a variance above what any is": with_array("covariance", lambda values: np.full_like(values, 1e30)),
    "larger than its variances allow": with_array(
        "covariance", lambda values: values + 100 * (1 - np.eye(len(values)))
    ),
}


@pytest.mark.parametrize("spoil", LOOKS_UNSOUND.values(), ids=LOOKS_UNSOUND.keys())
def test_a_client_whose_look_is_unsound_leaves_the_round(
    spoil: Callable[[Message], Message | None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first look in round 2 is spoiled: nobody asks it anything else in that round, and the others go on."""
    grid = grid_of(config_of("bcfl-c-3", racing=0.05), tmp_path)
    result = grid.serve(when(spoil, client=1, round=2, kind="look"))
    assert result.history[2]["work"]["rejected"] == 1
    asked = [(settings(one).get("round"), settings(one)["client"], settings(one).get("kind")) for one in grid.asked]
    assert [kind for index, client, kind in asked if (index, client) == (2, 1)] == ["look", None]  # and its test
    assert (3, 1, "look") in asked
    assert result.state.models.is_finite()
    assert caplog.text.count("answer rejected") == 1


@pytest.mark.parametrize("racing", [0.0, 0.05])
def test_a_score_beyond_all_bounds_counts_as_the_least_there_is(racing: float, tmp_path: Path) -> None:
    spoil = when(
        with_array("scores", lambda values: np.full_like(values, -1e300)), message=SCORE, client=1, kind="score"
    )
    result = federate(config_of(racing=racing), NUM_CLIENTS, tmp_path / "run", spoil)
    assert len(result.state.log_weight) > 1
    assert result.state.log_weight.isfinite().all()


def test_an_answer_that_cannot_be_unpacked_costs_the_others_nothing(
    tmp_path: Path, without: Callable[[str, str], Result]
) -> None:
    grid, bad = grid_of(config_of(), tmp_path, deadline=0.5), set[str]()
    pull = grid.pull_messages

    def unpack(message_ids: Any) -> Any:
        if bad & set(message_ids):
            raise DecodeError("Error parsing message")
        return pull(message_ids)

    def spoil(answer: Message) -> Message:
        bad.add(answer.metadata.reply_to_message_id)
        return answer

    grid.pull_messages = unpack  # type: ignore[method-assign]
    result = grid.serve(from_client_1(FIT, spoil))
    assert bad
    assert result.history[2]["work"]["late"] >= 1
    assert_same(result, without("bcfl-mh-3", FIT))


@pytest.mark.parametrize(
    "change",
    [
        {"noise": [float("nan")]},
        {"noise": [float("inf")]},
        {"noise": [1.0 + i for i in range(101)], "count": [1] * 101},
    ],
)
def test_an_unsound_privacy_report_is_not_added_up(
    change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(answer: Message) -> Message:
        answer.content["privacy"] = ConfigRecord({"noise": [20.0], "count": [1], "delta": 1e-5, **change})
        return answer

    federate(config_of("fedavg", 1), NUM_CLIENTS, tmp_path / "run", when(spoil, message=FIT, client=1))
    assert "client 1: its privacy report is unsound" in caplog.text
    assert not (tmp_path / "run" / "privacy.json").exists()


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"vector-length": 7}, r"have \d+ numbers, momentum included, but at the client 7"),
        ({"shapes": ["3×3"]}, r"the model's tensor 1 is \d+×64, but at the client 3×3"),
        ({"shapes": "64"}, "shapes must be a list of str"),
        ({"layers": ["Linear", "Sigmoid"]}, "the model's layer"),
        ({"layers": []}, "must be told"),
        ({"num-train": 2**40}, "num-train must be a whole number"),
        ({"name": 7}, "name must be a text"),
    ],
)
def test_a_client_with_another_model_or_that_says_what_cannot_be_is_left_out(
    said: dict[str, Any], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(answer: Message) -> Message:
        answer.content.config_records["answer"].update(said)
        return answer

    spoil_client_1 = when(spoil, message=DESCRIBE, node=FIRST_NODE + 1)
    result = federate(config_of("fedavg", 1), NUM_CLIENTS, tmp_path / "run", spoil_client_1)
    assert re.search(says, caplog.text)
    accuracy = result.history[1]["client_accuracy"]
    assert [one is None for one in accuracy] == [False, True, False, False]


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SCORE, FIT])
def test_a_late_answer_is_not_mixed_into_the_next_round(
    kind: str, tmp_path: Path, without: Callable[[str, str], Result]
) -> None:
    grid, held = grid_of(config_of(), tmp_path), list[Message]()

    def hold(question: Message, answer: Message) -> Message | None:
        ask = settings(question)
        if question.metadata.message_type == kind and ask.get("round") == 2 and ask["client"] == 1:
            held.append(answer)
            return None
        if question.metadata.message_type == kind and ask.get("round") == 3:
            grid.late += held
            held.clear()
        return answer

    result = grid.serve(hold)
    assert not held
    assert result.history[2]["work"]["late"] >= 1
    assert_same(result, without("bcfl-mh-3", kind))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("local", "fedavg")])
def test_a_client_that_misses_the_scores_stops_no_method(name: str, tmp_path: Path) -> None:
    result = federate(config_of(name), NUM_CLIENTS, tmp_path / "run", from_client_1(SCORE, lambda answer: None))
    assert result.history[-1]["round"] == 3
    assert result.state.hypotheses.models.is_finite()


def clusters_of(tmp_path: Path, client: int) -> list[int]:
    """Where the best hypothesis had a client, round by round."""
    return [line["assignment"][0][client] for line in RunFolder.open(tmp_path / "run").lines("associations.jsonl")]


def test_a_client_that_comes_back_takes_part_again_with_its_old_association(tmp_path: Path) -> None:
    grid = grid_of(config_of("bcfl-g", 4), tmp_path)

    def come_and_go(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == EVALUATE:
            grid.offline = {FIRST_NODE + 2} if settings(question)["round"] in (1, 2) else set()
        return answer

    grid.serve(come_and_go)
    trained = [settings(one)["round"] for one in grid.asked
               if one.metadata.message_type == FIT and settings(one)["client"] == 2]  # fmt: skip
    assert trained == [1, 4]
    cluster = clusters_of(tmp_path, 2)
    assert cluster[0] == cluster[1] == cluster[2]


def switch_on_after_first_evaluation(grid: InProcessGrid, node: int) -> Any:
    def switch_on(answer: Message) -> Message:
        grid.offline = set()
        return answer

    grid.offline = {node}
    return when(switch_on, message=EVALUATE)


@pytest.mark.parametrize("name", ["bcfl-g", "bcfl-mh-3", "bcfl-c-3", "ifca"])
def test_a_client_that_joins_late_is_placed_as_in_the_simulator(name: str, tmp_path: Path) -> None:
    config = with_experiment(config_of(name), joins=((2, 2),), mixture=True)
    grid = grid_of(config, tmp_path, min_share=1.0)
    # Before, its machine is not even on.
    result = grid.serve(switch_on_after_first_evaluation(grid, FIRST_NODE + 2))
    expected = start(config, None, num_workers=1)
    assert_same(result, expected)
    for mine, other in zip(result.history, expected.history, strict=True):  # whose true group is not known
        assert {**mine, "ari": None} == {**other, "ari": None}
    assert [cluster >= 0 for cluster in clusters_of(tmp_path, 2)] == [False, True, True]


def test_a_client_that_nobody_announced_may_join_a_run_that_is_under_way(tmp_path: Path) -> None:
    config = config_of("bcfl-mh-3")
    grid = grid_of(config, tmp_path)
    result = grid.serve(switch_on_after_first_evaluation(grid, FIRST_NODE + 2))
    assert [cluster >= 0 for cluster in clusters_of(tmp_path, 2)] == [False, True, True]
    assert_same(result, start(with_experiment(config, joins=((2, 2),)), None, num_workers=1))


def test_a_node_that_is_restarted_under_another_name_is_the_same_client(tmp_path: Path) -> None:
    config = config_of("fedavg", 3)
    grid = grid_of(config, tmp_path)

    def restart(answer: Message) -> Message:
        grid.contexts[77] = grid.contexts[FIRST_NODE + 1]
        grid.offline.add(FIRST_NODE + 1)
        return answer

    result = grid.serve(when(restart, message=EVALUATE))
    assert [record["work"]["trainings"] for record in result.history[1:]] == [4, 4, 4]
    assert_same(result, start(config, None, num_workers=1))


def test_a_node_that_claims_the_number_of_a_client_that_is_there_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of("fedavg", 2)
    grid = grid_of(config, tmp_path)
    grid.contexts[2000] = grid.contexts[FIRST_NODE + 1]
    result = grid.serve()
    assert [one.metadata.dst_node_id for one in grid.asked].count(2000) == 1  # who it is, and nothing more
    assert "node 2000 says that it is client 1, which is already here: refused" in caplog.text
    assert_same(result, start(config, None, num_workers=1))


def test_an_answer_of_a_node_that_was_not_asked_counts_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def of_another(answer: Message) -> Message:
        answer.metadata.__dict__["_src_node_id"] = FIRST_NODE + 2
        return answer

    result = federate(config_of("fedavg", 2), NUM_CLIENTS, tmp_path / "run", from_client_1(FIT, of_another))
    assert result.history[2]["work"]["rejected"] == 1
    assert f"it comes from node {FIRST_NODE + 2}, which was not asked" in caplog.text


def test_too_few_answers_stop_the_run_and_a_new_one_goes_on_from_there(tmp_path: Path) -> None:
    config = config_of("bcfl-mh-3", 3)

    def fail(question: Message, answer: Message) -> Message | None:
        ask = settings(question)
        lost = question.metadata.message_type == FIT and ask["round"] == 2 and ask["client"] != 0
        return None if lost else answer

    with pytest.raises(RunStoppedError, match=r"round 2: 1 of 4 clients answered train.fit, at least 2 must"):
        federate(config, NUM_CLIENTS, tmp_path / "run", fail)
    grid = grid_of(config, tmp_path)
    result = grid.serve()
    assert 1 not in [settings(one).get("round", 0) for one in grid.asked]  # the first round is not done again
    assert_same(result, start(config, None, num_workers=1))


def test_too_few_clients_stop_the_run_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="4 of 10 clients are there, at least 5 are needed"):
        federate(config_of(), NUM_CLIENTS, tmp_path / "run", num_clients=10)


def test_a_node_that_fails_at_first_is_asked_again_while_clients_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the SuperLink was killed: three of four nodes are not back when they are asked who they are."""
    monkeypatch.setattr("bcfl.engines.flower.roster.PAUSE", 0.1)
    config, failed = config_of("fedavg", 1), set[int]()

    def fail_once(question: Message, answer: Message) -> Message:
        node = question.metadata.dst_node_id
        if node == FIRST_NODE or node in failed:
            return answer
        failed.add(node)
        return Message(Error(5, "Node Unavailable"), reply_to=question)

    result = federate(config, NUM_CLIENTS, tmp_path / "run", fail_once, wait=30.0, deadline=5.0)
    assert len(failed) == NUM_CLIENTS - 1
    assert_same(result, start(config, None, num_workers=1))


def test_a_node_that_says_nothing_is_asked_ever_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcfl.engines.flower.roster.PAUSE", 0.1)
    stranger = FIRST_NODE + NUM_CLIENTS
    grid = grid_of(config_of("fedavg", 12), tmp_path, NUM_CLIENTS + 1, num_clients=NUM_CLIENTS, wait=120.0)
    grid.serve(when(lambda answer: None, message=DESCRIBE, node=stranger))
    assert 2 <= [one.metadata.dst_node_id for one in grid.asked].count(stranger) <= 5  # of 13 meetings


# ---- what the server's log tells -----------------------------------------------------------------------------------


def test_the_log_tells_by_names_who_is_waited_for_joins_and_leaves_and_how_each_round_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = grid_of(config_of("fedavg", 3), tmp_path, wait=3.0)
    grid.contexts[FIRST_NODE].node_config["name"] = "ward\n\x1b[31mZürich " + "x" * 1000
    switch_on = switch_on_after_first_evaluation(grid, FIRST_NODE + 3)

    def leave(question: Message, answer: Message) -> Message | None:
        if question.metadata.message_type == EVALUATE and settings(question)["round"] == 2:
            grid.offline = {FIRST_NODE}
            return answer
        return switch_on(question, answer)

    grid.serve(leave)
    told = capsys.readouterr().err
    name = r"ward \[31mZürich x+ \(client 0\)"
    in_turn = [
        rf"{name} joined, with \d+ training and \d+ test examples",
        "waiting for client 3 ",
        r"round 1 of 3: accuracy 0\.\d+ over 3 tested clients, [\d.]+ s",
        "client 3 joined",
        "round 2 of 3: .* over 4 tested",
        f"{name} left",
        "round 3 of 3: .* over 3 tested",
        rf"the run is complete: .*{grid.out}",
    ]
    assert re.search(".*".join(in_turn), told, re.S), told
    assert max(map(len, told.splitlines())) < 250
    assert "\x1b" not in told
    grid.asked.clear()
    grid.serve()  # once more
    again = capsys.readouterr().err.splitlines()
    assert len(again) == 1
    assert "complete" in again[0]
    assert grid.asked == []  # nobody was asked anything


def test_a_run_that_stops_says_why_and_how_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = grid_of(config_of(), tmp_path)

    def leave(answer: Message) -> Message:
        grid.offline = set(list(grid.contexts)[1:])
        return answer

    with pytest.raises(RunStoppedError):
        grid.serve(when(leave, message=EVALUATE))
    last = capsys.readouterr().err.splitlines()[-1]
    assert "1 of 4 clients are there, at least 2 are needed" in last
    assert "client 1, client 2, client 3" in last
    assert f"the same settings and folder {grid.out}" in last


# ---- the client's side of the border ---------------------------------------------------------------------------------

LENGTH = 64 * 32 + 32 + 32 * 10 + 10  # of the parameters; momentum is as much again
GOOD_FIT = {
    **{"client": 0, "round": 1, "kind": "all", "beliefs": [0], "parents": [0], "strengths": [1.0], "levels": [0.0]},
    **{"curvature": 1, "num-steps": -1, "max-examples": -1, "held-out": 0.0},
}
GOOD_LOOK = {
    **{"client": 0, "round": 1, "kind": "look", "num-models": 1, "first": 0, "total": 1},
    **{"max-examples": 100, "from": 0, "to": 32},
}
GOOD_CHOICE = {**GOOD_FIT, "kind": "best", "racing": 0.1}
TWICE = {"beliefs": [0, 0], "parents": [0, 0], "strengths": [1.0, 1.0], "levels": [0.0, 0.0]}


@pytest.mark.parametrize(
    ("kind", "good", "change", "message"),
    [
        (FIT, GOOD_FIT, {"client": 3}, "this is client 0, but client 3 was asked"),
        (FIT, GOOD_FIT, {"round": -1}, "round must be a whole number"),
        (FIT, GOOD_FIT, {"strengths": [float("nan")]}, "strengths must be finite"),
        (FIT, GOOD_FIT, {"strengths": [1.0, 1.0]}, "strengths must be a list of float, 1 long"),
        (FIT, GOOD_FIT, {"beliefs": [5]}, "'mean.0' was not asked for"),
        (FIT, GOOD_FIT, {"levels": [-1.0]}, "precision.0 is missing"),
        (FIT, GOOD_FIT, {"num-steps": 10**9}, "num-steps must be a whole number from -1 to 1000000"),
        (FIT, GOOD_FIT, {"num-steps": 10**6, **TWICE}, "2000000 local steps are asked for, at most 1000000 are"),
        (FIT, GOOD_FIT, {"curvature": 7}, "curvature must be a whole number from 0 to 1"),
        (FIT, GOOD_FIT, {"held-out": 1.0}, r"held-out must be a number in \[0, 1\)"),
        (FIT, GOOD_CHOICE, {"racing": 1.0}, "racing must be a number in"),
        (SCORE, GOOD_LOOK, {"to": 0}, "to must be a whole number from 1 to"),
        (SCORE, GOOD_LOOK, {"from": 32}, "to must be a whole number from 33 to"),
        (SCORE, GOOD_LOOK, {"from": 100, "to": 128}, "from must be a whole number from 0 to 99"),
        (SCORE, GOOD_LOOK, {"first": 1, "total": 2}, "the look so far is missing"),
    ],
)
def test_a_client_refuses_an_unsound_question(
    kind: str, good: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert ask_client(tmp_path, kind, good).has_content()
    with pytest.raises(ValueError, match=message):
        ask_client(tmp_path, kind, {**good, **change})


def ask_client(tmp_path: Path, kind: str, ask: dict[str, Any], model: Any = None) -> Message:
    context = grid_of(config_of(), tmp_path).contexts[FIRST_NODE]
    values = np.zeros(LENGTH if kind == SCORE else 2 * LENGTH, np.float32) if model is None else model
    content = RecordDict({"ask": ConfigRecord(ask), "models": ArrayRecord({"mean.0": Array(values)})})
    return client(Message(content, FIRST_NODE, kind), context)


@pytest.mark.parametrize("value", [np.full(2 * LENGTH, np.nan, np.float32), np.zeros(7, np.float32), np.zeros(LENGTH)])
def test_a_client_refuses_an_unsound_model(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mean\.0"):
        ask_client(tmp_path, FIT, GOOD_FIT, value)


def test_an_array_of_python_objects_is_never_unpickled() -> None:
    data = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    data += b"{'descr': '|O', 'fortran_order': False, 'shape': (2,), }".ljust(117) + b"\n" + b"cos\nsystem\n"
    with pytest.raises(ValueError, match="its bytes say otherwise"):
        read_array(Array("float32", (2,), "numpy.ndarray", data), (2,), FLOAT, "mean")


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"method.num_clusters": 7}, r"method\.num_clusters is 7, but there are only 4 clients"),
        ({"experiment.joins": "[[9, 2]]"}, r"experiment\.joins names client 9, but the clients are 0 to 3"),
        ({"deploy.model_bytes": 1000}, r"the model takes 19280 bytes, deploy\.model_bytes allows 1000"),
    ],
)
def test_settings_that_do_not_fit_the_clients_are_refused_before_any_is_met(
    override: dict[str, Any], message: str, tmp_path: Path
) -> None:
    grid = grid_of(config_of(), tmp_path)
    grid.run_config |= override
    with pytest.raises(ValueError, match=message):
        grid.serve()
    assert grid.asked == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"deploy.num_clients": 3, "deploy.min_share": 0.0}, r"deploy\.min_share must be in \(0, 1\]"),
        ({"deploy.num_clients": 3, "deploy.deadlin": 3.0}, r"did you mean deploy\.deadline"),
        ({"deploy.deadline": 3.0}, r"deploy\.num_clients must be given"),
        ({"deploy.num_clients": 3, "training.learning_rat": 3.0}, r"did you mean training\.learning_rate"),
    ],
)
def test_unknown_and_impossible_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_run_config(values)


def test_the_run_configuration_keeps_what_flower_cannot_hold(tmp_path: Path) -> None:
    run_config = grid_of(config_of(), tmp_path, num_clients=7).run_config
    assert {type(value) for value in run_config.values()} == {bool, int, float, str}
    again, terms, out = read_run_config(run_config)
    assert (again, terms.num_clients, out) == (config_of(), 7, tmp_path / "run")


@pytest.mark.parametrize(("key", "node"), [("data-factory", "failing_data:fails"), ("data.factory", None)])
def test_what_a_users_function_raises_names_the_setting(
    key: str, node: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_data.py").write_text("def fails():\n    raise KeyError('patients')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = parse_config({"data": {"factory": "failing_data:fails"}, "model": {"name": "mlp"}})
    with pytest.raises(ValueError, match=rf"^{re.escape(key)} 'failing_data:fails' failed: KeyError: 'patients'$"):
        client_data(config, 0, node)


def test_a_clients_own_log_tells_of_inputs_that_cannot_be_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "vast_data.py").write_text(
        "import torch\n"
        "def vast():\n"
        "    x, y = 1e5 * torch.arange(20.0)[:, None].expand(-1, 64), torch.arange(20) % 10\n"
        "    return x, y, x, y\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    grid = grid_of(config_of("fedavg", 1), tmp_path)
    grid.contexts[FIRST_NODE].node_config |= {"data-factory": "vast_data:vast"}
    with caplog.at_level("WARNING", "bcfl.deploy.app"):
        grid.serve()
    (told,) = [
        record.getMessage() for record in caplog.records if "no usual learning rate suits" in record.getMessage()
    ]
    assert told.startswith("inputs are about ")


# ---- clients that protect their data ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "racing"), [("bcfl-mh-3", 0), ("bcfl-g", 0), ("bcfl-g", 0.05), ("fedsoft", 0)])
def test_clients_that_blur_what_they_say_report_what_they_spent(
    name: str, racing: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    grid = grid_of(config_of(name, 2, racing), tmp_path)
    for context in list(grid.contexts.values())[:2]:
        context.node_config |= {"privacy-noise": 50.0, "privacy-clip": 1e-3}
    result = grid.serve()
    spent_by = RunFolder.open(grid.out).read("privacy.json")
    assert spent_by.keys() == {"0", "1"}
    for name_of_client, report in spent_by.items():
        assert 0 < report["epsilon"] < 10
        assert report["delta"] == 1e-5
        ledger = json.loads((tmp_path / "flwr" / f"privacy-client-{name_of_client}.json").read_text())
        assert report["releases"] == ledger["50.0"]
    assert [one is None for one in result.history[-1]["client_accuracy"]] == [True, True, False, False]


def test_a_client_that_blurs_what_it_says_takes_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    grid = grid_of(config_of("bcfl-c-3", 1, 0.05), tmp_path)
    grid.contexts[FIRST_NODE].node_config |= {"privacy-noise": 50.0}
    grid.serve()
    assert not (tmp_path / "flwr").exists()  # it has said nothing
    says = "failed: this client protects its data and tells only blurred scores: set method.racing = 0"
    assert warnings_in(caplog) == [f"round 1, query.score, client 0: {says}"]


def test_a_client_whose_budget_is_spent_says_no_more_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("dp_accounting")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    grid = grid_of(config_of("fedavg", 3), tmp_path)
    budget = 1.1 * spent({50.0: 1}, 1e-5)
    grid.contexts[FIRST_NODE].node_config |= {"privacy-noise": 50.0, "privacy-max-epsilon": budget}
    assert [record["work"]["trainings"] for record in grid.serve().history] == [0, 4, 3, 3]
    assert "round 2, train.fit, client 0: failed: the privacy budget" in caplog.text


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [[0], [1], [0, 2], [3]])
def test_nobodys_answer_is_held_for_a_straggler(
    late: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One posterior is folded in while the next is read: no more of them are there at any time."""
    read, draw = questions.read_posteriors, Participation.draw
    made: list[weakref.ref[Any]] = []
    held = []

    def watched(*arguments: Any) -> Any:
        posteriors = read(*arguments)
        made.extend(map(weakref.ref, posteriors))
        held.append(sum(one() is not None for one in made))
        return posteriors

    def slow(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        present, in_time = draw(*arguments)
        in_time[late] = False
        return present, in_time

    monkeypatch.setattr(questions, "read_posteriors", watched)
    monkeypatch.setattr(Participation, "draw", slow)
    result = federate(config_of("fedavg", 2), NUM_CLIENTS, tmp_path / "run")
    assert [record["work"]["late"] for record in result.history] == [0, len(late), len(late)]
    assert len(held) == 2 * (NUM_CLIENTS - len(late))
    assert max(held) <= 2
    assert_same(result, start(config_of("fedavg", 2), None, num_workers=1))
