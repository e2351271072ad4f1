"""What a configuration stands for: the data, the model and the method, found and checked against each other."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from bcfl.belief.gaussian import Gaussian
from bcfl.data.arrays import from_arrays
from bcfl.data.datasets import DATASETS, load
from bcfl.data.drift import with_drift
from bcfl.data.lazy import Held, LazyClients, given_clients
from bcfl.data.partition import FederatedData, partition
from bcfl.data.tables import Table
from bcfl.data.validation import with_validation
from bcfl.engines.heap import keep_freed_memory
from bcfl.federation import Clients, Hypotheses, Method, RoundInfo, State
from bcfl.likelihood import AUTO, CATEGORICAL, Likelihood, Own, attach, given
from bcfl.methods import load_plugin, method_of
from bcfl.model.flat import ModelFactory, build
from bcfl.model.zoo import MODELS, SIZED, look_up
from bcfl.runs.packing import classes_of
from bcfl.runs.sections import FROM_PYTHON, DataConfig
from bcfl.runs.settings import Config
from bcfl.runs.sites import UNKNOWN, Sites

PROBED = 32  # examples that show what a model's scores look like

logger = logging.getLogger(__name__)


class Split(Protocol):
    """What a server may know of the clients' data: how many hold some, what it is called, and perhaps true groups."""

    @property
    def num_clients(self) -> int: ...

    @property
    def description(self) -> str: ...

    def group_in(self, round_index: int) -> Tensor | None: ...  # (client,)


S = TypeVar("S", bound=Split)


@dataclass(frozen=True)
class Given:
    """What is given in Python in the place of what settings name."""

    clients: Iterable[Any] | LazyClients | None = None
    factory: ModelFactory | None = None


NOTHING = Given()


@dataclass(frozen=True)
class Sound:
    """A method whose answers are what the loop can go on with: somebody else may have written it."""

    name: str
    method: Method
    classes: Sequence[type]  # of which its states are made
    num_shared: int = 0  # of the first parameters: those that all clusters have in common

    def init(self, clients: Clients) -> State:
        state = self.method.init(clients)
        self._refuse_other("init must return a state", state, state)
        return state

    def round(self, state: State, clients: Clients) -> tuple[State, RoundInfo]:
        answer = self.method.round(state, clients)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], RoundInfo)):
            self._refuse_other("round must return (state, RoundInfo)", None, answer)
        self._refuse_other("round must return (state, RoundInfo)", answer[0], answer)
        return (_with_shared(answer[0], self.num_shared), answer[1]) if self.num_shared else answer

    def _refuse_other(self, must: str, state: Any, answer: Any) -> None:
        """Nothing happens if a run can go on with that state, and store it."""
        if type(state) in self.classes and hasattr(state, "hypotheses") and hasattr(state, "serving"):
            return
        many = isinstance(answer, tuple)
        got = f"({', '.join(type(part).__name__ for part in answer)})" if many else type(answer).__name__
        known = ", ".join(kind.__name__ for kind in self.classes if hasattr(kind, "serving"))
        raise ValueError(f"method {self.name!r}: {must}, a dataclass with hypotheses and serving() that its "
                         f"annotations name ({known}); it returned {got}")  # fmt: skip


def _with_shared(state: State, count: int) -> State:
    """The same state, but its clusters' models have these first parameters in common: their mean by precision.

    That is by examples where no curvature is learned. What a method keeps beside its hypotheses stays as it is.
    """
    hypotheses = state.hypotheses
    mean, precision = hypotheses.models.mean, hypotheses.models.precision[:, :count].double()
    total = precision.sum(0)
    shared = (precision * mean[:, :count].double()).sum(0) / total
    mean = mean.clone()
    mean[:, :count] = torch.where(total > 0, shared, mean[:, :count].double().mean(0)).to(mean.dtype)
    changed = replace(hypotheses, models=Gaussian(mean, hypotheses.models.precision))
    if isinstance(state, Hypotheses):
        return changed
    held = "hypotheses" in {field.name for field in fields(state)}  # type: ignore[arg-type]
    return replace(state, hypotheses=changed) if held else state  # type: ignore[type-var]


@dataclass(frozen=True)
class Problem(Generic[S]):
    """What a configuration stands for: data, model and method, checked against each other."""

    data: S
    factory: ModelFactory
    method: Sound
    sites: Sites = UNKNOWN


def prepare(config: Config, given: Given = NOTHING) -> Problem[Held]:
    """The problem that `config` describes; a user's own clients and model take the place of named ones."""
    if given.factory is not None:
        keep_freed_memory(given.factory)
    data = load_clients(config, given.clients)
    known = data.sample if isinstance(data, LazyClients) else data
    posed = pose(config, data, given.factory or model_factory(config, sizes_of(known)))
    problem = replace(posed, sites=Sites.of(data))
    own_data, own_model = config.data.factory is not None, config.model.factory is not None
    likelihood = known.likelihood
    if own_data and likelihood.is_plain:
        _tell_odd_labels(known)
    elif own_data and config.data.likelihood != likelihood.spec:
        logger.info(f"likelihood of y: {likelihood.spec}")
    if (own_data or own_model) and likelihood.is_plain:
        _tell_odd_scores(known, problem.factory, config.experiment.seed)
    return problem


