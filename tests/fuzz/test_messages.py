"""Tampered messages: whoever reads one refuses it in one line, or what it says is sound by checks of our own.

`make fuzz` tries many more of them: BCFL_FUZZ is how many of each kind, on each side.
"""

import io
import json
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from federation_fixtures import client_data, network
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from inprocess_grid import InProcessGrid, settings

from bcfl.client.client import is_usable, layout_of
from bcfl.deploy.app import respondent
from bcfl.engines.flower.answers import (
    Trained,
    read_choice,
    read_evaluation,
    read_member,
    read_posteriors,
    read_scores,
)
from bcfl.federation import served
from bcfl.likelihood import CATEGORICAL
from bcfl.likelihood.measures import FLOOR
from bcfl.model.flat import FlatModel, build
from bcfl.runs.settings import Config, parse_config
from bcfl.runs.stopping import RunStoppedError

pytestmark = pytest.mark.fuzz
COUNT = int(os.environ.get("BCFL_FUZZ", "150"))
SECONDS = 20  # longer than this is a hang
NUM_CLIENTS = 4
METHODS = {  # kind of question -> a method that asks it
    "describe": "fedavg",
    "score": "bcfl-mh-3",
    "share": "fedsoft",
    "look": "bcfl-c-3",
    "all": "bcfl-mh-3",
    "best": "bcfl-g",
    "evaluate": "fedavg",
}
OPTIONAL = {"name", "start", "later"}  # without which a message means the same, or has another sound meaning
Draw = random.Random


def config_of(method: str, rounds: int = 2) -> Config:
    options: dict[str, Any] = {"num_clusters": 2} if method != "fedavg" else {}
    racing = {"racing": 0.05} if method == "bcfl-c-3" else {}
    return parse_config(
        {
            "data": {"factory": "federation_fixtures:client_data"},
            "model": {"factory": "federation_fixtures:network"},
            "method": {"name": method, **options, **racing},
            "training": {"local_steps": 2, "batch_size": 4},
            "experiment": {"rounds": rounds},
        }
    )


def grid_of(config: Config, out: Path) -> InProcessGrid:
    return InProcessGrid(config, out, len(client_data()), deadline=0.1)


def kind_of(question: Message) -> str:
    ask, kind = settings(question), question.metadata.message_type.rpartition(".")[2]
    return str(ask.get("kind", kind))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Message, Message]]]:
    """Sound questions and answers of every kind."""
    kept: dict[str, list[tuple[Message, Message]]] = {}

    def record(question: Message, answer: Message) -> Message:
        kept.setdefault(kind_of(question), []).append((question, answer))
        return answer

    for method in sorted(set(METHODS.values())):
        grid_of(config_of(method), tmp_path_factory.mktemp(method) / "run").serve(record)
    return kept


@pytest.fixture(autouse=True)
def alarmed() -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---- tampering: each changes a message in place and says whether nobody may take it ------------------------------


def drop_record(content: RecordDict, draw: Draw) -> bool:
    name = draw.choice(sorted(content))
    del content[name]
    return name not in OPTIONAL


def add_record(content: RecordDict, draw: Draw) -> bool:
    content["more"] = draw.choice([ConfigRecord({}), ArrayRecord({}), MetricRecord({"x": 1.0})])
    return True


def other_record(content: RecordDict, draw: Draw) -> bool:
    content[draw.choice(sorted(content))] = MetricRecord({"x": 1.0})
    return True


def array_in(content: RecordDict, draw: Draw) -> tuple[ArrayRecord, str] | None:
    places = [(record, name) for record in content.array_records.values() for name in record]
    return draw.choice(places) if places else None


def on_array(change: Callable[[ArrayRecord, str, Draw], bool]) -> Callable[[RecordDict, Draw], bool | None]:
    def tamper(content: RecordDict, draw: Draw) -> bool | None:
        place = array_in(content, draw)
        return None if place is None else change(*place, draw)

    return tamper


