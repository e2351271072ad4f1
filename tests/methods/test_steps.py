"""Which trainings a set of hypotheses needs, and their fusion: shared exactly, aliased never."""

import pytest
import torch
from federation_fixtures import pulled_clients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bcfl.association.hypotheses import Branches
from bcfl.belief.gaussian import FUSION_RULES, Gaussian, fuse
from bcfl.methods.steps import FusionStack, distinct_groups, draw_starts
from bcfl.randomness import generator


def branches(parent: list[int], assignment: list[list[int]]) -> Branches:
    weight = torch.zeros(len(parent), dtype=torch.float64).log_softmax(0)
    return Branches(torch.tensor(parent), torch.tensor(assignment), weight)


def test_hypotheses_that_agree_share_their_groups_and_jobs() -> None:
    kept = branches([0, 0, 1], [[0, 0, 1], [0, 1, 1], [0, 0, 1]])
    groups = distinct_groups(torch.tensor([[0, 1], [0, 2]]), kept, torch.tensor([True, True, True]))
    # The third hypothesis shares belief 0 with the first, and its members: one group. Belief 2 is its own.
    assert groups.model_of.tolist() == [[0, 1], [2, 3], [0, 4]]
    assert groups.belief.tolist() == [0, 1, 0, 1, 2]
    jobs = list(zip(groups.job_belief.tolist(), groups.job_client.tolist(), strict=True))
    assert jobs == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)]
    assert groups.users_of_job == [[0, 2], [0], [3], [1, 3], [4]]


def test_starts_are_refused_only_if_all_of_them_are_the_same() -> None:
    starts = torch.ones(2, 3, 4)  # (hypothesis, cluster, parameter)
    starts[1, 2, 3] = 1 + 2**-23  # the next number
    clients = pulled_clients(torch.zeros(2, 4), [1.0, 1.0], starts)
    assert torch.equal(draw_starts(clients, 3, 2), starts.flatten(0, 1))
    assert torch.equal(draw_starts(clients, 1, 2), starts[:, 0])
    with pytest.raises(ValueError, match="all 3 clusters would stay alike") as refused:
        draw_starts(clients, 3)
    assert len(str(refused.value)) < 300  # what `bcfl deploy local` shows of an error


def test_absent_clients_train_nothing() -> None:
    groups = distinct_groups(torch.tensor([[0, 1]]), branches([0], [[0, 1, 1]]), torch.tensor([True, False, False]))
    assert groups.job_client.tolist() == [0]
    assert groups.model_of.tolist() == [[0, 1]]


@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_groups_are_what_a_plain_loop_over_hypotheses_would_train(data: st.DataObject) -> None:
    """Fused results per hypothesis and cluster, without any sharing, are those of the shared groups."""
    num_hypotheses, num_clients, num_clusters = 4, 4, 3
    index = st.integers(0, num_clusters - 1)
    rows = data.draw(
        st.lists(st.tuples(*[index] * num_clients), min_size=1, max_size=num_hypotheses, unique=True), "assignments"
    )
    parents = data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)), "parents")
    present = torch.tensor(data.draw(st.lists(st.booleans(), min_size=num_clients, max_size=num_clients), "present"))
    model_of = torch.tensor([[0, 1, 2], [0, 3, 4]])
    draws = generator(0)
    models = Gaussian(torch.randn(5, 2, generator=draws), torch.rand(5, 2, generator=draws))

    def posterior(belief: int, client: int) -> Gaussian:
        step = torch.tensor([float(client), 1.0]) + belief
        return Gaussian(models.mean[belief] + step, models.precision[belief] + client + 1)

    kept = branches(parents, [list(row) for row in rows])
    for rule in FUSION_RULES:
        groups = distinct_groups(model_of, kept, present)
        folds = FusionStack(models, models, groups.belief, rule)
        for b, c, users in zip(
            groups.job_belief.tolist(), groups.job_client.tolist(), groups.users_of_job, strict=True
        ):
            folds.add(users, posterior(b, c))
        shared = folds.results()
        for h, (parent, row) in enumerate(zip(parents, rows, strict=True)):
            for cluster in range(num_clusters):
                belief = int(model_of[parent, cluster])
                members = [c for c in range(num_clients) if row[c] == cluster and present[c]]
                alone = fuse([posterior(belief, c) for c in members], models[belief], rule)
                own = shared[int(groups.model_of[h, cluster])]
                assert torch.equal(own.mean, alone.mean)
                assert torch.equal(own.precision, alone.precision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_beliefs_of_a_stack_are_rows_of_one_tensor_and_do_not_touch_the_old_ones(dtype: torch.dtype) -> None:
    old = Gaussian(torch.zeros(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype))
    folds = FusionStack(old, old, torch.tensor([0, 0, 1]), "product")
    folds.add([0], Gaussian(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)))
    folds.add([1], None)  # a client that did not come back
    new = folds.results()
    assert new.mean.dtype == dtype
    assert new.mean.tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    new.mean.fill_(7)
    assert not old.mean.any()
