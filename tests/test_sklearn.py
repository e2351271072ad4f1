"""The estimators among scikit-learn's own tools: sites by `groups`, pipelines, its checks."""

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from bcfl.sklearn import BCFLClassifier, BCFLRegressor

QUICK: dict[str, Any] = {"rounds": 5, "num_clusters": 2}


def sites(seed: int = 0) -> tuple[Any, Any, Any]:
    """Six sites of two kinds: what the first column means is the opposite in the second kind."""
    rng = np.random.default_rng(seed)
    groups = np.repeat([f"site {j}" for j in range(6)], 50)
    x = rng.normal(size=(300, 2))
    return x, x[:, 0] * np.where(np.arange(300) < 150, 1, -1) + 0.1 * rng.normal(size=300), groups


def test_sites_of_a_kind_share_a_model_and_rows_go_to_their_own_site() -> None:
    x, value, groups = sites()
    y = np.where(value > 0, "ill", "well")
    model = BCFLClassifier(**QUICK).fit(x, y, groups)
    assigned = model.result_.assignment.tolist()
    assert assigned[:3] == [assigned[0]] * 3 != assigned[3:] == [assigned[3]] * 3
    assert model.classes_.tolist() == ["ill", "well"]
    x, value, groups = sites(1)
    assert model.score(x, np.where(value > 0, "ill", "well"), groups=groups) > 0.9
    assert model.predict_proba(x, groups).sum(1) == pytest.approx(np.ones(300))


def test_a_site_that_was_never_seen_gets_the_mixture_over_clusters() -> None:
    x, value, groups = sites()
    model = BCFLClassifier(**QUICK).fit(x, value > 0, groups)
    mixed = model.predict_proba(x)
    own = [model.predict_proba(x, np.full(300, site)) for site in ("site 0", "site 5")]
    assert mixed == pytest.approx((own[0] + own[1]) / 2, abs=1e-6)  # two clusters of three sites each
    assert np.array_equal(model.predict_proba(x, np.full(300, "another")), mixed)


def test_real_values_are_predicted_in_their_own_units() -> None:
    x, value, groups = sites()
    model = BCFLRegressor(**{**QUICK, "rounds": 20}, training={"learning_rate": 0.05}).fit(
        x, 1000 + 500 * value, groups
    )
    assert model.score(x, 1000 + 500 * value, groups=groups) > 0.9
    assert model.predict(x).mean() == pytest.approx(1000, abs=150)


def test_a_site_with_a_last_layer_of_its_own_is_predicted_by_it() -> None:
    x, value, groups = sites()
    model = BCFLRegressor(method="bcfl", model="linear", rounds=2).fit(x, value, groups)
    assert model.score(x, value, groups=groups) > 0.95
    assert np.isfinite(model.predict(x)).all()


def test_frames_keep_their_kinds_of_columns() -> None:
    pd = pytest.importorskip("pandas")
    x, value, groups = sites()
    frame = pd.DataFrame({"ward": np.where(x[:, 1] > 0, "heart", "lung"), "pressure": x[:, 0]})
    frame.loc[::7, "pressure"] = np.nan
    model = BCFLClassifier(**QUICK).fit(frame, value > 0, groups)
    assert model.feature_names_in_.tolist() == ["ward", "pressure"]
    assert model.result_.sites.form.preparation.inputs == ("ward lung", "pressure", "pressure missing")
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["pressure", "ward"]])


def test_it_is_one_step_of_a_pipeline_and_can_be_copied() -> None:
    x, value, groups = sites()
    pipe = make_pipeline(StandardScaler(), BCFLClassifier(**QUICK))
    fitted = pipe.fit(x, value > 0, bcflclassifier__groups=groups)
    assert fitted.predict(x, groups=groups).shape == (300,)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.predict_proba(x), fitted.predict_proba(x))
    assert clone(BCFLClassifier(seed=3)).get_params()["seed"] == 3
    one_site = BCFLClassifier(rounds=3)
    assert len(cross_val_score(one_site, x, x[:, 0] > 0, cv=3)) == 3


def test_unusable_input_is_refused() -> None:
    x, value, groups = sites()
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        BCFLClassifier(**QUICK).fit(x, value > 0, groups[:10])
    with pytest.raises(ValueError, match="y contains NaN"):
        BCFLRegressor(**QUICK).fit(x, np.where(value > 0, np.nan, value), groups)
    with pytest.raises(ValueError, match="only one class"):
        BCFLClassifier(**QUICK).fit(x, np.zeros(300), groups)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # scikit-learn's checks provoke its own
@pytest.mark.parametrize("estimator", [BCFLClassifier(), BCFLRegressor()], ids=["classifier", "regressor"])
def test_scikit_learns_own_checks_pass(estimator: Any) -> None:
    """All of them: without groups the rows are those of one site."""
    for found in check_estimator(estimator, on_fail=None, on_skip=None):
        assert found["status"] in ("passed", "skipped"), f"{found['check_name']}: {found['exception']!r}"
