"""The two entry points that Flower loads: `server` and `client`. The run's settings come in Flower's run configuration.

Keys `data.*`, `model.*`, `method.*`, `training.*`, `experiment.*` are those of a bcfl configuration, `deploy.*` are the
terms of the federation. A node's own configuration says which client it is (`partition-id`) and perhaps its `name`,
where its data come from (`data-factory`) and how they are protected (`privacy-noise` and others, see
`bcfl.engines.flower.privacy`).
"""

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from bcfl.client.check import check_model
from bcfl.client.client import Later, LocalClient
from bcfl.client.examples import Examples, pool
from bcfl.data.partition import FederatedData
from bcfl.data.scales import remark_on_scales, scales_itself
from bcfl.deploy.logbook import Logbook, told
from bcfl.engines.flower import FlowerEngine, Respondent, Terms
from bcfl.engines.flower.exchange import Exchange
from bcfl.engines.flower.privacy import Ledger, Protection, privacy_from, spent
from bcfl.engines.flower.wire import name_in
from bcfl.likelihood import AUTO, CATEGORICAL, Likelihood, attach
from bcfl.model.flat import FlatModel, build
from bcfl.runs.loop import is_unfinished, run_on
from bcfl.runs.observers import Observer
from bcfl.runs.problem import Problem, load_data, method_for, model_factory, own_likelihood, users_function
from bcfl.runs.settings import Config, apply_override, load_named_plugin, parse_config, parse_section, set_value
from bcfl.runs.store import RunFolder, refuse_if_full

logger = logging.getLogger(__name__)
server = ServerApp()
client = ClientApp()


@dataclass(frozen=True)
class RemoteSplit:
    """What the server knows of data that it never sees."""

    num_clients: int
    description: str
    group_in: Callable[[int], Tensor | None]  # round -> (client,)


def read_run_config(values: Mapping[str, Any]) -> tuple[Config, Terms, Path]:
    """The run's settings, the federation's terms and the run's folder, from Flower's flat run configuration."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, str):  # what Flower's configuration cannot hold, such as lists, is text
            apply_override(nested, f"{key}={value}")  # of "none" the setting's type says whether it means nothing
        else:
            set_value(nested, key, value)
    deploy = nested.pop("deploy", {})
    out = Path(str(deploy.pop("out", "run")))
    if "num_clients" not in deploy:
        raise ValueError("deploy.num_clients must be given: the number of clients in the federation")
    terms: Terms = parse_section(Terms, deploy, "deploy")
    load_named_plugin(nested)
    return parse_config(nested), terms, out


def likelihood_for_all(config: Config) -> Likelihood:
    """The likelihood of a federation, whose clients cannot see each other's y: its settings say all of it."""
    likelihood = own_likelihood(config.data.likelihood) or CATEGORICAL
    if likelihood.left_open:
        raise ValueError(f"data.likelihood = {likelihood.spec} must be told in full in a federation, where nobody sees "
                         f"all y: {', '.join(likelihood.left_open)} too")  # fmt: skip
    return likelihood


@server.main()
def serve(grid: Grid, context: Context) -> None:
    config, terms, out = read_run_config(context.run_config)
    with told(out):
        folder = RunFolder(out)
        if folder.complete and folder.read("config.json") == config.as_dict():
            return
        if not is_unfinished(out, config):  # before the engine waits for the clients
            refuse_if_full(folder, config.as_dict())
        likelihood = likelihood_for_all(config)
        method = method_for(config, terms.num_clients, likelihood)
        experiment = config.experiment
        factory, participation = attach(model_factory(config), likelihood), experiment.participation()
        engine = FlowerEngine(grid, factory, config.training, experiment.seed, participation, terms)
        split = RemoteSplit(terms.num_clients, f"{terms.num_clients} remote clients", engine.group_in)
        # No command may take what `data` names for the data of this run: nobody has all of them.
        known: dict[str, Any] = {"deployed": True, "num_clients": terms.num_clients, "group": _groups(engine, 0)}
        if likelihood != CATEGORICAL:
            known["likelihood"] = likelihood.spec
        drift_round = config.data.drift_round
        if drift_round is not None:
            group = _groups(engine, drift_round)
            known["drift"] = None if group is None else {"round": drift_round, "group": group}
        observers: list[Observer] = [PrivacyReport(engine.exchange, out), Logbook(out)]
        run_on(engine, config, Problem(split, factory, method), out, known, observers)


