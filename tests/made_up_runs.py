"""Run folders of any size, as `bcfl run` writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bcfl.runs.settings import load_config

WORK = ("trainings", "local_steps", "scored_examples", "parameters_down", "parameters_up", "scalars_up", "exchanges")


def write_run(
    path: Path,
    *,
    clients: int = 12,
    rounds: int = 8,
    hypotheses: int = 3,
    clusters: int = 3,
    seed: int = 0,
    method: str | None = None,
    grouped: bool = True,
    complete: bool = True,
    overrides: tuple[str, ...] = (),
) -> Path:
    """A run folder as `bcfl run` writes it, with random but well-formed content that settles over the rounds."""
    random = np.random.default_rng([seed, clients, rounds])
    name = method or f"bcfl-mh-{hypotheses}"
    settings = [f"method.name={name}", f"method.num_clusters={clusters}", f"experiment.rounds={rounds}"]
    config = load_config(None, [*settings, *overrides], seed=seed, compared=[name, "bcfl-g"])
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config.as_dict()))
    group = np.arange(clients) * clusters // clients
    labels = random.integers(0, 40, (clients, 10))
    manifest = {"format": 1, "dataset": "digits", "partition": "feature(3,4)", "seed": seed, "num_clients": clients,
                "train_labels": labels.tolist(), "sha256": "0" * 64,
                "group": group.tolist() if grouped else None}  # fmt: skip
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "environment.json").write_text(json.dumps({"bcfl": "0.1.0"}))
    work = [dict.fromkeys(WORK, 0)] + [{key: int(n) for key, n in zip(WORK, row, strict=True)}
                                       for row in random.integers(1, 1000, (rounds, len(WORK)))]  # fmt: skip
    records: list[dict[str, Any]] = [{"round": 0, "work": work[0]}]
    stories, timings = [], []
    for index in range(1, rounds + 1):
        wrong = random.random((hypotheses, clients)) < 1 / index  # ever fewer clients are in the wrong place
        assignment = np.where(wrong, random.integers(0, clusters, (hypotheses, clients)), group)
        weight = np.sort(random.dirichlet(np.ones(hypotheses)))[::-1]
        parent = random.integers(0, hypotheses, hypotheses)
        stories.append({"round": index, "parent": parent.tolist(), "log_weight": np.log(weight).tolist(),
                        "assignment": assignment.tolist()})  # fmt: skip
        count = random.integers(1, 50, 15)
        confidence = count * np.linspace(0.05, 0.99, 15)
        right = random.random(clients)
        records.append({"round": index, "work": work[index], "num_hypotheses": hypotheses, "num_beliefs": 5,
                        "changes": int(random.integers(0, clients)), "ari": random.random() if grouped else None,
                        "accuracy": random.random(), "macro_f1": random.random(), "nll": random.random(),
                        "ece": random.random() / 10, "client_accuracy": right.tolist(),
                        "calibration": np.stack([count, confidence, confidence * 0.9], 1).tolist()})  # fmt: skip
        timings.append({"round": index, "seconds": float(random.random())})
    for file, lines in {"rounds": records, "associations": stories, "timings": timings}.items():
        (path / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if complete:
        (path / "result.json").write_text("{}")
    return path


def keep_rounds(path: Path, rounds: int) -> Path:
    """The run folder as it was when that many rounds were finished."""
    for name, kept in {"rounds": rounds + 1, "associations": rounds, "timings": rounds}.items():
        lines = (path / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (path / f"{name}.jsonl").write_text("".join(lines[:kept]))
    (path / "result.json").unlink(missing_ok=True)
    return path


def change_lines(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every line of a log in place."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_eventful_run(path: Path) -> Path:
    """A run of 12 rounds in which clients 0 and 11 swap groups in round 7 and are followed in round 8, client 4 comes
    in round 5, and clusters are born, merged and given up."""
    write_run(path, rounds=12)
    manifest = json.loads((path / "manifest.json").read_text())
    later = list(manifest["group"])
    later[0], later[11] = later[11], later[0]
    (path / "manifest.json").write_text(json.dumps({**manifest, "drift": {"round": 7, "group": later}}))
    lines = [json.loads(line) for line in (path / "associations.jsonl").read_text().splitlines()]
    for line in lines:
        placed = list(manifest["group"] if line["round"] < 8 else later)
        placed[4] = -1 if line["round"] < 5 else placed[4]
        line |= {"assignment": [placed] * 3, "parent": [0, 1, 2]}
    birth = {"kind": "birth", "hypothesis": 0, "cluster": 3, "from": [1]}
    lines[2]["events"] = [birth, {**birth, "hypothesis": 2, "from": []}]
    lines[8]["events"] = [{"kind": "merge", "hypothesis": 0, "cluster": 1, "from": [1, 3]},
                          {"kind": "death", "hypothesis": 0, "cluster": 2, "from": []}]  # fmt: skip
    lines[10]["events"] = [{"kind": "death", "hypothesis": 1, "cluster": 2, "from": []},
                           {"kind": "something newer", "hypothesis": 1}]  # fmt: skip
    (path / "associations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
