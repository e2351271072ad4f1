"""The options that several methods have: what each may be and what it means."""

from typing import Annotated, Literal

from pydantic import Field

from bcfl.belief.evidence import PointKind
from bcfl.belief.gaussian import FusionRule
from bcfl.belief.robust import Robust

NumClusters = Annotated[int, Field(ge=1, le=1_000_000, description="K, the number of clusters")]
WarmUpRounds = Annotated[
    int,
    Field(
        ge=0,
        le=10_000,
        description="clients first train alone, for so many rounds' steps at a stretch, before their models are "
        "grouped; -w in a name sets 2",
    ),
]
Forgetting = Annotated[
    float, Field(ge=0, le=1, description="the share of a belief's precision that is forgotten from round to round")
]
PriorPrecision = Annotated[float, Field(ge=0, le=1e12, description="of the beliefs at the start")]
Tempering = Annotated[
    Annotated[float, Field(ge=1e-9, le=1e9)] | Literal["per_example", "none"],
    Field(description='log-likelihoods are divided by it: a number, "none" (1), or the client\'s number of examples'),
]
EvidencePoints = Annotated[
    int, Field(ge=1, le=10_000, description="at how many points of a belief its evidence is taken; 1: at its mean")
]
EvidenceKind = Annotated[PointKind, Field(description="which points, if more than one")]
ScoringExamples = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description='at most so many of a client\'s examples are scored in a round; "none": all'),
]
Fusing = Annotated[FusionRule, Field(description="how a cluster's belief is made of its clients'")]
MinWeight = Annotated[float, Field(ge=0, lt=1, description="hypotheses that weigh less are dropped")]
Proximal = Annotated[
    float, Field(ge=0, le=1e9, description="how strongly a client's training is drawn to the model it was sent")
]
Defence = Annotated[
    Robust,
    Field(
        description="what a few clients can do to a fusion is bounded: posteriors of unusual size are cut (clip), or "
        "the median or the trimmed mean of all is taken"
    ),
]