def _groups(engine: FlowerEngine, round_index: int) -> list[int] | None:
    group = engine.group_in(round_index)
    return None if group is None else group.tolist()


@dataclass(frozen=True)
class PrivacyReport(Observer):
    """privacy.json in the run's folder: the (ε, δ) that each client that protects its data has spent so far."""

    exchange: Exchange
    folder: Path

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        if self.exchange.privacy:
            reports = {}
            for client, (releases, delta) in sorted(self.exchange.privacy.items()):
                epsilon = spent(releases, delta)
                kept = epsilon if math.isfinite(epsilon) else None  # None: nothing is protected; JSON has no infinity
                told = {"epsilon": kept, "delta": delta, "releases": sum(releases.values())}
                reports[str(client)] = {"name": self.exchange.name(client), **told}
            RunFolder(self.folder).write("privacy.json", reports)


@client.query("describe")
def describe(message: Message, context: Context) -> Message:
    who = respondent(context)
    everything, _ = who.client.train.batch(torch.arange(len(who.client.train)))
    if not scales_itself(who.model.module) and (remark := remark_on_scales(everything)):
        logger.warning(remark)  # in the client's own log: nobody else sees its data
    return Message(who.describe(), reply_to=message)


@client.query("score")
def score(message: Message, context: Context) -> Message:
    return Message(respondent(context).score(message.content, context.state), reply_to=message)


@client.train("fit")
def fit(message: Message, context: Context) -> Message:
    return Message(respondent(context).fit(message.content, context.state), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return Message(respondent(context).evaluate(message.content), reply_to=message)


def respondent(context: Context) -> Respondent:
    """Whoever answers for this node's client; made once per process."""
    torch.set_num_threads(1)  # the same bits as everywhere else
    return _respondent(tuple(sorted(context.run_config.items())), tuple(sorted(context.node_config.items())))


@lru_cache(maxsize=64)
def _respondent(run_config: tuple[tuple[str, Any], ...], node_config: tuple[tuple[str, Any], ...]) -> Respondent:
    config, terms, _ = read_run_config(dict(run_config))
    node = dict(node_config)
    index = node.get("partition-id")
    if type(index) is not int or not 0 <= index < terms.num_clients:
        raise ValueError(
            f"partition-id must be a whole number below deploy.num_clients = {terms.num_clients}, got {index}"
        )
    data, own = client_data(config, index, node.get("data-factory"))
    (x_train, images), (x_test, _) = pool(data.x_train), pool(data.x_test)

    def held_by(client: int) -> tuple[Examples, Examples]:
        train = Examples(x_train, data.y_train, data.train_of[client], images)
        return train, Examples(x_test, data.y_test, data.test_of[client], images)

    train, test = held_by(own)
    likelihood = likelihood_for_all(config)
    said = data.likelihood if config.data.likelihood == AUTO else likelihood.fitted(data.y_train)
    if said != likelihood:
        raise ValueError("data.likelihood must be told in full in a federation, where nobody sees all y: for this "
                         f"client's it would be {said.spec}")  # fmt: skip
    model = FlatModel(build(attach(model_factory(config), likelihood), config.experiment.seed, "probe"))
    num_classes, draws_globally = check_model(model, train, data.num_classes, batch_size=config.training.batch_size)
    who = LocalClient(index, train, test, config.training, config.experiment.seed, draws_globally)
    group = None if data.group is None else int(data.group[own])
    later = None
    if data.drift is not None and data.group is not None:
        source = int(data.drift.source[own])
        train, test = held_by(source)
        later = Later(data.drift.round, replace(who, train=train, test=test, holder=source), int(data.group[source]))
    # Beside Flower's own files of this node, so that it outlives runs.
    ledger = Ledger(Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser() / f"privacy-client-{index}.json")
    privacy = privacy_from(node)
    protection = None if privacy is None else Protection(privacy, ledger)
    return Respondent(who, model, num_classes, group, protection, later, name_in(node))


def client_data(config: Config, index: int, factory: object) -> tuple[FederatedData, int]:
    """The data of client `index` and its place among them.

    A node's own `data-factory` returns this client's data alone. `data.factory` may do the same on every machine, or
    return a list of all clients, as it does for the simulator; without either, the named data set is cut into clients.
    """
    reference, key = (config.data.factory, "data.factory") if factory is None else (str(factory), "data-factory")
    if reference is None:
        return load_data(config), index
    found = users_function(reference, key)()
    if isinstance(found, list):
        return load_data(config, found), index
    return load_data(config, [found]), 0