def drop_array(record: ArrayRecord, name: str, draw: Draw) -> bool:
    del record[name]
    return name not in OPTIONAL


def rename_array(record: ArrayRecord, name: str, draw: Draw) -> bool:
    record[draw.choice(["", "mean.99", "mean.-1", "precision.7", name + " ", name.upper()])] = record.pop(name)
    return True


def more_arrays(record: ArrayRecord, name: str, draw: Draw) -> bool:
    record[f"more.{draw.random()}"] = Array(np.zeros(draw.choice([0, 1, 10**5])))
    return True


def other_type(record: ArrayRecord, name: str, draw: Draw) -> bool:
    values = record[name].numpy()
    types = [t for t in ("<f2", "<f4", "<f8", "<i8", "<i4", "u1", "?", "<c16", ">f4", ">f8") if t != values.dtype.str]
    with np.errstate(all="ignore"):
        record[name] = Array(values.astype(draw.choice(types)))
    return True


def other_shape(record: ArrayRecord, name: str, draw: Draw) -> bool:
    values = record[name].numpy()
    shapes = [values[None], values[..., None], np.concatenate([values, values]), values[:-1], values[:0]]
    shapes += [values.reshape(-1, 1), np.tile(values.ravel(), 100), np.array(1.0, values.dtype)]
    record[name] = Array(np.ascontiguousarray(draw.choice([s for s in shapes if s.shape != values.shape])))
    if draw.random() < 0.3:  # and says outside that it is right
        made = record[name]
        record[name] = Array(made.dtype, values.shape, made.stype, made.data)
    return record[name].numpy().shape != values.shape


def other_bytes(record: ArrayRecord, name: str, draw: Draw) -> bool:
    array = record[name]
    data = draw.choice([array.data[: draw.randrange(len(array.data))], array.data + b"\0" * draw.randint(1, 9)])
    record[name] = Array(array.dtype, tuple(array.shape), array.stype, data)
    return True


def other_claims(record: ArrayRecord, name: str, draw: Draw) -> bool:
    array = record[name]
    size = draw.choice([0, 1, 2**31, 2**62])
    said = draw.choice([(array.dtype, (size,) * 2), ("float16", tuple(array.shape)), ("O", tuple(array.shape))])
    stype = draw.choice([array.stype, "pickle"])
    record[name] = Array(*said, stype, array.data)
    return True


def python_objects(record: ArrayRecord, name: str, draw: Draw) -> bool:
    file = io.BytesIO()
    np.save(file, np.array([{}] * 3, dtype=object), allow_pickle=True)
    record[name] = Array(record[name].dtype, tuple(record[name].shape), "numpy.ndarray", file.getvalue())
    return True


def other_header(record: ArrayRecord, name: str, draw: Draw) -> bool:
    """Some bytes of the header are others: it is refused, unless it still says the same."""
    array = record[name]
    data = bytearray(array.data)
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(min(128, len(data)))] = draw.randrange(256)
    before = array.numpy()
    record[name] = Array(array.dtype, tuple(array.shape), array.stype, bytes(data))
    try:
        found = np.load(io.BytesIO(bytes(data)), allow_pickle=False)
        return not (found.dtype == before.dtype and np.array_equal(found, before, equal_nan=True))
    except Exception:
        return True


def other_values(record: ArrayRecord, name: str, draw: Draw) -> bool:
    values = record[name].numpy().copy()
    extremes = [np.nan, np.inf, -np.inf, 1e300, -1e300, 1e30, -1e30, -1.0, 1.0, 0.0, 1e-300, 2**62, -(2**62)]
    with np.errstate(all="ignore"):
        if draw.random() < 0.3:
            values = (values * draw.choice(extremes)).astype(values.dtype)
        else:
            for _ in range(draw.randint(1, 3)):
                extreme = np.array(draw.choice(extremes)).astype(values.dtype)
                values.flat[draw.randrange(values.size)] = extreme
    record[name] = Array(values)
    return False


