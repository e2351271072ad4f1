"""Who takes part in a round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.randomness import numpy_generator


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round, who vanishes and who is late; all of it drawn from the run's seed."""

    clients_per_round: float = 1.0  # up to 1: a share of all clients; above: their number
    dropout: float = 0.0  # probability that a chosen client vanishes before it answers anything
    straggling: float = 0.0  # probability that a client answers a score in time, but not a fit
    joins: tuple[tuple[int, int], ...] = ()  # (client, the first round it can take part in); all others from the start

    def joined(self, num_clients: int, round_index: int) -> Tensor:
        """Who belongs to the federation by that round."""  # (client,) bool
        joined = torch.ones(num_clients, dtype=torch.bool)
        for client, first_round in self.joins:
            joined[client] = round_index >= first_round
        return joined

    def draw(self, num_clients: int, seed: int, round_index: int) -> tuple[Tensor, Tensor]:
        """Who is present and who is in time for the fit; at least one client is present."""  # (client,) bool each
        random = numpy_generator(seed, "participation", round_index)
        share, joined = self.clients_per_round, self.joined(num_clients, round_index)
        num_joined = int(joined.sum())
        count = round(share * num_joined) if share <= 1 else int(share)
        present = torch.zeros(num_clients, dtype=torch.bool)
        order = random.permutation(num_clients)
        chosen = order[joined.numpy()[order]][: min(max(count, 1), num_joined)]
        vanished = random.random(len(chosen)) < self.dropout
        vanished[0] &= not vanished.all()  # a round needs somebody
        present[chosen[~vanished]] = True
        in_time = torch.from_numpy(random.random(num_clients) >= self.straggling)
        return present, in_time
