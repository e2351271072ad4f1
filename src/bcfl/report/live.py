"""The live view: a run's numbers, round by round, into TensorBoard or MLflow."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from bcfl.experiment.config import Config
from bcfl.experiment.problem import Split
from bcfl.report import require

QUALITY = ("accuracy", "macro_f1", "nll", "ece")
ASSOCIATION = ("ari", "changes", "num_hypotheses", "num_beliefs")


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


class LiveView:
    """The observer of a run that passes its numbers on to loggers."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = loggers

    def started(self, config: Config, data: Split, first_round: int) -> None:
        if first_round <= config.experiment.rounds:  # a complete run is only read: there is nothing to log
            for logger in self._loggers:
                logger.begin(config, first_round)

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        for logger in self._loggers:
            logger.log(record["round"], numbers(record, seconds))


class TensorBoard:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path):
        require("tensorboard")
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
        self._uri = uri_or_folder
        if "://" not in uri_or_folder:
            require("sqlalchemy", "alembic")
            Path(uri_or_folder).mkdir(parents=True, exist_ok=True)
            self._uri = f"sqlite:///{Path(uri_or_folder).resolve() / 'mlflow.db'}"
        self._client: Any = None
        self._run_id = ""
        self._last_round = self._rounds = 0

    def begin(self, config: Config, first_round: int) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        self._rounds = config.experiment.rounds
        known = self._client.get_experiment_by_name(self.EXPERIMENT)
        experiment = known.experiment_id if known else self._client.create_experiment(self.EXPERIMENT)
        identity = {"bcfl.identity": config.identity()}
        if first_round > 1:  # a resumed run goes on where its numbers are
            same = f"tags.`bcfl.identity` = '{config.identity()}' and attributes.status != 'FINISHED'"
            for run in self._client.search_runs([experiment], same, max_results=1):
                self._run_id = run.info.run_id
                return
        name = f"{config.method['name']}-s{config.experiment.seed}"
        self._run_id = self._client.create_run(experiment, run_name=name, tags=identity).info.run_id
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
    """The observers that the two options ask for; closed at the end, whatever happens."""
    loggers: list[Logger] = []
    if tensorboard is not None:
        loggers.append(TensorBoard(tensorboard))
    if mlflow is not None:
        loggers.append(MLflow(mlflow))
    try:
        yield [LiveView(loggers)] if loggers else []
    finally:
        for logger in loggers:
            logger.close()
