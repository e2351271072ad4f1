"""The options that commands share, and what their values may be: what is unusable is told before any work."""

import inspect
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
from click import BadParameter

SETTING = "SECTION.KEY=VALUE"
SECTIONS = "data, model, method, training, experiment"
PATH = click.Path(path_type=Path)
Make = Callable[[str, Any], click.Parameter]  # of a parameter's name and its default, or REQUIRED
REQUIRED = inspect.Parameter.empty


def option(metavar: str | None, says: str, read: Any = str, name: str | None = None) -> Make:
    """An option of that name, or of its parameter's; its help says what holds where it is not given."""

    def make(parameter: str, default: Any) -> click.Parameter:
        names = [name or f"--{parameter.replace('_', '-')}", parameter]
        given = {"required": True} if default is REQUIRED else {"default": default}
        return click.Option(names, metavar=metavar, type=read, help=says, **given)

    return make


def flag(name: str, says: str) -> Make:
    """An option that is given or not."""
    return lambda parameter, default: click.Option([name, parameter], is_flag=True, help=says)


def repeated(name: str, metavar: str, says: str) -> Make:
    """An option that may be given as often as it is wanted."""
    return lambda parameter, default: click.Option([name, parameter], metavar=metavar, multiple=True, help=says)


def argument(metavar: str | None, says: str, read: Any = PATH, many: bool = False) -> Make:
    """What is given by its place."""

    def make(parameter: str, default: Any) -> click.Parameter:
        required, count = default is REQUIRED, -1 if many else 1
        return click.Argument([parameter], metavar=metavar, type=read, help=says, required=required, nargs=count)

    return make


def positive(text: object) -> int:
    """A whole number of at least 1."""
    digits = str(text)
    if not (digits.isdecimal() and len(digits) < 16 and int(digits) >= 1):
        raise BadParameter(f"must be a whole number of at least 1, got {text!r}")
    return int(digits)


def usable_folder(text: str | Path) -> Path:
    """The folder of that name: it is there or can be made, and something can be written into it."""
    path = _named(text)
    _try(path, path)
    return path


def usable_file(text: str | Path) -> Path:
    """The file of that name: it can be written, in the place of one that is there."""
    path = _named(text)
    if os.path.isdir(path):
        raise BadParameter(f"{text} is a folder, give a file")
    if os.path.exists(path) and not os.path.isfile(path):  # a device, say, would be replaced
        raise BadParameter(f"{text} is no regular file")
    _try(path.parent, path, f"{path.name}.tmp")
    return path


def beside(runs: Iterable[Path], name: str) -> Path:
    """A place for what is made of these runs: in the run's folder, for several in the innermost that holds them all."""
    return Path(os.path.relpath(os.path.commonpath([os.path.abspath(run) for run in runs])), name)


def _named(given: str | Path) -> Path:
    text = str(given)
    if not text.strip() or "\0" in text or text != text.encode(errors="replace").decode():
        raise BadParameter(f"must be a name, got {text!r}")
    return Path(text)


def _try(folder: Path, wanted: Path, *names: str) -> None:
    """Nothing happens if a file can be made in the folder, or in the innermost around it that is there."""
    from tempfile import TemporaryFile

    missing = list(names)
    while not os.path.lexists(folder):
        missing.append(folder.name)
        folder = folder.parent
    try:
        with TemporaryFile(dir=folder):
            longest = os.pathconf(folder, "PC_NAME_MAX")
    except OSError as error:
        raise BadParameter(f"{wanted} cannot be written: {folder}: {error.strerror}") from None
    if any(len(os.fsencode(name)) > longest for name in missing):
        raise BadParameter(f"{str(wanted)[:40]}… cannot be written: a name may have {longest} bytes")


def _server_or_folder(text: str) -> str:
    return text if "://" in text else str(usable_folder(text))