def swapped_arrays(record: ArrayRecord, name: str, draw: Draw) -> bool:
    other = draw.choice(sorted(record))
    record[name], record[other] = record[other], record[name]
    return False


def setting_in(content: RecordDict, draw: Draw) -> tuple[ConfigRecord, str] | None:
    places = [(record, name) for record in content.config_records.values() for name in record]
    return draw.choice(places) if places else None


def on_setting(change: Callable[[ConfigRecord, str, Draw], bool]) -> Callable[[RecordDict, Draw], bool | None]:
    def tamper(content: RecordDict, draw: Draw) -> bool | None:
        place = setting_in(content, draw)
        return None if place is None else change(*place, draw)

    return tamper


def drop_setting(record: ConfigRecord, key: str, draw: Draw) -> bool:
    del record[key]
    return key not in OPTIONAL


def add_setting(record: ConfigRecord, key: str, draw: Draw) -> bool:
    record[f"more.{draw.random()}"] = draw.choice([1, "x" * 10**4, [1.0] * 1000])
    return True


def other_kind_of_setting(record: ConfigRecord, key: str, draw: Draw) -> bool:
    values: list[Any] = [1, 1.5, "1", b"1", True, [1], [1.5], ["1"], [True], []]
    before = record[key]

    def like(value: Any) -> bool:
        if isinstance(before, list):
            return isinstance(value, list) and (not value or not before or type(value[0]) is type(before[0]))
        return type(value) is type(before)

    record[key] = draw.choice([value for value in values if not like(value)])
    return True


def other_setting(record: ConfigRecord, key: str, draw: Draw) -> bool:
    """Another value of the same kind: whether it is sound is judged afterwards."""
    value = record[key]
    numbers = {
        int: [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 5, 10**6 + 1, 2**31, 2**40, 2**62, 2**63 - 1],
        float: [math.nan, math.inf, -math.inf, -1.0, -1e-9, 0.0, 0.5, 1.0, 2.0, 1e30, 1e300],
        str: ["", "x", "\0", "Σ" * 10**4, "a\nb", "\x1b[31m"],
    }
    if not isinstance(value, list):
        record[key] = draw.choice(numbers[type(value)])
        return False
    changed = list(value)
    if changed and draw.random() < 0.5:
        changed[draw.randrange(len(changed))] = draw.choice(numbers[type(changed[0])])
        record[key] = changed
        return False
    record[key] = draw.choice([changed + changed, changed[:-1], changed * 1000])
    return True


TAMPERINGS: list[Callable[[RecordDict, Draw], bool | None]] = [
    *(drop_record, add_record, other_record),
    *map(on_array, (drop_array, rename_array, more_arrays, other_type, other_shape, other_bytes, other_claims)),
    *map(on_array, (python_objects, other_header, other_values, other_values, other_values, swapped_arrays)),
    *map(on_setting, (drop_setting, add_setting, other_kind_of_setting, other_setting, other_setting)),
]


def copied(content: RecordDict) -> RecordDict:
    records: dict[str, Any] = {name: ConfigRecord(dict(record)) for name, record in content.config_records.items()}
    for name, record in content.array_records.items():
        arrays = {n: Array(a.dtype, tuple(a.shape), a.stype, bytes(a.data)) for n, a in record.items()}
        records[name] = ArrayRecord(arrays)
    return RecordDict(records)


def tampered(content: RecordDict, draw: Draw) -> tuple[RecordDict, bool]:
    """Another content, and whether nobody may take it."""
    while True:
        other = copied(content)
        wrong = draw.choice(TAMPERINGS)(other, draw)
        if wrong is not None:
            return other, wrong


# ---- what is sound, by checks that share no code with the readers -------------------------------------------------


def finite(content: RecordDict) -> bool:
    return all(
        np.isfinite(array.numpy()).all() for record in content.array_records.values() for array in record.values()
    )


