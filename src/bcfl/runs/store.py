"""A run as a folder that survives anything: every file is complete or absent, and a killed run can go on.

config.json        the resolved settings            rounds.jsonl        metrics, one line a round
environment.json   versions and machine             associations.jsonl  hypotheses and weights, one line a round
manifest.json      who holds which examples         timings.jsonl       seconds, apart: they never repeat
table.json         how a table's rows are prepared, where clients are its sites
checkpoints/       the last two states (safetensors with a digest, nothing that runs code when it is read)
result.json        the summary, once the run is complete
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from bcfl.files import write_atomically
from bcfl.runs.packing import Packed

MEASURED = ("rounds.jsonl", "associations.jsonl")  # what a run has found: a checkpoint holds their digests
LOGS = (*MEASURED, "timings.jsonl")
KEPT_CHECKPOINTS = 2  # should the last one be damaged, the one before is there
LEFTOVERS = {
    "lock",
    "config.json.tmp",
    "manifest.json",
    "manifest.json.tmp",
}  # all that can be there before config.json is


def new_folder(path: Path) -> Path:
    """The folder `path`, or `path-2`, `path-3` and so on: the first that nobody has, made at once and so taken."""
    number = 1
    while True:
        free = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            free.mkdir()
            return free
        except FileExistsError:
            number += 1


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands after a round."""

    round: int
    state: Packed
    momentum: dict[int, dict[int, Tensor]]  # what clients keep, for momentum_state = "client"
    shapes: Sequence[str] = ()  # of the model's tensors; none in a run of before they were noted
    layers: Sequence[str] = ()  # what the network is made of; none in a run of before that was noted


@dataclass(frozen=True)
class Standing:
    """Where a stopped run can be taken up again, and what is in the way of that."""

    checkpoint: Checkpoint | None  # the last sound one; None: start again
    log_sizes: Mapping[str, int]  # what the log files had by then
    damaged: Mapping[Path, str]  # later checkpoint -> why it cannot be used

    @property
    def notes(self) -> list[str]:
        """What a reader should know: nothing where all is as it should be."""
        goes_on = f"going on from round {self.checkpoint.round}" if self.checkpoint else "starting again from round 0"
        return [*self.damaged.values(), goes_on] if self.damaged else []


class TakenError(ValueError):
    """The folder is in another process's hands, or this very run has been begun in it."""