ConfigFile = Annotated[Path | None, argument("FILE.toml", "settings (default: the bundled example)")]
RunPath = Annotated[Path, argument("RUN", "the run's folder")]
RunPaths = Annotated[tuple[Path, ...], argument("RUN...", "run folders, or folders of run folders", many=True)]
Overrides = Annotated[tuple[str, ...], repeated("--set", SETTING, f"change one setting; sections: {SECTIONS}")]
Seed = Annotated[int | None, option("N", "the run's seed (experiment.seed)", int)]
RunOut = Annotated[Path | None, option("DIR", "the run's folder (default: runs/…)", usable_folder)]
DataPath = Annotated[Path | None, option("DIR", "where the run's data lie now (data.path)", PATH)]
Workers = Annotated[int | None, option("N", "threads that train clients (default: all cores)", positive, "--workers")]
Plugin = Annotated[str | None, option("MODULE", "a module that brings methods of your own (method.plugin)")]
Json = Annotated[bool, flag("--json", "print JSON instead of tables")]
Quiet = Annotated[bool, flag("--quiet", "no progress")]
DEVICE = "cpu (default), or cuda or cuda:N: many clients together on a GPU; stacked-cpu tries that without one"
Device = Annotated[str, option("NAME", DEVICE)]
ENGINES = ("simulator", "ray")
EngineName = Annotated[str, option("NAME", "simulator (default), or ray: on a cluster of machines",
                                   click.Choice(ENGINES))]  # fmt: skip
Address = Annotated[str | None, option("HOST:PORT", "of the Ray cluster (default: one is started here)")]
Gpus = Annotated[float, option("N", "of the Ray cluster's GPUs, for each worker", float)]
EventFiles = Annotated[Path | None, option("DIR", "follow it in TensorBoard: event files in DIR", usable_folder)]
Tracker = Annotated[
    str | None, option("URI|DIR", "follow it in MLflow: a server, or a data base in DIR", _server_or_folder)
]


@dataclass(frozen=True)
class Follow:
    """How a run is followed, and its result shown."""

    tensorboard: EventFiles = None
    mlflow: Tracker = None
    as_json: Json = False
    quiet: Quiet = False


@dataclass(frozen=True)
class Table:
    """A table of the user's own: each is the setting of [data] by that name."""

    data: Annotated[Path | None, option("FILE", "a table, .csv or .parquet, with a row for each example", PATH)] = None
    site: Annotated[str | None, option("COLUMN", "which site a row is from: each is a client")] = None
    target: Annotated[str | None, option("COLUMN", "what to predict; of times TIME,EVENT")] = None
    test: Annotated[
        str | None,
        option("SHARE|COLUMN|FILE", "each site's share to test on (default: 0.25), or which rows are"),
    ] = None
    likelihood: Annotated[str | None, option("NAME", "what the target is, where that is not plain")] = None
    drop: Annotated[str | None, option("COLUMN,…", "columns to leave out")] = None
    categories: Annotated[str | None, option("COLUMN,…", "columns of numbers that stand for kinds")] = None

    def settings(self) -> tuple[str, ...]:
        """As --set takes them."""
        given: dict[str, Any] = {key: value for key, value in vars(self).items() if value is not None}
        if self.data is None:
            for key in given:
                if key != "likelihood":
                    raise click.UsageError(f"--{key} is for a table: give that, too, as --data FILE")
            return tuple(f"data.{key}={_quoted(value)}" for key, value in given.items())
        for key in ("site", "target"):
            if key not in given:
                raise click.UsageError(f"--data needs --{key} COLUMN")
        for key in ("drop", "categories", "target"):
            parts = given.get(key, "").split(",")
            if key in given and (key != "target" or len(parts) > 1):
                given[key] = parts
        if self.test is not None and _is_number(self.test):
            given["test"] = float(self.test)
        del given["data"]
        return ("data.name=table", f"data.path={_quoted(str(self.data))}",
                *(f"data.{key}={_quoted(value)}" for key, value in given.items()))  # fmt: skip


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Machine:
    """What a run is computed with."""

    num_workers: Workers = None
    device: Device = "cpu"
    engine: EngineName = "simulator"
    address: Address = None
    gpus_per_worker: Gpus = 0.0

    @property
    def where(self) -> str:
        """The device by the name that `bcfl.train` takes for it: with Ray, which cluster, and what of it."""
        if self.engine == "simulator":
            if self.address or self.gpus_per_worker:
                raise ValueError("--address and --gpus-per-worker are for --engine ray")
            return self.device
        if self.device != "cpu":
            raise ValueError("--engine ray takes GPUs by --gpus-per-worker, not by --device")
        gpus = f",gpus={self.gpus_per_worker:g}" if self.gpus_per_worker else ""
        return "ray" + (f":{self.address}" if self.address else "") + gpus

    @property
    def how(self) -> dict[str, Any]:
        """As runs take it."""
        return {"num_workers": self.num_workers, "device": self.where}