def is_sound_answer(kind: str, content: RecordDict, question: Message) -> bool:
    ask, arrays = settings(question), content.array_records.get("answer", {})
    values = {name: array.numpy() for name, array in arrays.items()}
    if kind == "describe":
        said = content.config_records["answer"]
        return 0 <= said["client"] < NUM_CLIENTS + 2 and said["num-train"] >= 1 and said["num-test"] >= 0
    if not finite(content):
        return False
    if kind == "score":
        return bool((values["scores"] <= 0).all())
    if kind == "share":
        return bool((values["scores"] >= 0).all()) and abs(values["scores"].sum() - 1) < 1e-5
    if kind == "look":
        covariance = values["covariance"]
        bounds = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance))) * 1.01 + 1e-6
        least = FLOOR
        return bool(((values["mean"] <= 0) & (values["mean"] >= least)).all() and (abs(covariance) <= bounds).all())
    if kind == "evaluate":
        num_test = values["confusion"].astype(object).sum()
        own = values["calibration"]
        right = (values["confusion"] >= 0).all() and (own >= 0).all() and own[:, 0].sum() == num_test
        return bool(right and (own <= own[:, :1] * 1.01 + 1e-5).all() and 0 <= values["sums"][1][0] <= 2.01 * num_test)
    layout = layout_of(FlatModel(build(network, 0)), config_of("fedavg").training)
    variances = [values[n][part] for n in values if n.startswith("mean") for part in layout.variances]
    precisions = [value for name, value in values.items() if name.startswith("precision")]
    within = all((abs(value) <= 1.0001e18).all() for value in values.values())
    chosen = kind != "best" or 0 <= content.config_records["choice"]["choice"] < len(ask["beliefs"])
    return within and chosen and all((value >= 0).all() for value in variances + precisions)


def is_sound_question(client: int, content: RecordDict) -> bool:
    ask = content.config_records["ask"]
    ranges = {
        **{
            "client": (client, client),
            "round": (0, 2**31),
            "curvature": (0, 1),
            "num-steps": (-1, 10**6),
            "racing": (0, 1),
        },
        **{"held-out": (0, 1 - 1e-12), "first": (0, 2**31), "total": (1, 2**31)},
        **{"from": (0, 10**9), "to": (1, 2**62)},
    }
    within = all(low <= ask[key] <= high for key, (low, high) in ranges.items() if key in ask)
    scale = all(math.isfinite(value) for key in ("strengths", "levels", "shares") for value in ask.get(key, []))
    return within and scale and finite(content) and all(share > 0 for share in ask.get("shares", []))


# ---- the fuzzers --------------------------------------------------------------------------------------------------


def read(kind: str, content: RecordDict, question: Message) -> Any:
    """What the server makes of an answer; None for a posterior that it leaves out."""
    ask = settings(question)
    layout = layout_of(FlatModel(build(network, 0)), config_of("fedavg").training)
    if kind == "describe":
        return read_member(content, layout, NUM_CLIENTS + 2)
    if kind == "evaluate":
        train = client_data()[ask["client"]]
        return read_evaluation(content, CATEGORICAL, 3, len(train[3]))
    if kind in ("score", "share", "look"):
        return read_scores(ask, content, len(client_data()[ask["client"]][1]))
    chosen = range(len(ask["beliefs"])) if kind == "all" else [read_choice(content, len(ask["beliefs"]))[0]]
    priors = [max(ask["levels"][i], 0.0) * ask["strengths"][i] for i in chosen]
    trained = [
        Trained(i, torch.full((layout.num_parameters,), prior), 10.0, bool(ask["curvature"]))
        for i, prior in zip(chosen, priors, strict=True)
    ]
    posteriors = read_posteriors(content, layout, trained, *(["choice"] if kind == "best" else []))
    return posteriors if all(is_usable(posterior, layout.variances) for posterior in posteriors) else None


