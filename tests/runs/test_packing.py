"""A checkpoint holds any method's state, and those of runs of before states were described are read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

import bcfl
from bcfl.belief.gaussian import Gaussian, flat
from bcfl.extensions.births import Searching
from bcfl.extensions.staying import Remembering
from bcfl.federation import Clients, Hypotheses, Jobs, RoundInfo, one_story
from bcfl.methods import METHODS, Entry, make_method
from bcfl.methods.steps import Personal, single_story
from bcfl.runs.packing import Packed, classes_of, pack, unpack
from bcfl.runs.store import Checkpoint, RunFolder


@dataclass(frozen=True)
class Spread:
    """A part of a state."""

    scale: Tensor
    beliefs: list[Gaussian]
    rounds: tuple[int, ...]
    seen: Mapping[str, Tensor | None]
    share: float


@dataclass(frozen=True)
class Rich:
    """A state of whatever can be stored."""

    hypotheses: Hypotheses
    spread: Spread | None
    unheard: Tensor

    def serving(self) -> None:
        return


@dataclass(frozen=True)
class Mixed:
    """A method whose state is its own."""

    def init(self, clients: Clients) -> Rich:
        start = flat(clients.draw_model(0, 0)[None])
        hypotheses = single_story(start, torch.zeros(len(clients.present), dtype=torch.int64))
        spread = Spread(torch.tensor(0.5), [start[0]], (0,), {"first": start.mean[0], "last": None}, 0.1)
        return Rich(hypotheses, spread, torch.zeros(0, 2, dtype=torch.bool))

    def round(self, state: Rich, clients: Clients) -> tuple[Rich, RoundInfo]:
        assert state.spread is not None
        present = clients.present.nonzero()[:, 0]
        answers = clients.fit(state.hypotheses.models, Jobs(torch.zeros_like(present), present))
        came = [posterior for posterior in answers if posterior is not None]
        mean = torch.stack([posterior.mean for posterior in came]).mean(0) * state.spread.share**0.01
        spread = replace(state.spread, beliefs=came, rounds=(*state.spread.rounds, clients.round))
        hypotheses = single_story(flat(mean[None]), state.hypotheses.assignment)
        probability = torch.ones(len(clients.present), 1, dtype=torch.float64)
        info = replace(one_story(hypotheses), probability=probability)
        return replace(state, hypotheses=hypotheses, spread=spread), info


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mixed", Entry("mixed", "", Mixed, {}))


def linear() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def two_clients() -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, generator=draws), torch.tensor([0, 1] * 4)) for _ in range(2)]


def train(out: Path | None, rounds: int = 4, **options: Any) -> bcfl.Result:
    return bcfl.train(linear, two_clients(), method="mixed", rounds=rounds, num_workers=1, out=out, **options)


def same(one: Any, other: Any) -> bool:
    mine, yours = pack(one), pack(other)
    return mine.form == yours.form and all(torch.equal(mine.tensors[key], yours.tensors[key]) for key in mine.tensors)


def test_a_method_with_a_state_of_its_own_is_stored_and_resumed(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    assert same(bcfl.load(tmp_path / "whole", linear).state, whole.state)
    assert isinstance(whole.state, Rich)
    assert whole.state.spread is not None
    assert whole.state.spread.rounds == (0, 1, 2, 3, 4)
    half = train(tmp_path / "half", 2)
    longer = train(tmp_path / "longer", go_on_from=tmp_path / "half")
    assert same(longer.state, whole.state)
    assert not same(half.state, whole.state)


def test_what_a_round_tells_of_probabilities_is_the_result_s(tmp_path: Path) -> None:
    assert train(tmp_path / "run").probability.tolist() == [[1.0]] * 2
    assert bcfl.load(tmp_path / "run", linear).probability.tolist() == [[1.0]] * 2


def test_tensors_that_share_their_memory_are_stored(tmp_path: Path) -> None:
    hypotheses = single_story(flat(torch.ones(2, 3)), torch.zeros(4, dtype=torch.int64))
    state = Personal(hypotheses, hypotheses.models.mean)
    folder = RunFolder.create(tmp_path / "run", {})
    folder.save_checkpoint(Checkpoint(0, pack(state), {}))
    kept = folder.last_checkpoint().state
    assert same(unpack(kept, classes_of(make_method("fedsoft", {}))), state)


def test_what_cannot_be_stored_is_named() -> None:
    hypotheses = single_story(flat(torch.ones(1, 3)), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"state.personal cannot be stored: it is a set"):
        pack(Personal(hypotheses, {1, 2}))  # type: ignore[arg-type]


def test_a_class_that_the_method_does_not_tell_of_is_not_made() -> None:
    hypotheses = single_story(flat(torch.ones(1, 3)), torch.zeros(2, dtype=torch.int64))
    packed = pack(Personal(hypotheses, torch.zeros(2, 3)))
    with pytest.raises(ValueError, match="the checkpoint holds a Personal, and the method knows only"):
        unpack(packed, classes_of(make_method("fedavg", {})))


@pytest.mark.parametrize(
    ("method", "options", "fields", "expected"),
    [
        ("bcfl-mh-3", {}, {}, Hypotheses),
        ("bcfl-mh-3", {"stay": 0.9}, {"membership": torch.full((1, 4, 2), 0.5)}, Remembering),
        (
            "bcfl-mh-3",
            {"stay": "learn"},
            {"membership": torch.full((1, 4, 2), 0.5), "stays": torch.tensor([3.0, 1.0])},
            Remembering,
        ),
        ("bcfl-auto", {}, {"sketch": torch.ones(4, 512)}, Searching),
        ("fedsoft", {}, {"personal": torch.ones(4, 3)}, Personal),
        ("bp-fedavg", {}, {"personal": torch.ones(4, 3)}, Personal),
    ],
)
def test_a_checkpoint_without_a_description_is_read(
    method: str, options: Any, fields: dict[str, Tensor], expected: type, tmp_path: Path
) -> None:
    """As every version before had them: all methods' states in the same fields, some of them left out."""
    hypotheses = single_story(flat(torch.ones(2, 3)), torch.zeros(4, dtype=torch.int64))
    named = {f"models.{name}": getattr(hypotheses.models, name).contiguous() for name in ("mean", "precision")}
    for name in ("model_of", "log_weight", "assignment", "parent_of", "family"):
        named[name] = getattr(hypotheses, name)
    assert save(named | fields)
    state = unpack(Packed(named | fields, None), classes_of(make_method(method, options)))
    assert type(state) is expected
    assert same(state.hypotheses, hypotheses)
    assert all(torch.equal(getattr(state, name), values) for name, values in fields.items())
