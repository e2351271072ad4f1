"""What y is, given a network's output: classes, yes or no, real values, counts, times, or a function of your own.

    poisson = likelihood.of("poisson", extras="exposure")  # as a setting: model.likelihood = "poisson(extras=exposure)"
    poisson.log_prob(output, y)                            # (..., example)

A `Family` is the mathematics of one kind of target (`classes`, `real`, `counts`, …). A `Likelihood` is a family with
what goes for all of them: extra columns of y (weight, offset, exposure), which stand last in it, and for whom the
family's unknowns are: one for all sites, or one per cluster.

The unknowns (a noise scale, a dispersion, cut points) are ordinary parameters, the first ones of the flat vector.
`attach(factory, likelihood)` makes modules that append them, expanded, to the network's output as its last columns. So
whatever trains, sends, stores or protects parameters does so with them too, and the last layer stays last. `output` in
all that is said here includes them. A plain categorical likelihood attaches nothing: the module stays as it is, and
`likelihood_of(module)` is categorical wherever nothing is attached.

Every function takes leading dimensions: output (..., example, output), y (example, ...).
"""

from bcfl.likelihood.attached import Attached, Unknowns, attach, likelihood_of, network_of
from bcfl.likelihood.contract import EXTRAS, PER, Family, Likelihood, mean_loss
from bcfl.likelihood.own import OWN, Own
from bcfl.likelihood.registry import AUTO, CATEGORICAL, FAMILIES, choose, given, of, parse

__all__ = [
    "AUTO",
    "CATEGORICAL",
    "EXTRAS",
    "FAMILIES",
    "OWN",
    "PER",
    "Attached",
    "Family",
    "Likelihood",
    "Own",
    "Unknowns",
    "attach",
    "choose",
    "given",
    "likelihood_of",
    "mean_loss",
    "network_of",
    "of",
    "parse",
]
