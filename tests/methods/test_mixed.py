"""The default method on linear models: what it finds, chooses and gives to each client."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bcfl.client.head import log_predictive, own_posterior, seen
from bcfl.client.trainer import Training
from bcfl.data.partition import FederatedData
from bcfl.engines.participation import Participation
from bcfl.engines.simulator import Simulator
from bcfl.likelihood import attach, of
from bcfl.methods.mixed import Mixed, MixedState

NORMAL, YES_NO = "normal", "bernoulli"


def federation(sites: list[tuple[Tensor, Tensor]], num_test: int = 0) -> FederatedData:
    """Sites whose last `num_test` rows are their test data."""
    x, y = (torch.cat(part).float() for part in zip(*sites, strict=True))
    ends = np.cumsum([len(part) for _, part in sites])
    rows = [torch.arange(end - len(part), end) for end, (_, part) in zip(ends, sites, strict=True)]
    return FederatedData(
        x_train=x,
        y_train=y,
        x_test=x,
        y_test=y,
        train_of=[r[: len(r) - num_test] for r in rows],
        test_of=[r[len(r) - num_test :] for r in rows],
        num_classes=1,
        group=None,
        description="sites",
        num_unused=0,
    )


def made_up(num_sites: int, num_rows: int, means: Tensor, spread: float, seed: int, *, yes_no: bool = False):  # type: ignore[no-untyped-def]
    """Sites with intercepts and slopes about `means`, (kind, 2), kind after kind."""
    random = np.random.default_rng(seed)
    sites = []
    for j in range(num_sites):
        theta = means[j % len(means)].numpy() + random.normal(size=2) * spread
        x = random.normal(size=(num_rows, 1))
        line = theta[0] + theta[1] * x[:, 0]
        y = random.random(num_rows) < 1 / (1 + np.exp(-line)) if yes_no else line + 0.6 * random.normal(size=num_rows)
        sites.append((torch.from_numpy(x), torch.from_numpy(y.astype(float))))
    return sites


def simulator(data: FederatedData, likelihood: str, **participation: object) -> Simulator:
    factory = attach(lambda: nn.Linear(1, 1), of(likelihood))
    return Simulator(factory, data, Training(), 0, Participation(**participation), num_workers=1)  # type: ignore[arg-type]


def after(engine: Simulator, method: Mixed, rounds: int = 1) -> MixedState:
    state = method.init(engine.begin(0))
    for index in range(1, rounds + 1):
        state, _ = method.round(state, engine.begin(index))
    return state


def held_out(engine: Simulator, state: MixedState) -> Tensor:
    """Each site's mean log-likelihood of its test rows under its own predictive distribution."""
    template, found = engine._workers._network.template, []
    for client in engine.clients:
        own = own_posterior(state.heads, client, template, engine.head)
        at = seen(template, engine.head, state.heads.models[0], client.test)
        log_p = log_predictive(own, torch.arange(len(state.heads)), at, torch.Generator().manual_seed(0))
        found.append((own.log_share[:, None] + log_p).logsumexp(0).mean())
    return torch.stack(found)


ONE_KIND = torch.tensor([[0.5, -1.0]]).double()
THREE_KINDS = torch.tensor([[0.0, 1.5], [1.5, -1.0], [-1.5, 0.3]]).double()


def test_a_linear_model_is_the_mixed_model_of_statistics_after_one_exchange() -> None:
    api = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    sites = made_up(20, 10, ONE_KIND, 0.7, 0)
    with simulator(federation(sites), NORMAL) as engine:
        clients = engine.begin(1)
        method = Mixed(search=False, num_clusters=1, spread="last_layer")
        state, _ = method.round(method.init(clients), clients)
        group = np.repeat(np.arange(20), 10)
        x, y = (torch.cat(part).float().double().numpy() for part in zip(*sites, strict=True))
        design = np.column_stack([x, np.ones(len(x))])
        apart = api.MixedLMParams.from_components(fe_params=np.ones(2), cov_re=np.eye(2))
        theirs = api.MixedLM(y, design, group, exog_re=design).fit(reml=False, free=apart)
        heads = state.heads
        assert heads.mean[0].numpy() == pytest.approx(theirs.fe_params, abs=1e-3)
        assert heads.variance[0].numpy() == pytest.approx(np.diag(theirs.cov_re), rel=1e-3)
        assert float(heads.noise[0]) == pytest.approx(theirs.scale, rel=1e-3)
        assert state.error[0].numpy() == pytest.approx(theirs.bse_fe, rel=1e-3)
        template = engine._workers._network.template
        for j, client in enumerate(engine.clients):
            own = own_posterior(heads, client, template, engine.head)
            assert own.theta[0].numpy() == pytest.approx(theirs.fe_params + theirs.random_effects[j], abs=1e-3)


@pytest.mark.parametrize(
    ("likelihood", "num_sites", "num_rows"), [(NORMAL, 120, 16), pytest.param(YES_NO, 30, 40, marks=pytest.mark.slow)]
)
def test_kinds_are_found_where_there_are_kinds(likelihood: str, num_sites: int, num_rows: int) -> None:
    yes_no = likelihood == YES_NO
    kinds = THREE_KINDS * (2.5 if yes_no else 1)
    data = federation(made_up(num_sites, num_rows, kinds, 0.4, 1, yes_no=yes_no), num_rows // 2)
    with simulator(data, likelihood) as engine:
        chosen = after(engine, Mixed())
        one = after(engine, Mixed(search=False))
        assert chosen.choice.candidates[chosen.choice.chosen] == "3 clusters with a spread"
        gain = held_out(engine, chosen) - held_out(engine, one)
        assert float(gain.mean()) > 2 * float(gain.std()) / len(gain) ** 0.5


def test_one_kind_is_not_split_and_sites_that_do_not_differ_share_one_model() -> None:
    for spread, allowed in ((0.7, "one model with a spread"), (0.0, "one model")):
        with simulator(federation(made_up(60, 10, ONE_KIND, spread, 2)), NORMAL) as engine:
            choice = after(engine, Mixed()).choice
            assert choice.candidates[choice.chosen] == allowed


def test_who_comes_later_is_heard_and_who_is_away_is_not_forgotten() -> None:
    data, method = federation(made_up(24, 8, THREE_KINDS, 0.3, 3)), Mixed(search=False, num_clusters=3)
    with simulator(data, NORMAL) as engine:
        everybody = after(engine, method)
    with simulator(data, NORMAL, clients_per_round=0.5) as engine:
        some = after(engine, method, 1)
        assert int((some.hypotheses.assignment[0] >= 0).sum()) == 12
        in_the_end = after(engine, method, 8)
    assert bool((in_the_end.hypotheses.assignment[0] >= 0).all())
    assert torch.allclose(in_the_end.heads.mean, everybody.heads.mean, atol=1e-4)


def test_rounds_in_which_nothing_is_new_change_nothing() -> None:
    with simulator(federation(made_up(10, 8, ONE_KIND, 0.5, 4)), NORMAL) as engine:
        first, third = after(engine, Mixed()), after(engine, Mixed(), 3)
    assert torch.equal(first.heads.mean, third.heads.mean)
    assert torch.equal(first.heads.variance, third.heads.variance)
