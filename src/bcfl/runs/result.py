"""What a run gives back: the clusters' models, who belongs where with what probability, and how it went."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bcfl.association.hypotheses import align, co_association, entropy, marginals
from bcfl.association.membership import co_membership, mixed
from bcfl.belief.evidence import Temperature
from bcfl.client.head import head_layout
from bcfl.client.score import take_statistics
from bcfl.data.datasets import full_name
from bcfl.federation import RoundInfo, State, heads_in, served
from bcfl.likelihood.measures import TITLES
from bcfl.likelihood.real import Normal, units_in
from bcfl.methods.mixedstate import MixedState
from bcfl.model.flat import FlatModel, ModelFactory, build
from bcfl.predict.conformal import Intervals, PredictionSets
from bcfl.predict.densities import Densities, densities
from bcfl.predict.mixtures import ClusterPrior
from bcfl.predict.nowhere import plausibility, strangers
from bcfl.predict.owned import OwnModel, own_model
from bcfl.predict.predictors import (
    Newcomer,
    Predictor,
    associate,
    client_mixture,
    examples_of,
    module_of,
    predictor_of,
)
from bcfl.predict.tables import TablePredictor
from bcfl.runs.gains import Benefit, SpreadTable, benefit_of, spread_table
from bcfl.runs.settings import Config
from bcfl.runs.sites import UNKNOWN, PerSite, Sites, per_site
from bcfl.runs.trust import broad_belief, conformal, members_of

SHOWN = 12  # clusters whose sizes a result's short form tells
SURE = 0.99  # a probability from which it counts a client as placed
MEASURED = 3  # how many measures it tells of the end, and the agreement with true groups
OF_CLASSES = ("accuracy", "macro_f1", "nll", "ece", "brier")  # null where they were not measured


@dataclass(frozen=True)
class Result:
    """A finished run."""

    config: Config
    state: State
    info: RoundInfo | None  # the last round's hypotheses, before any merging
    history: list[dict[str, Any]]  # one record a round, round 0 first
    factory: ModelFactory
    group: Tensor | None  # (client,) true groups at the end, where known
    path: Path | None  # the run folder, if there is one
    drift: dict[str, Any] | None = None  # how changes of the true groups were followed: see metrics.follow_drift
    sites: Sites = UNKNOWN  # the clients' names, how much they hold, and how their table is prepared

    def __repr__(self) -> str:
        """What happened, in a few lines: who is where, how sure, how good, at what cost."""
        summary, data = self.summary(), self.config.data
        on = f"{full_name(data.name, data.domains)} {data.partition}" if data.factory is None else "own clients"
        sizes = torch.bincount(self.assignment[self.assignment >= 0]).tolist()
        members = ", ".join(map(str, sizes[:SHOWN])) + f", … {len(sizes) - SHOWN} more" * (len(sizes) > SHOWN)
        sure = int((self.probability.max(1).values >= SURE).sum())
        told = [key for key in TITLES if summary.get(key) is not None and key not in ("auc", "sensitivity")][:MEASURED]
        measured = [f"{key} {summary[key]:.3f}" for key in (*told, "ari") if summary.get(key) is not None]
        work = summary["work"]
        lines = [
            f"{summary['method']} on {on}, seed {summary['seed']}, {summary['rounds']} rounds",
            f"clients: {len(self.assignment)}; in clusters of {members or 'nobody'}",
            f"hypotheses: {self.num_hypotheses}; clients placed with probability {SURE} or more: {sure}",
            f"at the end: {', '.join(measured) or 'not tested, as no client has test data'}",
            f"work: {work.get('trainings', 0):,} trainings, {work.get('local_steps', 0):,} steps",
            *([] if self.benefit is None else [repr(self.benefit)]),
            *([f"left out: {work['rejected']} trainings that did not stay finite"] if work.get("rejected") else []),
            f"kept in {self.path}" if self.path else "not kept: `out` names a folder to keep a run in",
        ]
        return "\n  ".join(lines)

    @property
    def assignment(self) -> Tensor:
        """The cluster of each client in the best hypothesis."""  # (client,)
        return self.sites.by_name(self.state.hypotheses.assignment[0])

    @property
    def probability(self) -> Tensor:
        """How likely each client belongs to each cluster: by its data at the models of every hypothesis, mixed.

        Rows sum to one. Columns are the numbers of `assignment`, and hold 0 where there is no such cluster. At the
        models of one hypothesis it is a softmax of the client's evidence, by Bayes' rule and without "per_example".
        Methods whose clients tell no scores (bcfl-g, or runs with `hypotheses = "all"`) know only which hypotheses say
        so: 1 where all agree, and so always with a single one, which is not a test of each client.
        """  # (client, cluster)
        if self.info is not None and self.info.probability is not None:
            return self.sites.by_name(mixed(self.info.probability, self.info.assignment, self.info.log_weight))
        (assignment, log_weight), num_clusters = self._stories(), self.state.hypotheses.num_clusters
        probability = marginals(align(assignment, num_clusters), log_weight, num_clusters)
        return self.sites.by_name(torch.where((assignment[0] < 0)[:, None], self._anywhere(), probability))

    @property
    def is_placed_by_evidence(self) -> bool:
        """Whether `probability` is by what each client's data say, and not only by which hypotheses were kept."""
        return self.info is not None and self.info.probability is not None

    @property
    def num_hypotheses(self) -> int:
        """How many stories the last round kept."""
        return len(self._stories()[1])

    @property
    def temperature(self) -> float | None:
        """The temperature that the last round learned; None where it is a setting."""
        told = () if self.info is None or self.info.events is None else self.info.events
        return next((float(one["temperature"]) for one in told if one.get("kind") == "temperature"), None)

    @property
    def co_association(self) -> Tensor:
        """How likely any two clients share a cluster; one that never took part may be in any of them."""
        if self.info is not None and self.info.probability is not None:
            return self.sites.by_name(co_membership(self.info.probability, self.info.log_weight))
        assignment, log_weight = self._stories()
        unseen = assignment[0] < 0
        shared = torch.where(unseen[:, None] | unseen, self._anywhere().max(), co_association(assignment, log_weight))
        return self.sites.by_name(shared.fill_diagonal_(1.0))  # (client, client)

    @property
    def entropy(self) -> Tensor:
        """How unsure each client's association is, in nats."""  # (client,)
        return self.sites.by_name(entropy(self.probability))

    @property
    def models(self) -> dict[int, nn.Module]:
        """The clusters' models in the best hypothesis, by the numbers that `assignment` has, in evaluation mode."""
        told = self.state.hypotheses
        beliefs = enumerate(told.model_of[0].tolist())
        return {k: module_of(self.factory, told.models.mean[belief]) for k, belief in beliefs if belief >= 0}

    def by_site(self) -> PerSite:
        """A record for each client, to be printed or gone through: name, rows, cluster, its probability, measures."""
        return per_site(self.sites, self.assignment, self.probability, self.history[-1] if self.history else {})

    def predictor(self, client: int | str, *, statistics_of: Any = None) -> nn.Module:
        """The model that serves a client, by its name or number; of several together the one with the most say.

        It is in evaluation mode. Of a run on a table it takes frames as well as tensors of prepared inputs, and has
        `predict` for targets in the user's own words and units: see `TablePredictor`.

        With `statistics_of`, inputs of the client, its BatchNorm layers have their statistics instead of those of all
        the cluster's clients: that fits it to a client with other labels than theirs, without labels or training.
        """
        models, mixtures_of_clients = served(self.state)
        mixture = mixtures_of_clients[self._place_of(client)]
        module = module_of(self.factory, models.mean[max(mixture, key=mixture.__getitem__)])
        if statistics_of is not None:
            take_statistics(module, examples_of(self.factory, self._inputs(statistics_of), None))
        return module if self.sites.form is None else TablePredictor(module, self.sites.form)

    def mixture(self, client: int | str) -> Predictor:
        """What predicts for a client over all the hypotheses; its own model alone, where the method personalises."""
        client, serving, told = self._place_of(client), self.state.serving(), self.state.hypotheses
        if serving is None:
            return predictor_of(self.factory, told.models, client_mixture(told, self.info, client))
        return predictor_of(self.factory, serving[0], serving[1][client])

    def predict_proba(self, client: int | str, x: Any, **spread: Any) -> Tensor:
        """The predictive distribution p(class | x) of a client over its hypotheses, and over each belief if asked for.

        `beliefs` is "mean" (the default), "samples", "sigma" or "last_layer"; `num_samples`, `prior_precision`, `seed`
        say how these are drawn.
        """  # (example, class)
        return self.mixture(client).predict_proba(self._inputs(x), **spread)

    def associate(
        self, x: Any, y: Any = None, *, temperature: Temperature = "none", prior: ClusterPrior = "uniform"
    ) -> Newcomer:
        """Where a client that the run has never seen belongs, by what its models make of a handful of its examples.

        Nothing is trained, and nothing of the run changes. Of a run on a table, x may be a frame with the target in it.
        """
        if y is None and self.sites.form is not None and not isinstance(x, Tensor):
            x, y = self.sites.form.examples(x)
        membership = None if self.info is None else self.info.probability
        told, members = self.state.hypotheses, members_of(self.history)
        newcomer = associate(told, self.factory, x, y, temperature, prior, membership)
        fit = plausibility(newcomer.nll, newcomer.num_examples, members[:, 1:]) if len(members) else None
        return replace(newcomer, fit=fit, broad=broad_belief(told))

    def strangers(self, alpha: float = 0.05) -> list[int]:
        """The run's clients that belong nowhere, by how badly their test rows fit beside those of all others."""
        return strangers(members_of(self.history), alpha)

    def by_inputs(self, sums: Tensor) -> Densities:
        """What places newcomers that have no labels, from what each client tells of its inputs: (client, number).

        A client tells `bcfl.predict.densities.input_sums` of its inputs, or of features that mean the same everywhere.
        """
        if len(sums) != len(self.assignment):
            raise ValueError(
                f"sums must be one row for each of {len(self.assignment)} clients, got {tuple(sums.shape)}"
            )
        return densities(sums, torch.as_tensor(self.probability))

    def conformal(
        self, client: int | str, x: Any, alpha: float = 0.1, *, calibration: tuple[Any, Any]
    ) -> PredictionSets | Intervals:
        """Sets of classes, or intervals, that hold the truth of a new row of this client with probability 1 − alpha.

        `calibration` is (x, y) of rows of the same client that had no part in training or in its membership, such as
        `bcfl.predict.conformal.keep_aside` keeps. See there for what is promised, and of how many rows.
        """
        known, y = calibration
        return conformal(self.mixture(client), self._inputs(x), alpha, (self._inputs(known), y))

    def own_model(self, x: Any = None, y: Any = None) -> OwnModel:
        """What predicts for a client by its own last layer: the clusters' priors, updated by its examples (x, y).

        For one of the run's clients give its training examples, which only it has; for a newcomer the few that it has,
        or none. Of a run on a table, x may be a frame with the target in it.
        """
        heads = heads_in(self.state)
        if heads is None:
            raise ValueError(f"in this run of {self.config.method['name']} members of a cluster share one model: "
                             "associate says which")  # fmt: skip
        if x is not None and y is None and self.sites.form is not None and not isinstance(x, Tensor):
            x, y = self.sites.form.examples(x)
        return own_model(self.factory, heads, x, y)

    @property
    def benefit(self) -> Benefit | None:
        """What was chosen by held-out rows, how clear that was, and what each site gains; of the method bcfl only."""
        choice = self.state.choice if isinstance(self.state, MixedState) else None
        return None if choice is None else benefit_of(choice)

    def spread_table(self) -> SpreadTable:
        """Means, standard errors and variances between sites of all coefficients, by cluster, of a linear model."""
        model = FlatModel(build(self.factory, 0, "result"))
        layout, family = head_layout(model), model.likelihood.family
        if not isinstance(self.state, MixedState) or layout is None:
            raise ValueError("a table of the spread is there for linear models and the method bcfl")
        scale = units_in(family)[1] if isinstance(family, Normal) else 1.0
        inputs = None if self.sites.form is None else self.sites.form.preparation.inputs
        return spread_table(self.state, layout, inputs, family.kind, scale)

    def predict(self, client: int | str, x: Any) -> Tensor:
        """The point predictions of a client's mixture: the mean of y, or the likeliest class."""  # (example, ...)
        return self.mixture(client).predict(self._inputs(x))

    @property
    def accuracy(self) -> float | None:
        """Over all clients' own test examples at the end; None without test data."""
        return self.history[-1].get("accuracy")

    def summary(self) -> dict[str, Any]:
        """The numbers that people compare, ready for JSON."""
        last: dict[str, Any] = self.history[-1] if self.history else {"round": 0}
        totals: dict[str, int] = {}
        for record in self.history:
            for key, value in record["work"].items():
                totals[key] = totals.get(key, 0) + value
        return {
            "method": self.config.method["name"],
            "seed": self.config.experiment.seed,
            "rounds": last["round"],
            **{key: last.get(key) for key in (*OF_CLASSES, "ari")},
            **{key: last[key] for key in TITLES if key in last and key not in OF_CLASSES},
            **({"mixture": _mixture(last["mixture"])} if last.get("mixture") else {}),
            "assignment": self.assignment.tolist(),
            **({} if self.sites.names is None else {"names": list(self.sites.names)}),
            "work": totals,
            **({} if self.drift is None else {"drift": self.drift}),
        }

    def _anywhere(self) -> Tensor:
        """Where a client is that never took part: in all clusters of the best hypothesis alike."""  # (cluster,)
        there = (self.state.hypotheses.model_of[0] >= 0).double()
        return there / there.sum()

    def _inputs(self, x: Any) -> Any:
        """The inputs of a frame, where the run's clients are a table's sites; a tensor is taken as it is."""
        return x if self.sites.form is None or isinstance(x, Tensor) else self.sites.form.inputs(x)

    def _place_of(self, client: int | str) -> int:
        """The client's number as a plain one, if there is such a client."""
        return self.sites.place_of(client, len(self.assignment))

    def _stories(self) -> tuple[Tensor, Tensor]:
        if self.info is not None:
            return self.info.assignment, self.info.log_weight
        return self.state.hypotheses.assignment, self.state.hypotheses.log_weight


def _mixture(measured: dict[str, Any]) -> dict[str, Any]:
    """What is compared between a mixture and a single model."""
    return {key: measured[key] for key in TITLES if key in measured and key != "macro_f1"}