class RunFolder:
    """One run's files; used by one process at a time."""

    def __init__(self, path: Path):
        self.path = path

    @staticmethod
    def create(path: Path, config: Mapping[str, Any], split: Mapping[str, Any] | None = None) -> "RunFolder":
        """A new run folder that holds its settings, and first, if given, the split; one in use is refused."""
        folder = RunFolder(path)
        refuse_if_full(folder, config)  # before a lock is put into what may be somebody's own folder
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"output folder {path} cannot be made: {error.strerror}") from None
        with folder.locked():
            refuse_if_full(folder, config)  # another process may have been quicker
            if split is not None:
                folder.write("manifest.json", split)
            folder.write("config.json", config)
        return folder

    def refuse_if_begun(self) -> None:
        """Nothing happens unless a run has trained here: its maker may have been overtaken before it had the lock."""
        if self.has("rounds.jsonl"):
            raise TakenError(f"the run in {self.path} has meanwhile been begun by another process")

    @staticmethod
    def open(path: Path) -> "RunFolder":
        """The run folder at `path`, which must hold a run."""
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} is not a run folder: it has no config.json")
        return RunFolder(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing into the folder at the same time."""
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TakenError(f"run folder {self.path} is in use by another process") from None
            yield

    def write(self, name: str, value: Any) -> None:
        write_atomically(self.path / name, to_json(value))

    def read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:  # no file, no JSON, or nested beyond all bounds
            raise ValueError(f"{self.path / name} cannot be read: {error}") from None

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    @property
    def complete(self) -> bool:
        return self.has("result.json")

    @property
    def of_federation(self) -> bool:
        """Whether its clients' data lie with them: the server, whose folder this is, has never seen who holds what."""
        return self.has("manifest.json") and "format" not in self.read("manifest.json")

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """One more line; a line that was cut short by a crash is cut off on resuming."""
        with (self.path / name).open("ab") as file:
            file.write((json.dumps(record, separators=(",", ":")) + "\n").encode())

    def lines(self, name: str, size: int | None = None) -> list[dict[str, Any]]:
        """All records of a log file, or of its first bytes; none if there is no such file."""
        records = []
        content = (self.path / name).read_bytes()[:size] if self.has(name) else b""
        for number, line in enumerate(content.splitlines(), 1):
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError):
                raise ValueError(
                    f"{self.path / name} is damaged at line {number}: mend it, or delete {self.path} to run it again"
                ) from None
        return records

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write the state, then let go of all but the last two; log files are made safe first."""
        sizes = {name: self._sync_log(name) for name in LOGS}
        tensors = dict(checkpoint.state.tensors)
        for client, kept in checkpoint.momentum.items():
            # A client may go on with the momentum that it kept last, so their order is part of the state.
            tensors |= {f"momentum.{client}.{i}.{belief}": kept[belief] for i, belief in enumerate(kept)}
        logs = {name: self._digest_of_log(name, sizes[name]) for name in MEASURED}
        meta = {"round": str(checkpoint.round), "sizes": json.dumps(sizes), "logs": json.dumps(logs)}
        meta |= {"shapes": json.dumps(checkpoint.shapes), "layers": json.dumps(checkpoint.layers)}
        if checkpoint.state.form is not None:
            meta["state"] = json.dumps(checkpoint.state.form)
        path = self.path / "checkpoints" / f"round-{checkpoint.round:06d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, save(tensors, {**meta, "digest": _digest(tensors, meta)}))
        for old in self._checkpoints()[:-KEPT_CHECKPOINTS]:
            old.unlink()

    def standing(self) -> Standing:
        """Where the run can be taken up again; nothing is touched."""
        damaged: dict[Path, str] = {}
        for path in reversed(self._checkpoints()):
            try:
                checkpoint, log_sizes = self._load(path)
            except ValueError as error:
                damaged[path] = str(error)
                continue
            for name, size in log_sizes.items():  # a line that cannot be read is in no older checkpoint's way alone
                self.lines(name, size)
            self._refuse_changed_logs(path)  # nor is one that says something else
            return Standing(checkpoint, log_sizes, damaged)
        return Standing(None, dict.fromkeys(LOGS, 0), damaged)

    def go_back_to(self, standing: Standing) -> None:
        """Nothing is left of what came after the checkpoint: the run can go on from there."""
        (self.path / "result.json").unlink(missing_ok=True)  # first: from here on the run is not complete
        for leftover in (*self.path.rglob("*.tmp"), *standing.damaged):
            leftover.unlink()
        for name, size in standing.log_sizes.items():
            if self.has(name):
                os.truncate(self.path / name, size)

    def take_over(self, source: "RunFolder", standing: Standing) -> None:
        """This folder, which has only its settings, gets the rounds of another run up to its checkpoint."""
        assert standing.checkpoint is not None
        for name, size in standing.log_sizes.items():
            write_atomically(self.path / name, (source.path / name).read_bytes()[:size])
        for name in ("environment.json", "manifest.json", "table.json"):
            if name != "table.json" or source.has(name):
                write_atomically(self.path / name, (source.path / name).read_bytes())
        self.save_checkpoint(standing.checkpoint)  # last: without it the run only begins at the beginning

    def clear(self) -> None:
        """Nothing is left of a run that was refused before its first round: the folder is free for another."""
        for name in ("environment.json", "manifest.json", "table.json", "config.json", "lock"):
            (self.path / name).unlink(missing_ok=True)

    def last_checkpoint(self) -> Checkpoint:
        """The last checkpoint, nothing else touched; a ValueError if it is damaged or missing."""
        paths = self._checkpoints()
        if not paths:
            raise ValueError(f"{self.path} holds no checkpoint")
        checkpoint, _ = self._load(paths[-1])
        return checkpoint

    def refuse_changed_logs(self) -> None:
        """Nothing happens if the logs are as the run has written them, as far as it has kept their digests."""
        for path in self._checkpoints()[-1:]:
            self._refuse_changed_logs(path)

    def _refuse_changed_logs(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                meta = file.metadata() or {}
            sizes, digests, index = json.loads(meta["sizes"]), json.loads(meta.get("logs", "{}")), int(meta["round"])
            changed = [name for name in MEASURED
                       if name in digests and self._digest_of_log(name, int(sizes[name])) != digests[name]]  # fmt: skip
        except (KeyError, OSError, SafetensorError, TypeError, ValueError):  # damaged, of which resuming it tells
            return
        if changed:
            raise ValueError(f"{self.path / changed[0]} is not what the run has written up to round {index}: mend it, "
                             f"or delete {self.path} to run it again")  # fmt: skip

    def _digest_of_log(self, name: str, size: int) -> str:
        return hashlib.blake2b((self.path / name).read_bytes()[:size], digest_size=16).hexdigest()

    def _load(self, path: Path) -> tuple[Checkpoint, dict[str, int]]:
        """A checkpoint and the log files' sizes at its time; a ValueError if it cannot be relied on.

        An OSError says nothing about the file: it may be sound as soon as the disk or the system is.
        """
        try:
            with safe_open(path, "pt") as file:
                meta, names = file.metadata() or {}, file.keys()
                tensors = {name: file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise ValueError(f"checkpoint {path} is damaged: {error}") from None
        if meta.pop("digest", None) != _digest(tensors, meta):
            raise ValueError(f"checkpoint {path} is damaged: its content does not match its digest")
        sizes = json.loads(meta["sizes"])
        for name, size in sizes.items():
            if not self.has(name) or (self.path / name).stat().st_size < size:
                raise ValueError(f"checkpoint {path} cannot be used: {name} is shorter than when it was written")
        kept = [(*map(int, name.split(".")[1:]), name) for name in tensors if name.startswith("momentum.")]
        momentum: dict[int, dict[int, Tensor]] = {}
        for client, _, belief, name in sorted(kept):
            momentum.setdefault(client, {})[belief] = tensors.pop(name)
        shapes, layers = (json.loads(meta.get(key, "[]")) for key in ("shapes", "layers"))
        state = Packed(tensors, json.loads(meta["state"]) if "state" in meta else None)
        return Checkpoint(int(meta["round"]), state, momentum, shapes, layers), sizes

    def _sync_log(self, name: str) -> int:
        with (self.path / name).open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("round-*.safetensors"))


def refuse_if_full(folder: RunFolder, config: Mapping[str, Any]) -> None:
    """Nothing happens if the folder is free for a new run; else its user is told what is in it and what can be done."""
    path = folder.path
    if not path.exists() or (path.is_dir() and all(item.name in LEFTOVERS for item in path.iterdir())):
        return
    try:
        there, here = (_in_words(settings, config) for settings in (folder.read("config.json"), config))
    except (AttributeError, KeyError, TypeError, ValueError):  # no run has written it
        raise ValueError(f"output folder {path} already holds something else: choose another folder") from None
    differ = [key for key in here | there if here.get(key, "off") != there.get(key, "off") and key != "data.path"]
    if not differ:
        resumed = f"`bcfl resume {shlex.quote(str(path))}`"
        complete = f"complete: read it with {resumed}, or bcfl.load({str(path)!r}, …) in Python"
        state = complete if folder.complete else f"unfinished: continue it with {resumed}"
        raise TakenError(f"output folder {path} already holds this run, {state}")
    kept, asked = (settings.get(differ[0], "off") for settings in (there, here))
    if differ != ["experiment.rounds"]:
        raise ValueError(f"output folder {path} already holds another run: {differ[0]} is {kept} there, {asked} here; "
                         "choose another folder")  # fmt: skip
    way_on = f"choose another folder for {asked}"
    if int(asked) > int(kept):
        way_on += (f", into which `bcfl resume {shlex.quote(str(path))} --rounds {asked}`, or go_on_from={str(path)!r} "
                   "in Python, takes them over")  # fmt: skip
    raise ValueError(f"output folder {path} already holds this run with {kept} rounds: {way_on}")


def _in_words(settings: Mapping[str, Mapping[str, Any]], sections: Iterable[str]) -> dict[str, str]:
    """The settings of these sections by section.key, as they are written in a file; "none" stands for nothing."""
    return {
        f"{section}.{key}": json.dumps("none" if value is None else value)
        for section in sections
        for key, value in settings[section].items()
    }


def _digest(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    digest = hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
