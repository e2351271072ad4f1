"""Estimators with scikit-learn's manners for tables of several sites: `groups` says which site a row is from.

model = BCFLClassifier(num_clusters=2).fit(X, y, groups=hospital)
model.predict_proba(X, groups=hospital)      # each row by its own site's model
model.predict(X)                             # rows of a site that was never seen: by the mixture over clusters
"""

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from bcfl.api import train
from bcfl.data.frames import Column, columns_of
from bcfl.data.tables import table
from bcfl.federation import heads_in
from bcfl.likelihood import likelihood_of
from bcfl.methods import entry_of
from bcfl.predict.owned import OwnModel
from bcfl.runs.result import Result

SITE, TARGET = "which site", "what is to be predicted"  # columns of ours, which no user's is called
Array = npt.NDArray[Any]


class _Grouped(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A federation of the sites that `groups` names, trained in one process."""

    def __init__(
        self,
        *,
        method: str = "bcfl-mh-3",
        num_clusters: int = 2,
        rounds: int = 30,
        model: Any = None,
        likelihood: str | None = None,
        categories: tuple[str, ...] = (),
        seed: int = 0,
        training: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        self.method, self.num_clusters, self.rounds = method, num_clusters, rounds
        self.model, self.likelihood, self.categories = model, likelihood, categories
        self.seed, self.training, self.options = seed, training, options

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = tags.input_tags.categorical = True
        return tags

    def _train(self, X: Any, y: Array, groups: Any, likelihood: str) -> Self:
        columns = self._columns(X, fitting=True)
        check_consistent_length(next(iter(columns.values())).values, y)
        if len(y) < 2:
            raise ValueError(f"at least 2 rows are needed, got n_samples={len(y)}")
        sites = np.zeros(len(y), int) if groups is None else column_or_1d(groups)
        check_consistent_length(y, sites)
        named = {name: column.values for name, column in columns.items()}
        frame = {**named, SITE: [str(site) for site in sites], TARGET: y}
        made = table(frame, SITE, TARGET, test=0.0, likelihood=likelihood, categories=self.categories, seed=self.seed)
        count = min(self.num_clusters, len(made))
        how: dict[str, Any] = {"method": self.method if count > 1 else "fedavg"}
        if count > 1 and "num_clusters" in entry_of(self.method).options:
            how["num_clusters"] = count
        how |= {"rounds": self.rounds, "seed": self.seed, "training": self.training, **(self.options or {})}
        self.result_: Result = train(self.model, made, progress=False, **how)
        self.own_: dict[str | None, OwnModel] = {}  # where each site has a last layer of its own: its posterior
        if heads_in(self.result_.state) is not None:
            self.own_ = {name: self.result_.own_model(one["x"], one["y"]) for name, one in made.items()}
            self.own_[None] = self.result_.own_model()
        self.sites_ = np.array(list(made))
        return self

    def _columns(self, X: Any, fitting: bool) -> dict[str, Column]:
        """X as columns, checked as scikit-learn does; a frame's columns keep their names and kinds."""
        if hasattr(X, "columns") and not isinstance(X, Mapping):
            return columns_of(validate_data(self, X, reset=fitting, skip_check_array=True), "X")
        checked = validate_data(self, X, reset=fitting, dtype=np.float64, ensure_all_finite="allow-nan")
        if np.isinf(checked).any():
            raise ValueError("X contains infinity")
        return {f"x{place}": Column("number", checked[:, place]) for place in range(checked.shape[1])}

    def _means(self, X: Any, groups: Any) -> Array:
        """What each row's site predicts; where that is none of those trained on, the mixture over clusters."""
        check_is_fitted(self)
        columns = self._columns(X, fitting=False)
        form = self.result_.sites.form
        assert form is not None
        x = torch.from_numpy(form.preparation.apply(columns, "X"))
        sites = np.full(len(x), None, object) if groups is None else np.array([str(one) for one in groups], object)
        check_consistent_length(x, sites)
        found: Array | None = None
        for site in dict.fromkeys(sites.tolist()):
            rows = sites == site
            known = site is not None and site in self.sites_
            mean = self._of_site(site, x[rows]) if known else self._of_new_site(x[rows])
            found = np.empty((len(x), *mean.shape[1:])) if found is None else found
            found[rows] = mean
        assert found is not None
        return found

    def _of_site(self, site: str, x: torch.Tensor) -> Array:
        if self.own_:
            return np.asarray(self.own_[site].predict(x), np.float64)
        return _mean(self.result_.predictor(site).module, x)

    def _of_new_site(self, x: torch.Tensor) -> Array:
        """Σ_k π_k · the prediction of cluster k, π its share of the sites."""
        if self.own_:
            return np.asarray(self.own_[None].predict(x), np.float64)
        shares = torch.as_tensor(self.result_.probability).mean(0).tolist()
        parts = [(shares[k], _mean(module, x)) for k, module in self.result_.models.items() if shares[k] > 0]
        total = sum(share for share, _ in parts)
        mixed: Array = sum((share / total * mean for share, mean in parts), np.zeros(()))
        return mixed


def _mean(module: Any, x: torch.Tensor) -> Array:
    """In double precision: what a row gets may not depend on the rows beside it, not by a rounding either."""
    precise = copy.deepcopy(module).double()
    with torch.no_grad():
        mean: Array = likelihood_of(module).mean(precise(x.double())).numpy()
    return mean


class BCFLClassifier(ClassifierMixin, _Grouped):  # type: ignore[misc]
    """Classes at several sites: sites that are alike share a model, and it is learned which these are."""

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Trained on the rows of all sites; without groups they are one."""
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("Classifier can't train when only one class is present.")
        return self._train(X, numbers, groups, self.likelihood or "categorical")

    def predict_proba(self, X: Any, groups: Any = None) -> Array:
        """p(class | x), the classes in the order of `classes_`."""  # (row, class)
        return self._means(X, groups)

    def predict(self, X: Any, groups: Any = None) -> Array:
        """The likeliest class of each row."""
        likeliest = self._means(X, groups).argmax(1)
        most: Array = self.classes_[likeliest]
        return most

    def score(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> float:
        """The accuracy."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))


class BCFLRegressor(RegressorMixin, _Grouped):  # type: ignore[misc]
    """Real values (or counts, …: `likelihood`) at several sites that may share models."""

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Trained on the rows of all sites; without groups they are one."""
        y = column_or_1d(y, warn=True).astype(np.float64)
        if not np.isfinite(y).all():
            raise ValueError("y contains NaN or infinity")
        return self._train(X, y, groups, self.likelihood or "normal")

    def predict(self, X: Any, groups: Any = None) -> Array:
        """The mean of each row."""
        return self._means(X, groups)

    def score(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> float:
        """R²."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))