def _tell_odd_labels(data: FederatedData) -> None:
    """Whoever has labels of one kind only, or classes of which there is no example, is told."""
    there = torch.cat([data.y_train, data.y_test]).unique().tolist()
    if len(there) == 1:
        logger.warning(f"all labels are {there[0]}: there is nothing to tell apart")
    elif missing := sorted(set(range(data.num_classes)) - set(there)):
        logger.warning(f"no label is {missing[0]}, though the highest is {there[-1]}: labels count from 0, and a class "
                       "without examples is learned as one that never comes")  # fmt: skip


def _tell_odd_scores(data: FederatedData, factory: ModelFactory, seed: int) -> None:
    """Whoever has a model with more classes than there are, or one that returns probabilities, is told."""
    x = data.x_train[data.train_of[0][:PROBED]]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = build(factory, seed, "probe").eval()
        try:
            scores = module(x)
        except Exception:  # a user's model may raise anything, and the engine will tell it
            return
    if not isinstance(scores, Tensor) or scores.dim() != 2:
        return
    if scores.shape[1] > data.num_classes > 1:
        logger.warning(f"the model has scores for {scores.shape[1]} classes, the labels only {data.num_classes}")
    if scores.shape[1] > 1 and bool((scores >= 0).all() and ((scores.sum(1) - 1).abs() < 1e-4).all()):
        logger.warning("the model returns probabilities, a softmax perhaps: it is trained with cross-entropy, which "
                       "takes scores; without the softmax it learns better")  # fmt: skip


def set_up_memory(*configs: Config) -> None:
    """The allocator suits all of the configured models, if nothing in this process has set it up before."""
    keep_freed_memory(*(None if config.model.factory else MODELS.get(config.model.name) for config in configs))


def pose(config: Config, data: Held, factory: ModelFactory) -> Problem[Held]:
    """The configured method on these data, if it suits so many clients."""
    return Problem(data, attach(factory, data.likelihood), method_for(config, data.num_clients, data.likelihood))


def method_for(config: Config, num_clients: int, likelihood: Likelihood = CATEGORICAL) -> Sound:
    """The configured method, if it suits so many clients, and whoever joins late is one of them."""
    if "plugin" in config.method:
        load_plugin(config.method["plugin"])
    method = method_of(config.method)
    num_clusters = getattr(method, "num_clusters", 1)
    if num_clusters > num_clients:
        raise ValueError(f"method.num_clusters is {num_clusters}, but there are only {num_clients} clients")
    per_round = config.experiment.clients_per_round
    if per_round > num_clients:
        raise ValueError(f"experiment.clients_per_round is {per_round:g}, but there are {num_clients} clients")
    _check_joins(config, num_clients)
    if hasattr(method, "check"):  # a method may be particular about how many there are
        method.check(num_clients)
    shares = likelihood.per == "all" and not getattr(method, "apart", False)
    num_shared = likelihood.num_unknowns if shares else 0
    return Sound(config.method["name"], method, classes_of(method), num_shared)


def _check_joins(config: Config, num_clients: int) -> None:
    """Nothing happens if whoever joins late is one of the clients, and somebody is there from the start."""
    late = dict(config.experiment.joins)
    beyond = [client for client in late if client >= num_clients]
    if beyond:
        raise ValueError(f"experiment.joins names client {beyond[0]}, but the clients are 0 to {num_clients - 1}")
    if len(late) == num_clients:
        raise ValueError("experiment.joins must leave at least one client that is there from the start")


def load_data(config: Config, clients: Iterable[Any] | LazyClients | None = None) -> FederatedData:
    """The configured data, cut into clients, or a user's own clients: all of them at once."""
    data = load_clients(config, clients)
    if isinstance(data, LazyClients):
        raise ValueError("the clients are opened when they are asked, and this needs the data of all of them at once")
    return data


def load_clients(config: Config, clients: Iterable[Any] | LazyClients | None = None) -> Held:
    """The same; those of whom each is opened when it is asked are not opened yet."""
    set_up_memory(config)  # now: preparing data may start torch's threads
    section = config.data
    data = _whole_data(config, clients)
    if isinstance(data, LazyClients):
        if section.validation or section.drift_round is not None:
            raise ValueError("data.validation and data.drift_round are for clients whose data are there from the "
                             "beginning, not for those that are opened when they are asked")  # fmt: skip
        return data
    named = section.factory is None and clients is None and data.form is None
    if named and (likelihood := own_likelihood(section.likelihood)) is not None:
        data = _with_likelihood(data, likelihood)
    if section.validation:
        data = with_validation(data, section.validation, config.experiment.seed)
    if section.drift_round is not None:
        data = with_drift(data, section.drift_round, section.drift_share, split_seed(config))
    return data


