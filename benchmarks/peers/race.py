"""bcfl beside its peers and the bare arithmetic: the same work in turns, as ratios of processor time with their spread.

    python benchmarks/peers/race.py [--only mlp] [--rounds 9] [--python .peers/bin/python]

Each contestant is a process with one thread. The peers have an environment of their own (`make peers`); one that is not
installed there is named and left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from problem import STEPS, WORKS

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS, PAGE = HERE / "results.json", ROOT / "docs" / "peers.md"
OURS = "bcfl"
CONTESTANTS = {  # name -> script, and whether it runs in the peers' environment
    OURS: ("ours.py", False),
    "limit": ("limit.py", False),
    "JAX, vmap": ("plain_jax.py", True),
    "fedjax": ("with_fedjax.py", True),
    "Flower, in process": ("with_flower.py", True),
}
TARGETS = {  # (work, contestant) -> how many of its rounds ours may take
    ("mlp", "limit"): 1.3, ("mlp", "JAX, vmap"): 1.2, ("mlp", "fedjax"): 0.25, ("mlp", "Flower, in process"): 0.25,
    ("cnn", "limit"): 1.05, ("cnn", "JAX, vmap"): 1.0, ("cnn", "fedjax"): 1.0, ("cnn", "Flower, in process"): 1.0,
}  # fmt: skip
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}  # fmt: skip


@dataclass
class Contestant:
    """A process that plays a round when it is told to."""

    name: str
    process: subprocess.Popen[str]
    said: IO[str]  # what it tells beside its answers
    version: str = ""
    cpu: list[float] = field(default_factory=list)

    def read(self) -> dict[str, Any] | None:
        """Its next answer; None if it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        return None

    def play(self, steps: int) -> None:
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        answer = self.read()
        if answer is None or answer["steps"] != steps:
            raise RuntimeError(f"{self.name}: made {answer and answer['steps']} steps, not {steps}")
        self.cpu.append(answer["cpu"])

    def end(self) -> None:
        self.process.kill()
        with self.process:  # waits for it, and closes its pipes
            self.said.close()


def start(name: str, work: str, python: Path) -> Contestant | None:
    """The contestant once it has played its first round; None, with a word, where it cannot."""
    script, is_peer = CONTESTANTS[name]
    command = [str(python) if is_peer else sys.executable, str(HERE / script), work]
    if is_peer and not python.exists():
        print(f"  {name}: left out, as there is no {python} (make peers)", flush=True)
        return None
    told = tempfile.TemporaryFile("w+")  # a pipe that nobody empties would stop it  # noqa: SIM115
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, text=True,
                               env={**os.environ, **ONE_THREAD})  # fmt: skip
    contestant = Contestant(name, process, told)
    ready = contestant.read()
    if ready is None:
        told.seek(0)
        said = told.read().strip().splitlines() or ["it ended without a word"]
        print(f"  {name}: left out: {said[-1]}", flush=True)
        contestant.end()
        return None
    contestant.version = ready["ready"]
    print(f"  {name} is ready: {contestant.version}", flush=True)
    return contestant


def race(work: str, rounds: int, python: Path) -> list[dict[str, Any]]:
    """A figure for each contestant beside ours: the median of the ratios round by round, and their quartiles."""
    steps = WORKS[work].num_steps
    print(f"{work}: {WORKS[work].num_clients} clients, {STEPS} steps each, {rounds} rounds in turns", flush=True)
    there = [one for name in CONTESTANTS if (one := start(name, work, python)) is not None]
    try:
        for index in range(rounds):
            for one in there:
                one.play(steps)
            told = ", ".join(f"{one.name} {one.cpu[-1]:.3f} s" for one in there)
            print(f"  round {index + 1} of {rounds}: {told}", flush=True)
    finally:
        for one in there:
            one.end()
    ours = next(one for one in there if one.name == OURS)
    return [figure(work, ours, one) for one in there if one is not ours]


def figure(work: str, ours: Contestant, other: Contestant) -> dict[str, Any]:
    ratios = sorted(own / theirs for own, theirs in zip(ours.cpu, other.cpu, strict=True))
    quarter = len(ratios) // 4
    value, target = median(ratios), TARGETS[work, other.name]
    return {
        "work": work, "beside": other.name, "version": other.version, "ratio": value, "target": target,
        "low": ratios[quarter], "high": ratios[-1 - quarter], "verdict": "ok" if value <= target else "short",
        "cpu": median(other.cpu), "ours": median(ours.cpu), "rounds": len(ratios),
    }  # fmt: skip


def page(figures: list[dict[str, Any]]) -> str:
    """The page of the figures, with a bar for each contestant."""
    lines = ["# Beside its peers", "",
             "Processor seconds of a FedAvg round, each contestant one thread, taking turns; the steps are counted. "
             "`make peers` installs the peers in an environment of their own, `make bench ONLY=peers` measures.",
             ""]  # fmt: skip
    for work in dict.fromkeys(one["work"] for one in figures):
        own = [one for one in figures if one["work"] == work]
        said = WORKS[work]
        lines += [f"## {work}: {said.num_clients} clients, {STEPS} steps of 32", "", "```text"]
        bars = [(OURS, own[0]["ours"]), *((one["beside"], one["cpu"]) for one in own)]
        most = max(seconds for _, seconds in bars)
        lines += [f"{name:<20} {'█' * max(round(40 * s / most), 1)} {s:.3f} s" for name, s in bars]
        lines += ["```", "", "| bcfl takes | of | half of the rounds | target | |", "|---|---|---|---|---|"]
        lines += [
            f"| {one['ratio']:.2f} | {one['beside']} ({one['version']}) | {one['low']:.2f} to {one['high']:.2f} "
            f"| ≤ {one['target']:g} | {one['verdict']} |"
            for one in own
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(WORKS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--python", type=Path, default=ROOT / ".peers" / "bin" / "python")
    parser.add_argument("--print", action="store_true", help="write neither results nor page")
    given = parser.parse_args()
    figures = [
        one for work in ([given.only] if given.only else WORKS) for one in race(work, given.rounds, given.python)
    ]
    for one in figures:
        print(f"{one['work']}: {one['ratio']:.2f} of {one['beside']} ({one['low']:.2f} to {one['high']:.2f}), "
              f"target ≤ {one['target']:g}: {one['verdict']}")  # fmt: skip
    if not given.print:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        measured = {one["work"] for one in figures}
        figures = [*(one for one in kept if one["work"] not in measured), *figures]
        RESULTS.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(page(figures))


if __name__ == "__main__":
    main()
