"""A method of one's own works in every command: it is a module that is named once."""

import json
import sys
from pathlib import Path

import pytest

from bcfl.cli import main
from bcfl.methods import METHODS

MEDIAN = """
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from bcfl.belief.gaussian import flat
from bcfl.federation import Jobs, one_story
from bcfl.methods import register
from bcfl.methods.steps import single_story


@register("fedmiddle")
@dataclass(frozen=True)
class FedMiddle:
    \"\"\"One global model in the middle of the clients'.\"\"\"

    pull: Annotated[float, Field(gt=0, le=1, description="how far the model goes to the middle")] = 1.0

    def init(self, clients):
        return single_story(flat(clients.draw_model(0, 0)[None]), torch.zeros(len(clients.present), dtype=torch.int64))

    def round(self, state, clients):
        present = clients.present.nonzero()[:, 0]
        answers = clients.fit(state.models, Jobs(belief=torch.zeros_like(present), client=present))
        middle = torch.stack([one.mean for one in answers if one is not None]).median(0).values
        mean = state.models.mean[0].lerp(middle, self.pull)
        new = single_story(flat(mean[None]), state.assignment)
        return new, one_story(new)
"""
SMALL = ["--set", "data.partition=feature(4,2)", "--set", "experiment.rounds=2", "--set", "training.local_steps=2"]
PLUGIN = ["--plugin", "middle"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "middle.py").write_text(MEDIAN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setitem(METHODS, "fedmiddle", METHODS["fedavg"])  # so that it is gone again at the end
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process: nobody has named the module yet."""
    monkeypatch.delitem(sys.modules, "middle", raising=False)
    del METHODS["fedmiddle"]


def test_a_method_of_ones_own_works_in_every_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", *SMALL, *PLUGIN, "--set", "method.name=fedmiddle", "--out", "runs/a", "--quiet"]) == 0
    forget(monkeypatch)
    assert main(["run", "--set", "method.name=fedmiddle"]) == 2  # it must be named
    assert main(["table", "runs"]) == 0  # what has been measured is shown all the same
    assert "fedmiddle" in capsys.readouterr().out
    assert main(["list", "methods", *PLUGIN, "--json"]) == 0
    assert "fedmiddle" in json.loads(capsys.readouterr().out)
    forget(monkeypatch)
    (folder / "runs/a/result.json").unlink()
    assert main(["resume", "runs/a", *PLUGIN, "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    forget(monkeypatch)
    compared = ["compare", *SMALL, *PLUGIN, "--methods", "fedavg,fedmiddle", "--out", "all", "--jobs", "2", "--quiet"]
    assert main([*compared, "--json"]) == 0
    assert [run["method"] for run in json.loads(capsys.readouterr().out)] == ["fedavg", "fedmiddle"]


def test_its_options_are_checked_as_others_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, *PLUGIN, "--set", "method.name=fedmiddle", "--set", "method.pull=2"]) == 2
    assert "method.pull" in capsys.readouterr().err
    assert main(["list", "settings", *PLUGIN]) == 0
    assert "method.pull" in capsys.readouterr().out


def test_a_module_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run"], ["list"], ["table", "runs"]):
        assert main([*command, "--plugin", "nowhere"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "nowhere" in line
