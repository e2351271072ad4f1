"""What a federation runs: settings that suit its clients, and reach them as they are."""

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from bcfl.deploy.app import read_run_config
from bcfl.deploy.folder import run_config
from bcfl.deploy.terms import read_settings


@pytest.mark.parametrize(
    ("clients", "partition", "clusters"),
    [
        (8, "feature(4,2)", 4),
        (6, "feature(3,2)", 3),
        (4, "feature(2,2)", 2),
        (3, "feature(3,1)", 3),
        (2, "feature(2,1)", 2),
        (5, "label(0,5,0.5)", 2),
    ],
)
def test_what_is_left_open_suits_the_number_of_clients(clients: int, partition: str, clusters: int) -> None:
    config, terms = read_settings(None, [], clients)
    assert (config.data.partition, config.method["num_clusters"]) == (partition, clusters)
    assert terms["num_clients"] == clients


def test_the_number_of_clients_may_be_set_like_any_other_setting() -> None:
    config, terms = read_settings(None, ["deploy.num_clients=6"], None)
    assert (config.data.partition, terms["num_clients"]) == ("feature(3,2)", 6)
    assert read_settings(None, ["deploy.num_clients=6"], 6) == (config, terms)
    assert read_settings(None, [], None)[1]["num_clients"] == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("7", "deploy.num_clients is 7, but --clients says 3: give only one of them"),
        ("3.0", r"deploy\.num_clients must be a whole number"),
    ],
)
def test_a_number_of_clients_that_contradicts_or_is_none_is_refused(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(None, [f"deploy.num_clients={value}"], 3)


def test_rotations_that_were_asked_for_are_kept() -> None:
    config, _ = read_settings(None, ["data.rotations=[0,180]"], 4)
    assert config.data.rotations == (0, 180)
    assert (config.data.partition, config.method["num_clusters"]) == ("feature(2,2)", 2)
    with pytest.raises(ValueError, match=r"data\.rotations must be as many as divide 4 clients evenly"):
        read_settings(None, ["data.rotations=[0,90,180]"], 4)
    with pytest.raises(ValueError, match=r"data\.rotations must be a list"):
        read_settings(None, ["data.rotations=3"], 4)


@pytest.mark.parametrize("section", ["data", "deploy", "method", "experiment"])
def test_a_section_that_is_none_is_named(tmp_path: Path, section: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f"{section} = 3\n")
    with pytest.raises(ValueError, match=f"^{section} must be a section of settings, got 3$"):
        read_settings(path, [], 4)


@pytest.mark.parametrize("overrides", [[], ["method.temperature=none"], ["method.stay=none", "method.temperature=2.0"]])
def test_settings_reach_the_server_as_they_are(overrides: list[str]) -> None:
    """Of what is written as "none", some means nothing (data.path) and some is a choice (method.temperature)."""
    config, terms = read_settings(None, overrides, 4)
    assert read_run_config(run_config(config, terms))[0] == config


def test_settings_that_do_not_fit_the_clients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'feature\(4,5\)' makes 20 clients, the federation has 3 \(--clients\)"):
        read_settings(None, ["data.partition=feature(4,5)"], 3)
    with pytest.raises(ValueError, match=r"'label\(0,5,0\.5\)' makes 5 clients, the federation has 3 \(--clients\)"):
        read_settings(None, ["data.partition=label(0, 5, 0.5)"], 3)
    with pytest.raises(ValueError, match=r"partition 'feature\(3\)' is not one of"):
        read_settings(None, ["data.partition=feature(3)"], 3)
    read_settings(None, ["data.partition=file", "data.partition_file=split.npz"], 4)  # which knows how many it makes
    with pytest.raises(ValueError, match=r"method\.num_clusters is 7, but there are only 3 clients"):
        read_settings(None, ["method.num_clusters=7"], 3)
    with pytest.raises(ValueError, match=r"experiment\.joins names client 9, but the clients are 0 to 2"):
        read_settings(None, ["experiment.joins=[[9, 2]]"], 3)
    with pytest.raises(ValueError, match=r"600 hypotheses .* allow only 16"):
        read_settings(None, ["method.name=bcfl-mh-600"], 4)
    with pytest.raises(ValueError, match=r"deploy\.min_share must be in"):
        read_settings(None, ["deploy.min_share=2.0"], 3)
    with pytest.raises(ValueError, match=r"did you mean deploy\.deadline"):
        read_settings(None, ["deploy.deadlin=2.0"], 3)