def own_likelihood(text: str) -> Likelihood | None:
    """The likelihood that a setting names, None where y is to say it; one from Python comes with the model."""
    return Likelihood(Own()) if text == FROM_PYTHON else given(text)


def _with_likelihood(data: FederatedData, likelihood: Likelihood) -> FederatedData:
    """The same data, with y as the likelihood has it."""
    y_train, y_test = likelihood.check(data.y_train, "y"), likelihood.check(data.y_test, "y (test)")
    fitted = likelihood.fitted(y_train)
    num_classes = data.num_classes if fitted.is_plain else 0
    return replace(data, y_train=y_train, y_test=y_test, likelihood=fitted, num_classes=num_classes)


def split_seed(config: Config) -> int:
    """The seed from which it is drawn who holds what."""
    return config.experiment.seed if config.data.seed is None else config.data.seed


def _whole_data(config: Config, clients: Any) -> Held:
    section = config.data
    if clients is None and section.factory is not None:
        clients = users_function(section.factory, "data.factory", given_clients)()
    if isinstance(clients, LazyClients):
        return replace(clients, said=clients.said or own_likelihood(section.likelihood))
    if clients is not None:
        return from_arrays(clients, likelihood=own_likelihood(section.likelihood))
    seed = split_seed(config)
    found = load(section.name, section.path, **_options_of(section, seed))
    if isinstance(found, Table):
        return from_arrays(found, description=f"{section.name} {section.partition} seed {seed}")
    return partition(
        found,
        section.partition,
        seed,
        share_floor=section.share_floor,
        least=(section.min_examples, section.min_test_examples),
        path=section.partition_file,
        clients_per_group=section.clients_per_group,
    )


def _options_of(section: DataConfig, seed: int) -> dict[str, Any]:
    """What the data set is called for with: of its options those that are set."""
    known = DATASETS[section.name].options if section.name in DATASETS else {}
    said = {"likelihood": None if section.likelihood == AUTO else section.likelihood, "seed": seed}
    given = {key: said[key] if key in said else getattr(section, key) for key in known}
    return {key: value for key, value in given.items() if value is not None}


def sizes_of(data: FederatedData) -> tuple[int, int] | None:
    """How many inputs and outputs a network needs for these data; None unless an example is a row of numbers."""
    if data.x_train.dim() != 2:
        return None
    if data.form is not None:
        return data.x_train.shape[1], data.form.target.num_outputs
    return data.x_train.shape[1], data.num_classes or data.likelihood.family.num_outputs or 1


def model_factory(config: Config, sizes: tuple[int, int] | None = None) -> ModelFactory:
    """The configured model, or the one that suits the configured data set; of these sizes, where it may be of any."""
    if config.model.factory is not None:
        return users_function(config.model.factory, "model.factory")
    if config.model.name == "auto":  # parse_config knows no model for these data
        raise ValueError(f"model.name must be given for these data, one of: {', '.join([*MODELS, *SIZED])} "
                         "(or model.factory)")  # fmt: skip
    return look_up(config.model.name, sizes)


def users_function(reference: str, key: str, convert: Callable[[Any], Any] = lambda made: made) -> Callable[[], Any]:
    """The function that `package.module:function` names; whatever it raises becomes a ValueError that names it."""
    function = _import_object(reference, key)

    def call() -> Any:
        try:
            return convert(function())
        except Exception as error:
            raise ValueError(f"{key} {reference!r} failed: {type(error).__name__}: {error}") from error

    return call


def look_here() -> None:
    """From now on the working directory is a place for functions that settings name.

    For settings that somebody gives here and now; a kept run's may be a stranger's, and so may be what lies beside it.
    """
    if not _looks_here():
        sys.path.insert(0, str(Path.cwd()))


def _looks_here() -> bool:
    return "" in sys.path or str(Path.cwd()) in sys.path


def _import_object(reference: str, key: str) -> Callable[..., Any]:
    """The function that `package.module:function` names."""
    if reference == FROM_PYTHON:
        raise ValueError(f"{key} was given in Python and must be given there again: bcfl.train(…, out=FOLDER) goes on "
                         f"with an unfinished run, bcfl.load(FOLDER, model) reads a complete one")  # fmt: skip
    module_name, colon, name = reference.partition(":")
    if not colon or not name:
        raise ValueError(f"{key} must be package.module:function, got {reference!r}")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a module of the user's may raise anything
        where = "" if _looks_here() else "; a kept run's functions are not looked for here, unless PYTHONPATH=. says so"
        raise ValueError(f"{key} {reference!r} cannot be imported: {type(error).__name__}: {error}{where}") from error
    if isinstance(found, nn.Module):
        raise ValueError(f"{key} {reference!r} must be a function that returns a new torch.nn.Module, got a "
                         f"{type(found).__name__}")  # fmt: skip
    if not callable(found):
        raise ValueError(f"{key} {reference!r} must be a function, got {type(found).__name__}")
    return found
