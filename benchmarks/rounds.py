"""The speed of whole rounds: beside a bare training loop, on more workers, of one method beside another, by size."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from measure import Row, best_seconds, in_own_process, repeated, row
from workloads import NETS, SEED, TINY, BareLoop, Workload, round_of, turned_digits, with_known_groups

from bcfl.association.hypotheses import Branches
from bcfl.client.trainer import Training
from bcfl.engines.simulator import Simulator
from bcfl.federation import Hypotheses, Method
from bcfl.methods import make_method
from bcfl.methods.averaging import FedAvg
from bcfl.methods.bcfl import BCFL
from bcfl.methods.steps import Fuse, distinct_groups, train_groups
from bcfl.model.zoo import mlp

NUM_WORKERS = 2
TARGETS = {"Fashion-MNIST net": 1.10, "CIFAR-10 net": 1.10, "AmazonReview net": 1.15, "Digits-Five net": 1.15}
# More where rounds are short or uneven: the best of few may be one side's lucky moment and never the other's.
REPEATS = {"Fashion-MNIST net": 4, "CIFAR-10 net": 14, "AmazonReview net": 8, "Digits-Five net": 3}  # at each visit
RACING = 0.01  # the probability that racing may keep something else than full scoring
JOB_SCORING = 32  # scoring examples where trainings are compared: scores say which there are, and take no part


def say(what: str) -> None:
    print(f"  {what} …", flush=True)


def rows() -> list[Row]:
    # Nets and methods are visited twice, far apart: the machine may be busy elsewhere for longer than a visit takes.
    early_nets, early_methods = _visit_all()
    say("racing, many clients, growth")
    others = [*saved_scoring(), *many_clients(TINY), *scaling(TINY)]
    late_nets, late_methods = _visit_all()
    figures = []
    for net, early, late in zip(NETS, early_nets, late_nets, strict=True):
        figures += engine(net, (early, late), TARGETS[net.name])
    return [*figures, *methods(NETS[0], (early_methods, late_methods)), *others]


def _visit_all() -> "tuple[list[Visit], MethodsVisit]":
    # Each in a process of its own, as in a run: the allocator is set up once, for the model that is trained.
    nets = []
    for net in NETS:
        say(f"FedAvg with the {net.name}")
        nets.append(in_own_process(visit, net, REPEATS[net.name]))
    say("BCFL beside FedAvg")
    return nets, in_own_process(visit_methods, NETS[0])


class Visit(NamedTuple):
    """Seconds of a FedAvg round and of the same steps in a bare loop; the best of some turns."""

    ours: float  # on several workers
    alone: float  # on one
    bare: float
    bare_alone: float
    repeats: int


def visit(net: Workload, repeats: int) -> Visit:
    with (
        net.simulator(NUM_WORKERS) as many,
        net.simulator(1) as one,
        closing(BareLoop(net, NUM_WORKERS)) as bare,
        closing(BareLoop(net, 1)) as bare_alone,
    ):
        operations = (round_of(FedAvg(), many)[0], round_of(FedAvg(), one)[0], bare, bare_alone)
        for loop in (bare, bare_alone):
            loop()  # the engines have played a round by now, too
        ours, alone, yardstick, yardstick_alone = best_seconds(*operations, repeats=repeats)
    return Visit(ours, alone, yardstick, yardstick_alone, repeats)


def engine(net: Workload, visits: Sequence[Visit], target: float) -> list[Row]:
    """A FedAvg round beside the same steps in a bare loop, and on several workers beside one."""
    ours, alone, yardstick, yardstick_alone, _ = map(min, zip(*visits, strict=True))
    repeats = sum(seen.repeats for seen in visits)
    steps = f"{net.num_clients} clients, {net.training.local_steps} steps of {net.training.batch_size}"
    note = f"{ours:.2f} s against {yardstick:.2f} s, best of {repeats}; {steps}"
    faster = (  # what two workers share, the memory above all, they share in a bare loop as well
        f"{alone:.2f} s against {ours:.2f} s: {alone / ours:.2f} times as fast; a bare loop "
        f"{yardstick_alone / yardstick:.2f} times"
    )
    return [
        row(f"{net.name}: FedAvg round", ours / yardstick, target, "bare loops", note),
        row(f"{net.name}: a round on two workers", ours / alone, 1 / 1.8, "of one worker's time", faster),
    ]


class MethodsVisit(NamedTuple):
    """Seconds of rounds once beliefs tell the groups apart; the best of some turns."""

    average: float  # FedAvg
    greedy: float  # BCFL-G
    raced: float
    merged: float  # BCFL-C-6
    greedy_job: float  # a distinct training of BCFL-G
    multi_job: float  # and of BCFL-MH-6
    repeats: int
    at_home: int  # clients that BCFL-G puts with their group
    scoring: int  # examples of each client
    trainings: tuple[int, int]


def visit_methods(net: Workload, num_rounds: int = 3, scoring: int = 320, repeats: int = 4) -> MethodsVisit:
    with net.simulator(NUM_WORKERS) as simulator:
        greedy = _bcfl(net, "greedy", scoring)
        state = with_known_groups(greedy, simulator, net.group, num_rounds)
        found, _ = greedy.round(state, simulator.begin(num_rounds + 1))
        at_home = int((found.hypotheses.assignment[0] == net.group).sum())

        def from_there(method: BCFL) -> Callable[[], object]:
            return lambda: method.round(state, simulator.begin(num_rounds + 1))

        operations = (
            round_of(FedAvg(), simulator)[0],
            from_there(greedy),
            from_there(_bcfl(net, "greedy", scoring, racing=RACING)),
            from_there(_bcfl(net, "consensus", scoring)),
        )
        average, full, raced, merged = best_seconds(*operations, repeats=repeats)
        (greedy_job, multi_job), trainings = _per_job(net, simulator, state, num_rounds + 1, repeats)
    return MethodsVisit(average, full, raced, merged, greedy_job, multi_job, repeats, at_home, scoring, trainings)


def methods(net: Workload, visits: Sequence[MethodsVisit]) -> list[Row]:
    """BCFL beside FedAvg, consensus and multi-hypothesis beside greedy."""
    average, full, raced, merged, greedy_job, multi_job, *_ = map(min, zip(*visits, strict=True))
    repeats, told = sum(seen.repeats for seen in visits), visits[0]
    at_home = f"{told.at_home} of {net.num_clients} clients at home"
    setting = f"{net.name}, {at_home}, {told.scoring} scoring examples each, best of {repeats}"
    greedy_trainings, multi_trainings = told.trainings
    job = (
        f"training and fusing a round's groups ÷ trainings: {multi_job * 1e3:.1f} ms of {multi_trainings} against "
        f"{greedy_job * 1e3:.1f} ms of {greedy_trainings}"
    )
    return [
        row("BCFL-G round", full / average, 1.9, "FedAvg rounds", f"{full:.2f} s against {average:.2f} s; {setting}"),
        row(f"BCFL-G round, racing = {RACING}", raced / average, 1.35, "FedAvg rounds", f"{raced:.2f} s"),
        row("BCFL-C-6 round", merged / full, 1.25, "BCFL-G rounds", f"{merged:.2f} s against {full:.2f} s"),
        row("BCFL-MH-6, a distinct job", multi_job / greedy_job, 1.1, "jobs of BCFL-G", job),
    ]


def _per_job(
    net: Workload, simulator: Simulator, state: Hypotheses, index: int, repeats: int
) -> tuple[list[float], tuple[int, int]]:
    """The time of a distinct training of BCFL-G and of BCFL-MH-6, fusion included, and how many there are in a round.

    What a round does between its scores and its new beliefs, without the scores: their noise would drown the rest.
    """
    operations: list[Callable[[], Any]] = []
    trainings = []
    for method in (_bcfl(net, "greedy", JOB_SCORING), _bcfl(net, "multi", JOB_SCORING)):
        after, _ = method.round(state, simulator.begin(index))  # so that there are hypotheses to be carried on
        before = after.hypotheses
        kept = method._associate(before, None, simulator.begin(index + 1)).kept

        def play(method: BCFL = method, before: Hypotheses = before, kept: Branches = kept) -> int:
            clients = simulator.begin(index + 1)
            groups = distinct_groups(before.model_of, kept, clients.present)
            train_groups(before, groups, clients, Fuse(method.fusion, method.forgetting)).results()
            return clients.work.trainings

        trainings.append(play())
        operations.append(play)
    seconds = best_seconds(*operations, repeats=repeats)
    return [taken / count for taken, count in zip(seconds, trainings, strict=True)], (trainings[0], trainings[1])


def saved_scoring(num_clients: int = 40, num_rounds: int = 16, num_looks: int = 5) -> list[Row]:
    """How much of full scoring racing does on real data once the groups are apart: the bundled digits, turned."""
    figures = []
    with Simulator(mlp, turned_digits(num_clients), Training(), SEED, num_workers=NUM_WORKERS) as engine:
        for name in ("bcfl-g", "bcfl-c-6", "bcfl-mh-6"):
            _, state = round_of(make_method(f"{name}-w", {}), engine, num_rounds)
            method, scored, spared = make_method(name, {"racing": RACING}), 0, 0
            for index in range(num_rounds + 1, num_rounds + 1 + num_looks):  # each draws other examples
                clients = engine.begin(index)
                method.round(state, clients)
                scored += clients.work.scored_examples
                spared += clients.work.spared_examples or 0
            setting = f"digits, {num_clients} clients, after {num_rounds} rounds"
            note = f"{scored / num_looks:.0f} examples a round; {setting}"
            what = f"{name.upper()}, racing = {RACING}: scored examples"
            figures.append(row(what, scored / (scored + spared), 1 / 3, "of full scoring", note))
    return figures


def _bcfl(net: Workload, strategy: Any, scoring: int, **options: Any) -> BCFL:
    hypotheses = 1 if strategy == "greedy" else 6
    return BCFL(net.num_groups, strategy, hypotheses, scoring_examples=scoring, **options)


def many_clients(net: Workload, few: int = 100, many: int = 10_000, repeats: int = 5) -> list[Row]:
    """What a client costs beyond its training, and whether that depends on how many there are."""
    small, large = replace(net, num_clients=few), replace(net, num_clients=many)
    with (
        small.simulator(NUM_WORKERS) as of_few,
        large.simulator(NUM_WORKERS) as of_many,
        closing(BareLoop(large, NUM_WORKERS)) as bare,
        closing(BareLoop(large, 1)) as bare_alone,
    ):
        # A single round of few clients is so short that the best of several is the processor's best moment.
        operations = (repeated(round_of(FedAvg(), of_few)[0], 20), round_of(FedAvg(), of_many)[0], bare, bare_alone)
        seconds, ours, *yardsticks = best_seconds(*operations, repeats=repeats)
    yardstick = min(yardsticks)  # steps so small leave two workers waiting for Python's lock
    per_client = (ours / many) / (seconds / 20 / few)
    note = f"{ours / many * 1e3:.3f} ms against {yardstick / many * 1e3:.3f} ms in a bare loop; {net.name}, 1 step"
    return [
        row(f"{many} clients: fixed cost of one", (ours - yardstick) / many * 1e3, 1.0, "ms", note),
        row(f"{many} clients: a client's time", per_client, 1.1, f"of a client's among {few}", "FedAvg round"),
    ]


def scaling(net: Workload, repeats: int = 2, clients: Sequence[int] = (10, 1000, 10_000)) -> list[Row]:
    """How a round's time grows with C, K, M and P, divided by how they grow: 1 is linear, less is better.

    The worst of the steps from one size to the next: a first one that is mostly fixed cost must not hide a last one.
    Small sizes are played several times in a row: the best of short rounds would be the processor's best moment.
    """

    def multi(clusters: int = 4, hypotheses: int = 3) -> BCFL:
        return BCFL(clusters, "multi", hypotheses, scoring_examples=32)

    def of_width(width: int) -> Workload:
        return replace(net, factory=lambda: mlp(num_hidden=width))

    cases: dict[str, list[tuple[int, Workload, Method]]] = {
        "C, BCFL-MH-3": [(c, replace(net, num_clients=c), multi()) for c in clients],
        "K, BCFL-MH-3": [(k, net, multi(clusters=k)) for k in (2, 16)],
        "M, BCFL-MH-M with K = 4": [(m, net, multi(hypotheses=m)) for m in (2, 16)],
        "P, FedAvg": [(75 * width + 10, of_width(width), FedAvg()) for width in (32, 1638, 16384)],
    }
    figures = []
    for name, sides in cases.items():
        with ExitStack() as stack:
            sizes = [size for size, *_ in sides]
            times = [min(max(sizes[-1] // (2 * size), 1), 100) for size in sizes]
            engines = [(method, stack.enter_context(side.simulator(NUM_WORKERS))) for _, side, method in sides]
            rounds = [repeated(round_of(*pair)[0], count) for pair, count in zip(engines, times, strict=True)]
            taken = best_seconds(*rounds, repeats=repeats)
        points = [(size, total / count) for size, total, count in zip(sizes, taken, times, strict=True)]
        growth = max((later / before) / (more / fewer) for (fewer, before), (more, later) in pairwise(points))
        note = "a round takes " + ", ".join(f"{1e3 * seconds:.0f} ms with {size}" for size, seconds in points)
        figures.append(row(f"growth with {name}", growth, 1.1, "of linear growth", note))
    return figures
