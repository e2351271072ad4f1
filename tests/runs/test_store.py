"""A run folder: files are whole or absent, damage is noticed, told and survived."""

import errno
import json
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_runs import files_in

import bcfl
from bcfl.belief.gaussian import Gaussian
from bcfl.federation import Hypotheses
from bcfl.runs import store
from bcfl.runs.packing import Packed, pack
from bcfl.runs.store import LOGS, MEASURED, Checkpoint, RunFolder, TakenError, new_folder

CONFIG = {"method": {"name": "bcfl-g"}}


def state(seed: int) -> Hypotheses:
    draws = torch.Generator().manual_seed(seed)
    return Hypotheses(
        models=Gaussian(torch.randn(4, 9, generator=draws), torch.rand(4, 9, generator=draws)),
        model_of=torch.tensor([[0, 1], [2, 3]]),
        log_weight=torch.tensor([0.75, 0.25], dtype=torch.float64).log(),
        assignment=torch.randint(-1, 2, (2, 5), generator=draws),
        parent_of=torch.tensor([0, 1, 0, 1]),
        family=torch.tensor([0, 1]),
    )


def same(packed: Packed, b: Hypotheses) -> bool:
    mine, yours = packed.tensors, pack(b).tensors
    return mine.keys() == yours.keys() and all(torch.equal(mine[key], yours[key]) for key in mine)


def a_run(path: Path, rounds: int = 3) -> RunFolder:
    """A folder as a run leaves it after so many rounds."""
    folder = RunFolder.create(path, CONFIG)
    for index in range(rounds + 1):
        for name in LOGS:
            folder.append(name, {"round": index, "name": name})
        folder.save_checkpoint(Checkpoint(index, pack(state(index)), {}))
    return folder


def checkpoints(folder: RunFolder) -> list[Path]:
    return sorted((folder.path / "checkpoints").iterdir())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_a_bit(path: Path, position: int = -20) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    folder.save_checkpoint(Checkpoint(5, pack(state(1)), {}))
    restored = RunFolder.open(folder.path).standing().checkpoint
    assert restored is not None
    assert (restored.round, restored.momentum) == (5, {})
    assert same(restored.state, state(1))


def test_kept_momentum_comes_back_in_its_order(tmp_path: Path) -> None:
    """A client may go on with the latest momentum that it kept: the order is part of the state."""
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    beliefs = [3, 12, 2, 100, 11, 0, 1, 4, 5, 6, 7, 8]  # neither sorted as numbers nor as texts, and more than ten
    momentum = {client: {belief: torch.randn(4) for belief in beliefs} for client in (10, 9, 0)}
    folder.save_checkpoint(Checkpoint(1, pack(state(1)), momentum))
    restored = folder.standing().checkpoint
    assert restored is not None
    assert restored.momentum.keys() == momentum.keys()
    for client, kept in momentum.items():
        assert list(restored.momentum[client]) == beliefs
        assert all(torch.equal(restored.momentum[client][belief], vector) for belief, vector in kept.items())


def test_only_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", 12)
    assert [path.name for path in checkpoints(folder)] == ["round-000011.safetensors", "round-000012.safetensors"]


