"""Where results are kept: a file per task, a line per contestant, model and draw; what is there is not done again."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Key = tuple[str, str, str, int, bool, bool]
NAMED = ("task", "contestant", "model", "draw", "tuned", "newcomers")  # what a key is made of
LISTED = ("sites", "rows", "test_rows", "nll")


def key_of(record: Mapping[str, Any]) -> Key:
    task, contestant, model, draw, tuned, newcomers = (record[name] for name in NAMED)
    return str(task), str(contestant), str(model), int(draw), bool(tuned), bool(newcomers)


def keep(folder: Path, record: Mapping[str, Any]) -> None:
    """The record is the last line of its task's file, on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['task']}.jsonl"
    half = path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("ab") as file:
        file.write(b"\n" * half + json.dumps(record, separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def kept(folder: Path) -> dict[Key, dict[str, Any]]:
    """Every record of a folder by what it is of; of several the last. Half a line, where writing stopped, is none."""
    if not folder.is_dir():
        return {}
    return {key_of(record): record for path in sorted(folder.glob("*.jsonl")) for record in _records(path)}


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            record = json.loads(line) if line.strip() else None
        except ValueError:
            continue  # stopped in the middle of it
        if record is None:
            continue
        if not _is_record(record):
            raise ValueError(f"{path}, line {number}: must hold {', '.join((*NAMED, *LISTED))}, lists of one length")
        yield record


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or not all(name in record for name in (*NAMED, *LISTED)):
        return False
    return all(isinstance(record[name], list) and len(record[name]) == len(record["sites"]) for name in LISTED)
