"""Settings are checked at the border, resolved completely, and named by an identity."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bcfl.client.trainer import Training
from bcfl.data.datasets import DIGITS_FIVE
from bcfl.methods import METHODS, entry_of, method_of
from bcfl.runs.fields import Setting, settings_in
from bcfl.runs.sections import SECTIONS, DataConfig, ExperimentConfig, ModelConfig
from bcfl.runs.settings import (
    YOUNGER,
    Config,
    apply_override,
    kept_config,
    load_config,
    parse_config,
)

NAMES = [name.replace("-M", "-3") for name in METHODS]


def refusal(values: object) -> str:
    with pytest.raises(ValueError) as caught:
        parse_config(values)
    return str(caught.value)


def test_without_a_file_the_default_run_is_described() -> None:
    config = load_config(None)
    assert (config.data.name, config.data.partition) == ("digits", "feature(4,5)")
    assert (config.method["name"], config.method["num_clusters"]) == ("bcfl-mh-3", 4)
    assert (config.training, config.experiment) == (Training(), ExperimentConfig())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dta": {}}, "unknown section dta; did you mean data?"),
        ([], "settings must be sections of keys, got []"),
        ({"sweep": {"seeds": [0]}}, "section sweep describes several runs: give the file to `bcfl sweep`"),
        ({"data": {"nam": "digits"}}, "unknown key data.nam; did you mean data.name?"),
        ({"training": {"learningrate": 1}}, "did you mean training.learning_rate?"),
        ({"method": {"clusters": 4}}, "did you mean method.num_clusters?"),
        ({"method": {"learning_rate": 1}}, "unknown key method.learning_rate; did you mean training.learning_rate?"),
        ({"method": {"rounds": 1}}, "did you mean experiment.rounds?"),  # though search_rounds is nearly so called
        ({"training": {"seed": 1}}, "did you mean data.seed or experiment.seed?"),
        ({"experiment": {"zzz": 4}}, "unknown key experiment.zzz; allowed: checkpoint_every"),
        ({"data": 3}, "data must be a section of settings, got 3"),
        ({"experiment": {"rounds": 2.0}}, "experiment.rounds must be a whole number, got 2.0"),
        ({"experiment": {"rounds": "many"}}, "experiment.rounds must be a whole number, got 'many'"),
        ({"experiment": {"rounds": True}}, "experiment.rounds must be a whole number, got True"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate must be a number, got 'fast'"),
        ({"training": {"learning_rate": float("inf")}}, "training.learning_rate must be a number, got inf"),
        ({"training": {"learning_rate": True}}, "training.learning_rate must be a number, got True"),
        (
            {"training": {"fisher": "full"}},
            'training.fisher must be "auto" or "examples" or "batch" or "exact", got \'full\'',
        ),
        ({"data": {"name": 7}}, "data.name must be a text, got 7"),
        ({"data": {"rotations": "0"}}, "data.rotations must be a list of whole numbers or \"none\", got '0'"),
        ({"data": {"rotations": ["0"]}}, "data.rotations must be a list of whole numbers or \"none\", got ['0']"),
        ({"data": {"domains": [1]}}, 'data.domains must be a list of texts or "none", got [1]'),
        ({"method": {"cluster_size": [1]}}, 'method.cluster_size must be a list of 2 whole numbers or "none", got [1]'),
        ({"experiment": {"joins": [0, 1]}}, "experiment.joins must be a list of lists of 2 whole numbers, got [0, 1]"),
        ({"method": {"name": 1}}, "method.name must be a text, got 1"),
        ({"method": {"name": "fedavgg"}}, "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ({"method": {"name": "bcfl-mh-0"}}, "must keep at least 1 hypothesis"),
    ],
)
def test_what_is_unknown_or_of_the_wrong_type_is_named(values: dict[str, object], says: str) -> None:
    message = refusal(values)
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("training.learning_rate", [0, -1]),
        ("training.momentum", [-0.1, 1]),
        ("training.batch_size", [0]),
        ("training.local_steps", [0]),
        ("training.fisher_examples", [0]),
        ("experiment.rounds", [0]),
        ("experiment.seed", [-1]),
        ("experiment.evaluate_every", [0]),
        ("experiment.checkpoint_every", [0]),
        ("experiment.clients_per_round", [0, -2, 1.5]),
        ("experiment.dropout", [-0.1, 1]),
        ("experiment.straggling", [1]),
        ("experiment.joins", [[[-1, 2]], [[1, 0]], [[1, 2], [1, 3]]]),
        ("data.share_floor", [1]),
        ("data.min_examples", [0]),
        ("data.min_test_examples", [-1]),
        ("data.validation", [-0.5, 1]),
        ("data.drift_round", [0, 1, 31]),
        ("method.num_clusters", [0]),
        ("method.warm_up_rounds", [-1]),
        ("method.scoring_examples", [0]),
        ("method.evidence_points", [0, 3]),
        ("method.forgetting", [-0.1, 1.1]),
        ("method.min_weight", [1]),
        ("method.give_up_weight", [0, 2]),
        ("method.racing", [-0.1, 1]),
        ("method.temperature", [0]),
        ("method.prior_precision", [-1]),
        ("method.cluster_size", [[3, 2], [-1, 2]]),
        ("method.stay", [0, 1, -0.5, "always"]),
    ],
)
def test_values_out_of_range_are_refused_and_named(key: str, wrong: list[object]) -> None:
    section, name = key.split(".")
    for value in wrong:
        assert f"{key} must be " in refusal({section: {name: value}})


def test_a_share_of_clients_that_change_is_a_share() -> None:
    for wrong in (0, 1.5):
        message = refusal({"data": {"drift_round": 5, "drift_share": wrong}})
        assert message == f"data.drift_share must be in (0, 1], got {wrong}"


def test_published_runs_keep_their_names_and_settings() -> None:
    files = sorted((Path(__file__).parents[2] / "results").glob("*.json"))
    assert len(files) > 400
    for file in files:
        stored = json.loads(file.read_text())["config"]
        config = kept_config(stored)
        assert (config.identity(), config.as_dict()) == (file.stem.rpartition("-")[2], stored), file.name


def test_settings_younger_than_published_runs_leave_their_names_as_they_were() -> None:
    stored = load_config(None).as_dict()
    assert "stay" not in stored["method"]
    assert "racing" not in stored["method"]
    assert "drift_round" not in stored["data"]
    assert "min_test_examples" not in stored["data"]
    remembering = load_config(None, ["method.stay=learn", "data.drift_round=5", "data.min_test_examples=2"])
    assert parse_config(remembering.as_dict()) == remembering


@pytest.mark.parametrize("other", [{"evidence_points": 2}, {"cluster_size": [1, 9]}, {"stay": 0.9}])
def test_racing_is_refused_where_it_would_not_be_right(other: dict[str, object]) -> None:
    assert "method.racing must be 0 (off), or in (0, 1) with" in refusal({"method": {"racing": 0.1, **other}})
    parse_config({"method": {"racing": 0.0, **other}})


@pytest.mark.parametrize("other", [{"racing": 0.01}, {"cluster_size": [1, 9]}])
def test_the_papers_heuristic_goes_without_what_needs_all_of_the_best(other: dict[str, Any]) -> None:
    method = {"name": "bcfl-mh-3", "search": "one_change"}
    assert parse_config({"method": method}).method["search"] == "one_change"
    assert "method.search must be" in refusal({"method": {**method, **other}})


@pytest.mark.parametrize("key", ["sigma", "alpha", "smoothing", "selection"])
def test_options_of_baselines_have_ranges_too(key: str) -> None:
    owner = "fedsoft" if key in ("smoothing", "selection") else "fedamp"
    assert f"method.{key} must be " in refusal({"method": {"name": owner, key: 0}})


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("training.learning_rate", 10**400),
        ("training.learning_rate", 1e308),
        ("training.local_steps", 10**30),
        ("experiment.seed", 10**30),
        ("data.rotations", [10**30]),
        ("method.prior_precision", 1e308),
        ("method.name", "bcfl-mh-9999999"),
    ],
)
def test_numbers_beyond_all_sense_are_refused(key: str, wrong: object) -> None:
    section, name = key.split(".")
    message = refusal({section: {name: wrong}})
    assert key in message or "at most 1,000" in message


def test_numbers_of_more_digits_than_are_written_out_are_refused() -> None:
    assert "experiment.seed must be" in refusal({"experiment": {"seed": 10**5000}})
    assert "at most 1,000" in refusal({"method": {"name": "bcfl-c-" + "9" * 5000}})


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_settings_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(f"[experiment]\nrounds = {'[' * 5000}")
    with pytest.raises(ValueError, match="is not valid TOML: it is nested too deeply"):
        load_config(path)
    for wrong in (nested(100_000), nested(200)):
        assert len(refusal({"experiment": {"rounds": wrong}})) < 300
    with pytest.raises(ValueError, match=r"experiment\.rounds must be a whole number"):
        load_config(None, ["experiment.rounds=" + "[" * 5000])


@pytest.mark.parametrize("text", ["x" * 5000, "a\nb", "\x1b[31m", "a\u2028b"])
def test_texts_and_names_of_several_lines_or_pages_are_refused_in_one_line(text: str) -> None:
    for wrong in ({"method": {"name": text}}, {"method": {"plugin": text}}, {"data": {"partition": text}},
                  {"training": {text: 1}}, {text: {"a": 1}}, {"method": {text: 1}}):  # fmt: skip
        message = refusal(wrong)
        assert message.isprintable()
        assert len(message) < 1500


def test_options_that_no_method_here_has_are_refused_where_they_are_written() -> None:
    with pytest.raises(ValueError, match=r"method\.smoothing is an option of fedsoft, not of fedavg: leave it out"):
        load_config(None, ["method.name=fedavg", "method.smoothing=0.1"])
    shared = ["method.name=fedavg", "method.smoothing=0.1"]
    assert load_config(None, shared, compared=["fedavg", "fedsoft"]) == load_config(None, ["method.name=fedavg"])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"method": {"name": "fedproxy"}}, "unknown method 'fedproxy'; did you mean 'fedprox'?"),
        ({"training": {"loss": "mse"}}, "the likelihood of y says: data.likelihood"),
        ({"training": {"epochs": 2}}, "did you mean training.local_epochs, with training.local = epochs?"),
        ({"training": {"lr": 0.1}}, "did you mean training.learning_rate?"),
    ],
)
def test_what_is_called_otherwise_or_not_offered_is_said(values: dict[str, object], says: str) -> None:
    message = refusal(values)
    assert says in message
    assert "fedamp'?" not in message


def test_an_override_without_its_section_is_told_where_it_belongs() -> None:
    with pytest.raises(ValueError, match=r"got 'rounds'; did you mean experiment\.rounds\?"):
        load_config(None, ["rounds=3"])


@pytest.mark.parametrize("reference", ["mine:<lambda>", "mine", "mine:", "a:b:c", ""])
def test_a_factory_is_a_function_of_a_module(reference: str) -> None:
    for section in ("data", "model"):
        assert f"{section}.factory must be package.module:function" in refusal({section: {"factory": reference}})


def test_spaces_in_a_partition_make_no_other_run() -> None:
    spaced, plain = (load_config(None, [f"data.partition={text}"]) for text in ("feature( 4, 2 )", "feature(4,2)"))
    assert spaced == plain


def test_files_that_are_no_toml_are_named(tmp_path: Path) -> None:
    broken, foreign = tmp_path / "broken.toml", tmp_path / "foreign.toml"
    broken.write_text("[data\n")
    foreign.write_bytes(b"\xff\xfe\x00")
    for path, says in [
        (broken, f"{broken} is not valid TOML"),
        (foreign, f"{foreign} is not valid TOML"),
        (tmp_path / "none.toml", "none.toml does not exist"),
        (tmp_path, f"{tmp_path} cannot be read"),
    ]:
        with pytest.raises(ValueError, match=says):
            load_config(path)


def test_a_section_that_is_a_value_is_refused_wherever_it_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("experiment = 3\n")
    for overrides, own in [((), {}), ((), {"seed": 1}), (("experiment.rounds=2",), {})]:
        with pytest.raises(ValueError, match="experiment must be a section of settings, got 3"):
            load_config(path, overrides, **own)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[method]\nname = "ifca"\n[experiment]\nrounds = 7\nseed = 1\n')
    config = load_config(path, ["experiment.rounds=9"], seed=5)
    assert (config.method["name"], config.experiment.rounds, config.experiment.seed) == ("ifca", 9, 5)
    assert load_config(path, ["experiment.rounds=9"], seed=None).experiment.seed == 1


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("s.k=3", 3),
        ("s.k=-0.5", -0.5),
        ("s.k=1e-3", 1e-3),
        ("s.k=true", True),
        ("s.k=text", "text"),
        ("s.k = spaced ", "spaced"),
        ('s.k="3"', "3"),
        ("s.k=label(4,10,0.1)", "label(4,10,0.1)"),
        ("s.k=[1, 2]", [1, 2]),
        ('s.k=["a", "b"]', ["a", "b"]),
        ("s.k=none", "none"),
        ("s.k=a=b", "a=b"),
        ("s.k=", ""),
    ],
)
def test_overrides_are_read_as_toml_and_otherwise_as_text(override: str, value: object) -> None:
    values: dict[str, object] = {}
    apply_override(values, override)
    assert values == {"s": {"k": value}}


@pytest.mark.parametrize("override", ["rounds", "rounds=3", "=3", ".k=3", "experiment.=3"])
def test_overrides_that_name_no_setting_are_refused(override: str) -> None:
    with pytest.raises(ValueError, match=r"section\.key"):
        apply_override({}, override)


def test_where_data_lie_is_no_part_of_what_a_run_is() -> None:
    config = load_config(None, ["data.name=fashion_mnist", "data.path=here"])
    moved = config.with_data_path("there")
    assert moved.data.path == "there"
    assert moved.identity() == config.identity()


def test_none_empties_what_may_be_empty() -> None:
    config = load_config(None, ["method.scoring_examples=none", "data.seed=none", "method.temperature=none"])
    assert load_config(None, ["data.path=none", "data.factory=none"]).data == load_config(None).data
    assert config.method["scoring_examples"] is None
    assert config.data.seed is None
    assert config.method["temperature"] == "none"  # a name of its own: no tempering
    with pytest.raises(ValueError, match=r"experiment\.rounds must be a whole number"):
        load_config(None, ["experiment.rounds=none"])


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_every_method_is_stored_typed_and_read_back(name: str) -> None:
    config = parse_config({"method": {"name": name}})
    method = method_of(config.method)
    own = {key: value for key, value in dataclasses.asdict(method).items() if key in entry_of(name).options}
    assert config.method == {"name": name, **own}
    for key in own:
        assert settings_in(entry_of(name).build)[key].meaning
        assert f"method.{key} must be" in refusal({"method": {"name": name, key: {"no": "type"}}})


def test_options_that_only_other_methods_have_leave_no_trace() -> None:
    plain, with_others = ({"method": {"name": "fedavg", **more}} for more in ({}, {"num_clusters": 7, "sigma": 2.0}))
    assert parse_config(with_others) == parse_config(plain)
    assert parse_config(with_others).identity() == parse_config(plain).identity()
    assert "method.sigma must be" in refusal({"method": {"name": "fedavg", "sigma": "wide"}})


@pytest.mark.parametrize("name", [*NAMES, "bcfl-g-w", "bcfl-mh-6-w"])
def test_a_configuration_survives_json(name: str) -> None:
    config = parse_config({"method": {"name": name, "cluster_size": [0, 9]}, "data": {"rotations": [0, 90]}})
    again = parse_config(json.loads(json.dumps(config.as_dict())))
    assert (again, again.identity()) == (config, config.identity())


def test_defaults_are_written_out_so_that_they_may_change() -> None:
    config = load_config(None)
    stored = config.as_dict()
    assert stored["model"]["name"] == "mlp"  # what "auto" means for digits
    assert stored["data"]["rotations"] == [0, 90, 180, 270]
    assert stored["method"]["forgetting"] == 0.5
    for name, kind in SECTIONS.items():
        if kind is not None:
            plain = config.all_settings()[name]
            younger = {key for (part, key), off in YOUNGER.items() if part == name and plain[key] == off}
            younger |= {"drift_share"}
            assert set(stored[name]) == {field.name for field in dataclasses.fields(kind)} - younger
    assert load_config(None, ["model.name=mlp"]).identity() == config.identity()


def test_data_of_the_users_own_decide_nothing_about_the_model() -> None:
    assert parse_config({"data": {"factory": "a:b"}}).model == ModelConfig()
    assert parse_config({"data": {"factory": "a:b"}}).label == "own-bcfl-mh-3-s0"
    some = {"name": "digits_five", "domains": ["usps", "optdigits"], "partition": "feature(2,2)"}
    assert parse_config({"data": some}).label == "digits_five-usps-optdigits-bcfl-mh-3-s0"  # not the paper's five
    assert parse_config({"data": some | {"domains": list(DIGITS_FIVE)}}).label == "digits_five-bcfl-mh-3-s0"


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(DataConfig) if field.name != "factory"])
def test_what_own_clients_would_ignore_is_refused_but_read_from_older_runs(key: str) -> None:
    given = {"factory": "a:b", key: getattr(OTHER["data"], key) or "there"}
    own = [f"data.{name}={json.dumps(value)}" for name, value in given.items()]
    if key in ("likelihood", "seed", "validation", "drift_round", "drift_share"):
        own += ["data.drift_round=2"] * (key == "drift_share")
        assert load_config(None, own).data.factory == "a:b"
        return
    with pytest.raises(ValueError, match=f"^data.{key} is for named data sets: leave it out"):
        load_config(None, own)
    assert parse_config({"data": given}).data.factory == "a:b"


@pytest.mark.parametrize(
    ("key", "needed"),
    [("drift_share", "drift_round"), ("partition_file", "partition"), ("clients_per_group", "partition")],
)
def test_what_only_says_something_beside_another_setting_is_refused_without_it(key: str, needed: str) -> None:
    with pytest.raises(ValueError, match=rf"^data.{key} is for data.{needed}"):
        load_config(None, [f"data.{key}={getattr(OTHER['data'], key)}"])


OTHER = {
    "data": DataConfig(
        name="cifar10",
        factory="a:b",
        partition="label(4,5,0.1)",
        partition_file="a.npz",
        clients_per_group=3,
        seed=3,
        share_floor=0.01,
        min_examples=11,
        min_test_examples=2,
        rotations=(0, 90),
        domains=("mnist",),
        likelihood="poisson",
        site="hospital",
        target=("time", "event"),
        test=0.3,
        categories=("cp",),
        drop=("ca",),
        person="patient",
        weight="w",
        offset="o",
        exposure="e",
        rare=2,
        rows="all",
        validation=0.2,
        drift_round=9,
        drift_share=0.5,
    ),
    "model": ModelConfig(name="cifar_cnn", factory="a:b"),
    "training": Training(*(0.01, 0.5, 16, 5, "fresh", "exact", 64), *("adam", 0.1, 1.0, "cosine", 0.9, "epochs", 2)),
    "experiment": ExperimentConfig(31, 1, 2, 2, 0.5, 0.1, 0.1, ((1, 2),), True, 7, "present"),
}
CHANGES = [
    (section, field.name)
    for section, other in OTHER.items()
    for field in dataclasses.fields(other)
    if field.name not in ("path", "drift_share")  # the latter only says something beside drift_round
]


def test_the_identity_is_the_same_in_every_process() -> None:
    assert load_config(None).identity() == parse_config(load_config(None).as_dict()).identity()
    assert len(load_config(None).identity()) == 12


def test_settings_that_came_later_leave_older_runs_their_names() -> None:
    with_them = load_config(None, ["experiment.joins=[[1, 5]]", "experiment.mixture=true"])
    stored = with_them.as_dict()
    assert stored["experiment"]["joins"] == [[1, 5]]
    assert parse_config(json.loads(json.dumps(stored))) == with_them
    for key in ("joins", "mixture"):
        del stored["experiment"][key]
    assert parse_config(stored) == load_config(None)
    assert parse_config(stored).as_dict() == stored


def test_a_run_from_before_jobs_were_done_together_goes_on_one_by_one() -> None:
    stored = load_config(None).as_dict()
    assert stored["experiment"].pop("together") == "auto"
    older = kept_config(stored)
    assert older.experiment.together is None
    assert older.as_dict() == stored
    assert older.identity() == load_config(None, ["experiment.together=none"]).identity()


@pytest.mark.parametrize(("section", "key"), CHANGES)
def test_any_other_setting_is_another_identity(section: str, key: str) -> None:
    config = load_config(None)
    changed = dataclasses.replace(getattr(config, section), **{key: getattr(OTHER[section], key)})
    assert dataclasses.replace(config, **{section: changed}).identity() != config.identity()


@pytest.mark.parametrize("key", sorted(parse_config({}).method.keys() - {"name"}))
def test_any_other_option_of_the_method_is_another_identity(key: str) -> None:
    config = load_config(None)
    changed = dataclasses.replace(config, method={**config.method, key: "something else"})
    assert changed.identity() != config.identity()


def test_where_the_data_lie_is_no_part_of_the_identity() -> None:
    assert load_config(None, ["data.path=elsewhere"]).identity() == load_config(None).identity()


def test_numbers_become_what_their_setting_needs() -> None:
    assert isinstance(Setting(float).check(3, "key"), float)
    assert Setting(tuple[int, int]).check([1, 2], "key") == (1, 2)
    assert Setting(int | None).check("none", "key") is None
    assert isinstance(parse_config({"experiment": {"clients_per_round": 5}}), Config)