def answer_to(kind: str, content: RecordDict, grid: InProcessGrid, question: Message) -> Any:
    """What a client makes of a question."""
    context = grid.contexts[question.metadata.dst_node_id]
    who, state = respondent(context), RecordDict()
    if kind == "evaluate":
        return who.evaluate(content)
    return (who.fit if kind in ("all", "best") else who.score)(content, state)


def judge(
    counts: Counter[str], content: RecordDict, wrong: bool, take: Callable[[], Any], is_sound: Callable[[], bool]
) -> None:
    """One message is refused in one line, or is sound: whatever else happens is a finding."""
    signal.alarm(SECONDS)
    try:
        taken, complaint = take(), ""
    except ValueError as error:
        taken, complaint = None, str(error)
    signal.alarm(0)
    assert "\n" not in complaint
    assert len(complaint) < 1000
    counts["refused" if complaint else "left out" if taken is None else "sound"] += 1
    assert taken is None or (is_sound() and not wrong), content


@pytest.mark.parametrize("kind", METHODS)
def test_a_tampered_answer_is_refused_or_sound(kind: str, recorded: dict[str, Any]) -> None:
    draw, counts = Draw(f"answers {kind}"), Counter[str]()
    for question, answer in recorded[kind]:
        assert read(kind, answer.content, question) is not None
    for _ in range(COUNT):
        question, answer = draw.choice(recorded[kind])
        content, wrong = tampered(answer.content, draw)
        judge(
            counts,
            content,
            wrong,
            lambda content=content, question=question: read(kind, content, question),
            lambda content=content, question=question: is_sound_answer(kind, content, question),
        )
    print(json.dumps({"answers": kind, **counts}))


@pytest.mark.parametrize("kind", [kind for kind in METHODS if kind != "describe"])
def test_a_tampered_question_is_refused_or_sound(kind: str, recorded: dict[str, Any], tmp_path: Path) -> None:
    draw, counts = Draw(f"questions {kind}"), Counter[str]()
    grid = grid_of(config_of(METHODS[kind]), tmp_path / "run")
    for _ in range(COUNT):
        question, _ = draw.choice(recorded[kind])
        content, wrong = tampered(question.content, draw)
        ask = content.config_records.get("ask", {})
        if ask.get("num-steps") == 10**6:  # which a client may be asked for
            continue
        judge(
            counts,
            content,
            wrong,
            lambda content=content, question=question: answer_to(kind, content, grid, question),
            lambda content=content, question=question: is_sound_question(settings(question)["client"], content),
        )
    print(json.dumps({"questions": kind, **counts}))


@pytest.mark.parametrize("method", sorted(set(METHODS.values())))
def test_a_run_among_tampered_messages_ends_soundly_or_stops_in_order(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The unchanged apps: a third of all answers of two clients are tampered with, lost, or another question's."""
    draw, counts, kept = Draw(f"runs {method}"), Counter[str](), list[Message]()

    def tamper(question: Message, answer: Message) -> Message | None:
        counts["messages"] += 1
        if answer.has_content():
            kept.append(answer)
        if settings(question)["client"] not in (-1, 1, 2) or draw.random() > 1 / 3 or not answer.has_content():
            return answer
        counts["tampered"] += 1
        how = draw.randrange(4)
        if how == 0:
            return None
        if how == 1:
            return Message(copied(draw.choice(kept[-50:]).content), reply_to=question)
        content, _ = tampered(answer.content, draw)
        answer.content = content
        return answer

    for number in range(max(1, COUNT // 100)):
        signal.alarm(10 * SECONDS)
        try:
            result = grid_of(config_of(method), tmp_path / str(number)).serve(tamper)
            found = result.state.hypotheses
            assert served(result.state)[0].is_finite()
            assert found.models.is_finite()
            assert all(math.isfinite(float(weight)) for weight in found.log_weight if weight > -math.inf)
            counts["runs"] += 1
        except (RunStoppedError, ConnectionError):
            counts["stopped"] += 1
        signal.alarm(0)
    assert all("\n" not in record.getMessage() for record in caplog.records)
    print(json.dumps({"runs": method, **counts}))
