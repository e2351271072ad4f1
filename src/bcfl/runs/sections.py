"""The sections of a run's settings: each field has its bounds and says what it is for."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from bcfl.client.trainer import Training
from bcfl.engines.participation import Participation
from bcfl.likelihood import AUTO, given

FROM_PYTHON = "given in Python"  # stands for a factory where a caller brought clients or a model of their own


def _is_reference(text: str) -> str:
    if text != FROM_PYTHON and not re.fullmatch(r"\w+(\.\w+)*:\w+", text):
        raise ValueError("package.module:function")
    return text


def _is_share_or_count(number: float) -> float:
    if not (0 < number <= 1 or (1 < number <= 1e15 and number.is_integer())):
        raise ValueError("a share in (0, 1] or a whole number of clients")
    return number


def _are_joins(joins: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    once = len(dict(joins)) == len(joins)
    if not (once and all(client >= 0 and first_round >= 1 for client, first_round in joins)):
        raise ValueError("a list of [client, first round ≥ 1], every client once")
    return joins


def _is_likelihood(text: str) -> str:
    if text != FROM_PYTHON:
        try:
            given(text)
        except ValueError as error:  # what is said after "must be"
            raise ValueError(f"a likelihood ({error})") from None
    return text


Reference = Annotated[str, AfterValidator(_is_reference)]
Seed = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class DataConfig:
    """[data] which examples there are, and which client holds which."""

    name: Annotated[str, Field(description="the data set, of those in `bcfl list datasets`")] = "digits"
    path: Annotated[
        str | None, Field(description="a folder or file with the data set, where it is not found by itself")
    ] = None
    factory: Annotated[
        Reference | None,
        Field(description="package.module:function that returns a list of clients, instead of a named set"),
    ] = None
    partition: Annotated[
        str, Field(description="how it is cut into clients: feature(G,n), label(G,n,α), file, or sites")
    ] = "feature(4,5)"
    partition_file: Annotated[str | None, Field(description='the split to load, for partition = "file"')] = None
    clients_per_group: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(description='for partition = "file", where true groups are so many clients one after the other'),
    ] = None
    seed: Annotated[Seed | None, Field(description="the split's own seed; \"none\": the run's")] = None
    share_floor: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="shares of a class are rounded down to multiples of it; the paper's code has 0.01 (only for "
            "label)",
        ),
    ] = 0.0
    min_examples: Annotated[
        int, Field(ge=1, description="of every client; a draw that gives one fewer is drawn again")
    ] = 10
    min_test_examples: Annotated[int, Field(ge=0, description="as above, of test examples")] = 1
    likelihood: Annotated[
        str,
        AfterValidator(_is_likelihood),
        Field(
            description="what y is, of `bcfl list likelihoods`: poisson, normal(scale=network); auto: classes if y are "
            "whole numbers, normal if they are real"
        ),
    ] = AUTO
    rotations: Annotated[
        tuple[int, ...] | None,
        Field(description='of digits, the degrees by which the groups\' images are turned; "none": 0, 90, 180, 270'),
    ] = None
    domains: Annotated[
        tuple[str, ...] | None, Field(description='of digits_five, which collections; "none": the paper\'s five')
    ] = None
    site: Annotated[str | None, Field(description="of a table, the column that says which site a row is from")] = None
    target: Annotated[
        str | tuple[str, ...] | None, Field(description="of a table, the column to predict, or [time, event]")
    ] = None
    test: Annotated[
        float | str | None,
        Field(
            description="of a table, the share of each site's rows to test on, the column that says which, or a second "
            'file; "none": a quarter'
        ),
    ] = None
    categories: Annotated[
        tuple[str, ...] | None, Field(description="of a table, columns of numbers that stand for kinds")
    ] = None
    drop: Annotated[tuple[str, ...] | None, Field(description="of a table, columns to leave out")] = None
    person: Annotated[
        str | None, Field(description="of a table, the column that says whose row it is: nobody is on both sides")
    ] = None
    weight: Annotated[str | None, Field(description="of a table, the column of rows' weights")] = None
    offset: Annotated[str | None, Field(description="of a table, a column that is added to the first output")] = None
    exposure: Annotated[str | None, Field(description="of a table, a column whose logarithm is added to it")] = None
    rare: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(description='of a table, categories with fewer training rows share an input; "none": 5'),
    ] = None
    rows: Annotated[
        Literal["complete", "all"] | None,
        Field(description="of heart, patients of whom nothing is missing, or all of them"),
    ] = None
    validation: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="test on this share of the clients' training data, which is then not trained on, instead of "
            "the test data",
        ),
    ] = 0.0
    drift_round: Annotated[
        Annotated[int, Field(ge=2)] | None,
        Field(description="from this round on some clients hold the data of a client of another group"),
    ] = None
    drift_share: Annotated[
        float, Field(gt=0, le=1, description="of the clients: so many change, in pairs that swap their data")
    ] = 0.25


@dataclass(frozen=True)
class ModelConfig:
    """[model] the network that every cluster has."""

    name: Annotated[str, Field(description="one of `bcfl list models`; auto: what suits the data set")] = "auto"
    factory: Annotated[
        Reference | None,
        Field(description="package.module:function that returns a torch.nn.Module, instead of a named model"),
    ] = None


@dataclass(frozen=True)
class ExperimentConfig:
    """[experiment] how long, from which seed, who takes part, what is kept."""

    rounds: Annotated[
        int, Field(ge=1, le=1_000_000, description="rounds: in each, clients are placed and models trained")
    ] = 30
    seed: Annotated[
        Seed,
        Field(description="of all that is drawn: models, batches, who takes part, and the split unless it has its own"),
    ] = 0
    evaluate_every: Annotated[int, Field(ge=1, description="test in every so many rounds, and in the last")] = 1
    checkpoint_every: Annotated[int, Field(ge=1, description="so many rounds may be lost if the machine stops")] = 1
    clients_per_round: Annotated[
        float,
        AfterValidator(_is_share_or_count),
        Field(description="up to 1: the share of clients that takes part in a round; above: their number"),
    ] = 1.0
    dropout: Annotated[
        float,
        Field(ge=0, lt=1, description="the probability that a chosen client vanishes before it answers anything"),
    ] = 0.0
    straggling: Annotated[
        float, Field(ge=0, lt=1, description="the probability that it answers a score in time, but not a fit")
    ] = 0.0
    joins: Annotated[
        tuple[tuple[int, int], ...],
        AfterValidator(_are_joins),
        Field(description="[[client, first round], …]: who is not there from the start"),
    ] = ()
    mixture: Annotated[
        bool, Field(description="evaluate each client's mixture over the hypotheses, too, beside its best model")
    ] = False
    together: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1)] | None,
        Field(
            description="how many clients are trained at a time by the same operations; auto: by the size of model and "
            'batches, many where these are small; "none": one by one, and on a GPU as many as its memory holds, as in '
            "runs of before this setting"
        ),
    ] = "auto"

    evaluate: Annotated[
        Literal["all", "present"],
        Field(description="test all clients, or only those that took part in the round"),
    ] = "all"

    def participation(self) -> Participation:
        return Participation(self.clients_per_round, self.dropout, self.straggling, self.joins)


SECTIONS: dict[str, Any] = {
    "data": DataConfig,
    "model": ModelConfig,
    "method": None,  # its keys are the methods' own options
    "training": Training,
    "experiment": ExperimentConfig,
}
