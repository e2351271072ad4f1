"""The live view: a run's numbers, round by round, into TensorBoard or MLflow."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from bcfl.data.sources import one_line
from bcfl.likelihood.measures import TITLES
from bcfl.report import require
from bcfl.runs.observers import Observer
from bcfl.runs.problem import Split
from bcfl.runs.settings import Config

QUALITY = tuple(name for name in TITLES if name != "brier")
ASSOCIATION = ("ari", "changes", "num_hypotheses", "num_beliefs")
# How long a first word from an MLflow server is waited for, unless the user has set these: MLflow's own patience is for
# a server that is away for a while, and would keep somebody with a wrong address waiting for minutes.
FIRST_CONTACT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}

log = logging.getLogger("bcfl")


class Logger(Protocol):
    """Somewhere numbers can be sent while a run goes on."""

    def begin(self, config: Config, first_round: int) -> None: ...

    def log(self, round_index: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def numbers(record: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """A round's record as named numbers; what was not measured in this round is absent."""
    parts = {
        "quality": {key: record.get(key) for key in QUALITY},
        "association": {key: record.get(key) for key in ASSOCIATION},
        "work": {**record["work"], "seconds": seconds},
    }
    return {
        f"{part}/{key}": float(value) for part, own in parts.items() for key, value in own.items() if value is not None
    }


class LiveView(Observer):
    """The observer of a run that passes its numbers on to loggers, as long as they take them."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = list(loggers)

    def started(self, config: Config, data: Split, first_round: int) -> None:
        if first_round <= config.experiment.rounds:  # a complete run is only read: there is nothing to log
            self._tell(lambda logger: logger.begin(config, first_round))

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        self._tell(lambda logger: logger.log(record["round"], numbers(record, seconds)))

    def close(self) -> None:
        self._tell(lambda logger: logger.close())

    def _tell(self, say: Callable[[Logger], None]) -> None:
        """A run is worth more than its live view: a logger that fails, in whatever way, is left out from then on.

        It is not tried again, because it has tried by itself: waiting for a dead server would hold up every round.
        """
        for logger in list(self._loggers):
            try:
                say(logger)
            except Exception as error:
                self._loggers.remove(logger)
                log.warning("the run goes on without %s from here: %s", type(logger).__name__, one_line(error))


class TensorBoard:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path):
        require("tensorboard")
        folder.mkdir(parents=True, exist_ok=True)  # before the run: what is in the way is told before anything is done
        self._folder = folder
        self._writer: Any = None

    def begin(self, config: Config, first_round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Rounds that a stopped run had logged beyond its last checkpoint are taken back, not drawn twice.
        self._writer = SummaryWriter(str(self._folder), purge_step=first_round if first_round > 1 else None)
        rows = [f"    {s}.{key} = {value}" for s, own in config.as_dict().items() for key, value in own.items()]
        self._writer.add_text("settings", "\n".join(rows), first_round - 1)

    def log(self, round_index: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round_index)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow:
    """A run on an MLflow server, or in a folder's own data base (for `mlflow ui --backend-store-uri`)."""

    EXPERIMENT = "bcfl"

    def __init__(self, uri_or_folder: str):
        require("mlflow")
        uri = uri_or_folder
        if "://" not in uri_or_folder:
            require("sqlalchemy", "alembic")
            Path(uri_or_folder).mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{Path(uri_or_folder).resolve() / 'mlflow.db'}"
        try:  # before the run: an address that does not work is told before anything is done
            self._client, self._experiment = self._contact(uri)
        except Exception as error:  # of MLflow, SQLAlchemy, or a data base's driver that is not installed
            raise ValueError(f"--mlflow {uri_or_folder} cannot be used (give a folder, or the address of an MLflow "
                             f"server or data base): {one_line(error)}") from None  # fmt: skip
        self._run_id = ""
        self._last_round = self._rounds = 0

    def _contact(self, uri: str) -> tuple[Any, str]:
        """A client of the server or data base, and the experiment there."""
        from mlflow.tracking import MlflowClient

        patience = {name: value for name, value in FIRST_CONTACT.items() if name not in os.environ}
        os.environ.update(patience)
        try:
            client = MlflowClient(tracking_uri=uri)
            known = client.get_experiment_by_name(self.EXPERIMENT)
            return client, known.experiment_id if known else client.create_experiment(self.EXPERIMENT)
        finally:
            for name in patience:
                del os.environ[name]

    def begin(self, config: Config, first_round: int) -> None:
        self._rounds = config.experiment.rounds
        identity = {"bcfl.identity": config.identity()}
        if first_round > 1:  # a resumed run goes on where its numbers are
            same = f"tags.`bcfl.identity` = '{config.identity()}' and attributes.status != 'FINISHED'"
            for run in self._client.search_runs([self._experiment], same, max_results=1):
                self._run_id = run.info.run_id
                return
        name = f"{config.method['name']}-s{config.experiment.seed}"
        self._run_id = self._client.create_run(self._experiment, run_name=name, tags=identity).info.run_id
        for section, values in config.as_dict().items():
            for key, value in values.items():
                self._client.log_param(self._run_id, f"{section}.{key}", value)

    def log(self, round_index: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, round_index) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
        self._last_round = round_index

    def close(self) -> None:
        if self._run_id:
            done = self._last_round >= self._rounds
            self._client.set_terminated(self._run_id, "FINISHED" if done else "KILLED")


@contextmanager
def live_view(tensorboard: Path | None, mlflow: str | None) -> Iterator[list[LiveView]]:
    """The observers that the two options ask for; closed at the end, whatever happens.

    That they cannot be closed is no error of its own, so it does not hide why a run has ended.
    """
    loggers: list[Logger] = []
    if tensorboard is not None:
        loggers.append(TensorBoard(tensorboard))
    if mlflow is not None:
        loggers.append(MLflow(mlflow))
    view = LiveView(loggers)
    try:
        yield [view] if loggers else []
    finally:
        view.close()
