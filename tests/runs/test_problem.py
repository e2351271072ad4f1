"""What a configuration stands for is checked, and what is odd about a user's own data, model or method is said."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bcfl
from bcfl.cli import main
from bcfl.methods import METHODS, Entry

Clients = list[tuple[torch.Tensor, torch.Tensor]]


def labelled(*labels: int) -> Clients:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    return [(x, torch.tensor(labels).repeat(12 // len(labels)))] * 2


@pytest.mark.parametrize(
    ("clients", "make", "says"),
    [
        (labelled(1), lambda: nn.Linear(3, 2), "all labels are 1: there is nothing to tell apart"),
        (labelled(1, 2), lambda: nn.Linear(3, 3), "no label is 0, though the highest is 2"),
        (labelled(0, 3), lambda: nn.Linear(3, 4), "no label is 1, though the highest is 3"),
        (labelled(0, 1), lambda: nn.Linear(3, 10), "the model has scores for 10 classes, the labels only 2"),
        (labelled(0, 1), lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)), "the model returns probabilities"),
        (labelled(0, 1), lambda: nn.Linear(3, 2), ""),
        (labelled(0, 1), lambda: nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1)), ""),
    ],
)
def test_labels_and_scores_that_do_not_fit_each_other_get_one_line(
    clients: Clients, make: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    bcfl.train(make, clients, method="fedavg", rounds=1, num_workers=1)
    assert [record.getMessage().startswith(says) for record in caplog.records] == [True] * bool(says)


@dataclass(frozen=True)
class Wrong:
    """Returns what no loop can go on with."""

    at_start: Any
    later: Any = None

    def init(self, clients: Any) -> Any:
        return METHODS["fedavg"].build().init(clients) if self.at_start is None else self.at_start

    def round(self, state: Any, clients: Any) -> Any:
        return self.later


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (Wrong(3), "method 'wrong': init must return a state, .* it returned int"),
        (Wrong(None, None), "method 'wrong': round must return .*; it returned NoneType"),
        (Wrong(None, (1, 2)), r"method 'wrong': round must return .*; it returned \(int, int\)"),
        (Wrong(None, (1, 2, 3)), r"it returned \(int, int, int\)"),
    ],
)
def test_a_method_that_answers_something_else_is_named(
    method: Wrong, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        METHODS, "wrong", Entry("wrong", "", Wrong, {"at_start": method.at_start, "later": method.later})
    )
    with pytest.raises(ValueError, match=says):
        bcfl.train(lambda: nn.Linear(3, 2), labelled(0, 1), method="wrong", rounds=1, num_workers=1)


def test_a_module_in_the_place_of_a_function_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "with_a_net.py").write_text("import torch\nnet = torch.nn.Linear(64, 10)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["run", "--set", "model.factory=with_a_net:net", "--out", "run"]) == 2
    assert "must be a function that returns a new torch.nn.Module, got a Linear" in capsys.readouterr().err


def test_wecfl_with_one_cluster_is_fedprox_and_without_its_term_fedavg() -> None:
    how: dict[str, Any] = {"rounds": 3, "num_workers": 1, "batch_size": 4}
    clients, make = labelled(0, 1), lambda: nn.Linear(3, 2)
    averaged = bcfl.train(make, clients, method="fedavg", **how).state.models.mean
    without, with_term = (
        bcfl.train(make, clients, method="wecfl", num_clusters=1, proximal=p, **how).state.models.mean for p in (0, 10)
    )
    assert torch.allclose(without, averaged, atol=1e-6)
    assert not torch.allclose(with_term, averaged, atol=1e-2)