def test_lines_after_the_checkpoint_and_leftovers_of_a_kill_are_cut_off(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    whole = {name: (folder.path / name).read_bytes() for name in LOGS}
    for name in LOGS:
        folder.append(name, {"round": 4})
        with (folder.path / name).open("ab") as file:
            file.write(b'{"round": 5, "cut sho')
    for leftover in ("result.json.tmp", "checkpoints/round-000004.safetensors.tmp"):
        (folder.path / leftover).write_bytes(b"half")
    standing = folder.standing()
    assert standing.checkpoint is not None
    assert (standing.checkpoint.round, standing.notes) == (3, [])
    folder.go_back_to(standing)
    assert {name: (folder.path / name).read_bytes() for name in LOGS} == whole
    assert not list(folder.path.rglob("*.tmp"))


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit])
def test_a_damaged_last_checkpoint_falls_back_to_the_one_before_and_says_so(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = a_run(tmp_path / "run")
    damage(checkpoints(folder)[-1])
    standing = folder.standing()
    assert standing.checkpoint is not None
    assert standing.checkpoint.round == 2
    assert same(standing.checkpoint.state, state(2))
    assert re.search(r"round-000003.safetensors is damaged", standing.notes[0])
    assert standing.notes[-1] == "going on from round 2"
    folder.go_back_to(standing)
    assert [line["round"] for line in folder.lines("rounds.jsonl")] == [0, 1, 2]
    assert [path.name for path in checkpoints(folder)] == ["round-000002.safetensors"]


def test_with_all_checkpoints_damaged_the_run_starts_again_and_says_so(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    for path in checkpoints(folder):
        truncate(path)
    standing = folder.standing()
    assert standing.checkpoint is None
    assert len(standing.notes) == 3
    assert standing.notes[-1] == "starting again from round 0"
    folder.go_back_to(standing)
    assert all(folder.lines(name) == [] for name in LOGS)


def test_no_flipped_bit_anywhere_in_a_checkpoint_goes_unnoticed(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", 1)
    path = checkpoints(folder)[-1]
    sound, reference = path.read_bytes(), folder.last_checkpoint()
    header = 8 + int.from_bytes(sound[:8], "little")
    noticed = 0
    for position in [*range(header), *range(header, len(sound), 7)]:
        flip_a_bit(path, position)
        try:
            found = folder.last_checkpoint()
        except ValueError:
            noticed += 1
        else:  # a blank of the header's padding, or the order of its entries: what it says is the same
            assert (found.round, same(found.state, reference.state)) == (reference.round, True)
        path.write_bytes(sound)
    assert noticed > 0.9 * (header + (len(sound) - header) / 7)


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_a_log_shorter_than_recorded_does_not_pass(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    folder = a_run(tmp_path / "run")
    damage(folder.path / name)
    standing = folder.standing()
    assert standing.checkpoint is None
    assert f"{name} is shorter than when it was written" in standing.notes[0]
    assert standing.notes[-1] == "starting again from round 0"


def test_a_log_that_lost_its_last_line_falls_back_by_one_round(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    path = folder.path / "rounds.jsonl"
    os.truncate(path, path.stat().st_size - 1)
    restored = folder.standing().checkpoint
    assert restored is not None
    assert restored.round == 2


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    flip_a_bit(folder.path / "rounds.jsonl", 0)
    with pytest.raises(ValueError, match=r"rounds.jsonl is damaged at line 1"):
        folder.lines("rounds.jsonl")


def test_a_damaged_line_before_a_sound_checkpoint_is_in_its_owners_hands(tmp_path: Path) -> None:
    """An older checkpoint would not mend it, and to begin again would lose what is there."""
    folder = a_run(tmp_path / "run")
    path = folder.path / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"x" * (len(lines[1]) - 1) + b"\n" + b"".join(lines[2:]))
    before = {item: item.read_bytes() for item in files_in(folder.path)}
    with pytest.raises(ValueError, match=rf"damaged at line 2: mend it, or delete {folder.path} to run it again"):
        folder.standing()
    assert {item: item.read_bytes() for item in files_in(folder.path)} == before


def test_a_file_that_cannot_be_opened_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run(tmp_path / "run")

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("bcfl.runs.store.safe_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        folder.standing()
    assert len(checkpoints(folder)) == 2


def test_reading_the_last_checkpoint_touches_nothing(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    folder.append("rounds.jsonl", {"round": 4})
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    assert folder.last_checkpoint().round == 3
    truncate(checkpoints(folder)[-1])
    with pytest.raises(ValueError, match=r"round-000003.safetensors is damaged"):
        folder.last_checkpoint()
    assert folder.standing().notes  # finds the damage, and leaves it
    assert folder.lines("rounds.jsonl")[-1] == {"round": 4}
    assert before.keys() == {path for path in folder.path.rglob("*") if path.is_file()}


def hold(path: Path, held: "multiprocessing.synchronize.Event", done: "multiprocessing.synchronize.Event") -> None:
    with RunFolder.open(path).locked():
        held.set()
        done.wait(30)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    context = multiprocessing.get_context("forkserver")
    held, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(folder.path, held, done))
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(ValueError, match="in use by another process"), folder.locked():
            pass
    finally:
        done.set()
        other.join()
    with folder.locked():  # and free again as soon as the other is gone
        pass


def test_a_new_folder_is_the_first_that_nobody_has(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file by that name")
    assert [new_folder(tmp_path / "run").name for _ in range(2)] == ["run-2", "run-3"]
    assert [new_folder(tmp_path / "v0.1").name for _ in range(2)] == ["v0.1", "v0.1-2"]
    assert (tmp_path / "run-3").is_dir()


def test_a_folder_that_holds_anything_is_refused(tmp_path: Path) -> None:
    other, same_run, done, foreign, listing = (tmp_path / name for name in ("other", "same", "done", "a", "b"))
    for folder, content in ((other, None), (foreign, {"model_type": "bert"}), (listing, [1])):
        folder.mkdir()
        if content is not None:
            (folder / "config.json").write_text(json.dumps(content))
    (other / "notes.txt").write_text("mine")
    RunFolder.create(same_run, CONFIG)
    RunFolder.create(done, CONFIG).write("result.json", {})
    (tmp_path / "file").write_text("mine")
    for path, config, says in [
        (other, CONFIG, "something else"),
        (same_run, {"method": {"name": "other"}}, 'another run: method.name is "bcfl-g" there, "other" here'),
        (same_run, {"method": {"name": "bcfl-g", "stay": None}}, 'another run: method.stay is off there, "none" here'),
        (foreign, CONFIG, "something else"),
        (listing, CONFIG, "something else"),
        (same_run, CONFIG, f"this run, unfinished: continue it with `bcfl resume {same_run}`"),
        (done, CONFIG, "this run, complete"),
        (tmp_path / "file", CONFIG, "something else"),
    ]:
        with pytest.raises(ValueError, match=says):
            RunFolder.create(path, config)
    assert [item.name for item in other.iterdir()] == ["notes.txt"]


def test_what_a_kill_before_the_first_file_leaves_is_free(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "lock").touch()
    (path / "config.json.tmp").write_text('{"half')
    RunFolder.create(path, CONFIG)
    assert json.loads((path / "config.json").read_text()) == CONFIG


def test_only_run_folders_are_opened(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} is not a run folder"):
        RunFolder.open(tmp_path)
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    truncate(folder.path / "config.json")
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        folder.read("config.json")


def test_nothing_that_runs_code_when_read_is_ever_used() -> None:
    """Safetensors and JSON only: torch.save, numpy objects and their like execute what a file says.

    But among the processes of one Ray cluster, which run each other's code by design: no file and no stranger is read.
    """
    forbidden = re.compile(r"import pickle|from pickle|torch\.(save|load)\(|allow_pickle\s*=\s*True|joblib|shelve|dill")
    sources = sorted(Path(bcfl.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    assert [path.name for path in sources if forbidden.search(path.read_text(encoding="utf-8"))] == ["ray.py"]
    assert forbidden.search("import pickle")  # the search would find one


def test_a_failing_disk_during_a_checkpoint_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path / "run")

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "write_atomically", full)
    with pytest.raises(OSError, match="No space"):
        folder.save_checkpoint(Checkpoint(4, pack(state(4)), {}))
    assert folder.last_checkpoint().round == 3


def test_the_same_run_with_its_data_elsewhere_is_taken_not_another(tmp_path: Path) -> None:
    here, there = ({"data": {"path": path, "seed": 0}} for path in ("/a", "/b"))
    RunFolder.create(tmp_path / "run", here)
    with pytest.raises(TakenError, match="already holds this run, unfinished"):
        RunFolder.create(tmp_path / "run", there)


@pytest.mark.parametrize("name", MEASURED)
def test_a_changed_digit_in_what_was_measured_is_seen_and_nothing_is_lost(tmp_path: Path, name: str) -> None:
    folder = a_run(tmp_path / "run")
    folder.append(name, {"round": 4})  # of no checkpoint yet
    folder.refuse_changed_logs()
    path = folder.path / name
    path.write_bytes(path.read_bytes().replace(b'"round":1', b'"round":7'))
    before = {item: item.read_bytes() for item in files_in(folder.path)}
    for look in (folder.standing, folder.refuse_changed_logs):
        with pytest.raises(
            ValueError, match=f"{name} is not what the run has written up to round 3: mend it, or delete"
        ):
            look()
    assert {item: item.read_bytes() for item in files_in(folder.path)} == before


def test_a_run_of_before_digests_of_logs_were_kept_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store, "MEASURED", ())
        folder = a_run(tmp_path / "run")
    path = folder.path / "rounds.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round":1', b'"round":7'))
    folder.refuse_changed_logs()
    assert folder.last_checkpoint().round == 3
