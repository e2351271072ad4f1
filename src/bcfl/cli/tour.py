"""`bcfl demo`: a guided tour in the terminal that ends with the report of what it just did."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from bcfl.association.hypotheses import align
from bcfl.data.partition import FederatedData
from bcfl.files import write_atomically
from bcfl.report.page import report
from bcfl.report.reading import Ints, Run, read_run
from bcfl.runs.loop import start
from bcfl.runs.observers import Observer
from bcfl.runs.problem import Split, load_data
from bcfl.runs.settings import Config, load_config
from bcfl.runs.store import new_folder

ROUNDS = 20
SHADES = " ░▒▓█"
INKS = ("blue", "dark_orange", "green", "magenta", "yellow", "cyan", "red", "white")
SHOWN_ROUNDS = (1, 2, 3, 4, 5, 6, 8, 10, 15)


def tour(out: Path | None, pauses: bool, num_workers: int | None) -> None:
    """Two federations on the same clients, and the page that compares them."""
    console = Console(highlight=False)
    waits = sys.stdin.isatty() and console.is_terminal and pauses
    out = out or new_folder(Path("bcfl-demo"))
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} already holds something: choose another folder")
    ours = load_config(None, [f"experiment.rounds={ROUNDS}"])
    single = load_config(None, [f"experiment.rounds={ROUNDS}", "method.name=fedavg"])

    _say(console, "1  The clients", "Twenty clients want to read digits together without showing each other their "
         "images. What nobody knows: five of them hold their images upright, five a quarter turned, five upside down, "
         "five three quarters turned.")  # fmt: skip
    console.print(_sample_digits(load_data(ours)))
    _pause(console, waits)

    _say(console, "2  One model for all", f"Federated averaging trains one model for everybody, for {ROUNDS} rounds:")
    one_model = _follow(console, single, out / "fedavg", num_workers, film=False)
    console.print(f"Right: {one_model.last('accuracy'):.1%} of the clients' test images.")
    _pause(console, waits)

    _say(console, "3  Who belongs together?", "BCFL keeps four models and several weighted stories of which client "
         "belongs to which. In every round each client says how well each model explains its data; stories that "
         "explain little are dropped. Below, a column is a client, a colour the cluster that the best story gives it, "
         "and the bar the weight of each story:")  # fmt: skip
    clustered = _follow(console, ours, out / "bcfl-mh-3", num_workers, film=True)
    agreement = clustered.last("ari")
    found = "exactly the hidden groups" if agreement > 0.9999 else f"the hidden groups with agreement {agreement:.2f}"
    console.print(f"Right: {clustered.last('accuracy'):.1%}. Nobody told it about rotations, yet it found {found}.")
    _pause(console, waits)

    _say(console, "4  How sure is it?", _certainty(clustered))
    page = out / "report.html"
    try:
        write_atomically(page, report([one_model, clustered]).encode())
    except ValueError as missing:  # the tour was worth it without the page, too
        console.print(f"\nThe report page could not be made: {missing}", soft_wrap=True, markup=False)
        return
    _say(console, "5  Your report", "All of this is on one page that needs no network. Open it in a browser:")
    console.print(f"   {page.resolve()}", soft_wrap=True, markup=False, style="bold")
    console.print("\nNext: `bcfl run --help`, `bcfl compare --methods fedavg,bcfl-g,bcfl-mh-3 --seeds 0,1,2`, "
                  "`bcfl report RUN…`.")  # fmt: skip


def _say(console: Console, title: str, text: str) -> None:
    console.print(f"\n{title}", style="bold")
    console.print(text)


def _pause(console: Console, waits: bool) -> None:
    if waits:
        try:
            console.input("[dim]Enter to go on[/dim] ")
        except EOFError:  # Ctrl-D goes on as well, but leaves the line open
            console.print()


def _sample_digits(data: FederatedData) -> Text:
    """One client's image of a four from each group, side by side."""
    assert data.group is not None
    clients = [int((data.group == g).nonzero()[0]) for g in data.group.unique()]
    fours = [held[data.y_train[held] == 4][0] for held in (data.train_of[client] for client in clients)]
    images = [data.x_train[index].reshape(8, 8).numpy() for index in fours]
    lines = []
    for row in range(8):
        cells = [[SHADES[min(int(v * 5), 4)] * 2 for v in image[row]] for image in images]
        lines.append("   " + "    ".join("".join(cell) for cell in cells))
    names = "    ".join(f"client {client}".ljust(16) for client in clients)
    return Text("\n".join([*lines, "   " + names.rstrip()]))


class _Film(Observer):
    """An observer that prints how the best story and the weights change."""

    def __init__(self, console: Console, path: Path, film: bool):
        self._console, self._path, self._film = console, path, film
        self._before: Ints | None = None

    def started(self, config: Config, data: Split, first_round: int) -> None:
        self._rounds = config.experiment.rounds

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        if record["round"] not in (*SHOWN_ROUNDS, self._rounds):
            return
        line = Text(f"   round {record['round']:2d}  right {record['accuracy']:6.1%}   ")
        if self._film:
            run = read_run(self._path)
            now = run.associations[-1].assignment[0]
            if self._before is not None:  # a cluster keeps its colour from line to line
                now = align(torch.from_numpy(np.stack([self._before, now])), run.num_clusters)[1].numpy()
            self._before = now
            for position, client in enumerate(run.order):
                gap = position and run.colour_of[client] != run.colour_of[run.order[position - 1]]
                # The number besides the colour, for those who cannot tell the colours apart.
                line.append(("  " if gap else "") + f"{now[client]}", style=f"bold {INKS[now[client] % len(INKS)]}")
            line.append("   ")
            for index, weight in enumerate(run.associations[-1].weight):
                line.append("▇" * max(1, round(12 * weight)), style="default" if index == 0 else "bright_black")
                line.append(" ")
        self._console.print(line)


def _follow(console: Console, config: Config, path: Path, num_workers: int | None, film: bool) -> Run:
    start(config, path, num_workers=num_workers, observers=[_Film(console, path, film)])
    return read_run(path)


def _certainty(run: Run) -> str:
    last, first = run.associations[-1], run.entropy[0].mean()
    unsure = int((run.entropy[-1] > 0.01).sum())
    who = "every client's place is certain" if unsure == 0 else f"the place of {unsure} clients is still open"
    return (
        f"After the first round a client's place was uncertain by {first:.2f} nats on average, now by "
        f"{run.entropy[-1].mean():.2f}: {who}. {len(last.weight)} stories are alive, the best with weight "
        f"{last.weight[0]:.2f}; they differ in how the models came about, and where they differ in who belongs where, "
        "the probabilities say so."
    )
