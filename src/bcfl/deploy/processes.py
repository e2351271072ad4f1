"""A whole federation on this machine: real processes, real messages, loopback only. It stops what it started."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcfl.deploy.folder import LOCKED_DOWN, Site, init, link_command, node_command
from bcfl.deploy.ready import CONNECTION, START_SECONDS, link_answers, point_flwr_to, program
from bcfl.files import GrowingLog
from bcfl.runs.loop import is_unfinished, load_result
from bcfl.runs.observers import Observer, told_the_end
from bcfl.runs.result import Result
from bcfl.runs.settings import Config
from bcfl.runs.stopping import RunStoppedError, ended_in_order
from bcfl.runs.store import RunFolder, refuse_if_full

STOP_SECONDS = 10.0  # after which a process that was asked to end is made to
STATUS_EVERY = 10.0  # seconds between two questions to Flower: each is a process, and takes from the clients' cores
REQUESTS_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # from the keyboard, the system, a closed terminal


@dataclass(frozen=True)
class LocalSplit:
    """What is known of the clients' data before any of them was asked."""

    num_clients: int
    description: str

    def group_in(self, round_index: int) -> None:
        """Nobody has told yet."""


@dataclass
class Federation:
    """The processes of a site, all started by this object and stopped by it."""

    site: Site
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_link(self) -> None:
        """Start the SuperLink and wait until it answers."""
        certificates = None if self.site.insecure else self.site.server / "certificates"
        point_flwr_to(self.site.link_port, certificates, self.site.server / "flwr")
        self._start("server", link_command(self.site), self.site.server)
        self._await(lambda: link_answers(self.site.link_port, certificates), "the SuperLink")

    def register(self) -> None:
        """Tell the SuperLink the clients' public keys."""
        if not self.site.insecure:
            for index in range(self.site.num_clients):
                key = self.site.server / "nodes" / f"client-{index}.pub"
                self.flwr("supernode", "register", str(key), CONNECTION)

    def start_node(self, index: int) -> None:
        self._start(f"client-{index}", node_command(self.site, index), self.site.client(index))

    def submit(self, *overrides: str) -> str:
        """Start a run of the app and return Flower's number for it."""
        changes = ["-c", " ".join(overrides)] if overrides else []  # of several -c Flower would take the last
        app = str(self.site.folder / "app")
        answer = _json(self.flwr("run", app, CONNECTION, "--format", "json", *changes))
        if "run-id" not in answer:  # Flower's exit code does not tell
            raise RunStoppedError(f"flwr run failed: {_last_line(str(answer.get('error-message', answer)))}")
        return str(answer["run-id"])

    def status(self, run: str) -> str:
        """pending, starting, running, or finished:completed, finished:failed, finished:stopped."""
        answer = _json(self.flwr("list", "--run-id", run, "--format", "json", CONNECTION))
        return str(answer["runs"][0]["status"])

    def log(self, run: str) -> str:
        return self.flwr("log", run, CONNECTION, "--show")

    def flwr(self, *arguments: str) -> str:
        """What one of Flower's own commands prints; raises RunStoppedError if it fails."""
        done = subprocess.run(
            [program("flwr"), *arguments],
            cwd=self.site.server,
            env=self._environment(self.site.server),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RunStoppedError(f"flwr {arguments[0]} failed: {_last_line(done.stdout + done.stderr)}")
        return done.stdout

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End one process that this object started, and whatever that started in turn."""
        _end([self.processes.pop(name)], how)

    def close(self) -> None:
        """End all of them: clients are asked first, the SuperLink that they talk to last."""
        processes = list(reversed(self.processes.values()))
        self.processes.clear()
        _end(processes, signal.SIGTERM)

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, name: str, command: Sequence[str], folder: Path) -> None:
        with (folder / "log.txt").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [program(command[0]), *command[1:]],
                cwd=folder,
                env=self._environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interruption from the keyboard is ours alone to deal with
            )

    def _environment(self, folder: Path) -> dict[str, str]:
        modules = _paths(str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH"))
        programs = _paths(str(Path(sys.executable).parent), os.environ.get("PATH"))  # Flower starts its own by name
        own = {"FLWR_HOME": str(folder / "flwr"), "PYTHONPATH": modules, "PATH": programs}
        return {**os.environ, **LOCKED_DOWN, **own}

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + START_SECONDS
        while not ready():
            for name, process in self.processes.items():
                if process.poll() is not None:
                    folder = self.site.folder / name
                    reason = _last_line((folder / "log.txt").read_text(errors="replace"))
                    raise RunStoppedError(f"{what} could not be started: {reason}")
            if time.monotonic() > end:
                raise RunStoppedError(f"{what} did not answer within {START_SECONDS:g} seconds")
            time.sleep(0.1)


def run_local(
    config: Config,
    num_clients: int,
    out: Path,
    *,
    insecure: bool = False,
    terms: Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
) -> Result:
    """Run a federation of processes on loopback into the folder `out`; a run that was stopped there goes on."""
    _check_out(out, config)
    with (
        _way_on(out, config),
        ended_in_order(REQUESTS_TO_END),
        tempfile.TemporaryDirectory(prefix="bcfl-", ignore_cleanup_errors=True) as scratch,
    ):
        ports = free_ports(num_clients + 1)
        site = Site(Path(scratch, "federation"), num_clients, "127.0.0.1", ports[0], None, tuple(ports[1:]), insecure)
        init(site, config, {**(terms or {}), "out": str(out.resolve())})
        with Federation(site) as federation:
            federation.start_link()
            federation.register()
            for index in range(num_clients):
                federation.start_node(index)
            follow(federation, federation.submit(), config, out, observers)
    return load_result(out)


def follow(federation: Federation, run: str, config: Config, out: Path, observers: Sequence[Observer] = ()) -> None:
    """Tell the observers of every round as it is written, until the run has ended; raises if it did not end well."""
    split = LocalSplit(federation.site.num_clients, f"{federation.site.num_clients} processes")
    folder = RunFolder(out)
    rounds, timings = (GrowingLog(out / name, json.loads) for name in ("rounds.jsonl", "timings.jsonl"))
    done = max((record["round"] for record in rounds.records()), default=0)
    with told_the_end(observers):
        for observer in observers:
            observer.started(config, split, done + 1)
        next_look, status = 0.0, "pending"
        while not status.startswith("finished"):
            time.sleep(0.1)
            if folder.complete or time.monotonic() > next_look:
                status = federation.status(run)
                next_look = time.monotonic() + STATUS_EVERY
            seconds = {record["round"]: record["seconds"] for record in timings.records()}
            for record in rounds.records():
                if record["round"] > done and record["round"] in seconds:
                    done = record["round"]
                    for observer in observers:
                        observer.round_done(record, seconds[done])
        if status != "finished:completed":
            raise RunStoppedError(f"the run ended as {status}: {_reason(federation.log(run))}")


def _check_out(out: Path, config: Config) -> None:
    """Refuse now what the server would refuse only after everything has been started."""
    if not is_unfinished(out, config):
        refuse_if_full(RunFolder(out), config.as_dict())
    else:
        with RunFolder.open(out).locked():  # free at this moment: no other process is at this run
            pass


@contextlib.contextmanager
def _way_on(out: Path, config: Config) -> Iterator[None]:
    """Whatever stops a run in here that has begun, its user is told how: without --out a new folder would be taken."""
    try:
        yield
    except (RunStoppedError, KeyboardInterrupt) as error:
        if not is_unfinished(out, config):
            raise
        how = f"the same command with --out {shlex.quote(str(out))} goes on"
        raise type(error)("; ".join([*map(str, error.args), how])) from error


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _end(processes: Sequence[subprocess.Popen[bytes]], how: signal.Signals) -> None:
    """None of these processes is left, nor what they started: all are asked, then made to, whatever fails with one."""
    family: list[int] = []
    try:
        # Known only while they live, and not by their sessions: Flower gives its children sessions of their own.
        family = _descendants(process.pid for process in processes)
        for process in processes:
            with contextlib.suppress(OSError):
                process.send_signal(how)
        end = time.monotonic() + STOP_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    finally:  # whatever happened above, such as an interruption of the wait
        for process in processes:
            with contextlib.suppress(OSError):
                process.kill()
        for one in family:
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)
        for process in processes:
            process.wait()


def _descendants(processes: Iterable[int]) -> list[int]:
    """The processes that these have started, and those that they have started in turn."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found = [child for process in processes for child in children.get(process, [])]
    for one in found:  # grows while it is walked
        found += children.get(one, [])
    return found


def _parents() -> dict[int, int]:
    """Every process and its parent, as far as the system tells: slim containers have no `ps`, macOS has no /proc."""
    found: dict[int, int] = {}
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False)
            for line in listed.stdout.splitlines():
                child, parent = map(int, line.split())
                found[child] = parent
        return found
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            status = Path("/proc", name, "stat").read_bytes()
            found[int(name)] = int(status.rpartition(b")")[2].split()[1])  # its own name may hold spaces and brackets
    return found


def _paths(*parts: str | None) -> str:
    return os.pathsep.join(part for part in parts if part)


def _json(text: str) -> dict[str, Any]:
    """The JSON object in what a command printed, whatever it printed before."""
    found: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return found


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _reason(log: str) -> str:
    """The line of a run's log that says most about why it ended: the last that names an error."""
    named = [line.strip() for line in log.splitlines() if "Error" in line]
    return named[-1][:300] if named else _last_line(log)
