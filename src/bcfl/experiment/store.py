"""A run as a folder that survives anything: every file is complete or absent, and a killed run can go on.

config.json        the resolved settings            rounds.jsonl        metrics, one line a round
environment.json   versions and machine             associations.jsonl  hypotheses and weights, one line a round
manifest.json      who holds which examples         timings.jsonl       seconds, apart: they never repeat
checkpoints/       the last two states (safetensors with a digest, never pickle)
result.json        the summary, once the run is complete
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from bcfl.federation import Hypotheses
from bcfl.gaussian import Gaussian

LOGS = ("rounds.jsonl", "associations.jsonl", "timings.jsonl")
KEPT_CHECKPOINTS = 2  # should the last one be damaged, the one before is there


def write_atomically(path: Path, content: bytes) -> None:
    """The file with this content, or, whatever happens, the file as it was before."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands after a round."""

    round: int
    state: Hypotheses
    momentum: dict[int, dict[int, Tensor]]  # what clients keep, for momentum_state = "client"


class RunFolder:
    """One run's files; used by one process at a time."""

    def __init__(self, path: Path):
        self.path = path
        self.notes: list[str] = []  # what a reader should know of a resumption

    @staticmethod
    def create(path: Path, config: Mapping[str, Any]) -> "RunFolder":
        """A new, empty run folder; refuses one that holds anything."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            same = (path / "config.json").exists() and json.loads((path / "config.json").read_text()) == config
            hint = "the same run: continue it with `bcfl resume`" if same else "something else: choose another folder"
            raise ValueError(f"output folder {path} already holds {hint}")
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path)
        folder.write("config.json", config)
        return folder

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
                raise ValueError(f"run folder {self.path} is in use by another process") from None
            yield

    def write(self, name: str, value: Any) -> None:
        write_atomically(self.path / name, to_json(value))

    def read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / name} cannot be read: {error}") from None

    @property
    def complete(self) -> bool:
        return (self.path / "result.json").exists()

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """One more line; a line that was cut short by a crash is cut off on resuming."""
        with (self.path / name).open("ab") as file:
            file.write((json.dumps(record, separators=(",", ":")) + "\n").encode())

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write the state, then let go of all but the last two; log files are made safe first."""
        sizes = {name: self._sync_log(name) for name in LOGS}
        tensors = state_tensors(checkpoint.state)
        for client, kept in checkpoint.momentum.items():
            tensors |= {f"momentum.{client}.{belief}": vector for belief, vector in kept.items()}
        meta = {"round": str(checkpoint.round), "digest": _digest(tensors), "sizes": json.dumps(sizes)}
        write_atomically(self._checkpoint_path(checkpoint.round), save(tensors, meta))
        for old in self._checkpoints()[:-KEPT_CHECKPOINTS]:
            old.unlink()

    def restore(self) -> Checkpoint | None:
        """The last sound checkpoint, with the log files cut back to it; None if there is none (start again)."""
        for leftover in self.path.rglob("*.tmp"):
            leftover.unlink()
        for path in reversed(self._checkpoints()):
            try:
                checkpoint, sizes = self._load(path)
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                self.notes.append(f"checkpoint {path.name} is damaged ({error}); falling back to the one before")
                path.unlink()
                continue
            for name, size in sizes.items():
                os.truncate(self.path / name, size)
            return checkpoint
        for name in LOGS:
            (self.path / name).unlink(missing_ok=True)
        return None

    def _load(self, path: Path) -> tuple[Checkpoint, dict[str, int]]:
        with safe_open(path, "pt") as file:
            meta = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if _digest(tensors) != meta["digest"]:
            raise ValueError("its content does not match its digest")
        sizes = json.loads(meta["sizes"])
        for name, size in sizes.items():
            if (self.path / name).stat().st_size < size:
                raise ValueError(f"{name} is shorter than when it was written")
        momentum: dict[int, dict[int, Tensor]] = {}
        for name in [name for name in tensors if name.startswith("momentum.")]:
            _, client, belief = name.split(".")
            momentum.setdefault(int(client), {})[int(belief)] = tensors.pop(name)
        return Checkpoint(int(meta["round"]), state_from_tensors(tensors), momentum), sizes

    def _sync_log(self, name: str) -> int:
        with (self.path / name).open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def _checkpoint_path(self, round_index: int) -> Path:
        return self.path / "checkpoints" / f"round-{round_index:06d}.safetensors"

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("round-*.safetensors"))


def state_tensors(state: Hypotheses) -> dict[str, Tensor]:
    """The state as named tensors."""
    named: dict[str, Tensor] = {}
    for item in fields(state):
        value = getattr(state, item.name)
        if isinstance(value, Gaussian):
            named |= {f"{item.name}.mean": value.mean, f"{item.name}.precision": value.precision}
        elif value is not None:
            named[item.name] = value
    return {name: tensor.contiguous() for name, tensor in named.items()}


def state_from_tensors(tensors: Mapping[str, Tensor]) -> Hypotheses:
    """The state that `state_tensors` took apart."""
    models = Gaussian(tensors["models.mean"], tensors["models.precision"])
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("models.")}
    return Hypotheses(models=models, **rest)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
