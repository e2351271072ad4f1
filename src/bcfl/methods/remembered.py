"""What BCFL remembers of where its clients were, and how that bears on where they are (`method.stay`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.association.hypotheses import Branches
from bcfl.belief.evidence import Temperature, client_evidence
from bcfl.extensions.staying import FADING, Stay, evidence_power, expected_stays, learned_stay, predict
from bcfl.federation import Clients, Hypotheses


@dataclass(frozen=True)
class Memory:
    """The forward filter of every hypothesis, in the fields `membership` and `stays` of the state."""

    stay: Stay  # the probability that a client stays in its cluster from one round to the next, or "learn"
    scoring_examples: int | None
    temperature: Temperature

    def log_prior(self, state: Hypotheses, clients: Clients) -> Tensor:
        """How likely the present clients are in each cluster by what is remembered, on the scale of their scores."""
        membership, stay = self._recall(state)
        log_prior = predict(membership, stay).log()
        return (self._power(clients)[:, None] * log_prior)[:, clients.present]  # (hypothesis, client, cluster)

    def remember(
        self, state: Hypotheses, clients: Clients, scores: Tensor, log_point_weight: Tensor, kept: Branches
    ) -> dict[str, Tensor]:
        """The fields of the next state that tell where its clients are, and how often they have stayed so far.

        `scores` are tempered, (present client, belief, point). Here the temperature is taken out again, before points
        are put together: a filter by Bayes' rule has none.
        """
        before, stay = self._recall(state)
        present = clients.present
        after = predict(before, stay)
        evidence = client_evidence(scores / self._power(clients)[present, None, None], log_point_weight)
        after[:, present] = (evidence[:, state.model_of].transpose(0, 1) + after[:, present].log()).softmax(-1)
        memory = {"membership": after[kept.parent]}
        if self.stay == "learn":
            stays = expected_stays(before, stay, after)[kept.parent]  # (hypothesis, client)
            known = kept.log_weight.exp()[:, None] * (present & (state.assignment[kept.parent] >= 0))
            counts = torch.stack([(known * stays).sum(), (known * (1 - stays)).sum()])
            memory["stays"] = counts if state.stays is None else FADING * state.stays + counts
        return memory

    def _recall(self, state: Hypotheses) -> tuple[Tensor, float]:
        """Where the clients were in the round before, anywhere in the first, and how likely one stays there."""
        shape = (*state.assignment.shape, state.num_clusters)
        anywhere = torch.full(shape, 1 / state.num_clusters, dtype=torch.float64)
        membership = anywhere if state.membership is None else state.membership
        return membership, self.stay if isinstance(self.stay, float) else learned_stay(state.stays)

    def _power(self, clients: Clients) -> Tensor:
        return evidence_power(clients.num_examples, self.scoring_examples, self.temperature)  # (client,)
